"""Running a model in an engine that this node starts: what runs it, with which options, and the start.

Law: Paceline's own reader opens the file before any process starts, so that a damaged or truncated file is a clear error.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline.backends.memory import total_bytes
from paceline.core.clock import Clock
from paceline.core.errors import ModelFileError, UnsupportedModel
from paceline.core.ports import find_port
from paceline.engines.choice import Asked, EngineChoice, ModelTraits, choose
from paceline.engines.commands import EngineOptions, command_of, variables_of
from paceline.engines.contract import Door, EngineIdentity
from paceline.engines.environment import engine_environment
from paceline.engines.folders import MAX_SOCKET_PATH
from paceline.engines.installed import Gpu, Installed, Kind, find_installed
from paceline.engines.loading import LoadPatience
from paceline.engines.process import EngineExit, EngineProcess, Launch
from paceline.machine.devices import gpu_of_own_kernels, gpus_here, usable_cores
from paceline.store.catalog import ModelLocation, OpenedModel, open_model, resolve
from paceline.store.gguf_file import read_parts
from paceline.store.gguf_header import GgufHeader, read_header
from paceline.store.hf_folder import ENCODERS
from paceline.store.home import Home
from paceline.store.selection import projectors

DEFAULT_CONTEXT: Final = 16_384
"""Tokens of one request where the person names no context and the model allows more. Raising it: longer conversations; each slot takes more memory,
whether it is used or not."""
DEFAULT_SLOTS: Final = 4
"""Requests at once. Raising it: more of them run at the same time, each more slowly, and each takes memory for a whole context."""
CACHE_SHARE: Final = 0.05
"""Share of this machine's memory that a llama-server may fill with earlier prompts. Its own limit is 8 GiB, on every machine."""
_PLAIN: Final = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Properties of a GGUF file that decide how an engine runs it. 0: the file does not say."""

    n_layers: int = 0
    hidden: int = 0
    context: int = 0
    is_quantised: bool = True
    predicts_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one model on this machine."""

    choice: EngineChoice
    location: ModelLocation
    gguf: GgufFacts | None
    """None: the model is a folder."""
    opened: OpenedModel | None
    """The model as own kernels run it, if they were looked at and can."""
    projector: Path | None
    """File that turns images into embeddings, for the engine."""


def decide(
    ref: str,
    home: Home,
    asked: Asked | None = None,
    *,
    find: Callable[[], Sequence[Installed]] = find_installed,
    gpus: Collection[Gpu] | None = None,
    own_gpu: Callable[[], Gpu | None] = gpu_of_own_kernels,
) -> Decision:
    """Decide what runs a model. Blocks for up to seconds: the files are read, and installed engines may be asked for their devices.

    Args:
        ref: as for `open_model`.
        asked: the value of `--engine`; None: not given.
        find: lists the installed engines. It is called only if the decision depends on them.
        gpus: interfaces of this machine's GPUs; None: they are looked for.
        own_gpu: says which GPU own kernels use.

    Raises:
        ModelNotFound: this machine has no such model.
        ModelFileError: its files are missing, truncated or damaged.
        UnsupportedModel: it writes no text, or is an adapter.
        ConfigError: the engine that was asked for can't run it, or nothing can.
    """
    location = resolve(ref, home)
    gpus = gpus_here() if gpus is None else gpus
    gguf = read_gguf(location.path) if location.path.is_file() else None
    opened, own_lacks = None, ""
    if asked in {None, Asked.OWN}:
        try:
            opened = open_model(ref, home)
        except UnsupportedModel as error:
            own_lacks = error.message
    quantised = _folder_is_quantised(location.path) if gguf is None else gguf.is_quantised
    facts = ModelTraits(location.name, gguf is not None, quantised, own_lacks)
    needs_engine = asked not in {None, Asked.OWN} or (asked is None and (own_lacks or gpus))
    choice = choose(asked, facts, find() if needs_engine else (), gpus, own_gpu() if gpus else None)
    projector = find_projector(location.path, gguf.hidden) if gguf is not None else None
    if choice.engine is None and projector is not None:
        unread = f"Own kernels take no images. To use {projector.name}, which lies next to {location.name}: --engine llama"
        choice = replace(choice, note=" ".join(filter(None, (choice.note, unread))))
    return Decision(choice, location, gguf, opened if choice.engine is None else None, projector)


async def start_child(
    decision: Decision,
    home: Home,
    clock: Clock,
    *,
    context: int | None = None,
    slots: int = DEFAULT_SLOTS,
    draft: Path | None = None,
    gpu_layers: int | None = None,
    threads: int | None = None,
    on_exit: Callable[[EngineExit], None] | None = None,
    patience: LoadPatience | None = None,
) -> EngineProcess:
    """Start the engine of a decision. Returns while it loads: wait with `EngineProcess.wait_ready`.

    Args:
        context: tokens of one request; None: the model's, but at most `DEFAULT_CONTEXT`.
        slots: requests at once.
        draft: GGUF file of a smaller model that drafts tokens.
        gpu_layers: layers on the GPU; None: as many as fit.
        threads: threads that compute; None: a thread for each core if no GPU is used, else what the engine decides.
        on_exit: called on the event loop each time the process ends unasked, with the pause until its next start.

    Raises:
        ConfigError: the system starts no process, or no port is free.
    """
    engine = decision.choice.engine
    assert engine is not None, "own kernels run this model"
    facts = decision.gguf or GgufFacts()

    def open_door(folder: Path) -> Door:
        key, socket = secrets.token_urlsafe(32), folder / "engine.sock"
        if engine.takes_socket and len(os.fsencode(socket)) <= MAX_SOCKET_PATH:
            return Door("http://127.0.0.1", key, socket)
        return Door(f"http://127.0.0.1:{find_port('127.0.0.1')}", key)

    wanted = EngineOptions(
        decision.location.path,
        decision.location.name,
        context=context or min(facts.context or DEFAULT_CONTEXT, DEFAULT_CONTEXT),
        slots=slots,
        projector=decision.projector,
        predicts_ahead=facts.predicts_ahead,
        draft=draft,
        threads=threads or (None if engine.gpus else usable_cores()),
        cache_mib=int(total_bytes() * CACHE_SHARE) >> 20,
    )
    launch = Launch(
        EngineIdentity(engine.name, engine.version),
        open_door,
        lambda door, layers: command_of(engine, wanted, door, layers),
        lambda door, folder: engine_environment(os.environ, variables_of(engine, door.api_key, folder)),
        n_layers=facts.n_layers + 1 if engine.gpus and facts.n_layers and engine.kind is Kind.LLAMA else 0,  # the head counts as a layer
        gpu_layers=gpu_layers,
    )
    process = EngineProcess(launch, home.engine_logs, clock, patience=patience, on_exit=on_exit)
    try:
        await process.start()
    except BaseException:
        await process.stop()
        raise
    return process


def read_gguf(path: Path) -> GgufFacts:
    """Check the files of a GGUF model, and return what an engine needs to know.

    Raises:
        ModelFileError: a file is missing, truncated or damaged.
        UnsupportedModel: it is an encoder, an adapter or a projector, which answer no chat.
    """
    try:
        parts = read_parts(path)
    except UnsupportedModel:
        return GgufFacts()  # a newer version or tensor type: an engine may know it
    header = parts[0]
    arch = header.text("general.architecture")
    if arch is None:
        raise ModelFileError(f"{path} does not say which architecture it is (general.architecture)", "Get the model again")
    if arch in ENCODERS:
        raise UnsupportedModel(f"{path} is an encoder: it writes no text", "Serve it with --embeddings")
    if header.text("general.type") in {"adapter", "mmproj"} or arch == "clip":
        raise UnsupportedModel(f"{path} is a part for another model, and not a model", "Name the model's own file, next to it")
    types = {tensor.type.name for part in parts for tensor in part.tensors.values() if len(tensor.shape) > 1}
    return GgufFacts(
        _number(header, f"{arch}.block_count"),
        _number(header, f"{arch}.embedding_length"),
        _number(header, f"{arch}.context_length"),
        is_quantised=not types <= _PLAIN,
        predicts_ahead=_number(header, f"{arch}.nextn_predict_layers") > 0,
    )


def _number(header: GgufHeader, key: str) -> int:
    value = header.fields.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def find_projector(path: Path, hidden: int) -> Path | None:
    """Return the file that turns images into embeddings for a GGUF model: one named `mmproj` in its folder that makes embeddings of the model's size.

    Of several, one with weights of 16 bits is preferred.
    """
    found: list[tuple[int, Path]] = []
    for file in projectors(path):
        try:
            header = read_header(file)
        except (ModelFileError, UnsupportedModel):
            continue
        if _number(header, "clip.vision.projection_dim") in {0, hidden}:
            types = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
            found.append((not types & {"F16", "BF16"}, file))
    return min(found)[1] if found else None


def _folder_is_quantised(folder: Path) -> bool:
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool({"quantization", "quantization_config"} & config.keys())
