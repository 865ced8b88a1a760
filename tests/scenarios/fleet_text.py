"""A fleet as text, for scenario files.

    model NAME layers N hidden H layer BYTES edges BYTES kv BYTES context TOKENS [vocabulary V] [digest D] [weights W]
        [heads KVHEADS inner FFN words VOCABULARY attention BYTES]        (what tensor ranks divide)
    node NAME memory FREE/TOTAL rate BYTES [shards BYTES] [leaving] [guest]
      has MODEL [warm] [shard] [decode RATE] [prefill RATE] [numerics ID] [context TOKENS]    (as long as it is served there)
      loaded MODEL FIRST-LAST
      drafts MODEL [decode RATE]
      saw step ROWS TIMEms | saw drafts NODE MODEL SHARE        (of the model named last, as the node served it)
      link NODE RTTms BYTES [RTTms]                             (of a call; of the network alone)

Bytes take a suffix: K, M, G. A rate is tokens a second; without one it was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange
from paceline.fleet.card import DividedShape, Link, MeasuredDraft, ModelOffer, ModelShape, NodeCard, Role, ShardState, StepTime

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass
class FleetText:
    """Cards by name, and the models they speak of."""

    models: dict[str, ModelOffer] = field(default_factory=dict)
    cards: dict[str, NodeCard] = field(default_factory=dict)
    trust: dict[NodeId, Trust] = field(default_factory=dict)

    def read(self, line: str) -> None:
        kind, *words = line.split()
        match kind:
            case "model":
                self._model(words[0], _pairs(words[1:]))
            case "node":
                self._node(words[0], words[1:])
            case "has" | "drafts":
                self._offer(kind, words)
            case "saw":
                self._saw(*words)
            case "loaded":
                self._loaded(*words)
            case "link":
                rtt_s, *network_s = (float(word.removesuffix("ms")) / 1000 for word in words if word.endswith("ms"))
                self._change(links=(*self._last.links, Link(NodeId(words[0]), f"{words[0]}:1", rtt_s, number(words[2]), *network_s)))
            case _:
                raise ValueError(f"what is {line!r}?")

    @property
    def _last(self) -> NodeCard:
        return list(self.cards.values())[-1]

    def _change(self, **changes: object) -> None:
        card = self._last
        self.cards[card.node_id] = replace(card, **changes)

    def _model(self, name: str, said: dict[str, str]) -> None:
        shape = ModelShape(
            n_layers=int(said["layers"]),
            hidden=int(said["hidden"]),
            layer_bytes=int(number(said["layer"])),
            edge_bytes=int(number(said["edges"])),
            kv_bytes_per_token_per_layer=int(number(said["kv"])),
            max_context=int(said["context"]),
            divided=DividedShape(int(said["heads"]), int(said["inner"]), int(said["words"]), int(number(said["attention"])))
            if "heads" in said
            else None,
        )
        digest = said.get("digest", f"{name}-digest-of-weights")
        self.models[name] = ModelOffer(
            name, Role.VERIFIER, said.get("weights", "int4"), digest=digest, shape=shape, vocabulary=said.get("vocabulary", "")
        )

    def _node(self, name: str, words: list[str]) -> None:
        said = _pairs([word for word in words if word not in {"leaving", "guest"}])
        free, total = (int(number(size)) for size in said["memory"].split("/"))
        self.cards.pop(name, None)
        self.trust[NodeId(name)] = Trust.GUEST if "guest" in words else Trust.MEMBER
        self.cards[name] = NodeCard(
            node_id=NodeId(name), version=1, addresses=(f"{name}:1",), instance=name.encode(), ttl_s=120, announced_at=0, backend="cpu",
            memory_total_bytes=total, memory_free_bytes=free, memory_bytes_per_s=int(number(said.get("rate", "0"))), leaving="leaving" in words,
            serves_shards="shards" in said, shard_memory_bytes=int(number(said.get("shards", "0"))),
        )  # fmt: skip

    def _saw(self, what: str, *words: str) -> None:
        offer = self._last.models[-1]
        if what == "step":
            seen = replace(offer, steps=(*offer.steps, StepTime(int(words[0]), float(words[1].removesuffix("ms")) / 1000)))
        else:
            seen = replace(offer, drafts=(*offer.drafts, MeasuredDraft(NodeId(words[0]), words[1], float(words[2]))))
        self._change(models=(*self._last.models[:-1], seen))

    def _loaded(self, name: str, span: str) -> None:
        """Layers of a model that the node has, in the memory that it gives to that."""
        first, _, last = span.partition("-")
        own = next(offer for offer in self._last.models if offer.model_id == name)
        layers = LayerRange(int(first), int(last) + 1)
        held = len(layers) * (own.shape.layer_bytes if own.shape is not None else 0)
        shard = ShardState(layers, 4, memory_bytes=held)
        self._change(models=(*self._last.models, replace(own, role=Role.SHARD, warm=True, shard=shard)))

    def _offer(self, kind: str, words: list[str]) -> None:
        name, *rest = words
        said = _pairs([word for word in rest if word not in {"warm", "shard"}])
        base = self.models[name]
        role = Role.PROPOSER if kind == "drafts" else Role.SHARD if "shard" in rest else Role.VERIFIER
        offer = replace(
            base,
            role=role,
            warm="warm" in rest,
            tokens_per_second=float(said.get("decode", 0)),
            prefill_tokens_per_second=float(said.get("prefill", 0)),
            numerics_id=said.get("numerics", ""),
            digest=said.get("digest", base.digest).replace("unknown", ""),
            shape=None if base.shape is None else replace(base.shape, max_context=int(said.get("context", base.shape.max_context))),
        )
        self._change(models=(*self._last.models, offer))


def number(text: str) -> float:
    """A number, with a suffix or without."""
    return float(text[:-1]) * _SUFFIXES[text[-1]] if text[-1] in _SUFFIXES else float(text)


def blocks(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Pairs of (input lines, expected lines): a file is `input`, `----`, `expected`, an empty line, and so on."""
    said: list[str] = []
    expected: list[str] | None = None
    for line in [*text.splitlines(), ""]:
        if expected is None and line == "----":
            expected = []
        elif expected is None:
            said.append(line)
        elif line:
            expected.append(line)
        else:
            yield said, expected
            said, expected = [], None
    assert not any(said), f"input without an answer: {said}"


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))
