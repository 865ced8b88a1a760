"""A model in an engine of another maker, with what this machine knows of its files.

Law: nothing that an engine says is believed where its files can be read: the tokenizer, the template and the digest are then the files' own. An engine's path is
read only if the engine runs on this machine.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.encoding import Task
from paceline.core.errors import EngineGone, PacelineError, UnsupportedModel
from paceline.core.inference import ModelFacts, PassedChats, ServedModel, fingerprint_of
from paceline.core.model import ModelRef, WeightsFormat, digest_of_name
from paceline.core.no_tokenizer import NoTokenizer
from paceline.engines.contract import Capability, Door, EngineIdentity, EngineModel, Takes
from paceline.engines.refusals import without_address
from paceline.fleet.card import EngineOffer, ModelOffer, Role
from paceline.machine.embedder import encoder_shape
from paceline.machine.foreign.rates import Rates
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import locations, open_weights
from paceline.store.digests import DigestCache, digest_of_files, file_sums
from paceline.store.gguf_header import read_header
from paceline.store.home import Home
from paceline.store.tokenizer import ModelTokenizer, pack_tokenizer, tokenizer_digest
from paceline.store.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

logger = logging.getLogger(__name__)

IDLE_S = 900
"""Seconds without a text until the process of a tokenizer ends. Raising it: engines that are used now and then hold some 50 MB for longer."""
ASSUMED_CONTEXT = 131_072
"""Context, in tokens, of a model if neither its engine nor its files say it. The engine itself refuses what does not fit. Lowering it: prompts that fit are refused."""


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A model that an engine of another maker answers with. Weights that can't be read are known by name and quantisation."""

    identity: EngineIdentity
    told: EngineModel
    """The engine's last answer about it."""
    name: str
    """Name for clients."""
    ref: ModelRef
    context: int
    created: int
    """Unix seconds."""
    tokenizer: BoundedTokenizer | None = None
    """None: its files can't be read here, so only messages reach it."""
    tokenizer_sha256: str = ""
    leaves_network: bool = False
    plain_http: bool = False
    writes: bool = True
    """False: it is an encoder, and answers no chat."""

    @property
    def tasks(self) -> frozenset[Task]:
        """Work that it does besides writing."""
        return frozenset(task for task in Task if Capability(task) in self.told.capabilities)

    @property
    def form(self) -> Takes:
        """Form in which prompts reach the engine."""
        if self.tokenizer is not None:
            for form in (Takes.IDS, Takes.TEXT):
                if form in self.told.takes:
                    return form
        return Takes.MESSAGES

    def offer(self, rates: Rates, under_way: int, load_s: float) -> ModelOffer:
        """Return what the node's card says of it.

        Args:
            load_s: measured seconds of a load; 0: none was measured.
        """
        told = self.told
        engine = EngineOffer(
            str(self.identity),
            tuple(sorted({str(self.form), *(str(form) for form in told.takes if form is Takes.MESSAGES)})) if self.writes else (),
            told.quantisation,
            told.slots,
            tuple(sorted(map(str, told.capabilities))),
            self.leaves_network,
            self.plain_http,
            self.told.via,
            context=self.context,
            load_s=None if told.loaded else load_s,
            capacity=rates.at_once(told.slots),
            first_token_s=0.0 if rates.prompt_per_s else rates.first_s,
        )
        return ModelOffer(
            self.name,
            Role.VERIFIER if self.writes else Role.EMBEDDER,
            str(self.ref.weights),
            rates.tokens_per_s,
            rates.prompt_per_s,
            self.ref.digest,
            warm=True,
            size_bytes=told.size_bytes,
            shape=None if self.writes else encoder_shape(self.context),
            tokenizer=self.tokenizer_sha256,
            under_way=under_way,
            engine=engine,
        )

    def is_as(self, told: EngineModel) -> bool:
        """Return whether the engine still means the same model by its name."""
        mine = self.told
        return (mine.name, mine.digest, mine.path, mine.quantisation, mine.size_bytes) == (
            told.name,
            told.digest,
            told.path,
            told.quantisation,
            told.size_bytes,
        )


@dataclass(frozen=True, slots=True)
class Files:
    """Facts from a model's files on this machine."""

    path: Path
    context: int
    """Context that the model was trained for; 0: unknown."""
    tokenizer: ModelTokenizer | None
    """None: no text is tokenized for an encoder here."""


def take_in(
    identity: EngineIdentity,
    told: EngineModel,
    home: Home,
    created: int,
    *,
    name: str = "",
    is_here: bool = True,
    plain_http: bool = False,
    leaves: bool = False,
) -> ForeignModel:
    """Describe a model of an engine. Blocks: reads heads of files, and tokenizers.

    Args:
        name: as clients are to name it; empty: as this machine's catalogue names the same files, or as the engine does.
        is_here: the engine runs on this machine, so that its paths mean files of this machine.
        plain_http, leaves: see `EngineOffer`.
    """
    files = _files(told, home) if is_here else None
    digest = told.digest or ("" if files is None else _known_digest(files.path, home))
    called = name or _name(told, files, home)
    if digest:
        ref = ModelRef(digest, WeightsFormat.STORED, called)
    else:
        ref = ModelRef(digest_of_name(called, told.quantisation), told.quantisation, called)
    model = ForeignModel(
        identity,
        told,
        called,
        ref,
        told.context or (0 if files is None else files.context) or ASSUMED_CONTEXT,
        created,
        leaves_network=leaves,
        plain_http=plain_http,
        writes=bool(told.takes) and (files is None or files.tokenizer is not None),
    )
    if files is None or files.tokenizer is None or not told.takes & {Takes.IDS, Takes.TEXT}:
        return model
    tokenizer = BoundedTokenizer(files.tokenizer, IDLE_S)
    return replace(model, tokenizer=tokenizer, tokenizer_sha256=tokenizer_digest(pack_tokenizer(files.tokenizer)))


def facts_of(model: ForeignModel) -> ModelFacts:
    """Return the facts that lists show of the model."""
    return ModelFacts(
        model.ref.digest if model.ref.has_digest else "",
        model.told.size_bytes,
        stored_as=model.told.quantisation,
        engine=str(model.identity),
        leaves_network=model.leaves_network,
        via=model.told.via,
        on_disk=not model.told.loaded,
    )


def served(model: ForeignModel) -> ServedModel:
    """Return the model as the server shows it."""
    chats: PassedChats | None = None
    if Takes.MESSAGES in model.told.takes:
        able = model.told.capabilities
        can = (capability in able for capability in (Capability.IMAGES, Capability.TOOLS, Capability.SCHEMAS))
        chats = PassedChats(model.form is Takes.MESSAGES, *can)
    return ServedModel(
        model.name, model.created, model.context, model.tokenizer or NoTokenizer(), fingerprint_of(model.ref, ""), facts_of(model), chats
    )


def as_clients_see(error: PacelineError, door: Door, model: ForeignModel) -> PacelineError:
    """Return an engine's error for clients. The engine's address, and how to start it, are for its owner: they are in the log."""
    if isinstance(error, EngineGone):
        return EngineGone(f"{model.identity} failed while it answered for {model.name}", "Try again in a few seconds.")
    return without_address(error, door, str(model.identity))


def _files(told: EngineModel, home: Home) -> Files | None:
    """Find the model's files on this machine: where the engine says, else under its name in the catalogue."""
    path = told.path
    try:
        if path is None:  # its name means a model of the catalogue, and never a path of this process's folder
            path = next((location.path for location in locations(home) if location.name == told.name), None)
            if path is None:
                return None
        if path.is_dir():
            return Files(path, _trained_context(path), tokenizer_from_folder(path) if told.takes else None)
        if not path.is_file():  # opening a pipe waits for its writer without end
            raise UnsupportedModel(f"{path} is no file")
        header = read_header(path)
        family = header.fields.get("general.architecture")
        context = header.fields.get(f"{family}.context_length")
        # Converters write how a model pools if it was made for vectors.
        is_encoder = not told.takes or (Capability.EMBEDDINGS in told.capabilities and bool(header.fields.get(f"{family}.pooling_type")))
        tokenizer = None if is_encoder else tokenizer_from_gguf(header, home)
        return Files(path, context if isinstance(context, int) and context > 0 else 0, tokenizer)
    except (PacelineError, OSError, ValueError) as error:
        logger.info("%s of an engine has no files that can be read here, so it gets whole chats: %s", told.name, error)
        return None


def learn_digest(told: EngineModel, home: Home) -> bool:
    """Compute the digest of a weights file that this machine can read, if it is not known. Takes as long as reading the file.

    Returns:
        Whether it is known from now on and was not before.
    """
    files = _files(told, home)
    if files is None or _known_digest(files.path, home):
        return False
    try:
        for file in [files.path] if files.path.is_file() else _weight_files(files.path):
            file_sums(file, home, lambda _: None)
    except (PacelineError, OSError) as error:
        logger.warning("the digest of %s can't be computed, so it is known by its name: %s", files.path, error)
        return False
    return bool(_known_digest(files.path, home))


def _known_digest(path: Path, home: Home) -> str:
    """Return the weights' digest if it is known already; else nothing."""
    digests = DigestCache(home)
    try:
        if path.is_file():
            return digests.known(path) or ""
        try:
            return open_weights(path, digests).known_digest or ""
        except UnsupportedModel:  # own kernels don't run it, and engines that have the same files may
            files = _weight_files(path)
            return digest_of_files(digests, files) if files and all(map(digests.known, files)) else ""
    except (PacelineError, OSError):
        return ""


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _trained_context(folder: Path) -> int:
    """Return the context in a folder's settings; 0 if they do not say."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
        found = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return 0
    return found if isinstance(found, int) and found > 0 else 0


def _name(told: EngineModel, files: Files | None, home: Home) -> str:
    if files is not None:
        for location in locations(home):
            if location.path == files.path:
                return location.name
    named = Path(told.name)
    return named.stem if named.is_absolute() or named.suffix == ".gguf" else told.name
