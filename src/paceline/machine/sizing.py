"""How long a context and how many KV blocks a machine can hold: arithmetic on numbers, no look at the machine.

How much memory the next load of a model may take: what is free, less what the process itself takes to load it.

What a model takes in memory, tensor by tensor, by the forms it is held in: arithmetic, before anything is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.backends import cpu
from paceline.backends.cpu.padding import padded
from paceline.backends.cpu.shares import LANES, Share, undivided
from paceline.backends.holding import forms_by, held_bytes, mlx_bytes, mlx_formats, part_bytes, torch_bytes, working_bytes
from paceline.backends.memory import MIB, available_bytes, human
from paceline.backends.options import DeviceKind
from paceline.backends.table import Kernels
from paceline.core.errors import ConfigError, OutOfMemory
from paceline.core.model import BLOCK_TOKENS, LayerRange, ModelSpec, WeightsFormat
from paceline.fleet.card import DividedShape, ModelShape
from paceline.fleet.plan import LEAST_ROWS
from paceline.machine import devices

LOAD_BYTES_A_THREAD: Final = 16 * MIB
"""A slab of rows as read, as float32 and as requantised (`backends.quantize.SLAB_WEIGHTS`)."""
FETCH_BYTES: Final = 48 * MIB
"""Of a host, while layers come from another machine: pieces, and what gRPC has of them. The C library keeps most of it."""
KERNELS_BYTES: Final = 110 * MIB
"""Numba, and kernels that lie compiled. Source: a process with 8 layers of a small model, before and after: some 105 MiB."""
COMPILER_BYTES: Final = 210 * MIB
"""The same where they must be compiled first."""
TORCH_BYTES: Final = 250 * MIB
"""Torch, and the compiled functions beside it."""


def free_bytes(kernels: Kernels, threads: int, kernel_cache: Path | None) -> int:
    """Bytes that weights, KV and working memory of the next load may take together.

    Args:
        kernels: that it is loaded into; for CUDA's it is the GPU's memory.
        threads: that load.
        kernel_cache: where compiled kernels are kept; None: beside their sources.
    """
    if kernels.device is DeviceKind.CUDA:
        return devices.free_device_bytes()
    return max(0, available_bytes() - load_bytes(kernels, threads, kernel_cache))


def load_bytes(kernels: Kernels, threads: int, kernel_cache: Path | None) -> int:
    """Bytes that the process itself takes while it loads a model next, of the machine's memory; arguments as `free_bytes`."""
    return _first_load_bytes(kernels, kernel_cache) + threads * LOAD_BYTES_A_THREAD


def _first_load_bytes(kernels: Kernels, kernel_cache: Path | None) -> int:
    """What this process takes once, with the first model that it loads."""
    if not kernels.compiled:
        return 0 if "torch" in sys.modules else TORCH_BYTES
    if "paceline.backends.cpu.runner" in sys.modules:
        return 0
    return KERNELS_BYTES if kernel_cache is not None and cpu.compiled(kernel_cache) else COMPILER_BYTES


GPU_SHARE = 0.9
"""Of a GPU's free memory, how much weights may take. Raising it leaves less to KV and to what kernels need while they run."""

CARD_THREADS = 8
CARD_TOKENS = 8192
"""Of KV. What a card says of working memory is for these: every node writes the same card."""

TypeOf = Callable[[str], str]
"""GGML's name of the type a tensor is stored in."""


def weights_bytes(spec: ModelSpec, weights: WeightsFormat, type_of: TypeOf, kernels: Kernels) -> Mapping[str, int]:
    """Bytes of each tensor in memory."""
    if kernels.compiled:
        return held_bytes(spec, forms_by(weights, type_of))
    return mlx_bytes(spec, mlx_formats(spec, weights, type_of)) if kernels is Kernels.MLX else torch_bytes(spec)


def model_shape(spec: ModelSpec, weights: WeightsFormat, type_of: TypeOf, kernels: Kernels) -> ModelShape:
    """As a card says it. Every layer counts as the largest one: who holds any of them has room."""
    may_divide, hidden = kernels.compiled and undivided(spec) is None, spec.hidden
    spec = padded(spec) if kernels.compiled else spec
    held = weights_bytes(spec, weights, type_of, kernels)
    return ModelShape(
        n_layers=spec.n_layers,
        hidden=hidden,
        layer_bytes=max(part_bytes(held, LayerRange(layer, layer + 1), edges=False) for layer in range(spec.n_layers)),
        edge_bytes=part_bytes(held, LayerRange(0, 0), edges=True),
        kv_bytes_per_token_per_layer=spec.kv_bytes_per_token(LayerRange(0, 1)),
        max_context=spec.max_context,
        row_bytes=max(_row_bytes(spec, each) for each in Kernels),
        divided=_divided(spec, held) if may_divide else None,
    )


def _divided(spec: ModelSpec, held: Mapping[str, int]) -> DividedShape:
    attention = sum(n for name, n in held.items() if name.startswith("model.layers.0.self_attn."))
    return DividedShape(spec.n_kv_heads, spec.ffn, spec.vocab, attention)


def shares_bytes(spec: ModelSpec, held: Mapping[str, int], shares: Sequence[Share]) -> tuple[int, int]:
    """KV heads of some tensor ranks, and what their weights take: of the first, which has the embedding, all that lies outside of the layers.

    Args:
        held: bytes of each tensor, of all.
    """
    heads, inner = sum(len(share.kv_heads) for share in shares), sum(len(share.inner(spec)) for share in shares)
    layers, attention = part_bytes(held, spec.all_layers, edges=False), sum(n for name, n in held.items() if ".self_attn." in name)
    outputs = 1.0 if any(share.vocab.start == 0 for share in shares) else sum(len(share.vocab) for share in shares) * LANES / spec.vocab
    edges = int(outputs * part_bytes(held, LayerRange(0, 0), edges=True))
    return heads, attention * heads // spec.n_kv_heads + (layers - attention) * inner // spec.ffn + edges


def _row_bytes(spec: ModelSpec, kernels: Kernels) -> int:
    """Of a stage's working memory, what a row has of a batch of `LEAST_ROWS`. The machine that runs it tells exactly."""
    whole = working_bytes(kernels, spec, max_rows=LEAST_ROWS, threads=CARD_THREADS, n_blocks=CARD_TOKENS // BLOCK_TOKENS)
    return -(-whole // LEAST_ROWS)


def fits_gpu(spec: ModelSpec, type_of: TypeOf, gpu_bytes: int) -> bool:
    """Whether a GPU with so much memory has room for all of a model in bf16."""
    held = weights_bytes(spec, WeightsFormat.BF16, type_of, Kernels.CUDA)
    return part_bytes(held, spec.all_layers, edges=True) <= GPU_SHARE * gpu_bytes


KV_SHARE = 0.5
"""Of the memory that weights leave free, how much KV may take unasked. Raising it leaves less to everything else on the machine."""
TYPICAL_TOKENS = 2048
"""Length of an answer and its prompt in everyday use: the pool holds this many for every sequence that may run."""
MIN_CONTEXT = 256
"""Shorter contexts answer nothing of use; better to say that the model does not fit."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    n_blocks: int
    block_size: int
    context: int
    """Longest prompt and answer together, in tokens."""
    shortened_from: int | None
    """The model's own context, where memory allowed only a shorter one."""
    token_bytes: int
    """What one token takes, over all layers."""
    weights_bytes: int = field(default=0, compare=False)
    """Beside it."""
    working_bytes: int = field(default=0, compare=False)
    """Of a step's rows."""

    @property
    def tokens(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.tokens * self.token_bytes


def plan_kv(
    spec: ModelSpec,
    *,
    free_bytes: int,
    weights_bytes: int,
    working: Callable[[int], int] = lambda _: 0,
    max_running: int,
    block_size: int,
    group: int = 1,
    context: int | None,
    kv_tokens: int | None,
    layers: LayerRange | None = None,
    most: int | None = None,
    bounded: bool = False,
) -> KvPlan:
    """Divide memory.

    Args:
        free_bytes: memory available before the model is loaded.
        weights_bytes: what the weights will take of it.
        working: bytes that a step's rows take of it, with so many KV blocks.
        group: blocks whose memory comes together.
        context: as asked; None: the model's, or as long as memory allows.
        kv_tokens: as asked; None: enough for everyday use, at most `KV_SHARE` of what is left.
        layers: whose KV it is; None: all.
        most: tokens that there is room for elsewhere, where others keep their parts of it.
        bounded: `free_bytes` is what a person allowed, and more is free.

    Raises:
        ConfigError: what was asked contradicts itself or the model.
        OutOfMemory: what was asked does not fit.
    """
    if context is not None and context > spec.max_context:
        raise ConfigError(
            f"A context of {context} tokens is more than this model was made for ({spec.max_context})",
            f"Ask for --context {spec.max_context} or less.",
        )
    if context is not None and kv_tokens is not None and kv_tokens < context:
        raise ConfigError(f"--kv-tokens {kv_tokens} can't hold one context of {context} tokens", f"Raise it to {context} or more.")
    is_free, more = ("is left of --models-memory", "Raise --models-memory") if bounded else ("of memory is free", "Close other programs")
    token_bytes = max(1, spec.kv_bytes_per_token(spec.all_layers if layers is None else layers))
    group_tokens = group * block_size
    # With as many blocks as there could be: fewer take less.
    most_tokens = kv_tokens if kv_tokens is not None else int(max(0, free_bytes - weights_bytes) * KV_SHARE) // token_bytes
    working_bytes = working(-(-most_tokens // block_size))
    left = free_bytes - weights_bytes - working_bytes
    if left <= 0:
        beside = f" and work on them {human(working_bytes)}" if working_bytes else ""
        raise OutOfMemory(
            f"The weights need {human(weights_bytes)}{beside}, and {human(max(free_bytes, 0))} {is_free}",
            f"{more}, choose a smaller model, or a smaller --weights format.",
        )
    if kv_tokens is not None:
        pool_bytes = -(-kv_tokens // group_tokens) * group_tokens * token_bytes
        if pool_bytes > left:
            raise OutOfMemory(
                f"--kv-tokens {kv_tokens} needs {human(pool_bytes)}; {human(left)} {is_free} next to the weights ({human(weights_bytes)})",
                f"Ask for {left // token_bytes // group_tokens * group_tokens} or fewer.",
            )
        affordable = kv_tokens
    else:
        room = int(left * KV_SHARE) // token_bytes
        affordable = (room if most is None else min(room, most)) // group_tokens * group_tokens
    if context is not None and context > affordable:
        raise OutOfMemory(
            f"A context of {context} tokens needs {human(context * token_bytes)} for KV; "
            f"{human(affordable * token_bytes)} can be spared next to the weights ({human(weights_bytes)})",
            f"Ask for --context {affordable} or less, or give it the memory with --kv-tokens {context}.",
        )
    granted = context if context is not None else min(spec.max_context, affordable)
    if granted < MIN_CONTEXT and context is None and kv_tokens is None:
        raise OutOfMemory(
            f"Only {human(max(left, 0))} {is_free} next to the weights ({human(weights_bytes)}): room for {affordable} tokens",
            f"{more}, or choose a smaller model.",
        )
    tokens = kv_tokens if kv_tokens is not None else min(affordable, max(granted, max_running * min(granted, TYPICAL_TOKENS)))
    shortened_from = spec.max_context if context is None and granted < spec.max_context else None
    n_blocks = max(1, -(-tokens // block_size))
    if kv_tokens is None:
        n_blocks = -(-n_blocks // group) * group
    return KvPlan(n_blocks, block_size, granted, shortened_from, token_bytes, weights_bytes, working_bytes)
