"""Encoders on disk: their `EncoderSpec` and their tensors, from a folder of safetensors or a GGUF file.

Law: a setting that could change a vector and is unknown here is refused, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from paceline.core.errors import UnsupportedModel
from paceline.core.weights import FIRST_NORM, POSITIONS, TYPES, WORDS, EncoderSpec, Pooling, Shape, StoredTensor, encoder_shapes
from paceline.store.catalog import resolve
from paceline.store.faults import damaged, reading, unsupported
from paceline.store.gguf_header import GgufHeader, read_header
from paceline.store.hf_folder import CONFIG, ENCODERS, JsonObject, load_object, read_head, weight_files
from paceline.store.home import Home
from paceline.store.tensor_files import MAX_LAYERS, StoredAt, check_range, stored_tensor
from paceline.store.tokenizer import ModelTokenizer
from paceline.store.tokenizer_files import TOKENIZER, VOCABULARY, tokenizer_from_folder, tokenizer_from_gguf, tokenizer_from_vocabulary

_MODULES: Final = "modules.json"
_UNUSED: Final = ("pooler.", "cls.", "embeddings.position_ids")
"""Beginnings of the names of tensors that no vector depends on: heads for training tasks, and numbers that are computed here anyway."""
_MOST_WIDE: Final = 1 << 16
_POOLINGS: Final = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_cls_token": Pooling.CLS}
_GGUF_POOLINGS: Final = {1: Pooling.MEAN, 2: Pooling.CLS}
_GGUF_NAMES: Final = {"token_embd": WORDS, "position_embd": POSITIONS, "token_types": TYPES, "token_embd_norm": FIRST_NORM}
_GGUF_LAYER: Final = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderTensors:
    """An `EncoderSource` over files."""

    spec: EncoderSpec
    tensors: Mapping[str, StoredAt]

    def read(self, name: str) -> StoredTensor:
        at = self.tensors[name]
        return stored_tensor(at, at.read())


@dataclass(frozen=True, slots=True)
class OpenedEncoder:
    """An encoder ready to be loaded. Its tensors are read on demand."""

    name: str
    tensors: EncoderTensors
    tokenizer: ModelTokenizer
    files: tuple[Path, ...]
    """Files of the weights."""


def open_encoder(ref: str) -> OpenedEncoder:
    """Find an encoder, by a name or a path as `resolve` does, and open its tensors and its tokenizer.

    Raises:
        ModelNotFound: this machine has no such model.
        ModelFileError: its files are missing, truncated or damaged.
        UnsupportedModel: it is not an encoder, or has something that Paceline does not run.
    """
    home = Home.from_environment()
    location = resolve(ref, home)
    return replace(open_encoder_at(location.path, home), name=location.name)


def is_encoder(path: Path) -> bool:
    """Return whether the model in a folder or GGUF file says that it is an encoder.

    Raises:
        ModelFileError, UnsupportedModel: its configuration can't be read.
    """
    if path.is_dir():
        return load_object(path / CONFIG).text("model_type") in ENCODERS
    return read_header(path).text("general.architecture") in ENCODERS


def open_encoder_at(path: Path, home: Home) -> OpenedEncoder:
    """Open the encoder in a folder or GGUF file; its name is the last part of the path. Raises as `open_encoder`, except ModelNotFound."""
    if path.is_dir():
        spec = _spec_of_folder(path)
        files = tuple(weight_files(path))
        found = [at for file in files for at in read_head(file, leave_out=_UNUSED)]
        tensors = {at.name.removeprefix("bert."): at for at in found}
        has_tokenizer = (path / TOKENIZER).is_file() or not (path / VOCABULARY).is_file()
        tokenizer = tokenizer_from_folder(path, spec.vocab) if has_tokenizer else tokenizer_from_vocabulary(path, spec.vocab)
    else:
        header, files = read_header(path), (path,)
        spec, tensors = _spec_of_gguf(header), dict(_renamed(header))
        tokenizer = tokenizer_from_gguf(header, home, spec.vocab)
    return OpenedEncoder(path.name, EncoderTensors(spec, _checked(path, spec, tensors)), tokenizer, files)


def _checked(path: Path, spec: EncoderSpec, found: Mapping[str, StoredAt]) -> dict[str, StoredAt]:
    """Return the tensors that the spec needs. Raises if one is missing or has another shape, or if there are others that might change vectors."""
    expected: dict[str, Shape] = dict(encoder_shapes(spec))
    for name, shape in expected.items():
        if name not in found:
            raise damaged(path, f"tensor {name} is missing")
        if found[name].shape != shape:
            raise damaged(path, f"tensor {name} has shape {list(found[name].shape)}, its configuration says {list(shape)}")
    extra = sorted(name for name in found.keys() - expected.keys() if not name.startswith(_UNUSED))
    if extra:
        raise unsupported(path, f"tensor {extra[0]} is not part of a BERT")
    return {name: found[name] for name in expected}


def _check_sizes(path: Path, spec: EncoderSpec) -> EncoderSpec:
    """Return the spec, and raise for sizes that no encoder has, before any of them is used to allocate or to divide."""
    sizes = {
        "layers": spec.n_layers, "hidden size": spec.hidden, "heads": spec.n_heads, "feed-forward size": spec.ffn,
        "vocabulary": spec.vocab, "positions": spec.max_tokens, "segments": spec.n_types,
    }  # fmt: skip
    check_range(path, sizes)
    if spec.n_layers > MAX_LAYERS or max(spec.hidden, spec.ffn, spec.max_tokens) > _MOST_WIDE or spec.hidden % spec.n_heads:
        raise damaged(path, f"its {spec.n_layers} layers of {spec.n_heads} heads, {spec.hidden} and {spec.ffn} wide, are no encoder's")
    if not 0 <= spec.norm_eps < math.inf:
        raise damaged(path, f"its norm's epsilon is {spec.norm_eps}")
    return spec


def no_encoder(path: Path, family: object) -> UnsupportedModel:
    """Return the error for a model that is not an encoder, and so makes no vectors."""
    return UnsupportedModel(
        f"{path}: it is no encoder that Paceline runs, but of the family {family!r}", "Name a BERT, like all-MiniLM-L6-v2"
    )


def _spec_of_folder(folder: Path) -> EncoderSpec:
    config = load_object(folder / CONFIG)
    if config.text("model_type") not in ENCODERS:
        raise no_encoder(folder, config.text("model_type"))
    if config.text("hidden_act") not in {None, "gelu"}:
        raise unsupported(config.path, f"its activation is {config.text('hidden_act')!r}")
    if config.text("position_embedding_type") not in {None, "absolute"} or config.flag("is_decoder"):
        raise unsupported(config.path, "its positions are relative, or it is a decoder")

    eps, n_types = config.number("layer_norm_eps"), config.integer("type_vocab_size")
    pooling, normalise = _pooling(folder)
    return _check_sizes(
        config.path,
        EncoderSpec(
            n_layers=config.needed("num_hidden_layers"),
            hidden=config.needed("hidden_size"),
            n_heads=config.needed("num_attention_heads"),
            ffn=config.needed("intermediate_size"),
            vocab=config.needed("vocab_size"),
            max_tokens=config.needed("max_position_embeddings"),
            n_types=2 if n_types is None else n_types,
            norm_eps=1e-12 if eps is None else eps,
            pooling=pooling,
            normalise=normalise,
        ),
    )


def _pooling(folder: Path) -> tuple[Pooling, bool]:
    """Read modules.json: how the tokens' vectors are pooled, and whether the result is normalised. Without that file: the mean, normalised."""
    path = folder / _MODULES
    if not path.is_file():
        return Pooling.MEAN, True
    pooling, normalise = Pooling.CLS, False
    for place, module in enumerate(_modules(path)):
        kind = (module.text("type") or "").rpartition(".")[2]
        match kind:
            case "Transformer" if place == 0:
                pass
            case "Pooling" if place == 1:
                pooling = _mode(load_object(_inside(folder, module) / CONFIG))
            case "Normalize" if place == 2:
                normalise = True
            case _:
                raise unsupported(path, f"its module {place} is {kind!r}")
    return pooling, normalise


def _modules(path: Path) -> Iterator[JsonObject]:
    try:
        with reading(path):
            listed: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not valid JSON ({error})") from error
    modules = cast("list[Any]", listed) if isinstance(listed, list) else [None]
    if len(modules) < 2:
        raise damaged(path, "it is not a list of a transformer, a pooling, and what follows")
    for module in modules:
        if not isinstance(module, dict):
            raise damaged(path, "it lists something else than modules")
        yield JsonObject(path, cast("dict[str, Any]", module))


def _inside(folder: Path, module: JsonObject) -> Path:
    name = module.text("path") or ""
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise damaged(module.path, f"its pooling lies at {name!r}")
    return folder / name


def _mode(config: JsonObject) -> Pooling:
    modes = [key for key in config.fields if key.startswith("pooling_mode_") and config.flag(key)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise unsupported(config.path, f"it pools by {' and '.join(modes) or 'nothing'}")
    return _POOLINGS[modes[0]]


def _spec_of_gguf(header: GgufHeader) -> EncoderSpec:
    path, arch = header.path, header.text("general.architecture")
    if arch not in ENCODERS:
        raise no_encoder(path, arch)

    def needed(key: str) -> int:
        return header.needed(f"{arch}.{key}")

    pooling = header.integer(f"{arch}.pooling_type")
    if pooling is not None and pooling not in _GGUF_POOLINGS:
        raise unsupported(path, f"its pooling is of type {pooling}")
    eps = header.number(f"{arch}.attention.layer_norm_epsilon")
    words, types = (header.tensors.get(f"{name}.weight") for name in ("token_embd", "token_types"))
    if words is None or types is None:
        raise damaged(path, "tensor token_embd.weight or token_types.weight is missing")
    return _check_sizes(
        path,
        EncoderSpec(
            n_layers=needed("block_count"),
            hidden=needed("embedding_length"),
            n_heads=needed("attention.head_count"),
            ffn=needed("feed_forward_length"),
            vocab=words.shape[0],
            max_tokens=needed("context_length"),
            n_types=types.shape[0],
            norm_eps=1e-12 if eps is None else eps,
            pooling=Pooling.MEAN if pooling is None else _GGUF_POOLINGS[pooling],
        ),
    )


def _renamed(header: GgufHeader) -> Iterator[tuple[str, StoredAt]]:
    """Yield the tensors under Hugging Face's names. A tensor that has none there keeps its own."""
    for name, at in header.tensors.items():
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.removeprefix("blk.").partition(".")
        if stem in _GGUF_NAMES:
            yield _GGUF_NAMES[stem].removesuffix(".weight") + f".{kind}", at
        elif stem.startswith("blk.") and part in _GGUF_LAYER:
            yield f"encoder.layer.{layer}.{_GGUF_LAYER[part]}.{kind}", at
        else:
            yield name, at
