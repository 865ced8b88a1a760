"""How a model runs on this machine: which weights, which kernels, how many threads, how much KV; and its layers, loaded so.

Law: what a person asked for holds, or an error says why not. What they left open is decided here, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from paceline.backends import cpu, table
from paceline.backends.cpu.padding import padded
from paceline.backends.cpu.shares import RANK_BYTES, deal
from paceline.backends.holding import kv_group, mlx_formats, part_bytes, working_bytes
from paceline.backends.memory import human
from paceline.backends.options import DeviceKind, LoadOptions, LoadProgress
from paceline.backends.table import Kernels
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError
from paceline.core.inference import ModelFacts, ServedModel, fingerprint_of
from paceline.core.model import BLOCK_TOKENS, LayerRange, ModelRef, WeightsFormat
from paceline.core.weights import WeightSource, tensor_shapes
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.drafts import MoreSources
from paceline.engine.local import LayerRunner
from paceline.machine import devices
from paceline.machine.capability import WarmModel
from paceline.machine.devices import usable_cores
from paceline.machine.settings import NodeSettings
from paceline.machine.sizing import KvPlan, fits_gpu, free_bytes, model_shape, plan_kv, shares_bytes, weights_bytes
from paceline.machine.speed import Speed
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import OpenedModel, open_model
from paceline.store.gguf_file import GgufWeights
from paceline.store.home import Home
from paceline.store.tokenizer import pack_tokenizer, tokenizer_digest

if TYPE_CHECKING:
    from paceline.backends.cpu.sampler import CompiledSampler


MOST_THREADS_A_CORE = 8
"""More only take memory."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model that is open, and how it is to run."""

    settings: NodeSettings
    opened: OpenedModel
    weights: WeightsFormat
    kernels: Kernels
    threads: int
    notes: tuple[str, ...] = ()
    """Where what was left open was not decided the obvious way."""

    @property
    def digest(self) -> str:
        """Of the weights: SHA-256, hex."""
        return self.opened.weights.digest

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.digest, self.weights, self.opened.name)

    @property
    def most(self) -> EngineConfig:
        """An engine's bounds that don't depend on memory: rows of a batch, with and without logits."""
        return EngineConfig(max_context=2, max_running=self.settings.max_running, prefill_chunk=self.settings.prefill_chunk)

    def room(self, layers: LayerRange, *, edges: bool = True, unasked: bool = False) -> KvPlan:
        """KV for layers that are not loaded yet, by the memory that is free now.

        Args:
            edges: with embedding, norm and head.
            unasked: leave aside what was asked of context and KV.

        Raises:
            ConfigError: what was asked contradicts itself or the model.
            OutOfMemory: it does not fit.
        """
        spec, settings = padded(self.opened.spec) if self.kernels.compiled else self.opened.spec, self.settings
        held = weights_bytes(spec, self.weights, self.opened.weights.type_of, self.kernels)
        heads, weights = spec.n_kv_heads, part_bytes(held, layers, edges=edges)
        if settings.tensor_on:
            shares = zip(deal(spec, settings.tensor), settings.tensor_on, strict=True)
            heads, weights = shares_bytes(spec, held, [share for share, node in shares if node is None])

        def working(n_blocks: int) -> int:
            most = self.most
            logits = most.max_logits_rows if edges else 0
            return working_bytes(self.kernels, spec, max_rows=most.max_rows, threads=self.threads, n_blocks=n_blocks, logits_rows=logits)

        ranks = len(settings.tensor) - sum(node is not None for node in settings.tensor_on)
        taken = settings.bound.promised_bytes + (ranks - 1) * RANK_BYTES
        free = free_bytes(self.kernels, self.threads, Home.from_environment().kernels) - taken
        allowed = free if settings.bound.most_bytes is None else min(free, settings.bound.most_bytes)
        return plan_kv(
            replace(spec, n_kv_heads=heads),
            free_bytes=allowed,
            bounded=allowed < free,
            weights_bytes=weights,
            working=working,
            max_running=settings.max_running,
            block_size=BLOCK_TOKENS,
            group=kv_group(self.kernels),
            context=None if unasked else settings.context,
            kv_tokens=None if unasked else settings.kv_tokens,
            layers=layers,
            most=settings.tensor_tokens,
        )

    def config(self, kv: KvPlan) -> EngineConfig:
        """Of an engine with that room."""
        settings = self.settings
        return EngineConfig(
            max_context=kv.context,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            prefill_chunk=settings.prefill_chunk,
            step_budget_s=settings.step_budget_ms / 1000,
            prefix_cache=settings.prefix_cache,
            kv_check_every=settings.kv_check_every,
            model_digest=self.digest,
        )

    def drafting(self, runner: LayerRunner[Any], drafts: MoreSources | None) -> DraftingConfig | None:
        """How its engine drafts; None where kernels here give other bytes for other batches: a draft would change the answer.

        Args:
            drafts: made elsewhere; None: none are.
        """
        if not runner.holds_identity:
            return None
        return DraftingConfig(self.settings.draft, {} if drafts is None else drafts.sources, drafts)

    def load(
        self, layers: LayerRange, n_blocks: int, max_rows: int, progress: LoadProgress | None = None, *, edges: bool = True
    ) -> LayerRunner[Any]:
        """Layers, in memory. Blocks.

        Args:
            n_blocks: of KV, of 16 tokens.
            edges: with embedding, norm and head.

        Raises:
            ConfigError: the settings share each layer among processes, and this loads them into one.
            UserError: see `load` of the backends.
        """
        if len(self.settings.tensor) > 1:
            raise ConfigError("--tensor shares each layer among processes, and this would run whole layers in one", "Leave --tensor out.")
        options = LoadOptions(
            layers,
            self.weights,
            n_blocks,
            BLOCK_TOKENS,
            self.threads,
            max_rows=max_rows,
            edges=edges,
            kernel_cache=Home.from_environment().kernels,
        )
        return load_runner(self.kernels, self.opened.weights, options, progress)

    def sampler(self) -> CompiledSampler:
        """What draws this model's tokens here; its caller closes it."""
        return cpu.load_sampler(self.opened.tokenizer.size, self.threads, Home.from_environment().kernels)

    def served(self, runner: LayerRunner[Any], kv: KvPlan, clock: Clock) -> ServedModel:
        """The model as the API shows it, once `runner` has its layers, or the first of them."""
        opened = self.opened
        fingerprint = fingerprint_of(self.model, runner.numerics_id)
        tokenizer = BoundedTokenizer(opened.tokenizer)
        tokenizer.begin()
        return ServedModel(opened.name, int(clock.wall()), kv.context, tokenizer, fingerprint, self.facts)

    @property
    def facts(self) -> ModelFacts:
        """What the API tells of the model."""
        source, spec = self.opened.weights, self.opened.spec
        shapes = tensor_shapes(spec)
        held = Counter[str]()
        for name in source.names():
            held[source.type_of(name)] += source.nbytes(name)
        return ModelFacts(
            digest=self.digest,
            size_bytes=held.total(),
            family=spec.model_type,
            parameters=sum(prod(shape) for shape in shapes.values()),
            stored_as=held.most_common(1)[0][0],
            file_format="gguf" if isinstance(source, GgufWeights) else "safetensors",
            hidden=spec.hidden,
            on_gpu=self.kernels.device is not DeviceKind.CPU,
        )

    @property
    def _tokenizer(self) -> str:
        return tokenizer_digest(pack_tokenizer(self.opened.tokenizer))

    def warm(self, kv: KvPlan, speed: Speed) -> WarmModel:
        """The model as this node's card shows it."""
        source = self.opened.weights
        size = sum(source.nbytes(name) for name in source.names())
        shape = model_shape(self.opened.spec, self.weights, source.type_of, self.kernels)
        return WarmModel(self.model, shape, kv.context, size, speed, self._tokenizer)


def set_up(settings: NodeSettings, *, spread: bool = False) -> Setup:
    """Open a model and decide how it runs.

    Args:
        settings: what the person asked for.
        spread: over several machines, of which others may have no GPU: unasked, weights are as the file has them.

    Raises:
        UserError: something asked for can't be had.
    """
    cores = usable_cores()
    if settings.threads is not None and settings.threads > MOST_THREADS_A_CORE * cores:
        raise ConfigError(f"--threads {settings.threads}: this machine has {cores} cores to use", f"Ask for {cores}, or leave it out.")
    as_trained = open_model(settings.model)
    opened = as_trained.of_context(settings.context)
    if opened is not as_trained and (spread or any(settings.tensor_on)):
        raise ConfigError(
            f"--context {settings.context}: beyond {as_trained.spec.max_context} tokens {opened.name} has another rope, by which other machines can't compute yet",
            "Serve it on one machine (`--ways alone`), or ask for less.",
        )
    spec, type_of, notes = opened.spec, opened.weights.type_of, list[str]()
    if spec.long is not None:
        notes.append(
            f"it serves {spec.max_context} tokens as it was first trained; with --context, up to {spec.long.tokens} by its rope for long texts"
        )
    asked = settings.device
    device = devices.fastest_device() if asked is None or asked.device is DeviceKind.CUDA else asked.device
    if asked is None and device is DeviceKind.CPU and (lacks := devices.gpu_lacks()) is not None:
        notes.append(f"the GPU is not used: {lacks}")
    takes_whole = settings.weights in {None, device.format_unasked} and not spread  # of several machines, each takes what the plan says
    unasked = device is not DeviceKind.CPU and asked is None
    if unasked and takes_whole and not fits_gpu(spec, type_of, free := devices.free_device_bytes()):
        needed = part_bytes(weights_bytes(spec, WeightsFormat.BF16, type_of, Kernels.CUDA), spec.all_layers, edges=True)
        notes.append(f"the GPU is not used: in bf16 the weights need {human(needed)}, and {human(free)} is free there")
        device = DeviceKind.CPU
    if unasked and device is not DeviceKind.CPU and len(settings.tensor) > 1:
        notes.append("the GPU is not used: tensor ranks run in compiled kernels")
        device = DeviceKind.CPU
    if unasked and device is not DeviceKind.CPU and (reason := table.gpu_refuses(device, spec)) is not None:
        notes.append(f"the GPU is not used: {reason} there")
        device = DeviceKind.CPU
    weights = settings.weights or (DeviceKind.CPU if spread else device).format_unasked
    kernels = table.choose(spec, weights, asked=asked, device=device)
    if weights is WeightsFormat.STORED and kernels is Kernels.MLX:
        kept = sorted(set(mlx_formats(spec, weights, type_of).values()))
        notes.append(f"{kernels} holds matrices in {' and '.join(kept)}, each in the one nearest to what the file has of it")
    elif weights is WeightsFormat.STORED and not kernels.compiled:
        notes.append(f"{kernels} holds all matrices in bf16, whatever the file has")
    return Setup(settings, opened, weights, kernels, settings.threads or cores, tuple(notes))


def load_runner(kernels: Kernels, source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None) -> LayerRunner[Any]:
    """Load weights into the kernels chosen.

    Raises:
        UserError: see `load` of the backends.
    """
    if kernels.lowering is not None:
        return cpu.load(source, options, progress, lowering=kernels.lowering)
    if kernels is Kernels.MLX:
        from paceline.backends import mlx

        return mlx.load(source, options, progress)
    from paceline.backends import torch

    return torch.load(source, options, progress, device=kernels.device)
