"""A decoder made of a plan: real nodes, real mTLS, and the same tokens whoever drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.engines import VOCAB, VOCABULARY, answer_alone
from tests.fakes.null_backend import NullRunner
from tests.unit.net.member.nodes import until
from tests.unit.ways.draft.fleet import DraftFleet, on_fleet
from tests.unit.ways.draft.proposers import TooLong
from tests.unit.ways.draft.test_finding import SMALL, VERIFIER, card

from paceline import DistributedSpeculativeDecoder
from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.core.clock import SystemClock
from paceline.core.errors import PlacementError, RemoteProposerError
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.core.model import WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.drafts import BlockProposal
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.engine.proposers import DraftModelProposer
from paceline.fleet.plan import ALONE, Choice, PlanRequest
from paceline.machine.setup import load_runner
from paceline.node.ways import plan
from paceline.store.catalog import BUNDLED, open_model
from paceline.store.home import Home
from paceline.ways.draft.decoder import GREEDY
from paceline.ways.draft.price import DRAFT

CONFIG = EngineConfig(max_context=200, prefill_chunk=64)
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def runner() -> NullRunner:
    return NullRunner(n_blocks=80, vocab=VOCAB, one_path=True)


def placement(node_id: str, model_id: str = "small") -> Choice:
    """What a plan says where one machine verifies and another drafts."""
    cards = [card("a", VERIFIER), card(node_id, replace(SMALL, model_id=model_id))]
    return plan(cards, PlanRequest("big", ways=frozenset({DRAFT}), proposer=NodeId(node_id))).chosen


def expected(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    return answer_alone(GenerationRequest(RequestId("r"), tuple(prompt), 40, sampling), one_path=True).token_ids


def finish(decoder: DistributedSpeculativeDecoder) -> list[int]:
    while decoder.has_work:
        decoder.step()
    return decoder.token_ids


def finish_again_and_again(decoder: DistributedSpeculativeDecoder, prompt: Sequence[int]) -> None:
    """The model is quick: its proposer may be heard of later."""
    while True:
        finish(decoder)
        decoder.begin(prompt, 40, SAMPLED)


@on_fleet
async def test_tokens_are_those_without_drafts_and_a_failed_proposer_is_told_once(fleet: DraftFleet) -> None:
    b, c = fleet.others
    b.proposers.add("small", DraftModelProposer(runner(), vocabulary_size=VOCAB))
    c.proposers.add("small", TooLong())
    make = DistributedSpeculativeDecoder.from_placement
    decoder = make(placement("b0"), LocalExecutor(runner()), VOCABULARY, CONFIG, fleet.a, SystemClock())
    prompt = [3, 4, 5, 6]
    for sampling in (SamplingParams(temperature=0, seed=1), SAMPLED):
        decoder.begin(prompt, 40, sampling)
        assert await asyncio.to_thread(finish, decoder) == expected(prompt, sampling)
    while not b.proposers.stats["small"].blocks:  # the model may be quicker, and what it no longer waits for is not drafted
        decoder.begin(prompt, 40, SAMPLED)
        assert await asyncio.to_thread(finish, decoder) == expected(prompt, SAMPLED)

    decoder.place(placement("b1"))
    decoder.begin(prompt, 40, SAMPLED)
    with pytest.raises(RemoteProposerError, match="b1 drafted"):
        await asyncio.to_thread(finish_again_and_again, decoder, prompt)
    assert await asyncio.to_thread(finish, decoder) == expected(prompt, SAMPLED)  # it was said, and is said no more
    decoder.place(placement("b0"))
    decoder.begin(prompt, 40, SAMPLED)
    assert await asyncio.to_thread(finish, decoder) == expected(prompt, SAMPLED)
    await decoder.close()
    await until(lambda: b.proposers.sessions == 0)


class Recalls:
    """Drafts what it knows to follow, but for every fifth token."""

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary_size: int) -> None:
        self._texts, self._vocabulary_size = [tuple(text) for text in texts], vocabulary_size

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        del num_steps
        known = tuple(committed)
        rest = next((text[len(known) :][:block_size] for text in self._texts if text[: len(known)] == known), ())
        return BlockProposal(
            tuple((token + (place % 5 == 4)) % self._vocabulary_size for place, token in enumerate(rest, len(known))), forward_passes=1
        )


@on_fleet
async def test_a_real_model_writes_what_it_writes_alone_whoever_drafts_from_afar(fleet: DraftFleet) -> None:
    opened = open_model(BUNDLED)
    whole = opened.weights.spec.all_layers
    options = LoadOptions(whole, WeightsFormat.INT4, 40, threads=1, kernel_cache=Home.from_environment().kernels)

    def loaded() -> LayerRunner[Any]:
        return load_runner(choose(opened.weights.spec, WeightsFormat.INT4), opened.weights, options)

    model, drafter = await asyncio.to_thread(loaded), await asyncio.to_thread(loaded)
    config, vocabulary = EngineConfig(max_context=200, prefill_chunk=64, prefix_cache=False), opened.tokenizer
    prompt = vocabulary.encode("The quick brown fox jumps over the lazy dog. The quick brown fox")
    asked = [GenerationRequest(RequestId(str(n)), tuple(prompt), 40, sampling) for n, sampling in enumerate((GREEDY, SAMPLED))]
    plain = Engine(LocalExecutor(model), vocabulary, config, SystemClock())

    def alone(request: GenerationRequest) -> list[int]:
        plain.add(request)
        tokens: list[int] = []
        while plain.has_work:
            tokens += [token for chunk in plain.step() for token in chunk.token_ids]
        return tokens

    expected = [await asyncio.to_thread(alone, request) for request in asked]
    assert [len(tokens) for tokens in expected] == [40, 40]
    assert expected[0] != expected[1]
    b, c = fleet.others
    b.proposers.add("real", Recalls([[*prompt, *tokens] for tokens in expected], vocabulary.size))
    c.proposers.add("real", DraftModelProposer(drafter, vocabulary_size=vocabulary.size))
    make = DistributedSpeculativeDecoder.from_placement
    decoder = make(placement("b0", "real"), LocalExecutor(model), vocabulary, config, fleet.a, SystemClock())

    def decoded() -> list[list[int]]:
        answers: list[list[int]] = []
        for request in asked:
            decoder.begin(prompt, 40, request.sampling)
            answers.append(list(finish(decoder)))
        return answers

    while not 0 < sum(decoder.stats.accepted_tokens.values()) < sum(decoder.stats.drafted_tokens.values()):
        assert await asyncio.to_thread(decoded) == expected
    decoder.place(placement("b1", "real"))
    while not c.proposers.stats["real"].tokens:
        assert await asyncio.to_thread(decoded) == expected
    await decoder.close()
    await until(lambda: b.proposers.sessions == c.proposers.sessions == 0)
    model.close()
    drafter.close()


@on_fleet
async def test_a_plan_without_drafts_or_of_another_fleet_makes_no_decoder(fleet: DraftFleet) -> None:
    make = DistributedSpeculativeDecoder.from_placement
    alone = plan([card("a", VERIFIER)], PlanRequest("big", ways=frozenset({ALONE}))).chosen
    with pytest.raises(PlacementError, match="without drafts"):
        make(alone, LocalExecutor(runner()), VOCABULARY, CONFIG, fleet.a, SystemClock())
    for gone in (placement("z"), placement("b0", "another")):
        with pytest.raises(PlacementError, match="does not draft with"):
            make(gone, LocalExecutor(runner()), VOCABULARY, CONFIG, fleet.a, SystemClock())
