"""Choose the files of a repository or folder that make a model: its GGUF files (whole or split), or safetensors and the files next to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelNotFound, UnsupportedModel

_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[^/\s]+/[^/?#\s]+)"
    r"(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/?#\s]+)(?:/(?P<file>[^?#\s]+))?)?/?(?:[?#]\S*)?$"
)
_SPLIT: Final = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$", re.IGNORECASE)
_REF: Final = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?(:(?P<selector>[^:]+))?$")
INDEX: Final = "model.safetensors.index.json"
BESIDE: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/tool_use.jinja", "special_tokens_map.json",
    INDEX, "modules.json", "1_Pooling/config.json",
)  # fmt: skip
"""Files next to safetensors that are part of the model. The last two say how an encoder pools."""


@dataclass(frozen=True, slots=True)
class HubRef:
    """`org/name[@revision][:file or quantisation]`."""

    repo: str
    revision: str | None
    selector: str | None

    @property
    def folder(self) -> str:
        """Folder of its files under `models/`. A revision that was named has a folder of its own."""
        return self.repo if self.revision is None else f"{self.repo}@{self.revision.replace('/', '--')}"


def is_path(ref: str) -> bool:
    """Return whether every command reads a name as a path, and as nothing else."""
    return ref.startswith((".", "/", "~")) or (ref.lower().endswith(".gguf") and ":" not in ref)


def from_url(ref: str) -> str:
    """Return the name, `org/name[@revision][:file]`, for a hub's address that was copied from a browser; any other text unchanged."""
    match = _URL.match(ref)
    if match is None:
        return ref
    revision = "" if match["revision"] in {None, "main"} else f"@{match['revision']}"
    return match["repo"] + revision + (f":{match['file']}" if match["file"] else "")


def parse_ref(ref: str) -> HubRef | None:
    """Return the hub reference in a text, or None if it can't be one."""
    match = _REF.match(ref)
    if match is None or any(set(part) == {"."} for part in match["repo"].split("/")):
        return None
    if match["revision"] is not None and ".." in match["revision"]:
        return None
    return HubRef(match["repo"], match["revision"], match["selector"])


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF models among file names: all files of each, by its first file. Adapters for images (`mmproj`) are not models."""
    models: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower()):
        split = _SPLIT.match(name)
        first = name if split is None else f"{split['stem']}-00001-of-{split['parts']}{name[-5:]}"
        models.setdefault(first, []).append(name)
    return models


def model_stem(name: str) -> str:
    """Return the name of a GGUF model from that of its first file: without the extension, and without the part numbers of a split model."""
    split = _SPLIT.match(name)
    return split["stem"] if split is not None else name.rpartition(".")[0] or name


def whole_name(first: str) -> str:
    """Return the file name of a GGUF model, without its folder and without the part numbers of a split model."""
    return f"{model_stem(first)}.gguf".rpartition("/")[2] if _SPLIT.match(first) else first.rpartition("/")[2]


def choose_gguf(where: str, names: Iterable[str], selector: str | None, *, is_path: bool = False) -> list[str]:
    """Return the files of the one GGUF model that is meant, the first file first.

    Args:
        where: the repository or folder that has the files, for errors.
        selector: a file's name or path, or a part of it such as `Q4_1`, in any letter case; None: only one model may be there.
        is_path: `where` is a path, so the error's hint names files by paths, not after a colon.

    Raises:
        ModelNotFound: none or several match.
    """
    models = gguf_models(names)
    if selector is None:
        fits = list(models)
    else:
        asked = selector.lower()
        exact = [first for first in models if asked in {first.lower(), first.lower().rpartition("/")[2], whole_name(first).lower()}]
        fits = exact or [first for first in models if asked in re.split(r"[-./]", first.lower())]
        fits = fits or [first for first in models if asked in first.lower()]
    if len(fits) == 1:
        return models[fits[0]]
    listed = ", ".join(first.rpartition("/")[2] for first in (fits or models)) or "none"
    problem = f"{len(fits)} GGUF files" if selector is None else f"{len(fits)} GGUF files that match {selector!r}"
    how = (
        f"Name one by its path, as in {where.rstrip('/')}/{next(iter(models), 'model.gguf')}"
        if is_path
        else "Name one after a colon, as in org/name:file"
    )
    raise ModelNotFound(f"{where} has {problem}", f"{how}. There are: {listed}")


def choose_files(where: str, names: Sequence[str], selector: str | None) -> list[str]:
    """Return the files of a repository that its model needs. All safetensors at the top level count as shards; the index selects among them later.

    Raises:
        ModelNotFound: the repository has no model, or several that may be meant.
        UnsupportedModel: Paceline does not read this kind of weights, or the repository has no tokenizer that it reads.
    """
    top = {name for name in names if "/" not in name}
    safetensors = {name for name in top if name.endswith(".safetensors")}
    if selector is not None or not safetensors:
        if not gguf_models(names) and {name for name in top if name.endswith((".bin", ".pth", ".pt"))}:
            raise UnsupportedModel(f"{where} has its weights as pickles only", "Choose a repository with safetensors or GGUF files")
        return choose_gguf(where, names, selector)
    if "config.json" not in top:
        raise UnsupportedModel(f"{where} has safetensors but no config.json", "Choose the repository of a whole model")
    if "tokenizer.json" not in top:
        raise UnsupportedModel(f"{where} has no tokenizer.json", "Choose a repository with one, or a GGUF file of the model")
    if INDEX in top:
        weights = {INDEX, *(name for name in safetensors if not name.startswith("consolidated"))}
    else:
        weights = {"model.safetensors"} if "model.safetensors" in safetensors else safetensors
    return sorted(weights | set(names).intersection(BESIDE))


def projectors(path: Path) -> list[Path]:
    """Return the files next to a GGUF model that have the name of a projector, which turns images into embeddings."""
    return [file for file in sorted(path.parent.glob("*.gguf")) if "mmproj" in file.name.lower() and file != path]
