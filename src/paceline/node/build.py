"""Puts one machine's engine together: model, backend, KV, executor, engine, host.

Law: what a person asked for is built, or an error says why not. What they left open is decided here, and `notes` says where the
decision is not the obvious one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.backends import cpu, table
from paceline.backends.memory import available_bytes, human
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.table import Kernels
from paceline.core.clock import Clock, SystemClock
from paceline.core.model import WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.node import accelerator
from paceline.node.cores import usable_cores
from paceline.node.host import EngineHost
from paceline.node.offers import WarmModel
from paceline.node.settings import NodeSettings
from paceline.node.shapes import stored_format, weights_bytes
from paceline.node.sizing import KvPlan, plan_kv
from paceline.node.speed import SpeedKey, learn_speed
from paceline.server.inference import ServedModel, fingerprint_of
from paceline.store.catalog import ModelLocation, OpenedModel, open_model
from paceline.store.home import Home
from paceline.transport.trust.folder import FleetFolder

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to step, and what it was built of."""

    engine: Engine
    executor: LocalExecutor[Any]
    model: ServedModel
    config: EngineConfig
    kv: KvPlan
    weights: WeightsFormat
    threads: int
    kernels: Kernels
    notes: tuple[str, ...]
    opened: OpenedModel
    runner: LayerRunner[Any]

    @property
    def summary(self) -> str:
        """The engine in one line."""
        room = human(self.kv.tokens * self.kv.token_bytes)
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return (
            f"{self.model.name}, {self.weights} weights, {self.kernels} kernels, {threads}, "
            f"context {self.model.max_context}, KV for {self.kv.tokens} tokens ({room})"
        )


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """An engine behind its host."""

    host: EngineHost
    model: ServedModel
    notes: tuple[str, ...]
    summary: str
    warm: WarmModel | None
    """What the node's card says of it; None on a machine in no fleet."""
    location: ModelLocation | None = None
    """Where all of the model lies, so that members can have it."""

    def close(self) -> bool:
        """Stop; see `EngineHost.close`."""
        return self.host.close()


def build_engine(settings: NodeSettings, progress: LoadProgress | None = None, clock: Clock | None = None) -> BuiltEngine:
    """Load a model and make an engine of it.

    Args:
        settings: what the person asked for.
        progress: called with (bytes read, bytes to read).
        clock: default: the machine's.

    Raises:
        UserError: something asked for can't be had.
    """
    clock = clock or SystemClock()
    opened = open_model(settings.model, clock=clock)
    cuda = settings.device in {None, Kernels.CUDA} and accelerator.has_cuda()
    weights = settings.weights or (WeightsFormat.BF16 if cuda else stored_format(opened.weights))
    kernels = table.choose(opened.spec, weights, asked=settings.device, cuda=cuda)
    kv = plan_kv(
        opened.spec,
        free_bytes=accelerator.free_cuda_bytes() if kernels is Kernels.CUDA else available_bytes(),
        weights_bytes=weights_bytes(opened.spec, weights),
        max_running=settings.max_running,
        block_size=BLOCK_SIZE,
        context=settings.context,
        kv_tokens=settings.kv_tokens,
    )
    threads = settings.threads or usable_cores()
    config = EngineConfig(
        max_context=kv.context,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        prefix_cache=settings.prefix_cache,
        model_digest=opened.weights.digest,
    )
    options = LoadOptions(
        opened.spec.all_layers,
        weights,
        kv.n_blocks,
        BLOCK_SIZE,
        threads,
        max_rows=config.prefill_chunk + config.max_running,
        kernel_cache=Home.from_environment().kernels,
    )
    runner = load_runner(kernels, opened.weights, options, progress)
    executor = LocalExecutor(runner)
    notes: list[str] = []
    if kv.shortened_from:
        notes.append(f"context shortened from {kv.shortened_from} to {kv.context} tokens, to fit memory (see --kv-tokens)")
    if cuda and kernels is not Kernels.CUDA:
        notes.append(f"the GPU is not used: it holds bf16, and --weights {weights} was asked for")
    drafting = DraftingConfig(settings.draft)
    if not runner.holds_identity:
        notes.append(
            f"{kernels} gives other bytes for other batches here: an answer may depend on what runs beside it, so nothing is drafted"
        )
        drafting = None
    return BuiltEngine(
        engine=Engine(executor, opened.tokenizer, config, clock, drafting=drafting),
        executor=executor,
        model=served(opened, weights, runner.numerics_id, kv.context, clock),
        config=config,
        kv=kv,
        weights=weights,
        threads=threads,
        kernels=kernels,
        notes=tuple(notes),
        opened=opened,
        runner=runner,
    )


def build_node(settings: NodeSettings, progress: LoadProgress | None = None, clock: Clock | None = None) -> BuiltNode:
    """`build_engine`, behind a host with the engine in a thread of its own. In a fleet, a new model's speed is measured: about a second.

    Raises:
        UserError: something asked for can't be had.
    """
    clock = clock or SystemClock()
    built = build_engine(settings, progress, clock)
    home = Home.from_environment()
    warm = introduced(built, home, clock) if FleetFolder(home.fleet).is_member else None
    host = EngineHost(built.engine, built.executor.close, built.model, built.config, clock)
    return BuiltNode(host, built.model, built.notes, built.summary, warm, built.opened.location)


def introduced(built: BuiltEngine, home: Home, clock: Clock) -> WarmModel:
    """What a card says of an engine that has not run yet. Its speed is measured if it never was."""
    opened, digest = built.opened, built.opened.weights.digest
    key = SpeedKey(digest, built.weights, built.threads)
    speed = learn_speed(home, key, built.runner, opened.tokenizer, built.config, clock)
    size = sum(opened.weights.nbytes(name) for name in opened.weights.names())
    return WarmModel(built.model.name, digest, built.weights, opened.spec, built.kv.context, size, speed)


def must_compile() -> bool:
    """Whether the kernels of this version never ran on this machine: the start then takes longer, and should say so."""
    return cpu.runs_here() and not cpu.compiled(Home.from_environment().kernels)


def load_runner(kernels: Kernels, source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None) -> LayerRunner[Any]:
    """Load weights into the kernels chosen.

    Raises:
        UserError: see `load` of the backends.
    """
    match kernels:
        case Kernels.AVX512_BF16:
            return cpu.load(source, options, progress)
        case Kernels.TORCH | Kernels.CUDA:
            from paceline.backends import torch

            return torch.load(source, options, progress, device="cuda" if kernels is Kernels.CUDA else "cpu")


def served(opened: OpenedModel, weights: WeightsFormat, numerics_id: str, context: int, clock: Clock) -> ServedModel:
    """A model as the API shows it."""
    fingerprint = fingerprint_of(opened.weights.digest, weights, numerics_id)
    return ServedModel(opened.name, int(clock.wall()), context, opened.tokenizer, fingerprint)
