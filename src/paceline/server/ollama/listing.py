"""What Ollama's clients are told of the models served: figures that are known here, and nothing where they are not.

Every name has a tag, as in Ollama, since some clients look for `NAME:latest` in the list where a person wrote NAME.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.inference import ServedModel
from paceline.server.formats.format import Format
from paceline.server.ollama.shape import Fields, stamp

FOREVER: Final = "2300-01-01T00:00:00Z"
"""When a model that stays loaded is unloaded."""
_BILLION, _MILLION = 1e9, 1e6


def tagged(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


def capabilities(form: Format) -> list[str]:
    """What a model was made for, by its template. Tools are served to others as well, in plain text."""
    return ["completion", *(["tools"] if form.knows_tools else []), *(["thinking"] if form.thinking is not None else [])]


def details(model: ServedModel) -> Fields:
    """Family and size, in words."""
    facts = model.facts
    return {
        "parent_model": "",
        "format": facts.file_format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _in_words(facts.parameters),
        "quantization_level": facts.stored_as,
    }


def tag(model: ServedModel) -> Fields:
    """An entry of `/api/tags`."""
    name = tagged(model.name)
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(model.created),
        "size": model.facts.size_bytes,
        "digest": model.facts.digest,
        "details": details(model),
    }


def process(model: ServedModel) -> Fields:
    """An entry of `/api/ps`: what is served is loaded, and stays so."""
    name, facts = tagged(model.name), model.facts
    return {
        "name": name,
        "model": name,
        "size": facts.size_bytes,
        "digest": facts.digest,
        "details": details(model),
        "expires_at": FOREVER,
        "size_vram": facts.size_bytes if facts.on_gpu else 0,
        "context_length": model.max_context,
    }


def shown(model: ServedModel, can: Sequence[str]) -> Fields:
    """`/api/show`."""
    facts = model.facts
    family = facts.family or "model"
    info: Fields = {
        "general.architecture": family,
        "general.basename": model.name,
        f"{family}.context_length": model.max_context,
    }
    if facts.parameters:
        info["general.parameter_count"] = facts.parameters
    if facts.hidden:
        info[f"{family}.embedding_length"] = facts.hidden
    return {
        "modelfile": f"# Served by Paceline.\nFROM {model.name}\n",
        "parameters": "",
        "template": model.tokenizer.chat_template or "",
        "details": details(model),
        "model_info": info,
        "capabilities": list(can),
        "modified_at": stamp(model.created),
    }


def _in_words(parameters: int) -> str:
    """As Ollama writes it: 134.5M, 8.0B."""
    if parameters >= _BILLION:
        return f"{parameters / _BILLION:.1f}B"
    return f"{parameters / _MILLION:.2f}M" if parameters else ""
