"""What this node says of itself: measured, not declared.

Law: `look` measures and blocks, so it runs in a thread: at the start, when models come and go, and about once a minute. `card` says what the last
look saw, at once. Figures have two digits and keep them, so a card changes only when it means something.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import __version__
from paceline.backends import cpu
from paceline.backends.memory import available_bytes, total_bytes
from paceline.backends.table import Kernels
from paceline.core.ids import NodeId
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role, ShardState
from paceline.fleet.figures import settled, settled_within
from paceline.node import accelerator
from paceline.node.cores import usable_cores
from paceline.node.memory_rate import memory_rate
from paceline.node.offers import Shelf, WarmModel
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.transport.ring import mlx_version, probe_ring_environment

LOOKUP = ModelOffer("ngram", Role.PROPOSER, "")
"""Prompt lookup: every node can draft with it, and it needs no weights."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look saw."""

    backend: Kernels
    device: str
    memory_total_bytes: int
    memory_free_bytes: int
    memory_bytes_per_s: int
    models: tuple[ModelOffer, ...]
    ring_address: str


class SelfPortrait:
    """One node's account of itself.

    Args:
        home: its models and caches.
    """

    def __init__(self, node_id: NodeId, home: Home) -> None:
        self._node_id, self._home = node_id, home
        self._cuda = accelerator.has_cuda()
        self._shelf = Shelf(home, usable_cores(), cuda=self._cuda)
        self._seen: Seen | None = None
        self._memory_rate: float | None = None
        self._shards: tuple[ModelOffer, ...] = ()
        self._shard_memory: int | None = None

    def look(self, warm: Sequence[WarmModel] = (), drafts: Sequence[ModelOffer] = (LOOKUP,), beside: Sequence[ModelLocation] = ()) -> bool:
        """Measure. Blocks for about 0.1 s the first time in a machine's uptime; afterwards for as long as reading new models' heads takes.

        Args:
            drafts: what this node proposes tokens with.
            beside: models that lie elsewhere than in the home.

        Returns:
            Whether the card changed.
        """
        before = self._seen
        total, free = (accelerator.total_cuda_bytes(), accelerator.free_cuda_bytes()) if self._cuda else (total_bytes(), available_bytes())
        if self._memory_rate is None:  # once: it would disturb what serves by now
            self._memory_rate = memory_rate(self._home, measure=accelerator.cuda_memory_rate if self._cuda else None)
        self._seen = Seen(
            backend=_kernels(cuda=self._cuda),
            device=accelerator.cuda_name() if self._cuda else processor_name(),
            memory_total_bytes=_settled(total, before.memory_total_bytes if before else 0),
            memory_free_bytes=_settled(free, before.memory_free_bytes if before else 0),
            memory_bytes_per_s=_settled(self._memory_rate, before.memory_bytes_per_s if before else 0),
            models=_steady((*self._shelf.offers(warm, beside), *drafts), before.models if before else ()),
            ring_address=probe_ring_environment().address,
        )
        return self._seen != before

    def show_shards(self, shards: Sequence[ModelOffer], memory_bytes: int | None) -> bool:
        """What the card says of shards from now on. Measures nothing, so it may be called whenever one comes, goes, or gets busier.

        Args:
            shards: layers loaded here for others, one offer a range (`offers.shard_offer`).
            memory_bytes: what further ones may take; None: this node serves no shards.

        Returns:
            Whether the card changed.
        """
        before = self._shards, self._shard_memory
        self._shards = _steady(shards, self._shards)
        self._shard_memory = None if memory_bytes is None else int(settled_within(memory_bytes, self._shard_memory or 0))
        return before != (self._shards, self._shard_memory)

    def card(self, addresses: tuple[str, ...] = (), links: tuple[Link, ...] = ()) -> NodeCard:
        """The card as of the last look; the first call looks. Version, instance, stamp and TTL are its announcer's to add."""
        if self._seen is None:
            self.look()
        seen = self._seen
        assert seen is not None
        return NodeCard(
            node_id=self._node_id,
            version=0,
            addresses=addresses,
            instance=b"",
            ttl_s=0,
            announced_at=0,
            platform=f"{platform.system().lower()}-{platform.machine()}",
            backend=seen.backend,
            device=seen.device,
            memory_total_bytes=seen.memory_total_bytes,
            memory_free_bytes=seen.memory_free_bytes,
            memory_bytes_per_s=seen.memory_bytes_per_s,
            models=(*seen.models, *self._shards),
            links=links,
            ring_address=seen.ring_address,
            mlx_version=mlx_version(),
            software=__version__,
            serves_shards=self._shard_memory is not None,
            shard_memory_bytes=self._shard_memory or 0,
        )


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, and how many cores a step uses."""
    cores = usable_cores()
    name = platform.processor() or platform.machine()
    try:
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    except OSError:
        pass  # not Linux: the name above will do
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"


def own_name() -> str:
    """This machine's name, for a node that belongs to no fleet yet."""
    return platform.node() or f"node-{os.getuid()}"


def _kernels(*, cuda: bool) -> Kernels:
    """What the node would choose for most models."""
    return Kernels.CUDA if cuda else Kernels.AVX512_BF16 if cpu.runs_here() else Kernels.TORCH


def _settled(value: float, shown: int) -> int:
    return int(settled(value, shown))


def _steady(offers: Sequence[ModelOffer], before: Sequence[ModelOffer]) -> tuple[ModelOffer, ...]:
    """Offers with figures of two digits, which stay what they were while they mean the same."""
    shown = {_subject(offer): offer for offer in before}
    steady: list[ModelOffer] = []
    for offer in offers:
        last = shown.get(_subject(offer), offer)
        same = last.numerics_id == offer.numerics_id and last is not offer
        steady.append(
            replace(
                offer,
                tokens_per_second=settled(offer.tokens_per_second, last.tokens_per_second if same else 0.0),
                prefill_tokens_per_second=settled(offer.prefill_tokens_per_second, last.prefill_tokens_per_second if same else 0.0),
                shard=_steady_shard(offer.shard, last.shard if last is not offer else None),
            )
        )
    return tuple(steady)


def _subject(offer: ModelOffer) -> tuple[object, ...]:
    """What two offers with different figures are both about."""
    return (offer.model_id, offer.role, offer.weights, None if offer.shard is None else offer.shard.layers)


def _steady_shard(shard: ShardState | None, last: ShardState | None) -> ShardState | None:
    if shard is None:
        return None
    return replace(
        shard,
        queue_depth=_settled(shard.queue_depth, last.queue_depth if last else 0),
        memory_bytes=_settled(shard.memory_bytes, last.memory_bytes if last else 0),
    )
