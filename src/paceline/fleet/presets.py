"""How a person sets a node's part in its fleet, and how a fleet gossips: three presets instead of knobs, and what a peer may send and gossip may hold.
Each field says what raising it costs.

What is beyond a bound is refused with a typed error, before anything in it is looked at: transport calls `Gossip.admit` with a message's measures
before it checks a signature, so that refusing costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from paceline.core.errors import ConfigError, MessageTooLarge
from paceline.fleet.eligibility import TrustPolicy


@dataclass(frozen=True, slots=True)
class Measures:
    """How large a request is, counted without decoding cards."""

    digests: int = 0
    cards: int = 0
    largest_card_bytes: int = 0
    """Card, signature and certificate."""
    revocations: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Raising any of these costs memory in proportion, on every node."""

    max_nodes: int = 256
    """Ids the registry holds. A card of one more is ignored."""
    max_card_bytes: int = 16384
    """Card, signature and certificate; a card with ten models and twenty links has some 3 KB."""
    max_cards: int = 256
    """Cards in one message; the rest follow in the next call."""
    max_message_bytes: int = 1 << 20
    """Of cards in one message; the rest follow in the next call, as above."""
    max_revocations: int = 4096
    """Revocations in one message. The set itself only grows by the CA's word."""
    burst: int = 32
    """Requests one peer may send at once; one more is earned every `exchange_s / burst`."""

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many cards, of so many bytes each and in this order, go into one message. The first one always does."""
        filled = 0
        for count, size in enumerate(sizes[: self.max_cards]):
            filled += size
            if count and filled > self.max_message_bytes:
                return count
        return min(len(sizes), self.max_cards)

    def check(self, measures: Measures) -> None:
        """Raise `MessageTooLarge` where a request exceeds a bound."""
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
    """From one round of exchanges to the next. Raising it: news takes longer to arrive, in proportion; bytes fall in proportion."""
    restamp_s: float = 30.0
    """A node signs its unchanged card again this often. Raising it: fewer lost rounds are forgiven before a live node
    expires. Lowering it below `exchange_s` changes nothing."""
    rpc_timeout_s: float = 5.0
    """One call may take so long. Raising it: a round that meets a dead peer ends later."""
    fanout: int = 2
    """Peers a node exchanges with in a round, besides one that it has lost or only knows the address of. Raising it: news reaches
    every node in fewer rounds; each costs a set of digests (18 bytes a node) and two calls more."""
    fanout_news: int = 3
    """The same after a round that brought a new card, a goodbye or a revocation. Raising it: as above, but only while there is news."""
    fanout_goodbye: int = 16
    """Peers a node says goodbye to itself. Raising it: stopping takes a call to each; a node that is not called hears of it in a round or two."""
    jitter: float = 0.1
    """Rounds are spread by this fraction of `exchange_s`. Raising it: rounds grow uneven; at 0 nodes that started together call together."""
    max_calls: int = 8
    """Calls one exchange may take when there is more than messages may carry. Raising it: a newcomer to a large fleet is complete after
    fewer rounds, and holds its peer for longer."""
    remember_lost_s: float = 86400.0
    """Nodes that expired are called again for so long, one a round, so that a healed partition is noticed. Raising it: calls into the
    void go on for longer after a machine was given away."""
    bounds: Bounds = field(default_factory=Bounds)


def desk() -> Preset:
    """Two to five machines on one desk: each calls every other, a lost machine is out of the view within 30 s."""
    return Preset(ttl_s=30, exchange_s=5.0, restamp_s=5.0, rpc_timeout_s=2.0, fanout=4, fanout_news=4)


def lan() -> Preset:
    """Up to some fifty machines."""
    return Preset()


def simulation() -> Preset:
    """A thousand nodes: news takes several rounds to arrive, so cards live longer and are signed again less often."""
    return Preset(ttl_s=600, restamp_s=120.0, fanout=1, fanout_news=2, bounds=Bounds(max_nodes=4096, max_cards=1024))


FLEET_PORT = 8154
MAX_TTL_S = 86400
"""No card that is to live for longer is believed."""
PRESETS = {"desk": desk, "lan": lan, "simulation": simulation}
DEFAULT_PRESET = "lan"
"""All nodes of a fleet want the same."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """One node's part in its fleet."""

    port: int = FLEET_PORT
    """Of the node's gRPC services; 0: any free one."""
    host: str = ""
    """Address to listen on; empty: all of this machine's. Only members of the fleet are answered, whatever else can reach it."""
    peers: tuple[str, ...] = ()
    """host:port of other nodes, beside those found by mDNS and those remembered."""
    mdns: bool = True
    preset: Preset = lan()  # noqa: RUF009 - frozen
    max_revocation_age_s: float | None = None
    """Other nodes are refused where what this one knows of revocations is older; None: never."""
    tensor_port: int = 0
    """Of activations between machines that share a model; 0: any free one. On `host` too."""
    trust: TrustPolicy = TrustPolicy()  # noqa: RUF009 - frozen


def parse_preset(text: str) -> Preset:
    """A preset by name, and what is to differ from it: `desk`, or `desk,ttl_s=10,exchange_s=1`.

    Raises:
        ConfigError: no such preset or field, or no number.
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
