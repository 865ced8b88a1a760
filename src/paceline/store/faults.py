"""Errors about a model's files, worded alike everywhere: damaged, unsupported, unreadable, or not writable. `Fields` reads the named values of such
files, and checks the type of each before it is used.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import DownloadError, ModelFileError, UnsupportedModel
from paceline.core.text import printable

LONGEST: Final = 500
"""Most characters of a reason that are shown. Raising it: an error that quotes a hostile file fills more of the screen."""


def damaged(path: Path, reason: str) -> ModelFileError:
    """Return the error for a file that can't be what it claims to be."""
    return ModelFileError(
        f"{path} is not a usable model file: {_shown(reason)}",
        "Get it again where it came from; `paceline pull` does so for what was pulled",
    )


_POINTER: Final = b"version https://git-lfs"


def check_not_pointer(path: Path, beginning: bytes) -> None:
    """Refuse a git-lfs pointer: a short text that stands in a clone for the file itself.

    Raises:
        ModelFileError: the file begins as one.
    """
    if beginning.startswith(_POINTER):
        raise ModelFileError(
            f"{path} is a git-lfs pointer, not the file itself: git cloned the repository without its large files",
            "Run `git lfs pull` in the clone, or fetch the model with `paceline pull`",
        )


def unsupported(path: Path, reason: str, nearest: str = "") -> UnsupportedModel:
    """Return the error for an undamaged file with a model that Paceline does not run.

    Args:
        nearest: the supported family with the name most like the file's, as people call it; empty: no name is close.
    """
    instead = f"The nearest that runs is {nearest}. " if nearest else ""
    return UnsupportedModel(f"{path}: {_shown(reason)}", f"{instead}`paceline models --supported` lists the families that Paceline runs")


def encoder_alone(path: Path) -> UnsupportedModel:
    """Return the error for an encoder that was opened as a model that writes text."""
    return UnsupportedModel(
        f"{path}: it is an encoder, which makes embeddings and writes no text", "Serve it with `paceline up --embeddings`"
    )


def quantised(folder: Path, scheme: Fields | None) -> UnsupportedModel:
    """Return the error for weights that another program quantised (AWQ, GPTQ, FP8, bitsandbytes, MLX and others).

    Args:
        scheme: the folder's `quantization_config`.
    """
    fields = {} if scheme is None else scheme.fields
    method = fields.get("quant_method")
    name = printable(method).upper() if isinstance(method, str) else "MLX" if "group_size" in fields else "no method is named"
    return _unread_weights(folder, f"its weights are quantised (quantization_config: {name})")


def unread_tensor(path: Path, name: str, kind: str) -> UnsupportedModel:
    """Return the error for a safetensors file with a tensor of a type that Paceline does not read.

    Args:
        kind: the type as the file spells it. Small integers and floats of 8 bits or fewer are the work of a quantiser.
    """
    why = "holds weights that are not floats of 16 or 32 bits" if kind in _WIDE_TYPES else "holds quantised weights"
    return _unread_weights(path, f"it {why}: tensor {_shown(name)} is of type {printable(kind, 20)}")


_WIDE_TYPES: Final = frozenset({"BOOL", "I64", "U64", "F64", "C64"})
"""Tensor types that no quantiser writes."""


def _unread_weights(path: Path, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path}: {reason}, and Paceline does not read that",
        "Use a GGUF file of the model, or the folder with its original weights (bf16, fp16 or fp32)",
    )


def unreadable(path: Path, error: OSError) -> ModelFileError:
    """Return the error for a file that the operating system does not let us read."""
    return ModelFileError(f"{path} can't be read: {error.strerror or error}", "Check that it exists and that you may read it")


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Turn any OSError of the block, which reads a file of a model, into a ModelFileError.

    Raises:
        ModelFileError: the operating system did not let the block read the file.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def can_not_write(what: str, folder: Path, error: OSError) -> DownloadError:
    """Return the error for fetched bytes that can't be written to the disk.

    Args:
        what: the thing that was fetched, as the message names it.
    """
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    why, first = ("the disk is full", "Free some space") if full else (error.strerror or str(error), "Check PACELINE_HOME")
    return DownloadError(f"{what} can't be written to {folder}: {why}", go_on(first))


def go_on(first: str) -> str:
    """Return the hint for a fetch that can be continued: `first`, then run the same command again."""
    return f"{first} and run the same command again: it goes on from there"


def _shown(reason: str) -> str:
    """Return a reason fit for printing. Reasons quote files, so control characters are replaced and long text is cut."""
    return printable(reason, LONGEST) + "..." * (len(reason) > LONGEST)


@dataclass(frozen=True, slots=True)
class Fields:
    """Named values and the file they came from. Getters give None for an absent or null field, and raise ModelFileError for a wrong type."""

    path: Path
    fields: Mapping[str, Any]

    def text(self, key: str) -> str | None:
        return self.typed(key, str, "a string")

    def flag(self, key: str) -> bool | None:
        return self.typed(key, bool, "true or false")

    def integer(self, key: str) -> int | None:
        value = self.fields.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise damaged(self.path, f"{self.called(key)} is not an integer ({key} is {value!r})")

    def needed(self, key: str) -> int:
        """Return an integer. Raises ModelFileError if the field is absent, too."""
        value = self.integer(key)
        if value is None:
            raise damaged(self.path, f"{self.called(key)} is missing")
        return value

    def number(self, key: str) -> float | None:
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                pass  # falls to the error below: a float can't hold so large an integer
        raise damaged(self.path, f"{self.called(key)} is not a number")

    def typed(self, key: str, kind: type, what: str) -> Any:
        value = self.fields.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise damaged(self.path, f"{self.called(key)} is not {what}")

    def called(self, key: str) -> str:
        """Return the name of a field as errors show it."""
        return key
