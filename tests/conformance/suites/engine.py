"""What every adapter of an engine must do, with the real engine behind it, or with one that answers as its documents say.

Subclass `EngineSuite` in a test module that has a fixture `case` (an `EngineCase`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from paceline.core.errors import ContextOverflow, EngineGone, NotServed, UnknownModel
from paceline.core.generation import FinishReason, Grammar, GrammarKind, SamplingParams
from paceline.engines.contract import AnswerPiece, Ask, Capability, Door, EngineModel, ForeignEngine, Takes
from paceline.engines.table import open_engine

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0)
NO_ENGINE = "http://127.0.0.1:1"


@dataclass(frozen=True)
class EngineCase:
    """An engine to be looked at.

    Args:
        ids: a prompt as token ids, for engines that take them; `texts` has the same and others.
        spell: the text of token ids.
        model: fields of its first model that are known.
    """

    name: str
    make: Callable[[Door], ForeignEngine]
    door: Door
    takes: frozenset[Takes]
    texts: Sequence[str] = ("one two three", "The capital of France is")
    ids: Sequence[int] = ()
    spell: Callable[[Sequence[int]], str] | None = None
    model: Mapping[str, object] = field(default_factory=dict[str, object])
    tells_length: bool = True
    """It counts the tokens of prompts."""
    is_recognised: bool = True
    """The adapter is the one that fits best."""
    draws_bytes: bool = False
    """Its model draws bytes that are not UTF-8."""
    unknown_model: bool = True
    """It refuses names that it does not have."""

    def prompt(self, form: Takes, text: str = "") -> tuple[int, ...] | str | Mapping[str, Any]:
        text = text or self.texts[0]
        if form is Takes.IDS:
            return tuple(self.ids)
        return text if form is Takes.TEXT else {"messages": [{"role": "user", "content": text}], "temperature": 0}


class EngineSuite:
    def run(self, case: EngineCase, use: Callable[[ForeignEngine, EngineModel], Awaitable[T]]) -> T:
        """Use the engine and its first model, on an event loop of its own."""

        async def go() -> T:
            engine = case.make(case.door)
            try:
                return await use(engine, (await engine.models())[0])
            finally:
                await engine.close()

        return asyncio.run(go())

    async def answer(self, case: EngineCase, engine: ForeignEngine, ask: Ask) -> list[AnswerPiece]:
        """Return the pieces of an answer, after the laws that hold for all."""
        pieces = [piece async for piece in engine.generate(ask)]
        assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        for piece in pieces:
            assert case.draws_bytes or "�" not in piece.text
            assert piece.tokens_read is None or not (piece.text or piece.token_ids or piece.n_tokens)
            assert not piece.token_ids or piece.n_tokens == len(piece.token_ids)
        return pieces

    def text(self, pieces: Sequence[AnswerPiece]) -> str:
        return "".join(piece.text for piece in pieces)

    # -------------------------------------------------------------------------------------------------------------- laws

    def test_it_says_who_it_is_and_what_it_has_and_nothing_begins_to_work(self, case: EngineCase) -> None:
        async def look(engine: ForeignEngine, model: EngineModel) -> None:
            identity = await engine.identify()
            assert identity is not None
            assert identity.name == case.name
            assert engine.door == case.door
            opened = await open_engine(case.door)
            assert type(opened) is type(engine) or not case.is_recognised
            await opened.close()
            assert model.takes == case.takes
            for name, value in case.model.items():
                assert getattr(model, name) == value, name
            assert await engine.is_ready()
            assert (await engine.busy()).running in {0, None}

        self.run(case, look)

    def test_an_answer_is_as_long_as_allowed_and_says_why_it_ended(self, case: EngineCase) -> None:
        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            for form in sorted(case.takes):
                pieces = await self.answer(case, engine, Ask(model.name, case.prompt(form), 6, GREEDY))
                assert pieces[-1].finish is FinishReason.LENGTH
                assert self.text(pieces)
                assert sum(piece.n_tokens for piece in pieces) == 6
                assert all((piece.delta is not None) == (form is Takes.MESSAGES) for piece in pieces if piece.text)
                if case.tells_length:
                    assert max(piece.prompt_tokens for piece in pieces) > 0
                    assert pieces[-1].cached_tokens <= pieces[-1].prompt_tokens

        self.run(case, write)

    def test_token_ids_spell_the_text_and_an_answer_goes_on_from_any_of_its_tokens(self, case: EngineCase) -> None:
        if Takes.IDS not in case.takes or case.spell is None:
            return
        spell = case.spell

        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            whole = await self.answer(case, engine, Ask(model.name, tuple(case.ids), 12, GREEDY))
            ids = [token for piece in whole for token in piece.token_ids]
            assert spell(ids) == self.text(whole)
            rest = await self.answer(case, engine, Ask(model.name, (*case.ids, *ids[:5]), 7, GREEDY))
            assert spell([*ids[:5], *(token for piece in rest for token in piece.token_ids)]) == spell(ids[:5]) + self.text(rest)

        self.run(case, write)

    def test_the_same_seed_gives_the_same_answer(self, case: EngineCase) -> None:
        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            form = min(case.takes - {Takes.MESSAGES})
            ask = Ask(model.name, case.prompt(form), 8, SamplingParams(temperature=1.5, seed=(1 << 40) + 7))
            assert self.text(await self.answer(case, engine, ask)) == self.text(await self.answer(case, engine, ask))

        self.run(case, write)

    def test_a_json_schema_is_followed_or_refused_and_other_forms_are_refused(self, case: EngineCase) -> None:
        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "enum": ["blue"]}')
            prompt = case.prompt(min(case.takes - {Takes.MESSAGES}))
            if Capability.SCHEMAS in model.capabilities:
                assert '"blue"' in self.text(await self.answer(case, engine, Ask(model.name, prompt, 40, GREEDY, grammar=schema)))
            else:
                with pytest.raises(NotServed):
                    await self.answer(case, engine, Ask(model.name, prompt, 40, GREEDY, grammar=schema))
            with pytest.raises(NotServed):
                await self.answer(case, engine, Ask(model.name, prompt, 4, GREEDY, grammar=Grammar(GrammarKind.LARK, 'start: "a"')))

        self.run(case, write)

    def test_a_prompt_that_is_too_long_is_refused(self, case: EngineCase) -> None:
        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            if model.context:
                for form in sorted(case.takes):
                    long = (*case.ids, 5) * model.context if form is Takes.IDS else case.prompt(form, "one two " * model.context)
                    with pytest.raises(ContextOverflow):
                        await self.answer(case, engine, Ask(model.name, long, 4, GREEDY))

        self.run(case, write)

    def test_a_name_that_it_does_not_have_is_refused(self, case: EngineCase) -> None:
        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            for form in sorted(case.takes) if case.unknown_model else ():
                with pytest.raises(UnknownModel):
                    await self.answer(case, engine, Ask("no/such-model", case.prompt(form), 4, GREEDY))

        self.run(case, write)

    def test_closing_an_answer_ends_its_request(self, case: EngineCase) -> None:
        async def write(engine: ForeignEngine, model: EngineModel) -> None:
            for form in sorted(case.takes):
                async with aclosing(engine.generate(Ask(model.name, case.prompt(form), 200, GREEDY))) as pieces:
                    async for piece in pieces:
                        if piece.text:
                            break
            async with asyncio.timeout(20):
                while (await engine.busy()).running:
                    pass

        self.run(case, write)

    def test_loads_and_vectors_are_done_or_refused(self, case: EngineCase) -> None:
        async def ask(engine: ForeignEngine, model: EngineModel) -> None:
            for asked in (lambda: engine.load(model.name), lambda: engine.unload(model.name)):
                try:
                    await asked()
                except NotServed:
                    continue
            if Capability.EMBEDDINGS in model.capabilities:
                vectors = (await engine.embed(model.name, ("a", "b"))).vectors
                assert len(vectors) == 2
                assert len(vectors[0]) == len(vectors[1]) > 0
            else:
                with pytest.raises((NotServed, UnknownModel)):
                    await engine.embed(model.name, ("a",))
            if Capability.RERANK not in model.capabilities:
                with pytest.raises(NotServed):
                    await engine.rerank(model.name, "a", ("b",))

        self.run(case, ask)

    def test_an_engine_that_is_not_there_is_gone_and_nothing_else(self, case: EngineCase) -> None:
        async def go() -> None:
            engine = case.make(Door(NO_ENGINE))
            for asked in (engine.identify, engine.models, engine.is_ready):
                with pytest.raises(EngineGone):
                    await asked()
            for form in sorted(case.takes):
                with pytest.raises(EngineGone):
                    await self.answer(case, engine, Ask("m", case.prompt(form), 4, GREEDY))
            await engine.close()
            await engine.close()

        asyncio.run(go())
