"""Models that make vectors of texts or rank them, as the server sees them. The server treats one machine's (`machine.encoders`) and the fleet's (`ways.forward.encoding`) alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

from paceline.core.inference import ModelFacts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Task(StrEnum):
    """Work on texts other than writing. The values are those of `engines.contract.Capability`, and stand on cards."""

    EMBED = "embeddings"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """A model that makes vectors or ranks texts."""

    name: str
    created: int
    """Unix seconds."""
    tasks: frozenset[Task]
    max_tokens: int = 0
    """Maximum tokens of one text; 0: not known."""
    dimensions: int = 0
    """Numbers in a vector; 0: not known."""
    facts: ModelFacts = field(default_factory=ModelFacts)


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts to make vectors of, or to rank."""

    inputs: Sequence[str | Sequence[int]]
    """At least one. Token ids only for vectors."""
    query: str | None = None
    """The text that the inputs are ranked by; None: vectors are wanted."""
    via: tuple[str, ...] = ()
    """Marks of the nodes that the request went through; see `core.via`."""
    field: str = "input"
    """Name of the inputs' field in errors."""
    first: int | None = None
    """Place of the first input where this is a part of a longer request; None: it is whole."""

    @property
    def names(self) -> list[str]:
        """Names of the inputs in errors."""
        if self.first is None and len(self.inputs) == 1:
            return [self.field]
        return [f"{self.field}[{(self.first or 0) + place}]" for place in range(len(self.inputs))]

    def part(self, start: int, stop: int) -> EncodeRequest:
        """Return the request for some of the inputs."""
        if start == 0 and stop >= len(self.inputs):
            return self
        return replace(self, inputs=self.inputs[start:stop], first=(self.first or 0) + start)

    @property
    def task(self) -> Task:
        return Task.EMBED if self.query is None else Task.RERANK


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result for each text of a request, in its order. One holder computed all of it."""

    values: npt.NDArray[np.floating[Any]]
    """Vectors as rows of float32; or scores as float64, one a text."""
    tokens: int
    """Tokens of all texts together, as the model counts them; 0: its engine does not say."""


def joined(parts: Sequence[Encoded]) -> Encoded:
    """Return the results of a request's parts as one."""
    import numpy as np  # commands that only name tasks need none of it

    return parts[0] if len(parts) == 1 else Encoded(np.concatenate([part.values for part in parts]), sum(part.tokens for part in parts))


class Encoders(Protocol):
    """Holders of encoders. For one event loop, but `encoders` and `expects` for any thread."""

    def encoders(self) -> Sequence[EncoderModel]:
        """Return the models that texts may be sent to, one for each name; this machine's own first."""
        ...

    def expects(self, name: str) -> bool:
        """Return whether an encoder that does not answer now will soon, or did until a moment ago."""
        ...

    async def encode(self, name: str, request: EncodeRequest) -> Encoded:
        """Compute what a request asks for.

        Args:
            name: an encoder's own name.

        Raises:
            UnknownModel, ModelAway: no holder has it, or none at this moment.
            InvalidRequest, ContextOverflow: a text is empty, too long, or in a form that the model does not take.
            Overloaded, FleetError, EngineGone: no holder could do it.
        """
        ...


class NoEncoders:
    """Implements `Encoders` where there are none."""

    def encoders(self) -> Sequence[EncoderModel]:
        return ()

    def expects(self, name: str) -> bool:
        del name
        return False

    async def encode(self, name: str, request: EncodeRequest) -> Encoded:
        raise AssertionError(f"{name} is not listed, so {request.task} can't be asked of it")


NO_ENCODERS: Final = NoEncoders()


def meant_encoder(name: str, encoders: Iterable[EncoderModel]) -> EncoderModel | None:
    """Return the encoder that a client means: by its name, else without `:latest`, else without case."""
    found = list(encoders)
    plain = name.removesuffix(":latest")
    exact = (each for wanted in (name, plain) for each in found if each.name == wanted)
    return next(exact, None) or next((each for each in found if each.name.lower() == plain.lower()), None)
