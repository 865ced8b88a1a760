"""From Hugging Face's config.json to a `ModelSpec`. What would change the numbers and is not known here is refused, never ignored.

A JSON object read from someone else's file: every field is checked for its type before it is believed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.model import ModelSpec, MoeSpec, RopeSpec
from paceline.store.faults import damaged, encoder_alone, unreadable, unsupported
from paceline.store.tensor_files import check_sizes

MAX_JSON_BYTES: Final = 64 << 20
"""Configurations have kilobytes, tokenizers a few megabytes."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object and the file it came from. Getters give None for an absent or null field, and ModelFileError for a wrong type."""

    path: Path
    fields: dict[str, Any]

    def text(self, key: str) -> str | None:
        return self._typed(key, str, "a string")

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def integer(self, key: str) -> int | None:
        value = self.fields.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise damaged(self.path, f"{key} is {value!r}, not an integer")

    def number(self, key: str) -> float | None:
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass  # falls to the complaint below: an integer beyond a float's range is no number here
        raise damaged(self.path, f"{key} is not a number")

    def child(self, key: str) -> JsonObject | None:
        value = self._typed(key, dict, "an object")
        return None if value is None else JsonObject(self.path, value)

    def strings(self, key: str) -> list[str] | None:
        values = self._typed(key, list, "a list")
        if values is not None and not all(isinstance(value, str) for value in values):
            raise damaged(self.path, f"{key} is not a list of strings")
        return values

    def integers(self, key: str) -> list[int]:
        """One integer or a list of them; empty for an absent field."""
        value = self.fields.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            raise damaged(self.path, f"{key} is not an integer or a list of integers")
        return found

    def _typed(self, key: str, kind: type, what: str) -> Any:
        value = self.fields.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise damaged(self.path, f"{key} is not {what}")


def parse_object(path: Path, data: bytes) -> JsonObject:
    """Parse JSON that must be an object.

    Raises:
        ModelFileError: it is not JSON, or not an object.
    """
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
    try:
        if path.exists() and not path.is_file():
            raise damaged(path, "it is not a file")  # a pipe or a device may never end
        if path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, f"it is longer than {MAX_JSON_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_object(path, data)


FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
ENCODERS: Final = frozenset({"bert"})
"""Families that write no text: `store.encoder_files` opens them."""
_UNUSED_BY_DEFAULT: Final = ("attention_bias", "mlp_bias", "quantization_config", "attn_logit_softcapping", "no_rope_layers")
"""Fields that ask, when set, for something Paceline does not do."""


def spec_from_config(config: JsonObject) -> ModelSpec:
    """Sizes of the model a config.json describes.

    Raises:
        ModelFileError: a field is missing, of the wrong type or absurd.
        UnsupportedModel: a family or feature Paceline does not run.
    """
    family = config.text("model_type")
    if family is None:
        raise damaged(config.path, "model_type is missing")
    if family in ENCODERS:
        raise encoder_alone(config.path)
    if family not in FAMILIES:
        raise unsupported(config.path, f"the model family {family!r} is not one Paceline runs")
    for field in _UNUSED_BY_DEFAULT:
        if config.fields.get(field):
            raise unsupported(config.path, f"{field} is set")
    activation = config.text("hidden_act")
    if activation not in {None, "silu"}:
        raise unsupported(config.path, f"its activation is {activation!r}")
    hidden, n_heads = _needed(config, "hidden_size"), _needed(config, "num_attention_heads")
    if n_heads <= 0:
        raise damaged(config.path, f"it has {n_heads} heads")
    n_layers, context = _needed(config, "num_hidden_layers"), _needed(config, "max_position_embeddings")
    n_kv_heads, eps = config.integer("num_key_value_heads"), config.number("rms_norm_eps")
    tied = config.flag("tie_word_embeddings")
    window = _window(config, n_layers)
    spec = ModelSpec(
        model_type=family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=config.integer("head_dim") or hidden // n_heads,
        ffn=_needed(config, "intermediate_size"),
        vocab=_needed(config, "vocab_size"),
        # Within one window, sliding attention is plain attention.
        max_context=context if window is None else min(context, window),
        rms_eps=1e-6 if eps is None else eps,
        rope=_rope(config),
        tied_head=bool(tied),
        qkv_bias=family == "qwen2",
        qk_norm=family in {"qwen3", "qwen3_moe"},
        moe=_moe(config) if family == "qwen3_moe" else None,
    )
    check_sizes(config.path, spec)
    return spec


def _needed(config: JsonObject, key: str) -> int:
    value = config.integer(key)
    if value is None:
        raise damaged(config.path, f"{key} is missing")
    return value


def _window(config: JsonObject, n_layers: int) -> int | None:
    """The sliding window, where some layer uses it."""
    mistral = config.text("model_type") == "mistral"
    # Mistral's configuration class takes 4096 where the field is absent; null says none.
    window = 4096 if mistral and "sliding_window" not in config.fields else config.integer("sliding_window")
    if not window or config.flag("use_sliding_window") is False:
        return None
    kinds = config.strings("layer_types")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if mistral:
        return window
    if not config.flag("use_sliding_window"):
        return None
    first = config.integer("max_window_layers")
    return window if first is None or first < n_layers else None


def _moe(config: JsonObject) -> MoeSpec:
    if config.integer("decoder_sparse_step") not in {None, 1} or config.integers("mlp_only_layers"):
        raise unsupported(config.path, "only some of its layers are mixtures of experts")
    n_experts = config.integer("num_experts")
    return MoeSpec(
        n_experts=_needed(config, "num_local_experts") if n_experts is None else n_experts,
        top_k=_needed(config, "num_experts_per_tok"),
        ffn=_needed(config, "moe_intermediate_size"),
        norm_topk=bool(config.flag("norm_topk_prob")),
    )


def _rope(config: JsonObject) -> RopeSpec:
    """transformers 5 writes everything into `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    scaling = config.child("rope_parameters") or config.child("rope_scaling") or JsonObject(config.path, {})
    theta = scaling.number("rope_theta")
    theta = config.number("rope_theta") if theta is None else theta
    theta = 10000.0 if theta is None else theta
    partial = scaling.number("partial_rotary_factor") or config.number("partial_rotary_factor")
    if partial not in {None, 1.0}:
        raise unsupported(config.path, f"rope covers only {partial} of each head")
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    match kind:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, linear_factor=_needed_number(scaling, "factor"))
        case "llama3":
            context = scaling.integer("original_max_position_embeddings")
            if context is None:
                raise damaged(config.path, "original_max_position_embeddings of its rope scaling is missing")
            factors = (_needed_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
            factor, low, high = factors
            if not (0 < factor < math.inf and 0 < low < high < math.inf and context > 0):
                raise damaged(config.path, "the factors of its rope scaling contradict one another")
            return RopeSpec(theta, llama3=(factor, low, high, context))
        case _:
            raise unsupported(config.path, f"rope scaling {kind!r}")


def _needed_number(scaling: JsonObject, key: str) -> float:
    value = scaling.number(key)
    if value is None:
        raise damaged(scaling.path, f"{key} of its rope scaling is missing")
    return value
