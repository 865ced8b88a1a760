"""What this node says of itself: measured, not declared.

Law: `look` measures and blocks, so it runs in a thread: at the start, when models come and go, and about once a minute. `card` says what the last
look saw, at once. Figures have two digits and keep them, so a card changes only when it means something.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline import __version__
from paceline.core.ids import NodeId
from paceline.fleet.card import Device, Link, MeasuredDraft, ModelOffer, NodeCard, ShardState, StepTime
from paceline.fleet.figures import kept, settled, settled_within
from paceline.machine.devices import LocalDevice, local_devices, usable_cores
from paceline.machine.offers import Shelf, WarmModel
from paceline.machine.ring import mlx_version, probe_ring_environment
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look saw."""

    devices: tuple[Device, ...]
    models: tuple[ModelOffer, ...]
    ring_address: str


class SelfPortrait:
    """One node's account of itself.

    Args:
        devices: what runs layers here; None: this machine's.
    """

    def __init__(self, node_id: NodeId, home: Home, devices: Sequence[LocalDevice] | None = None) -> None:
        self._node_id, self._devices = node_id, local_devices(home) if devices is None else devices
        self._shelf = Shelf(home, usable_cores(), self._devices)
        self._seen: Seen | None = None
        self._memory_rates: list[float] = []
        self._shards: tuple[ModelOffer, ...] = ()
        self._shard_memory: tuple[int, ...] | None = None

    def look(self, warm: Sequence[WarmModel] = (), drafts: Sequence[ModelOffer] = (), beside: Sequence[ModelLocation] = ()) -> bool:
        """Measure. Blocks for about 0.1 s the first time in a machine's uptime; afterwards for as long as reading new models' heads takes.

        Args:
            drafts: what this node proposes tokens with.
            beside: models that lie elsewhere than in the home.

        Returns:
            Whether the card changed.
        """
        before = self._seen
        if not self._memory_rates:  # once: it would disturb what serves by now
            self._memory_rates = [device.memory_rate() for device in self._devices]
        shown = before.devices if before else [None] * len(self._devices)
        self._seen = Seen(
            devices=tuple(map(_device, self._devices, self._memory_rates, shown)),
            models=_steady((*self._shelf.offers(warm, beside), *drafts), before.models if before else ()),
            ring_address=probe_ring_environment().address,
        )
        return self._seen != before

    def show_shards(self, shards: Sequence[ModelOffer], memory_bytes: Sequence[int] | None) -> bool:
        """What the card says of shards from now on. Measures nothing, so it may be called whenever one comes, goes, or gets busier.

        Args:
            shards: layers loaded here for others, one offer a range (`offers.shard_offer`).
            memory_bytes: what further ones may take of each device; None: this node serves no shards.

        Returns:
            Whether the card changed.
        """
        before = self._shards, self._shard_memory
        self._shards = _steady(shards, self._shards)
        known = self._shard_memory or [0] * len(self._devices)
        self._shard_memory = None if memory_bytes is None else tuple(map(_settled_within, memory_bytes, known))
        return before != (self._shards, self._shard_memory)

    def card(self, addresses: tuple[str, ...] = (), links: tuple[Link, ...] = ()) -> NodeCard:
        """The card as of the last look; the first call looks. Version, instance, stamp and TTL are its announcer's to add."""
        if self._seen is None:
            self.look()
        seen = self._seen
        assert seen is not None
        memory = self._shard_memory or [0] * len(seen.devices)
        main, *others = (replace(device, shard_memory_bytes=left) for device, left in zip(seen.devices, memory, strict=True))
        return NodeCard(
            node_id=self._node_id,
            version=0,
            addresses=addresses,
            instance=b"",
            ttl_s=0,
            announced_at=0,
            platform=f"{platform.system().lower()}-{platform.machine()}",
            backend=main.backend,
            device=main.name,
            memory_total_bytes=main.memory_total_bytes,
            memory_free_bytes=main.memory_free_bytes,
            memory_bytes_per_s=main.memory_bytes_per_s,
            models=(*seen.models, *self._shards),
            links=links,
            ring_address=seen.ring_address,
            mlx_version=mlx_version(),
            software=__version__,
            serves_shards=self._shard_memory is not None,
            shard_memory_bytes=main.shard_memory_bytes,
            devices=tuple(others),
        )


def own_name() -> str:
    """This machine's name, for a node that belongs to no fleet yet."""
    return platform.node() or f"node-{os.getuid()}"


def _device(device: LocalDevice, rate: float, shown: Device | None) -> Device:
    """As a card says it, with figures that stay what they were while they mean the same."""
    return Device(
        device.kernels,
        device.name(),
        _settled(device.total_bytes(), shown.memory_total_bytes if shown else 0),
        _settled(device.free_bytes(), shown.memory_free_bytes if shown else 0),
        _settled(rate, shown.memory_bytes_per_s if shown else 0),
        weights=tuple(map(str, device.weights)),
    )


def _settled_within(value: float, shown: int) -> int:
    return int(settled_within(value, shown))


def _settled(value: float, shown: int) -> int:
    return int(settled(value, shown))


def _steady(offers: Sequence[ModelOffer], before: Sequence[ModelOffer]) -> tuple[ModelOffer, ...]:
    """Offers with figures of two digits, which stay what they were while they mean the same."""
    shown = {_subject(offer): offer for offer in before}
    steady: list[ModelOffer] = []
    for offer in offers:
        last = shown.get(_subject(offer), offer)
        same = last.numerics_id == offer.numerics_id and last is not offer
        stays = kept if offer.steps else settled
        steady.append(
            replace(
                offer,
                tokens_per_second=stays(offer.tokens_per_second, last.tokens_per_second if same else 0.0),
                prefill_tokens_per_second=stays(offer.prefill_tokens_per_second, last.prefill_tokens_per_second if same else 0.0),
                steps=_steady_steps(offer.steps, last.steps),
                drafts=_steady_drafts(offer.drafts, last.drafts),
                shard=_steady_shard(offer.shard, last.shard if last is not offer else None),
            )
        )
    return tuple(steady)


def _steady_steps(steps: Sequence[StepTime], before: Sequence[StepTime]) -> tuple[StepTime, ...]:
    shown = {step.rows: step.seconds for step in before}
    return tuple(replace(step, seconds=kept(step.seconds, shown.get(step.rows, 0.0))) for step in steps)


def _steady_drafts(drafts: Sequence[MeasuredDraft], before: Sequence[MeasuredDraft]) -> tuple[MeasuredDraft, ...]:
    shown = {(draft.node_id, draft.model_id): draft.acceptance for draft in before}
    return tuple(
        replace(draft, acceptance=kept(max(draft.acceptance, 0.01), shown.get((draft.node_id, draft.model_id), 0.0))) for draft in drafts
    )


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
