"""Puts one machine's engine together: model, backend, KV, executor, engine; and, for embeddings, an encoder with its tokenizer.

Law: what a person asked for is built, or an error says why not; `notes` says where what they left open was not decided the obvious way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.backends import cpu
from paceline.backends.bert import Bert
from paceline.backends.memory import human
from paceline.backends.options import DeviceKind, LoadProgress
from paceline.core.clock import Clock, SystemClock
from paceline.core.inference import ServedModel
from paceline.core.model import WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.drafts import MoreSources
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.engine.grammar import Grammars
from paceline.engine.kv_source import KvLoans
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.fleet.card import ModelOffer, Role
from paceline.machine import devices
from paceline.machine.capability import WarmModel
from paceline.machine.embedder import encoder_shape
from paceline.machine.kv_spans import ClosableKv
from paceline.machine.kv_tier import DiskTier, KvDiskLimits, Wakeup
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import Setup, set_up
from paceline.machine.sizing import KvPlan
from paceline.machine.speed import SpeedCache, SpeedKey, learn_speed
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.digests import DigestCache, digest_of_files
from paceline.store.encoder_files import OpenedEncoder, open_encoder
from paceline.store.home import Home

if TYPE_CHECKING:
    from paceline.backends.cpu.sampler import CompiledSampler


KvBeside = Callable[[LayerRunner[Any], str, DiskTier | None, KvLoans, Callable[[], None]], ClosableKv]
"""Puts other places of KV beside the disk: from the runner, the model's digest, the disk, what the pool lends, and what to call when a fetch is over."""


Spread = Callable[[Setup, KvPlan, EngineConfig, LoadProgress | None], tuple[LayerRunner[Any], LocalExecutor[Any]]]
"""Loads a model's layers into several processes of this machine."""


X = TypeVar("X", bound=Executor)


@dataclass(slots=True, kw_only=True)
class EngineAssembly(Generic[X]):
    """An engine ready to step, and what it runs on."""

    setup: Setup
    executor: X
    runner: LayerRunner[Any]
    """This machine's layers."""
    config: EngineConfig
    kv: KvPlan
    """What this machine's part takes of its memory."""
    model: ServedModel
    clock: Clock
    drafts: MoreSources | None
    """Made elsewhere; None, which it becomes where the kernels here do not allow for drafts: this engine drafts by itself or not at all."""
    kv_beside: InitVar[Callable[[KvLoans, Callable[[], None]], ClosableKv | None]]
    """Makes `beside`, from what the pool lends and what to call when a fetch is over."""
    sampler: CompiledSampler = field(init=False)
    grammars: Grammars = field(init=False)
    loans: KvLoans = field(init=False)
    """Of the pool."""
    beside: ClosableKv | None = field(init=False)
    """KV beside the pool; None: there is none."""
    engine: Engine = field(init=False)
    _wakeup: Wakeup = field(init=False)

    def __post_init__(self, kv_beside: Callable[[KvLoans, Callable[[], None]], ClosableKv | None]) -> None:
        if not self.runner.holds_identity:
            self.drafts = None
        self.sampler = self.setup.sampler()
        with ExitStack() as undo:
            undo.callback(self.sampler.close)
            self.grammars = Grammars(self.setup.opened.tokenizer)
            self._wakeup, self.loans = Wakeup(), KvLoans()
            self.beside = kv_beside(self.loans, self._wakeup.came)
            self.engine = self._make()
            undo.pop_all()

    def _make(self) -> Engine:
        return Engine(
            *(self.executor, self.setup.opened.tokenizer, self.config, self.clock),
            drafting=self.setup.drafting(self.runner, self.drafts),
            sampler=self.sampler,
            grammars=self.grammars,
            wait=self._wakeup.wait,
            kv=self.beside,
            loans=self.loans,
        )

    def rebuild(self) -> Engine:
        """Make another engine, in place of one that failed."""
        if self.beside is not None:
            self.beside.reset()
        self.loans.void(None)
        self.executor.reset()
        return self._make()

    def close(self) -> None:
        """End what the engine runs on."""
        if self.beside is not None:
            self.beside.close()
        self.executor.close()
        self.sampler.close()


@dataclass(slots=True, kw_only=True)
class BuiltEngine(EngineAssembly[LocalExecutor[Any]]):
    """One machine's."""

    notes: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The engine in one line."""
        room = human(self.kv.kv_bytes)
        setup = self.setup
        threads = "1 thread" if setup.threads == 1 else f"{setup.threads} threads"
        if (ranks := len(setup.settings.tensor)) > 1:
            threads += f" of {ranks} tensor ranks"
        return (
            f"{self.model.name}, {setup.weights} weights, {setup.kernels} kernels, {threads}, "
            f"context {self.model.max_context}, KV for {self.kv.tokens} tokens ({room})"
        )


def build_engine(
    settings: NodeSettings,
    progress: LoadProgress | None = None,
    clock: Clock | None = None,
    drafts: MoreSources | None = None,
    kv_beside: KvBeside | None = None,
    spread: Spread | None = None,
) -> BuiltEngine:
    """Load a model and make an engine of it.

    Args:
        drafts: made elsewhere; None: none are.
        kv_beside: KV of other nodes; None: there is none.
        spread: where the settings name several tensor ranks, what loads them.

    Raises:
        UserError: something asked for can't be had.
    """
    clock = clock or SystemClock()
    setup = set_up(settings)
    layers = setup.opened.spec.all_layers
    kv = setup.room(layers)
    config = setup.config(kv)
    if spread is not None and len(settings.tensor) > 1:
        runner, executor = spread(setup, kv, config, progress)
    else:
        runner = setup.load(layers, kv.n_blocks, config.max_rows, progress)
        executor = LocalExecutor(runner)
    notes = list(setup.notes)
    if kv.shortened_from:
        notes.append(f"context shortened from {kv.shortened_from} to {kv.context} tokens, to fit memory (see --kv-tokens)")
    if (
        setup.kernels.device is DeviceKind.CPU
        and settings.device is None
        and settings.weights not in {None, WeightsFormat.BF16}
        and devices.fastest_device() is not DeviceKind.CPU
    ):
        notes.append(f"the GPU is not used: it holds bf16, and --weights {setup.weights} was asked for")
    if not runner.holds_identity:
        notes.append(
            f"{setup.kernels} gives other bytes for other batches here: an answer may depend on concurrent requests, so nothing is drafted"
        )

    def beside_pool(loans: KvLoans, came: Callable[[], None]) -> ClosableKv | None:
        disk = None
        if settings.kv_disk_bytes and config.prefix_cache:
            disk = DiskTier(runner, setup.digest, Home.from_environment().kv, KvDiskLimits(settings.kv_disk_bytes), clock, came)
        if kv_beside is None or not (config.prefix_cache and runner.holds_identity):
            return disk
        return kv_beside(runner, setup.digest, disk, loans, came)

    return BuiltEngine(
        setup=setup,
        executor=executor,
        runner=runner,
        config=config,
        kv=kv,
        model=setup.served(runner, kv, clock),
        clock=clock,
        drafts=drafts,
        kv_beside=beside_pool,
        notes=tuple(notes),
    )


def introduced(built: BuiltEngine, home: Home, clock: Clock, *, is_shared: bool = False) -> WarmModel:
    """What a card says of an engine that has not run yet. Its speed is measured if it never was: about a second.

    Args:
        is_shared: with other machines. Where it is known what this one does alone, the card says that: plans are made of it.
    """
    setup = built.setup
    if is_shared and (own := SpeedCache(home).find(SpeedKey(setup.digest, setup.weights, setup.threads))) is not None:
        return setup.warm(built.kv, own)
    places = setup.settings.tensor_on or (None,) * len(setup.settings.tensor)
    ranks = tuple(speed if node is None else -speed for speed, node in zip(setup.settings.tensor, places, strict=True))
    key = SpeedKey(setup.digest, setup.weights, setup.threads, ranks)
    return setup.warm(built.kv, learn_speed(home, key, built.runner, setup.opened.tokenizer, built.config, clock, built.sampler))


class LoadedEncoder:
    """A `machine.embedder.TextEncoder`."""

    def __init__(self, opened: OpenedEncoder, created: int) -> None:
        """Load. Blocks.

        Raises:
            ModelFileError: the weights can't be read.
        """
        from paceline.backends import kernel_cache

        cpu.prepare(None, Home.from_environment().kernels)
        with kernel_cache.alone():  # what reads a GGUF file's blocks is compiled
            self._bert = Bert(opened.tensors)
            kernel_cache.complete()
        self.name = opened.name
        self.created = created
        self._files = opened.files
        self.tokenizer = BoundedTokenizer(opened.tokenizer)
        self.tokenizer.begin()

    @property
    def max_tokens(self) -> int:
        return self._bert.spec.max_tokens

    @property
    def dimensions(self) -> int:
        return self._bert.spec.hidden

    def vectors(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        return self._bert.vectors(texts)

    def offer(self, home: Home) -> ModelOffer:
        """Return what the node's card says of it. Blocks: reads the weights' files if their digest is not known.

        Raises:
            ModelFileError: they can't be read.
        """
        spec, size = self._bert.spec, sum(file.stat().st_size for file in self._files)
        digest = digest_of_files(DigestCache(home), self._files)
        shape = encoder_shape(spec.max_tokens, spec.hidden, spec.n_layers)
        return ModelOffer(self.name, Role.EMBEDDER, WeightsFormat.STORED, digest=digest, warm=True, size_bytes=size, shape=shape)

    @property
    def summary(self) -> str:
        """The encoder in one line."""
        spec = self._bert.spec
        return f"{self.name} for embeddings of {spec.hidden} numbers, texts of up to {spec.max_tokens} tokens, {spec.pooling} pooling"


def load_encoder(ref: str, clock: Clock) -> LoadedEncoder:
    """Find an encoder and load it.

    Raises:
        UserError: it is not here, is none, or can't be read.
    """
    return LoadedEncoder(open_encoder(ref), int(clock.wall()))
