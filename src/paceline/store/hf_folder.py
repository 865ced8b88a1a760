"""A Hugging Face folder: its config.json as a `ModelSpec`, and its safetensors (one file, or shards with an index) as a source of tensors.

Every field is checked for its type before it is used. A setting that could change the numbers and is unknown here is refused, never ignored.
Only the heads of safetensors are read when a folder is opened. The safetensors library's reader is not used: it maps the file, and its numpy side has no
bf16. Format: eight bytes of little-endian length, a JSON table, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from paceline.core.errors import ModelFileError
from paceline.core.model import Activation, LongContext, LowRank, ModelSpec, MoeSpec, Multipliers, RopeSpec, WindowSpec, YarnSpec, yarn_gain
from paceline.core.weights import TENSOR_TYPES, DenseTensor, StoredTensor, TensorType
from paceline.store.digests import DigestCache
from paceline.store.families import BY_DEPTH, BY_NAME, Family, Windows, apart, nearest, scaled_by_depth
from paceline.store.faults import Fields, check_not_pointer, damaged, encoder_alone, quantised, reading, unread_tensor, unsupported
from paceline.store.selection import INDEX
from paceline.store.stacked_experts import unstacked
from paceline.store.tensor_files import DENSE, MAX_LAYERS, StoredAt, TensorFiles, check_sizes

MAX_JSON_BYTES: Final = 64 << 20
"""Longest JSON file that is read: configurations have kilobytes, tokenizers a few megabytes. Raising it: a hostile file takes more memory."""


@dataclass(frozen=True, slots=True)
class JsonObject(Fields):
    """A JSON object and the file it came from."""

    fields: dict[str, Any]

    def child(self, key: str) -> JsonObject | None:
        value = self.typed(key, dict, "an object")
        return None if value is None else JsonObject(self.path, value)

    def strings(self, key: str) -> list[str] | None:
        values = self.typed(key, list, "a list")
        if values is not None and not all(isinstance(value, str) for value in values):
            raise damaged(self.path, f"{key} is not a list of strings")
        return values

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers; empty if the field is absent. Raises ModelFileError for anything else."""
        found = self.typed(key, list, "a list") or []
        if not all(isinstance(item, int | float) and not isinstance(item, bool) and abs(item) < 1e300 for item in found):
            raise damaged(self.path, f"{key} is not a list of numbers")
        return [float(item) for item in found]

    def integers(self, key: str) -> list[int]:
        """Return a field that is one integer or a list of integers, as a list; empty if it is absent. Raises ModelFileError for anything else."""
        value = self.fields.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            raise damaged(self.path, f"{key} is not an integer or a list of integers")
        return found


def parse_object(path: Path, data: bytes) -> JsonObject:
    """Parse JSON that must be an object.

    Raises:
        ModelFileError: it is not JSON, or not an object.
    """
    check_not_pointer(path, data)
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    return JsonObject(path, value)


def load_object(path: Path) -> JsonObject:
    """Read a file that must be a JSON object.

    Raises:
        ModelFileError: it can't be read, is not JSON, or not an object.
    """
    with reading(path):
        if path.exists() and not path.is_file():
            raise damaged(path, "it is not a file")  # a pipe or a device may never end
        if path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, f"it is longer than {MAX_JSON_BYTES >> 20} MiB")
        data = path.read_bytes()
    return parse_object(path, data)


ENCODERS: Final = frozenset({"bert"})
"""Values of `model_type` (or of a GGUF architecture) of models that write no text: `store.encoder_files` opens them."""
_UNUSED_BY_DEFAULT: Final = (
    "attention_bias", "attention_out_bias", "mlp_bias", "quantization_config", "attn_logit_softcapping", "final_logit_softcapping", "no_rope_layers",
    "use_bidirectional_attention",
)  # fmt: skip
"""Fields that ask, when set, for something that Paceline does not do, except in a family that has it (`_is_known`)."""


def spec_from_config(config: JsonObject) -> ModelSpec:
    """Return the sizes of the model that a config.json describes.

    Raises:
        ModelFileError: a field is missing, of the wrong type or absurd.
        UnsupportedModel: the model has a family or feature that Paceline does not run.
    """
    try:
        return _spec(config)
    except ArithmeticError as error:
        raise damaged(config.path, f"its numbers are such that a size of it has none: {error}") from error


def _spec(config: JsonObject) -> ModelSpec:
    family = config.text("model_type")
    if family is None:
        raise damaged(config.path, "model_type is missing")
    if family in ENCODERS:
        raise encoder_alone(config.path)
    if family in _OF_TEXTS and (texts := config.child("text_config")) is not None:
        if (inner := texts.text("model_type") or _OF_TEXTS[family]) != _OF_TEXTS[family]:
            raise unsupported(config.path, f"its texts are of the family {inner!r}", nearest(inner))
        tied = {key: config.fields[key] for key in ("tie_word_embeddings", "quantization_config") if key in config.fields}
        family, config = _OF_TEXTS[family], JsonObject(config.path, tied | texts.fields)
    kind = BY_NAME.get(family)
    if kind is None:
        raise unsupported(config.path, f"the model family {family!r} is not one Paceline runs", nearest(family))
    config = JsonObject(config.path, {**kind.defaults, **config.fields})
    for field in _UNUSED_BY_DEFAULT:
        if config.fields.get(field) and not _is_known(config, kind, field):
            if field == "quantization_config":
                raise quantised(config.path.parent, config.child("quantization_config"))
            raise unsupported(config.path, f"{field} is set")
    for field, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if kind.activation is Activation.CLAMPED and config.number(field) not in {None, value}:
            raise unsupported(config.path, f"{field} is {config.number(field)}, and {value} alone has code")
    activation = config.text("hidden_activation") or config.text("hidden_act") or "silu"
    if _ACTIVATIONS.get(activation) is not (Activation.SILU if kind.activation is Activation.CLAMPED else kind.activation):
        raise unsupported(config.path, f"its activation is {activation!r}")
    hidden, n_heads = config.needed("hidden_size"), config.needed("num_attention_heads")
    if n_heads <= 0:
        raise damaged(config.path, f"it has {n_heads} heads")
    n_layers, context = config.needed("num_hidden_layers"), config.needed("max_position_embeddings")
    n_kv_heads, eps = config.integer("num_key_value_heads"), config.number("rms_norm_eps")
    tied = config.flag("tie_word_embeddings")
    low, longest = _low(config, hidden // n_heads) if kind.low_rank else None, context
    turned = None if low is None else config.needed("qk_rope_head_dim")
    head_dim = (config.integer("head_dim") or hidden // n_heads) if turned is None else config.needed("qk_nope_head_dim") + turned
    rope, context, long = _rope(config, head_dim, context, turned)
    spec = ModelSpec(
        model_type=family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=head_dim,
        ffn=config.needed("intermediate_size"),
        vocab=config.needed("vocab_size"),
        max_context=context,
        rms_eps=1e-6 if eps is None else eps,
        rope=rope,
        tied_head=bool(tied),
        qkv_bias=kind.qkv_bias and config.flag("attention_bias") is not False,
        out_bias=kind.biases,
        sinks=kind.sinks,
        qk_norm=kind.qk_norm,
        qk_norm_whole=kind.qk_norm_whole,
        moe=_moe(config, kind) if kind.expert_width else None,
        unturned=_unturned(config, kind, n_layers),
        window=_window(config, kind, n_layers, longest if long else context),
        norms=kind.norms,
        activation=kind.activation,
        scales=_scales(config, kind, hidden, n_layers),
        long=long,
        low=low,
    )
    check_sizes(config.path, spec)
    return spec


def _is_known(config: JsonObject, kind: Family, field: str) -> bool:
    """Return whether Paceline runs a field of `_UNUSED_BY_DEFAULT` in this family."""
    if field == "quantization_config":
        quantised = config.child(field)
        return kind.biases and quantised is not None and quantised.text("quant_method") == "mxfp4"
    return (field == "attention_bias" and kind.qkv_bias) or (field == "no_rope_layers" and kind.unturned_every > 0)


_OF_TEXTS: Final = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_vl": "qwen3_vl_text"}
"""Families that also see images, with the family of their text model."""
_ACTIVATIONS: Final = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


def _scales(config: JsonObject, kind: Family, hidden: int, n_layers: int) -> Multipliers:
    scalar = config.number("query_pre_attn_scalar")
    named = {key: config.number(key) for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")}
    by_depth = {key: config.number(key) for key in BY_DEPTH if kind.scaled_by_depth}
    for key, value in {"query_pre_attn_scalar": scalar, **named, **by_depth}.items():
        if value is not None and not 0 < value < math.inf:
            raise damaged(config.path, f"{key} is {value}")
        if key in by_depth:
            continue
        if value not in {None, 1} and not (kind.root_embedding if key == "query_pre_attn_scalar" else kind.scaled):
            raise unsupported(config.path, f"{key} is {value}")
    if by_depth:
        return scaled_by_depth(by_depth, hidden, n_layers)
    embedding, attention, residual, logits = named.values()
    embedding = max(0, hidden) ** 0.5 if kind.root_embedding else embedding
    return Multipliers(embedding or 1.0, attention if scalar is None else scalar**-0.5, residual or 1.0, 1 / (logits or 1.0))


def _low(config: JsonObject, value_dim: int) -> LowRank:
    """Return the ranks of the queries' and of the keys' and values' two matrices, and the size of a value.

    The norms between the two matrices have their own epsilon in transformers, so the model's is not part of this.
    """
    if config.fields.get("q_lora_rank") is None:
        raise unsupported(config.path, "its queries are one product, where keys and values are two (q_lora_rank is null)")
    scaling = config.child("rope_parameters") or config.child("rope_scaling")
    if scaling is not None and scaling.number("mscale_all_dim"):
        raise unsupported(config.path, "mscale_all_dim is set")
    return LowRank(config.needed("q_lora_rank"), config.needed("kv_lora_rank"), config.integer("v_head_dim") or value_dim)


def _unturned(config: JsonObject, kind: Family, n_layers: int) -> tuple[bool, ...]:
    if not kind.unturned_every or n_layers > MAX_LAYERS:
        return ()
    turned = config.integers("no_rope_layers")
    if turned and len(turned) != n_layers:
        raise damaged(config.path, f"it has {n_layers} layers and {len(turned)} no_rope_layers")
    every = max(1, config.needed("no_rope_layer_interval"))
    return tuple(not turn for turn in turned) or tuple((layer + 1) % every == 0 for layer in range(n_layers))


def _window(config: JsonObject, kind: Family, n_layers: int, context: int) -> WindowSpec | None:
    """Return the layers with a sliding window; None if no layer has one, or if it is not shorter than the context and has no rope of its own."""
    tokens, local = config.integer("sliding_window"), _local_rope(config, kind)
    if not tokens or (tokens >= context and local is None) or config.flag("use_sliding_window") is False or n_layers > MAX_LAYERS:
        return None
    listed = config.strings("layer_types")
    if listed is not None:
        if len(listed) != n_layers:
            raise damaged(config.path, f"it has {n_layers} layers and {len(listed)} layer_types")
        windowed = [name == "sliding_attention" for name in listed]
    elif kind.windows is Windows.PATTERN:
        windowed = [(layer + 1) % max(1, config.needed("sliding_window_pattern")) > 0 for layer in range(n_layers)]
    else:
        first = 0
        if kind.windows is Windows.LATER:
            first = (config.integer("max_window_layers") or 0) if config.flag("use_sliding_window") else n_layers
        windowed = [layer >= first for layer in range(n_layers)]
    return WindowSpec(tokens, tuple(windowed), local) if any(windowed) else None


def _local_rope(config: JsonObject, kind: Family) -> RopeSpec | None:
    """Return the rope of the layers with a window; None if they use the model's."""
    both = config.child("rope_parameters")
    local = None if both is None else both.child("sliding_attention")
    theta = config.number("rope_local_base_freq") if local is None else local.number("rope_theta")
    if local is not None and local.text("rope_type") not in {None, "default"}:
        raise unsupported(config.path, f"rope scaling {local.text('rope_type')!r} of layers with a window")
    if theta is None and kind.plain_windows:
        theta = config.number("rope_theta") if both is None or both.number("rope_theta") is None else both.number("rope_theta")
    return None if theta is None else RopeSpec(theta)


def _moe(config: JsonObject, kind: Family) -> MoeSpec:
    if config.integer("decoder_sparse_step") not in {None, 1} or config.integers("mlp_only_layers"):
        raise unsupported(config.path, "only some of its layers are mixtures of experts")
    n_experts = config.integer("num_experts")
    return MoeSpec(
        n_experts=config.needed("num_local_experts") if n_experts is None else n_experts,
        top_k=config.needed("num_experts_per_tok"),
        ffn=config.needed(kind.expert_width),
        norm_topk=bool(config.flag("norm_topk_prob")),
        biased=kind.biases,
    )


def _rope(config: JsonObject, head_dim: int, context: int, turned: int | None) -> tuple[RopeSpec, int, LongContext | None]:
    """Return the rope, the context in tokens that it serves, and the setting for a longer context if there is one.

    transformers 5 writes all of it into `rope_parameters`; older files have `rope_theta` and `rope_scaling`.

    Args:
        turned: number of a head's dimensions that turn; None: the configuration says which part of them does.
    """
    both = config.child("rope_parameters")
    scaling = (both and both.child("full_attention")) or both or config.child("rope_scaling") or JsonObject(config.path, {})
    theta = scaling.number("rope_theta")
    theta = config.number("rope_theta") if theta is None else theta
    theta = 10000.0 if theta is None else theta
    partial = scaling.number("partial_rotary_factor") or config.number("partial_rotary_factor") or 1.0
    if not 0 < partial <= 1:
        raise damaged(config.path, f"rope covers {partial} of each head")
    plain = RopeSpec(theta, dims=turned if turned is not None or partial == 1 else int(head_dim * partial))
    if scaling.fields.get("llama_4_scaling_beta"):
        raise unsupported(config.path, "llama_4_scaling_beta is set")
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    original = scaling.integer("original_max_position_embeddings") or config.integer("original_max_position_embeddings")
    match kind:
        case "default":
            return plain, context, None
        case "linear":
            return replace(plain, linear_factor=_needed_number(scaling, "factor")), context, None
        case "llama3":
            original = _original(config, original)
            factors = (_needed_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
            factor, low, high = factors
            if not (0 < factor < math.inf and 0 < low < high < math.inf and original > 0):
                raise damaged(config.path, "the factors of its rope scaling contradict one another")
            return replace(plain, llama3=(factor, low, high, original)), context, None
        case "yarn":
            factor = _needed_number(scaling, "factor")
            yarn = YarnSpec(factor, _original(config, original or context), scaling.number("beta_fast") or 32.0, scaling.number("beta_slow") or 1.0,
                            scaling.flag("truncate") is not False)  # fmt: skip
            gain = scaling.number("attention_factor")
            if gain is None:
                own, all_dims = scaling.number("mscale"), scaling.number("mscale_all_dim")
                gain = yarn_gain(factor, own) / yarn_gain(factor, all_dims) if own and all_dims else yarn_gain(factor)
            return replace(plain, yarn=yarn, gain=gain), context, None
        case "longrope" | "su":
            first = _original(config, original)
            ratio = scaling.number("factor") or context / max(1, first)
            gain = scaling.number("attention_factor")
            if gain is None:
                gain = math.sqrt(1 + math.log(ratio) / math.log(max(2, first))) if ratio > 1 else 1.0
            # A longer context needs other divisors for all positions, so KV that was computed with the first ones could not be used.
            short, further = (replace(plain, divisors=tuple(scaling.numbers(f"{name}_factor")), gain=gain) for name in ("short", "long"))
            return short, min(context, first), LongContext(context, further) if context > first and further.divisors else None
        case _:
            raise unsupported(config.path, f"rope scaling {kind!r}")


def _original(config: JsonObject, original: int | None) -> int:
    if original is None:
        raise damaged(config.path, "original_max_position_embeddings of its rope scaling is missing")
    return original


def _needed_number(scaling: JsonObject, key: str) -> float:
    value = scaling.number(key)
    if value is None:
        raise damaged(scaling.path, f"{key} of its rope scaling is missing")
    return value


MAX_HEAD_BYTES: Final = 8 << 20
"""Longest head of a safetensors file, enough for about 60,000 tensors. Raising it: a table of empty lists takes twenty times its size in memory."""
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"

_COMPUTED: Final = ("rotary_emb.inv_freq", "masked_bias")
"""Endings of the names of tensors that old checkpoints hold, although they follow from the configuration."""


class SafetensorsWeights(TensorFiles):
    """The tensors of a folder with config.json and safetensors. The digest covers config.json too."""

    format = "safetensors"

    def __init__(self, folder: Path, digests: DigestCache) -> None:
        """Read the configuration and the heads of all files, and check the tensors against the configuration.

        Raises:
            ModelFileError: a file is missing, truncated or damaged, or its tensors don't fit the configuration.
            UnsupportedModel: the model has a family, feature or tensor type that Paceline does not run.
        """
        spec = spec_from_config(load_object(folder / CONFIG))
        files = weight_files(folder)
        tensors = dict(_renamed((at for path in files for at in read_head(path) if not at.name.endswith(_COMPUTED)), spec))
        super().__init__(spec, tensors, files, digests, beside=[folder / CONFIG], neighbours=BY_NAME[spec.model_type].neighbours)
        self._less_one: Final = BY_NAME[spec.model_type].norms_less_one

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        tensor = super().read(name, rows, columns)
        if not (self._less_one and name.endswith("norm.weight") and isinstance(tensor, DenseTensor)):
            return tensor
        wide = (tensor.data.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "bf16" else tensor.data.astype(np.float32)
        return DenseTensor(wide + np.float32(1), "f32")


_BYTES: Final = TensorType("U8", -1, 1, 1)
"""Type of the two byte tensors, codes and exponents, that hold an MXFP4 tensor."""
_IMAGES: Final = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "visual.",
    "model.visual.",
)
"""Beginnings of the names of tensors for images, which are left out."""


def _renamed(stored: Iterable[StoredAt], spec: ModelSpec) -> Iterator[tuple[str, StoredAt]]:
    """Yield the tensors under our names: stacked experts and fused matrices are split, and tensors for images left out."""
    theirs = BY_NAME[spec.model_type].tensors
    of_texts = spec.model_type in _OF_TEXTS.values()
    stored = list(stored)
    names = {at.name for at in stored}
    exponents = {at.name: at for at in stored if at.name.endswith("_scales")}
    for at in stored:
        name = at.name
        if name in exponents and name.removesuffix("_scales") + "_blocks" in names:
            continue
        if of_texts and name.startswith(_IMAGES):
            continue
        if of_texts:
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.partition(".layers.")[2].partition(".")
        if layer and theirs:
            name = f"model.layers.{layer}.{'.'.join(theirs.get(word, word) for word in part.split('.'))}.{kind}"
        for own, part in unstacked(name, at, exponents, 0 if spec.moe is None else spec.moe.n_experts):
            yield from apart(own, part, spec)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights.

    Raises:
        ModelFileError: the folder has none, the index is damaged, or it names a file that does not exist.
    """
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        if single.exists():
            return [single]
        others = sorted(folder.glob("*.safetensors"))
        if len(others) == 1:
            return others
        found = f"{len(others)} safetensors files and no {INDEX}" if others else "no safetensors file"
        raise ModelFileError(f"{folder} holds {found}", "A model folder has config.json and safetensors; Paceline reads GGUF files too")
    table = load_object(index).child("weight_map")
    if table is None or not table.fields or not all(isinstance(name, str) for name in table.fields.values()):
        raise damaged(index, "it has no weight_map of file names")
    names = sorted(set(cast("dict[str, str]", table.fields).values()))
    for name in names:
        if "/" in name or "\\" in name or "\0" in name or not (folder / name).is_file():
            raise damaged(folder, f"{name!r}, which its index names, is not there")
    return [folder / name for name in names]


def read_head(path: Path, leave_out: tuple[str, ...] = ()) -> Iterator[StoredAt]:
    """Yield the tensors of a safetensors file with their places in it. Reads only the file's head.

    Args:
        leave_out: beginnings of the names of tensors to skip. Their types are not checked.

    Raises:
        ModelFileError: the file is missing, truncated or damaged.
        UnsupportedModel: a tensor's type is not F32, F16 or BF16.
    """
    with reading(path):
        if path.exists() and not path.is_file():
            raise damaged(path, "it is not a file")  # opening a pipe may never end
        size = path.stat().st_size
        if size < 10:
            raise damaged(path, f"it is truncated: it has {size} bytes")
        with path.open("rb", buffering=0) as file:
            n = int.from_bytes(file.read(8), "little")
            if n > min(size - 8, MAX_HEAD_BYTES):
                file.seek(0)
                check_not_pointer(path, file.read(64))
                raise damaged(path, f"it is truncated: its table should have {n} bytes, the file has {size}")
            head = file.read(n)
    table = parse_object(path, head)
    for name, entry in table.fields.items():
        if name != "__metadata__" and not name.startswith(leave_out):
            yield _entry(path, name, entry, 8 + n, size)


def _entry(path: Path, name: str, entry: object, data_start: int, size: int) -> StoredAt:
    """Return the tensor of one row of the table. Raises if its type, shape and size contradict each other, or exceed the file."""
    fields: dict[str, Any] = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2 or len(shape) > 8:
        raise damaged(path, f"its table has {json.dumps(entry)[:100]} for tensor {name}")
    if kind not in DENSE and not (kind == _BYTES.name and name.endswith(("_blocks", "_scales"))):
        raise unread_tensor(path, name, kind)
    stored_type = _BYTES if kind == _BYTES.name else TENSOR_TYPES[kind]
    start, stop = offsets
    nbytes = math.prod(shape) * stored_type.nbytes
    if stop - start != nbytes:
        raise damaged(path, f"tensor {name} of shape {shape} and type {kind} can't have {stop - start} bytes")
    if data_start + stop > size:
        raise damaged(path, f"it is truncated: tensor {name} ends at byte {data_start + stop}, the file at {size}")
    return StoredAt(path, name, stored_type, tuple(shape), data_start + start, nbytes)


def _sizes(values: object) -> list[int] | None:
    """Return a list of non-negative integers, or None for anything else."""
    items = cast("list[object]", values) if isinstance(values, list) else [None]
    sizes = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    return sizes if len(sizes) == len(items) else None
