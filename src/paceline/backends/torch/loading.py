"""Loads a source of weights into a runner: checks the family and the memory, and measures the kernels' numerics.

The weights are loaded first, then the KV pool takes memory from the rest. Then the numerics id is measured on a small seeded model of the same family,
and on the first loaded layer in its real sizes. The check that other rows change no byte of a row uses products with sums as long as the model's, and
attention over its heads. It uses few outputs, because outputs are independent of each other and a start has no time for all.

Shapes: T rows, H query heads, D head dimension, K inputs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding
from torch import Tensor

from paceline.backends.holding import part_bytes, torch_bytes
from paceline.backends.memory import available_bytes, check_kv, give_memory_back
from paceline.backends.numerics import CUTS, ROWS, Numerics, SeededWeights, answer, measure, small
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.table import check_torch_holds, torch_refuses
from paceline.backends.torch.attention import KEYS, CpuStep, KvPool, Rope
from paceline.backends.torch.families import Layer, TensorReader
from paceline.backends.torch.linear import Linear, multiplies_bf16, onednn_isa
from paceline.backends.torch.runner import Edges, TorchModel, TorchRunner, wire_bits
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, WeightSource
from paceline.engine.local import LayerRunner, RowPlan

FEW = range(1, 66)
MANY = (127, 128, 129, 255, 256, 257, 511, 512, 513)
LENGTH = 2 * KEYS + MANY[-1] + 37
"""Rows of the sequence in the measurement of attention."""
TOGETHER = (2, 3, 5, 16)
"""Numbers of one-row sequences that are measured together."""
OUTPUTS = 1024
"""Outputs of the measured matrix. Lowering it: libraries also choose kernels by the number of outputs, and differences would not show."""


def torch_holds(spec: ModelSpec) -> bool:
    """Return whether the products and the attention of a model give a row the same bytes for any other rows in the batch."""
    widths = {spec.hidden, spec.n_heads * spec.head_dim, spec.ffn_width}
    return all(map(products_hold, sorted(widths))) and attention_holds(
        replace(spec, n_heads=2 * (spec.n_heads // spec.n_kv_heads), n_kv_heads=2)
    )


@cache
def products_hold(width: int) -> bool:
    """Return whether the first and the last n rows of a seeded product give the same bytes alone as among all rows, for each n of `FEW`.

    Args:
        width: inputs of the matrix.
    """
    generator = torch.Generator().manual_seed(width)
    linear = Linear(torch.randn(OUTPUTS, width, generator=generator).mul_(width**-0.5).bfloat16())
    x_TK = torch.randn(FEW[-1], width, generator=generator).bfloat16()
    whole = linear(x_TK)
    return all(torch.equal(linear(x_TK[:count]), whole[:count]) and torch.equal(linear(x_TK[-count:]), whole[-count:]) for count in FEW)


@cache
def attention_holds(spec: ModelSpec) -> bool:
    """Return whether attention gives the last n rows of a sequence the same bytes alone as among all rows, for each n of `FEW` and `MANY`.

    It also compares single rows of several sequences that run together, for each number of `TOGETHER`.
    """
    generator = torch.Generator().manual_seed(spec.head_dim)
    q_THD, k_THD, v_THD = (torch.randn(LENGTH, heads, spec.head_dim, generator=generator).bfloat16() for heads in (spec.n_heads, 2, 2))
    n_blocks = -(-LENGTH // KEYS)
    pool, rope = KvPool(1, n_blocks, KEYS, 2, spec.head_dim), Rope(spec.rope, spec.head_dim, LENGTH, torch.device("cpu"))

    def attend(firsts: list[int], count: int) -> Tensor:
        """Run `count` rows from each of the positions `firsts` on."""
        places = np.array(firsts, np.int32)
        starts, counts = np.arange(len(firsts), dtype=np.int32) * count, np.full(len(firsts), count, np.int32)
        tables = np.broadcast_to(np.arange(n_blocks, dtype=np.int32), (len(firsts), n_blocks))
        step = CpuStep(RowPlan(starts, counts, places, np.zeros_like(places), tables), spec, pool, rope)
        rows = torch.cat([torch.arange(first, first + count) for first in firsts])
        return step.attend(0, q_THD[rows], k_THD[rows], v_THD[rows])

    whole = attend([0], LENGTH)
    if not all(torch.equal(attend([LENGTH - count], count), whole[-count:]) for count in (*FEW, *MANY)):
        return False
    apart = [list(range(LENGTH - 61, 0, -61))[:count] for count in TOGETHER]
    return all(torch.equal(attend(places, 1), whole[places]) for places in apart)


def load_model(source: WeightSource, options: LoadOptions, progress: LoadProgress | None, device: torch.device) -> TorchModel:
    """Read only the layers that `options` names.

    Raises:
        UnsupportedModel: torch does not run the model.
        ConfigError: the weights format is int4 or int8.
    """
    spec = source.spec
    if (reason := torch_refuses(spec)) is not None:
        raise UnsupportedModel(
            f"torch does not run this model: {reason}",
            "Serve it on a processor with compiled kernels: x86 since AVX2, ARM with the dot product.",
        )
    check_torch_holds(options.weights)
    reader = TensorReader(source, device, progress)
    reader.expect(options.layers, edges=options.edges)
    layers = [Layer(reader, index, slot) for slot, index in enumerate(range(options.layers.start, options.layers.stop))]
    edges = None
    if options.edges:
        embedding = reader.table(EMBEDDING)
        edges = Edges(embedding, reader.norm(FINAL_NORM), embedding if spec.tied_head else reader.table(HEAD))
    return TorchModel(spec, options.layers, layers, edges)


def load_cpu(source: WeightSource, options: LoadOptions, progress: LoadProgress | None) -> TorchRunner:
    """Load a runner on this machine's CPU.

    Raises:
        ModelFileError, UnsupportedModel: the source can't be read, or torch does not run the model.
        ConfigError: the block size is impossible, or the weights format is int4 or int8.
        OutOfMemory: the KV pool does not fit.
    """
    if KEYS % options.block_size:
        raise ConfigError(
            f"A KV block of {options.block_size} tokens does not divide an attention block of {KEYS}", "Choose a power of two."
        )
    with _threads(options.threads), torch.inference_mode():
        token_bytes, tokens = source.spec.kv_bytes_per_token(options.layers), options.n_blocks * options.block_size
        # Memory is checked before a byte is loaded.
        check_kv(tokens, token_bytes, available_bytes() - _needed(source, options) + tokens * token_bytes)
        model = load_model(source, options, progress, torch.device("cpu"))
        give_memory_back()
        return _runner(model, len(options.layers), options, _measured(model, options))


def _runner(model: TorchModel, n_layers: int, options: LoadOptions, numerics: Numerics) -> TorchRunner:
    spec = model.spec
    pool = KvPool(n_layers, options.n_blocks, options.block_size, spec.n_kv_heads, spec.head_dim)
    rope = Rope(spec.rope, spec.head_dim, min(spec.max_context, options.n_blocks * options.block_size), torch.device("cpu"))
    return TorchRunner(model, pool, rope, options.threads, numerics)


def _measured(model: TorchModel, options: LoadOptions) -> Numerics:
    def make(source: WeightSource, threads: int) -> LayerRunner[Any]:
        small = LoadOptions(source.spec.all_layers, WeightsFormat.BF16, -(-ROWS // options.block_size), options.block_size, threads)
        return _runner(
            load_model(source, small, None, torch.device("cpu")), source.spec.n_layers, small, Numerics("", holds_identity=False)
        )

    capability, processor = torch.backends.cpu.get_cpu_capability(), "" if multiplies_bf16() else binding.get_host_cpu_name()
    label = f"torch-cpu {torch.__version__} {capability} {onednn_isa()} {processor} bf16"
    found = measure(make, SeededWeights(small(model.spec)), {1, options.threads}, tensor_bytes, label)
    return Numerics(found.id, found.holds_identity and _first_layer_holds(model, options) and torch_holds(model.spec))


def _first_layer_holds(model: TorchModel, options: LoadOptions) -> bool:
    """Return whether whole and cut runs of the first loaded layer, in its real sizes, give the same bytes."""
    if not model.layers:
        return True
    first = TorchModel(model.spec, LayerRange(0, 1), model.layers[:1], None)
    small = LoadOptions(options.layers, options.weights, -(-ROWS // options.block_size), options.block_size, options.threads)
    runner = _runner(first, 1, small, Numerics("", holds_identity=False))
    return cuts_agree(runner, seeded_rows(ROWS, model.spec.hidden), CUTS)


def cuts_agree(runner: LayerRunner[Any], x_TD: Tensor, cuts: Iterable[Sequence[int]], behind: int = 0) -> bool:
    """Return whether rows give the same bytes in every cut.

    Args:
        behind: number of keys before the rows, from rows that ran earlier.
    """
    return len({answer(runner, x_TD, tensor_bytes, cut, logits=False, behind=behind) for cut in cuts}) == 1


def seeded_rows(rows: int, hidden: int) -> Tensor:
    """Return random bf16 activations [rows, hidden], on the CPU."""
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()


def tensor_bytes(x_TD: Tensor) -> bytes:
    """Return the bits of a bf16 tensor as bytes."""
    return wire_bits(x_TD).tobytes()


def _needed(source: WeightSource, options: LoadOptions) -> int:
    """Return the bytes that weights and KV will take."""
    held = torch_bytes(source.spec)
    return part_bytes(held, options.layers, edges=options.edges) + options.n_blocks * options.block_size * source.spec.kv_bytes_per_token(
        options.layers
    )


@contextmanager
def _threads(count: int) -> Generator[None]:
    """Set torch's thread count during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
