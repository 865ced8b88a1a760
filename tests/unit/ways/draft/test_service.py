"""A machine that drafts for itself with the bundled model, and what it says of that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet
from tests.fakes.null_backend import NullRunner
from tests.unit.net.member.nodes import in_loop, make_node
from tests.unit.ways.draft.cards import SMALL
from tests.unit.ways.draft.proposers import Lookup, Scripted

from paceline.core.clock import SystemClock
from paceline.core.errors import VocabularyMismatch
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.drafts import BlockProposal
from paceline.fleet.card import Role
from paceline.machine.settings import DEFAULT_MODEL, NodeSettings
from paceline.net.channels import Purpose
from paceline.net.wire import propose_pb2
from paceline.net.wire.propose_pb2_grpc import ProposerServiceStub
from paceline.node.build import BuiltNode, build_node
from paceline.ways.draft.service import (
    MEASURED_LENGTH,
    DraftService,
    LoadedProposer,
    check_vocabulary,
    draft_use,
    drafting_alone,
    load_proposer,
    measure,
)

DRAFT = f"jacobi:{DEFAULT_MODEL}"


@pytest.fixture(scope="module")
def proposer() -> Iterator[LoadedProposer]:
    made = load_proposer(DRAFT, 1, None, SystemClock())
    yield made
    made.runner.close()


async def answer(node: BuiltNode, draft: str) -> list[int]:
    prompt = tuple(node.model.tokenizer.encode("One, two, three, four, five, six, seven,"))
    request = GenerationRequest(RequestId(draft), prompt, 24, SamplingParams(temperature=0), draft=draft)
    return [token async for chunks in node.host.generate(node.model.name, request) for chunk in chunks for token in chunk.token_ids]


def test_a_model_is_measured_and_offered(proposer: LoadedProposer) -> None:
    offer = proposer.offer
    assert (offer.model_id, offer.role, offer.warm) == (DRAFT, Role.PROPOSER, True)
    assert min(offer.tokens_per_second, offer.prefill_tokens_per_second) > 1
    check_vocabulary(offer.vocabulary, [proposer], {DRAFT})
    check_vocabulary("another", [proposer], {"fleet"})
    with pytest.raises(VocabularyMismatch, match=DRAFT):
        check_vocabulary("another", [proposer], {DRAFT})


def test_blocks_that_other_programs_slow_are_no_measure_of_a_proposer() -> None:
    clock, takes_s = FakeClock(), iter([9.0, 0.1, 0.1, 3.0, 0.1, 0.1, 5.0, 0.1, 4.0])

    class Slowed(Scripted):
        def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
            clock.advance(next(takes_s))
            return super().propose_block(committed, block_size, num_steps)

    assert measure(Slowed(*range(MEASURED_LENGTH)), [1, 2, 3], clock) == MEASURED_LENGTH / 0.1


@in_loop
async def test_it_drafts_for_the_engine_beside_it(proposer: LoadedProposer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ways.draft.client.LATE_S", 20.0)  # whatever else the machine does
    clock = SystemClock()
    node = build_node(NodeSettings(kv_tokens=512, context=256, max_running=2, threads=1, draft=DRAFT), clock=clock)
    assert node.drafts is not None
    async with drafting_alone(node.drafts, node.model.tokenizer, [replace(proposer, runner=NullRunner(n_blocks=1))]) as metrics:
        assert await answer(node, DRAFT) == await answer(node, "off")
        had = node.drafts.meter.of(DRAFT)
        assert had.blocks > 0
        assert 0 < had.diffusion_steps <= had.forward_passes
        registry = CollectorRegistry()
        for collector in metrics:
            registry.register(collector)
        page = generate_latest(registry).decode()
        for connection in (
            f'paceline_draft_source_blocks_total{{source="{DRAFT}"}} {had.blocks}.0',
            f'paceline_draft_source_available{{source="{DRAFT}"}} 1.0',
            f"paceline_draft_hop_seconds_count {had.blocks}.0",
        ):
            assert connection in page
        (seen,) = (each for each in draft_use(node.host.stats(), node.drafts) if each.by == DRAFT)
        assert (seen.node_id, seen.model_id, seen.failures, seen.trouble) == ("here", DRAFT, 0, "")
        assert seen.hop_s > 0
        assert seen.blocks == had.blocks
    assert node.drafts.sources[DRAFT].expected_s is None
    await asyncio.to_thread(node.close)


@in_loop
async def test_a_node_drafts_with_what_it_was_given(tmp_path: Path) -> None:
    fleet = TestFleet()
    a, b = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "b")
    drafting = DraftService(a, [LoadedProposer("small", "small", Lookup(), SMALL, NullRunner(n_blocks=1))])
    await a.start(drafting.service)
    try:
        stub = ProposerServiceStub(b.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member))
        request = propose_pb2.ProposeBlockRequest(committed_token_ids=[1, 2, 3, 4, 1, 2], block_size=3, model_id="small")
        assert list((await stub.ProposeBlock(request)).token_ids) == [3, 4, 1]
        request.model_id = "gone"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ProposeBlock(request)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await b.pool.close()
    finally:
        await drafting.stop()
        await a.stop()
