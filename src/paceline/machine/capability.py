"""What this node says of itself on its card: its devices, as measured, and what it could do with the models on its disk.

Law: `look` measures and blocks, so it runs in a thread: at the start, when models come and go, and about once a minute. `card` says what the last
look saw, at once. Figures have two digits and keep them, so a card changes only when it means something. Of models, nothing is read but the heads
of files, and no digest is computed: it is empty until it is known (`learn_digests`, in a thread of its own). Speeds are those measured when a
model was last loaded (`machine.speed`); a model that never was has none.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import __version__
from paceline.backends import table
from paceline.backends.options import DeviceKind
from paceline.core.errors import PacelineError
from paceline.core.ids import NodeId
from paceline.core.model import ModelRef, ModelSpec
from paceline.core.stats import EngineStats
from paceline.core.weights import tensor_shapes
from paceline.fleet.card import (
    Device,
    EngineOffer,
    Link,
    MeasuredDraft,
    ModelOffer,
    ModelShape,
    NodeCard,
    Role,
    ShardState,
    StepTime,
    kept,
    settled,
    settled_within,
)
from paceline.machine.devices import RING_VARIABLES, LocalDevice, local_devices, mlx_version, probe_ring_environment, usable_cores
from paceline.machine.sizing import fits_gpu, model_shape
from paceline.machine.speed import Speed, SpeedCache, SpeedKey
from paceline.store.catalog import ModelLocation, locations, open_weights
from paceline.store.digests import DigestCache, digest_of_files, file_sums
from paceline.store.home import Home, identity_key
from paceline.store.selection import BESIDE

logger = logging.getLogger(__name__)

MOST_STEPS = 8
"""Row counts of which a card says what steps take. Raising it: larger cards."""


@dataclass(frozen=True, slots=True)
class WarmModel:
    """A model that is loaded and serving here."""

    model: ModelRef
    shape: ModelShape
    context: int
    """As served: memory may allow less than the model's own."""
    size_bytes: int
    speed: Speed
    tokenizer: str = ""
    """SHA-256 of its packed tokenizer and template. Empty where it gives none."""
    steps: tuple[StepTime, ...] = ()
    drafts: tuple[MeasuredDraft, ...] = ()
    """As they were while it served."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What the heads of a model's files say."""

    spec: ModelSpec
    size_bytes: int
    types: Mapping[str, str]
    """The type that each tensor is stored in."""
    digest: str
    """Empty where it is not known yet."""
    files_digest: str
    """Of all files, tokenizer and template among them. Empty as `digest`."""
    keys: dict[Path, str]
    """The files, as they were."""

    @property
    def is_current(self) -> bool:
        return self.digest != "" and all(identity_key(file, "head") == key for file, key in self.keys.items())


class LocalOffers:
    """The models on this machine's disk. Remembers the heads of files it has read."""

    def __init__(self, home: Home, threads: int, devices: Sequence[LocalDevice]) -> None:
        self._home, self._threads, self._devices = home, threads, devices
        self._digests, self._speeds = DigestCache(home), SpeedCache(home)
        self._heads: dict[Path, _Head] = {}
        self.unread: tuple[ModelLocation, ...] = ()
        """Models whose digest was not known at the last look."""

    def offers(self, warm: Sequence[WarmModel] = (), beside: Sequence[ModelLocation] = ()) -> tuple[ModelOffer, ...]:
        """Every model that could run here, those that do first; of those that lie elsewhere than in the home, the ones named."""
        loaded = {(name, one.model.weights) for one in warm for name in (one.model.digest, one.model.name)}
        here = locations(self._home)
        known = {location.path for location in here}
        here += [location for location in beside if location.path not in known]
        cold = [offer for location in here for offer in self._offers(location)]
        self.unread = tuple(location for location in here if (head := self._heads.get(location.path)) is not None and not head.digest)
        files = {offer.digest: offer.files for offer in cold}
        return (
            *(replace(warm_offer(one), files=files.get(one.model.digest, "")) for one in warm),
            *(offer for offer in cold if (offer.digest or offer.model_id, offer.weights) not in loaded),
        )

    def _offers(self, location: ModelLocation) -> list[ModelOffer]:
        """One for each device, in the format that runs there unasked; none where the model can't run here, or is damaged."""
        found: list[ModelOffer] = []
        try:
            head = self._head(location)
            for device in self._devices:
                kind = device.kernels.device
                if kind is not DeviceKind.CPU and not fits_gpu(head.spec, head.types.__getitem__, device.total_bytes()):
                    continue
                weights = kind.format_unasked
                shape = model_shape(head.spec, weights, head.types.__getitem__, table.choose(head.spec, weights, device=kind))
                speed = self._speeds.find(SpeedKey(head.digest, weights, self._threads)) if head.digest else None
                found.append(
                    replace(_offer(ModelRef(head.digest, weights, location.name), shape, head.size_bytes, speed), files=head.files_digest)
                )
        except (PacelineError, OSError) as error:
            logger.debug("%s is not offered: %s", location.name, error)
        return found

    def _head(self, location: ModelLocation) -> _Head:
        head = self._heads.get(location.path)
        if head is None or not head.is_current:
            weights = open_weights(location.path, self._digests)
            beside = [location.path / name for name in BESIDE if location.path.is_dir()]
            whole = list(dict.fromkeys((*weights.files, *(file for file in beside if file.is_file()))))
            keys = {file: identity_key(file, "head") for file in whole}
            size = sum(file.stat().st_size for file in weights.files)
            types = {name: weights.type_of(name) for name in tensor_shapes(weights.spec)}
            together = digest_of_files(self._digests, whole) if weights.known_digest else ""
            head = self._heads[location.path] = _Head(weights.spec, size, types, weights.known_digest or "", together, keys)
        return head


def warm_offer(warm: WarmModel) -> ModelOffer:
    """A model that serves, as a card says it."""
    offer = _offer(warm.model, warm.shape, warm.size_bytes, warm.speed)
    assert offer.shape is not None
    shape = replace(offer.shape, max_context=warm.context)
    return replace(offer, warm=True, tokenizer=warm.tokenizer, shape=shape, steps=warm.steps, drafts=warm.drafts)


def as_served(model: WarmModel, stats: EngineStats, drafts: tuple[MeasuredDraft, ...]) -> WarmModel:
    """With what its engine saw in the place of what was measured when it was loaded.

    Args:
        drafts: what became of those that other nodes made for it.
    """
    one_s = stats.step_seconds.get(1)
    decode = 1 / one_s if one_s else model.speed.tokens_per_second
    speed = replace(
        model.speed, tokens_per_second=decode, prefill_tokens_per_second=stats.prefill_per_s or model.speed.prefill_tokens_per_second
    )
    steps = tuple(StepTime(rows, seconds) for rows, seconds in sorted(stats.step_seconds.items()))
    return replace(model, speed=speed, steps=steps[:MOST_STEPS], drafts=drafts)


def shard_offer(model: WarmModel, state: ShardState) -> ModelOffer:
    """Layers of a model that are loaded for others, as a card says it. `model.speed` is that of the whole model, where it was measured."""
    return replace(warm_offer(model), role=Role.SHARD, shard=state)


def learn_digests(unread: Sequence[ModelLocation], home: Home, stopped: Callable[[], bool]) -> tuple[str, ...]:
    """Compute digests, where there are none yet. Takes as long as reading the models; for a thread of its own.

    Args:
        stopped: asked every few MiB; True ends this at once.

    Returns:
        What is to be said of those that can't be had.
    """
    missing: list[str] = []

    def read(done: int, total: int) -> None:
        del done, total
        if stopped():
            raise _Stopped

    for location in unread:
        why = "it can't be kept"
        try:
            if learn_digest(location, home, read):
                continue
        except _Stopped:
            break
        except (PacelineError, OSError) as error:
            why = str(error)
        missing.append(f"the digest of {location.name} can't be computed, and without it other machines can't share the model: {why}")
    return tuple(missing)


def learn_digest(location: ModelLocation, home: Home, progress: Callable[[int, int], None]) -> bool:
    """Compute the digest of one model, and what other nodes check its pieces by. Takes as long as reading it.

    Returns:
        Whether it is known from now on: False where it can't be kept.

    Raises:
        ModelFileError, UnsupportedModel: it can't be read, or run.
    """
    weights = open_weights(location.path, DigestCache(home))
    if weights.known_digest is not None:
        return True
    total, before = sum(file.stat().st_size for file in weights.files), 0
    for file in weights.files:
        before += file_sums(file, home, lambda read, before=before: progress(before + read, total)).size
    return weights.known_digest is not None


class _Stopped(Exception):
    """Raised inside a file that is being read."""


def _offer(model: ModelRef, shape: ModelShape, size_bytes: int, speed: Speed | None) -> ModelOffer:
    offer = ModelOffer(model.name, Role.VERIFIER, str(model.weights), digest=model.digest, size_bytes=size_bytes, shape=shape)
    if speed is None:
        return offer
    return replace(
        offer,
        tokens_per_second=speed.tokens_per_second,
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        numerics_id=speed.numerics_id,
        holds_identity=speed.holds_identity,
        vocabulary=speed.vocabulary,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    devices: tuple[Device, ...]
    models: tuple[ModelOffer, ...]
    ring_address: str


class CapabilityReport:
    """One node's account of itself.

    Args:
        devices: what runs layers here; None: this machine's.
    """

    def __init__(self, node_id: NodeId, home: Home, devices: Sequence[LocalDevice] | None = None) -> None:
        self._node_id, self._devices = node_id, local_devices(home) if devices is None else devices
        self._offers_here = LocalOffers(home, usable_cores(), self._devices)
        self._seen: Seen | None = None
        self._shards: tuple[ModelOffer, ...] = ()
        self._shard_memory: tuple[int, ...] | None = None

    @property
    def unread(self) -> tuple[ModelLocation, ...]:
        """Models whose digest was not known at the last look."""
        return self._offers_here.unread

    def look(
        self,
        warm: Sequence[WarmModel] = (),
        drafts: Sequence[ModelOffer] = (),
        beside: Sequence[ModelLocation] = (),
        *,
        is_busy: bool = False,
    ) -> bool:
        """Measure. Blocks for about 0.1 s the first time in a machine's uptime, and once more where that was a busy time; afterwards for as long as reading new models' heads takes.

        Args:
            drafts: what this node proposes tokens with.
            beside: models that lie elsewhere than in the home.
            is_busy: answers are written here now.

        Returns:
            Whether the card changed.
        """
        before = self._seen
        shown = before.devices if before else [None] * len(self._devices)
        ring = probe_ring_environment()
        if before is None and not ring.is_available and os.environ.keys() & {*RING_VARIABLES}:
            logger.warning("this machine is in no MLX ring, though it was started as a rank of one: %s", ring.failure_reason)
        self._seen = Seen(
            devices=tuple(_device(device, last, is_busy) for device, last in zip(self._devices, shown, strict=True)),
            models=_steady((*self._offers_here.offers(warm, beside), *drafts), before.models if before else ()),
            ring_address=ring.address,
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


def _device(device: LocalDevice, shown: Device | None, is_busy: bool) -> Device:
    """As a card says it, with figures that stay what they were while they mean the same."""
    return Device(
        device.kernels,
        device.name(),
        _settled(device.total_bytes(), shown.memory_total_bytes if shown else 0),
        _settled(device.free_bytes(), shown.memory_free_bytes if shown else 0),
        _settled(device.memory_rate(is_busy), shown.memory_bytes_per_s if shown else 0),
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
        stays = kept if offer.steps or offer.engine is not None else settled
        steady.append(
            replace(
                offer,
                tokens_per_second=stays(offer.tokens_per_second, last.tokens_per_second if same else 0.0),
                prefill_tokens_per_second=stays(offer.prefill_tokens_per_second, last.prefill_tokens_per_second if same else 0.0),
                steps=_steady_steps(offer.steps, last.steps),
                drafts=_steady_drafts(offer.drafts, last.drafts),
                shard=_steady_shard(offer.shard, last.shard if last is not offer else None),
                engine=_steady_engine(offer.engine, last.engine if last is not offer else None),
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


def _steady_engine(engine: EngineOffer | None, last: EngineOffer | None) -> EngineOffer | None:
    if engine is None:
        return None
    load_s, shown_s = engine.load_s, 0.0 if last is None else last.load_s or 0.0
    return replace(
        engine,
        load_s=None if load_s is None else kept(load_s, shown_s),
        first_token_s=kept(engine.first_token_s, 0.0 if last is None else last.first_token_s),
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
