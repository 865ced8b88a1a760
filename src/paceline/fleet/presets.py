"""The fleet settings of a node, three presets for the times of gossip, and the bounds on what a peer may send and gossip may hold. Each field says what
raising it costs.

A message beyond a bound is refused with a typed error before it is decoded: transport calls `Gossip.admit` with the message's measures before it
checks a signature, so that a refusal costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from paceline.core.errors import ConfigError, MessageTooLarge
from paceline.fleet.eligibility import TrustPolicy


@dataclass(frozen=True, slots=True)
class Measures:
    """The sizes of a request, counted without decoding its cards."""

    digests: int = 0
    cards: int = 0
    largest_card_bytes: int = 0
    """Size of card, signature and certificate together."""
    revocations: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Raising any of these costs memory in proportion, on every node."""

    max_nodes: int = 256
    """Ids that the registry holds. Cards of further ids are ignored."""
    max_card_bytes: int = 16384
    """Size of card, signature and certificate together. A card with ten models and twenty links has some 3 KB."""
    max_cards: int = 256
    """Cards in one message; the rest follow in the next call."""
    max_message_bytes: int = 1 << 20
    """Size of all cards in one message; the rest follow in the next call, as above."""
    max_revocations: int = 4096
    """Revocations in one message. The set itself has no bound, because only the CA adds to it."""
    burst: int = 32
    """Requests that one peer may send at once; it gains one more every `exchange_s / burst` seconds."""

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many cards, of these sizes in bytes and in this order, fit into one message. The first card always fits."""
        filled = 0
        for count, size in enumerate(sizes[: self.max_cards]):
            filled += size
            if count and filled > self.max_message_bytes:
                return count
        return min(len(sizes), self.max_cards)

    def check(self, measures: Measures) -> None:
        """Raise `MessageTooLarge` if a request exceeds a bound."""
        for what, size, most in (
            ("digests", measures.digests, self.max_nodes),
            ("cards", measures.cards, self.max_cards),
            ("bytes in one card", measures.largest_card_bytes, self.max_card_bytes),
            ("revocations", measures.revocations, self.max_revocations),
        ):
            if size > most:
                raise MessageTooLarge(f"a peer sent {size} {what}; the bound is {most}", "All nodes of a fleet need one preset")


@dataclass(frozen=True, slots=True)
class Preset:
    """Times in seconds. The defaults are those of `lan`."""

    ttl_s: int = 120
    """A card is dropped when its node has not signed it for this long. Raising it: a dead machine stays in views, and in plans, for longer. It must exceed
    `restamp_s` and the time that a card takes to reach every node (about log of the fleet's size to the base 1 + 2 `fanout`, times `exchange_s`)."""
    exchange_s: float = 30.0
    """Seconds from one round of exchanges to the next. Raising it: news takes longer to arrive and fewer bytes are sent, both in proportion."""
    restamp_s: float = 30.0
    """Seconds after which a node signs its unchanged card again. Raising it: fewer lost rounds are enough for a live node to
    expire; lowering it below `exchange_s` changes nothing."""
    rpc_timeout_s: float = 5.0
    """Timeout of one call. Raising it: a round that meets a dead peer ends later."""
    fanout: int = 2
    """Peers that a node exchanges with in a round, in addition to one lost node or seed. Raising it: news reaches every node in fewer
    rounds; each further peer costs two more calls and a set of digests (18 bytes a node)."""
    fanout_news: int = 3
    """Peers of a round after a new card, a goodbye or a revocation came. Raising it: as for `fanout`, but only while there is news."""
    fanout_goodbye: int = 16
    """Peers that a leaving node says goodbye to. Raising it: a stop takes more calls; nodes that are not called learn of it in a round or two."""
    jitter: float = 0.1
    """Fraction of `exchange_s` by which rounds are spread at random. Raising it: rounds grow uneven; at 0 nodes that started together call together."""
    max_calls: int = 8
    """Most calls of one exchange when there is more than one message may carry. Raising it: a new node of a large fleet knows every card after
    fewer rounds, and occupies its peer for longer."""
    remember_lost_s: float = 86400.0
    """Seconds for which expired nodes are called again, one a round, so that a healed partition is noticed. Raising it: a machine that
    was given away is called in vain for longer."""
    bounds: Bounds = field(default_factory=Bounds)


def desk() -> Preset:
    """Return the preset for two to five machines on one desk. Each calls every other, and a lost machine is out of the view within 30 s."""
    return Preset(ttl_s=30, exchange_s=5.0, restamp_s=5.0, rpc_timeout_s=2.0, fanout=4, fanout_news=4)


def lan() -> Preset:
    """Return the preset for up to about fifty machines."""
    return Preset()


def simulation() -> Preset:
    """Return the preset for a thousand nodes. News takes several rounds to arrive, so cards live longer and are signed again less often."""
    return Preset(ttl_s=600, restamp_s=120.0, fanout=1, fanout_news=2, bounds=Bounds(max_nodes=4096, max_cards=1024))


FLEET_PORT = 8154
MAX_TTL_S = 86400
"""Longest `ttl_s` of a card; cards that claim to live longer are refused."""
PRESETS = {"desk": desk, "lan": lan, "simulation": simulation}
DEFAULT_PRESET = "lan"
"""Name of the preset used if none is set. All nodes of a fleet need the same one."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """One node's part in its fleet."""

    port: int = FLEET_PORT
    """Port of the node's gRPC services; 0: any free one."""
    host: str = ""
    """Address to listen on; empty: all addresses of this machine. Only members of the fleet get answers, whatever else can reach it."""
    peers: tuple[str, ...] = ()
    """host:port of other nodes, in addition to those found by mDNS and those remembered."""
    mdns: bool = True
    preset: Preset = lan()  # noqa: RUF009 - frozen
    max_revocation_age_s: float | None = None
    """Seconds after which this node's knowledge of revocations is too old and it refuses other nodes; None: never."""
    tensor_port: int = 0
    """Port for activations between machines that share a model, on `host` too; 0: any free one."""
    trust: TrustPolicy = TrustPolicy()  # noqa: RUF009 - frozen


def parse_preset(text: str) -> Preset:
    """Return a preset from its name and the fields to change, such as `desk` or `desk,ttl_s=10,exchange_s=1`.

    Raises:
        ConfigError: the preset or a field does not exist, a value is not a number, or the result can't work.
    """
    name, *changes = [part.strip() for part in text.split(",")]
    make = PRESETS.get(name)
    if make is None:
        raise ConfigError(f"There is no fleet preset {name!r}", f"One of: {', '.join(PRESETS)}.")
    preset = make()
    kinds = {field.name: type(getattr(preset, field.name)) for field in fields(preset) if field.name != "bounds"}
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals or field not in kinds:
            raise ConfigError(f"A fleet preset has no field {field!r}", f"It has: {', '.join(kinds)}.")
        try:
            number = kinds[field](value)
        except ValueError as error:
            raise ConfigError(f"{field}={value} is not a number", f"Such as {field}={getattr(preset, field)}.") from error
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{field} can't be {value}", "It is 0 or more.")
        preset = replace(preset, **{field: number})
    if preset.exchange_s <= 0 or preset.rpc_timeout_s <= 0 or not preset.restamp_s < preset.ttl_s <= MAX_TTL_S:
        raise ConfigError(
            f"The preset {text!r} can't work",
            f"exchange_s and rpc_timeout_s are above 0, and ttl_s is above restamp_s, {MAX_TTL_S} at most.",
        )
    return preset
