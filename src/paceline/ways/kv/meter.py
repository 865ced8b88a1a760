"""What came of KV between this node and others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from paceline.core.ids import NodeId
from paceline.core.stats import Row, counter, gauge


class KvMeter:
    """What became of it, since the start."""

    def __init__(self, leases: Callable[[], int] = lambda: 0) -> None:
        """Count from nothing.

        Args:
            leases: prompts that are computed for others now.
        """
        self.leases = leases
        self.fetches = Counter[str]()
        """By how they ended."""
        self.blocks = Counter[str]()
        self.bytes = Counter[str]()
        self.moved = Counter[tuple[str, str]]()
        """Bytes taken and given, by what they came or went through."""
        self.nixl_failures = 0
        self.marks = 0
        """Told by peers, now."""
        self.least_tokens: Mapping[NodeId, int] = {}
        """From which on KV is fetched, by node."""
        self.pushes = Counter[str]()
        """Prompts that others were to compute, by how that ended."""
        self.push_s = defaultdict[str, float](float)
        """What they took, from being asked to their last block or failure, likewise."""
        self.checks = Counter[str]()
        """Blocks of others that were computed again, by what was found."""
        self.lies = Counter[NodeId]()
        """Times that what a node gave was found to be wrong, or stood on what was."""
        self.prefills = Counter[str]()
        """Prompts of others, likewise."""
        self.least_pushed: Mapping[NodeId, int] = {}
        """New tokens of a prompt, from which on it is computed elsewhere while no answer is written here, by node."""
        self.least_beside: Mapping[NodeId, int] = {}
        """While answers are."""


# fmt: off
KV_ROWS: tuple[Row[KvMeter], ...] = (
    counter("paceline_kv_peer_fetches", "Prefixes asked of other nodes, by how it ended.", lambda meter: dict(meter.fetches), "outcome"),
    counter("paceline_kv_peer_blocks", "KV blocks between this node and others.", lambda meter: dict(meter.blocks), "what"),
    counter("paceline_kv_peer_bytes", "Bytes of these blocks.", lambda meter: dict(meter.bytes), "what"),
    counter("paceline_kv_transport_bytes", "Bytes of KV taken from other nodes and given to them, by what they went through.", lambda meter: dict(meter.moved), "what", "transport"),
    counter("paceline_kv_nixl_failures", "Transfers that NIXL did not finish: blocks of that node come over TLS for ten minutes.", lambda meter: meter.nixl_failures),
    gauge("paceline_kv_peer_prefixes", "Names of prefixes that other nodes used last, as they told.", lambda meter: meter.marks),
    gauge("paceline_kv_peer_least_tokens", "Tokens from which on a prefix is fetched, where it pays at all.", lambda meter: dict(meter.least_tokens), "node"),
    counter("paceline_kv_spot_checks", "KV blocks of other nodes that were computed again here, by what was found.", lambda meter: dict(meter.checks), "found"),
    counter("paceline_kv_lies", "Times that KV was found to be wrong which a node gave: it is left out for an hour.", lambda meter: dict(meter.lies), "node"),
    counter("paceline_kv_pushes", "Prompts that other nodes were to compute, by how it ended.", lambda meter: dict(meter.pushes), "outcome"),
    counter("paceline_kv_push_seconds", "What prompts that other nodes were to compute took, from being asked for to the last block or failure.", lambda meter: dict(meter.push_s), "outcome"),
    counter("paceline_kv_prefills", "Prompts computed for other nodes, by how it ended.", lambda meter: dict(meter.prefills), "outcome"),
    gauge("paceline_kv_leases", "Prompts that are computed for other nodes now.", lambda meter: meter.leases()),
    gauge("paceline_kv_push_least_tokens", "New tokens from which on a prompt is computed elsewhere while no answer is written here.", lambda meter: dict(meter.least_pushed), "node"),
    gauge("paceline_kv_push_least_tokens_beside_answers", "The same, while answers are written here.", lambda meter: dict(meter.least_beside), "node"),
)
# fmt: on
