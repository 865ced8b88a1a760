"""This machine's encoders: its own, and models of foreign engines that make vectors or rank texts.

Laws:
- An own encoder comes before an engine's model of the same name.
- A request stays with one holder: vectors of two models, or of two engines, never stand in one answer.
- Engines get few texts at a time, so that reading their answers never holds the event loop for long, and only texts: their token ids may mean something else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from paceline.core.encoding import Encoded, EncodeRequest, EncoderModel, Task, joined
from paceline.core.errors import EngineGone, InvalidRequest, ModelAway, PacelineError, UnknownModel
from paceline.core.inference import ModelFacts
from paceline.core.model import ModelRef
from paceline.core.via import outside, through
from paceline.engines.sense import made_sense
from paceline.fleet.card import ModelOffer
from paceline.machine.embedder import Embedder, TextEncoder
from paceline.machine.foreign.encoding import encode_texts
from paceline.machine.foreign.engines import ForeignEngines
from paceline.machine.foreign.model import as_clients_see, facts_of
from paceline.machine.foreign.watched import Offered, WatchedEngine

ENGINE_TEXTS: Final = 32
"""Texts that an engine gets at a time. Raising it: engines that batch are faster, and a large answer holds the event loop longer, about 10 ms for 32
vectors of 4096 numbers."""
NO_REF: Final = ModelRef("", "")


class LocalEncoders:
    """Implements `core.encoding.Encoders` for one machine.

    Args:
        encoder: its own; None: there is none.
        engines: its foreign engines; None: there are none.
        offer: what the node's card says of its own encoder; None: other machines don't see it.
    """

    def __init__(self, encoder: TextEncoder | None, engines: ForeignEngines | None = None, offer: ModelOffer | None = None) -> None:
        self._own = None if encoder is None else Embedder(encoder)
        self._engines, self._offer = engines, offer

    @property
    def offers(self) -> tuple[ModelOffer, ...]:
        """Return the offer of its own encoder for the node's card. Engines' models are among `ForeignEngines.offers`."""
        return () if self._offer is None else (self._offer,)

    @property
    def own_name(self) -> str:
        """Name of this machine's own encoder; empty: there is none."""
        return "" if self._own is None else self._own.encoder.name

    def encoders(self) -> Sequence[EncoderModel]:
        found: dict[str, EncoderModel] = {}
        if self._own is not None:
            own = self._own.encoder
            size = 0 if self._offer is None else self._offer.size_bytes
            facts = ModelFacts("" if self._offer is None else self._offer.digest, size, hidden=own.dimensions)
            found[own.name] = EncoderModel(own.name, own.created, frozenset({Task.EMBED}), own.max_tokens, own.dimensions, facts)
        for _, one in self._of_engines():
            model = one.model
            found.setdefault(model.name, EncoderModel(model.name, model.created, model.tasks, model.context, facts=facts_of(model)))
        return tuple(found.values())

    def expects(self, name: str) -> bool:
        return any(self._is_known(name, task) for task in Task)

    def _is_known(self, name: str, task: Task) -> bool:
        """Return whether an engine has a model for a task, also one that is away or is being tested."""
        engines = () if self._engines is None else self._engines.engines
        return any(one.model.name == name and task in one.model.tasks for engine in engines for one in engine.known)

    def ref_of(self, name: str, task: Task) -> ModelRef | None:
        """Return the model that would do a task under a name; None: none would."""
        if self._own is not None and name == self._own.encoder.name:
            return (NO_REF if self._offer is None else self._offer.model) if task is Task.EMBED else None
        found = self._engine_of(name)
        return found[1].model.ref if found is not None and task in found[1].model.tasks else None

    async def encode(self, name: str, request: EncodeRequest) -> Encoded:
        """See `Encoders.encode`.

        Raises:
            RequestLoop: the request would pass through this node a second time, on its way to an engine.
        """
        if self.ref_of(name, request.task) is None:
            if self._is_known(name, request.task):
                raise ModelAway(f"The engine of {name!r} does not answer now", "Try again in a few seconds.")
            raise UnknownModel(f"No encoder {name[:200]!r} is served here")
        if self._own is not None and name == self._own.encoder.name:
            return await self._own.embed(request)
        found = self._engine_of(name)
        assert found is not None
        return await self._encode_there(*found, request)

    async def _encode_there(self, engine: WatchedEngine, one: Offered, request: EncodeRequest) -> Encoded:
        assert self._engines is not None
        texts = [text for text in request.inputs if isinstance(text, str)]
        if len(texts) != len(request.inputs):
            raise InvalidRequest(
                f"{request.field}: {one.model.name} runs in an engine of another maker, which takes texts",
                "Send texts.",
                field=request.field,
            )
        for text, name in zip(texts, request.names, strict=True):
            if not text:
                raise InvalidRequest(f"{name}: empty", "Leave it out, or send some text.", field=name)
        via = through(request.via, self._engines.mark)
        if engine.sharing.leaves_network:
            via = outside(via)
        one.live += 1
        try:
            await engine.check_same(one.model)
            parts = [
                await made_sense(
                    engine.url, encode_texts(engine.engine, one.model, tuple(texts[at : at + ENGINE_TEXTS]), request.query, via)
                )
                for at in range(0, len(texts), ENGINE_TEXTS)
            ]
            if len({part.values.shape[1:] for part in parts}) > 1:
                raise EngineGone(f"{engine.identity} changed the length of its vectors during an answer")
            return joined(parts)
        except PacelineError as error:
            if isinstance(error, EngineGone):
                engine.failed(one, error)
            raise as_clients_see(error, engine.engine.door, one.model) from error
        finally:
            one.live -= 1

    def _of_engines(self) -> Collection[tuple[WatchedEngine, Offered]]:
        return () if self._engines is None else self._engines.encoding

    def _engine_of(self, name: str) -> tuple[WatchedEngine, Offered] | None:
        return next((found for found in self._of_engines() if found[1].model.name == name), None)

    def close(self) -> None:
        """End the threads, after their current work. Idempotent."""
        if self._own is not None:
            self._own.close()
