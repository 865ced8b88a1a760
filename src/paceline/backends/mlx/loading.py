"""Loads a source of weights into a runner: a module of mlx-lm, its weights, a KV pool, and the measured numerics of MLX on this machine.

mlx-lm's modules are imported without its own `__init__`, which imports transformers: one second and a hundred megabytes that serving does not need.
A module is created with as many layers as are loaded. Its random initial weights are never evaluated, so layers or edges of other stages take no memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
from mlx import nn  # pyright: ignore[reportMissingImports]
from mlx.utils import tree_flatten  # pyright: ignore[reportMissingImports]

from paceline.backends.holding import formats_of_products, mlx_formats
from paceline.backends.memory import available_bytes, check_kv
from paceline.backends.mlx.paged import KEYS, MlxPool, attends
from paceline.backends.mlx.ring import RingRunner
from paceline.backends.mlx.runner import MlxModel, MlxRunner
from paceline.backends.numerics import CUTS, ROWS, Numerics, SeededWeights, answer, measure, small, together
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.quantize import to_float32
from paceline.backends.table import MLX_MODULES, mlx_refuses
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import LayerRange, ModelSpec, RopeSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, FINAL_NORM, GROUP, HEAD, DenseTensor, StoredTensor, WeightSource
from paceline.engine.local import LayerRunner

BITS = {WeightsFormat.INT4: 4, WeightsFormat.INT8: 8}
"""Bits of a code. Each group of 32 inputs has a scale and an offset, as `mx.quantize` makes them."""
CACHE_BYTES = 1 << 30
"""Bytes of freed buffers that MLX keeps for the next step. Without this limit it may keep all of the machine's memory."""
LONGER_CUTS = ((300,), (150, 150), (1, 2, 4, 8, 285))
"""Rows of each piece in the cuts that are compared on a GPU, which has other kernels for many rows."""


def load_mlx(
    source: WeightSource, options: LoadOptions, progress: LoadProgress | None = None, group: mx.distributed.Group | None = None
) -> MlxRunner:
    """Load a runner on MLX's default device.

    Args:
        group: the ranks that share each layer; each of them must call this. None: this rank has all of every layer.

    Raises:
        ModelFileError, UnsupportedModel: the source can't be read, or MLX does not run the model.
        ConfigError: the block size is impossible, or ranks can't share the model's heads.
        OutOfMemory: the KV pool does not fit.
    """
    if KEYS % options.block_size:
        raise ConfigError(
            f"A KV block of {options.block_size} tokens does not divide an attention block of {KEYS}", "Choose a power of two."
        )
    spec = source.spec
    mx.set_cache_limit(CACHE_BYTES)
    model = load_model(source, options, progress, group)
    check_kv(options.n_blocks * options.block_size, spec.kv_bytes_per_token(options.layers), available_bytes())
    return _runner(model, options, _measured(model, source, options, group), group)


def _runner(model: MlxModel, options: LoadOptions, numerics: Numerics, group: mx.distributed.Group | None = None) -> MlxRunner:
    pool = MlxPool(len(model.layers), options.n_blocks, options.block_size, model.n_kv_heads, model.spec.head_dim)
    return MlxRunner(model, pool, numerics) if group is None else RingRunner(model, pool, numerics, group)


def load_model(
    source: WeightSource, options: LoadOptions, progress: LoadProgress | None, group: mx.distributed.Group | None = None
) -> MlxModel:
    """Read only the layers that `options` names.

    Raises:
        UnsupportedModel: MLX does not run the model.
        ConfigError: ranks can't share its heads.
    """
    spec, layers = source.spec, options.layers
    if (reason := mlx_refuses(spec)) is not None:
        raise UnsupportedModel(f"MLX does not run this model: {reason}", "Leave --device mlx out.")
    formats = mlx_formats(spec, options.weights, source.type_of)
    if spec.moe is not None and formats[EMBEDDING] is WeightsFormat.BF16 and not on_gpu():
        raise UnsupportedModel(
            "MLX multiplies experts in bf16 on a GPU alone", "Ask for --weights int4 or int8, or leave --device mlx out."
        )
    module = _module(MLX_MODULES[spec.model_type])
    attends(module)
    whole = module.Model(module.ModelArgs.from_dict(config_of(spec, len(layers))))
    weights, held = _read(source, formats, options, progress)
    nn.quantize(whole, GROUP, 4, class_predicate=lambda path, _: {"group_size": GROUP, "bits": held[path]} if path in held else False)
    used = whole.model.layers[: len(layers)]
    prefixes = tuple(f"model.layers.{place}." for place in range(len(layers)))
    edges = (EMBEDDING.rpartition(".")[0], FINAL_NORM.rpartition(".")[0], HEAD.rpartition(".")[0]) if options.edges else ()
    made: Any = tree_flatten(whole.parameters())
    wanted = {name: array.shape for name, array in made if name.startswith((*prefixes, *edges))}
    given = {name: array.shape for name, array in weights.items()}
    if wanted != given:
        name = min(set(wanted.items()) ^ set(given.items()))[0]
        raise UnsupportedModel(
            f"mlx-lm's {spec.model_type} has {name} of {wanted.get(name)}, and this model of {given.get(name)}", "Leave --device mlx out."
        )
    whole.load_weights(list(weights.items()), strict=False)
    if group is not None:
        _share(whole, spec, group)
    mx.eval([value for layer in used for part in layer.modules() for value in part.values() if isinstance(value, mx.array)])
    return MlxModel(spec, layers, used, whole if options.edges else None, spec.n_kv_heads // (1 if group is None else group.size()))


def _share(whole: Any, spec: ModelSpec, group: mx.distributed.Group) -> None:
    """Reduce the model to this rank's share of each layer. Raises ConfigError if ranks can't have equal shares."""
    ranks = group.size()
    width = spec.ffn_width
    if spec.n_kv_heads % ranks or width % ranks or not hasattr(whole, "shard"):
        raise ConfigError(
            f"mlx-lm deals even shares: {spec.n_kv_heads} KV heads and {width} columns can't be had by {ranks} ranks of {spec.model_type}",
            "Start another number of ranks.",
        )
    whole.shard(group)


def config_of(spec: ModelSpec, n_layers: int) -> dict[str, Any]:
    """Return the arguments of mlx-lm's modules, under the names of config.json. Windows are left out, because this backend applies them."""
    config: dict[str, Any] = {
        "model_type": spec.model_type,
        "hidden_size": spec.hidden,
        "num_hidden_layers": max(1, n_layers),  # mlx-lm reads the first layer, so at least one is made
        "intermediate_size": spec.ffn,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_eps,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_context,
        "rope_theta": spec.rope.theta,
        "rope_scaling": _scaling(spec.rope),
        "tie_word_embeddings": spec.tied_head,
    }
    if (moe := spec.moe) is not None:
        config |= {"num_experts": moe.n_experts, "num_local_experts": moe.n_experts, "num_experts_per_tok": moe.top_k}
        config |= {"moe_intermediate_size": moe.ffn, "norm_topk_prob": moe.norm_topk, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def _scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.llama3 is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return {"rope_type": "llama3", **dict(zip(names, rope.llama3, strict=True))}
    if (yarn := rope.yarn) is not None:
        return {"rope_type": "yarn", "factor": yarn.factor, "original_max_position_embeddings": yarn.original,
                "beta_fast": yarn.fast, "beta_slow": yarn.slow}  # fmt: skip
    return {"rope_type": "linear", "factor": rope.linear_factor} if rope.linear_factor != 1 else None


def _module(name: str) -> ModuleType:
    if "mlx_lm" not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")
        assert found is not None
        package = importlib.util.module_from_spec(found)
        sys.modules["mlx_lm"] = package
    return importlib.import_module(f"mlx_lm.models.{name}")


_EXPERT = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def _read(
    source: WeightSource, formats: Mapping[str, WeightsFormat], options: LoadOptions, progress: LoadProgress | None
) -> tuple[dict[str, mx.array], dict[str, int]]:
    """Read the arrays by mlx-lm's names, with layers counted from the first loaded one. Also return the bits of each quantised module."""
    layers, spec = options.layers, source.spec
    outside = {EMBEDDING, FINAL_NORM, *([] if spec.tied_head else [HEAD])} if options.edges else set[str]()
    names = [name for name in source.names() if name in outside or ((at := _LAYER.match(name)) and int(at[1]) in layers)]
    done, total = 0, sum(map(source.nbytes, names))
    arrays, held, experts = dict[str, mx.array](), dict[str, int](), dict[str, list[tuple[int, mx.array]]]()
    for name in names:
        array = _bf16(source.read(name))
        place = _LAYER.sub(lambda at: f"model.layers.{int(at[1]) - layers.start}.", name)
        place = place if spec.model_type != "mixtral" else place.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        module, expert = place.rpartition(".")[0], _EXPERT.fullmatch(place)
        if expert is not None:
            block = "block_sparse_moe" if spec.model_type == "mixtral" else "mlp"
            module = f"{expert[1]}{block}.switch_mlp.{expert[3]}"
        bits = BITS.get(formats.get(name, WeightsFormat.BF16))
        if bits and array.shape[-1] % GROUP:
            raise UnsupportedModel(f"MLX in {bits} bits takes rows of whole groups of {GROUP}, unlike {name}'s", "Ask for --weights bf16.")
        parts = dict(zip(("weight", "scales", "biases"), mx.quantize(array, GROUP, bits), strict=True)) if bits else None
        if bits:
            held[module] = bits
        mx.eval(array if parts is None else parts)
        for part, value in (parts or {place.rpartition(".")[2]: array}).items():
            if expert is None:
                arrays[f"{module}.{part}"] = value
            else:
                experts.setdefault(f"{module}.{part}", []).append((int(expert[2]), value))
        done += source.nbytes(name)
        if progress is not None:
            progress(done, total)
    for name, parts in experts.items():
        arrays[name] = mx.stack([value for _, value in sorted(parts, key=lambda part: part[0])])
        mx.eval(arrays[name])
        parts.clear()
    return arrays, held


def _bf16(tensor: StoredTensor) -> mx.array:
    if isinstance(tensor, DenseTensor) and tensor.dtype == "bf16":
        bits: Any = tensor.data
        return mx.array(bits).view(mx.bfloat16)
    return mx.array(to_float32(tensor)).astype(mx.bfloat16)


def _measured(model: MlxModel, source: WeightSource, options: LoadOptions, group: mx.distributed.Group | None) -> Numerics:
    def make(weights: WeightsFormat, source: WeightSource, threads: int) -> LayerRunner[Any]:
        few = LoadOptions(source.spec.all_layers, weights, -(-ROWS // options.block_size), options.block_size, threads)
        return _runner(load_model(source, few, None), few, Numerics("", holds_identity=False))

    spec = model.spec
    label = f"mlx {version('mlx')} {version('mlx-lm')} {device_name()}" + ("" if group is None else f" {group.size()} ranks")
    few = small(spec)
    seeded = SeededWeights(replace(few, hidden=few.n_heads * spec.head_dim))  # some mlx-lm families need hidden = heads * head_dim
    formats = formats_of_products(mlx_formats(spec, options.weights, source.type_of))
    found = [measure(partial(make, weights), seeded, {1}, _bytes, f"{label} {weights}") for weights in formats]
    return Numerics(
        together([each.id for each in found]), all(each.holds_identity for each in found) and _first_layer_holds(model, options)
    )


def _first_layer_holds(model: MlxModel, options: LoadOptions) -> bool:
    """Return whether whole and cut runs of the first loaded layer, in its real sizes, give the same bytes."""
    if not model.layers:
        return True
    cuts = LONGER_CUTS if on_gpu() else CUTS
    rows = sum(cuts[0])
    first = MlxModel(model.spec, LayerRange(0, 1), model.layers[:1], None, model.n_kv_heads)
    few = LoadOptions(first.held, options.weights, -(-rows // options.block_size), options.block_size)
    runner = _runner(first, few, Numerics("", holds_identity=False))
    x_TD = mx.array(np.random.default_rng(rows).standard_normal((rows, model.spec.hidden), np.float32)).astype(mx.bfloat16)
    return len({answer(runner, x_TD, _bytes, cut, logits=False) for cut in cuts}) == 1


def _bytes(x_TD: mx.array) -> bytes:
    return np.array(x_TD.view(mx.uint16)).tobytes()


def on_gpu() -> bool:
    """Return whether MLX computes on a GPU here."""
    return mx.default_device().type == mx.DeviceType.gpu


def device_name() -> str:
    """Return the name of MLX's default device."""
    info: dict[str, Any] = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or platform.machine())
