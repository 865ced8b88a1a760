"""What a peer with a certificate can send: no request ends a node, fills its memory, holds up its loop, or takes what is others'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adversarial.live import LiveNode, live_node, request
from tests.fakes.engines import EngineBench
from tests.sampling import examples
from tests.unit.net.member.nodes import until

from paceline.core.errors import MessageTooLarge, ModelNotFound, Overloaded
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId, Trust
from paceline.core.manifest import PIECE, ByteRuns, ModelManifest
from paceline.engine.config import SHARES, EngineConfig, check_room
from paceline.engine.prefix_cache import root_key, salted_key
from paceline.net.join_client import renewal_service
from paceline.net.member.gossip import capability_service
from paceline.net.member.state import control_service
from paceline.net.server import MAX_REQUEST_BYTES, MAX_STREAMS
from paceline.net.trust.handlers import _reader
from paceline.net.weights_servicer import MAX_RANGES, WeightsServicer, weights_service
from paceline.net.wire import control_pb2, fleet_pb2, generate_pb2, kv_pb2, propose_pb2, shard_pb2, weights_pb2
from paceline.net.wire.propose_pb2_grpc import ProposerServiceStub
from paceline.net.wire.weights_pb2_grpc import WeightsServiceStub, add_WeightsServiceServicer_to_server
from paceline.ways.draft.pool import proposer_service
from paceline.ways.forward.service import generate_service
from paceline.ways.kv.giving import kv_service
from paceline.ways.pipeline.host.host import shard_service

finite = st.floats(allow_nan=False, allow_infinity=False)
extremes = st.sampled_from(
    [0.0, -0.0, 5e-324, -5e-324, 1e-300, 1e-45, 1e-5, 1.0, 2.0, -2.0, 10.0, 1e45, 1e300, 1.7976931348623157e308, -1e300]
)
reals = st.one_of(finite, extremes)


def within(least: float, most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.floats(least, most), reals)


samplings = st.builds(
    generate_pb2.Sampling,
    temperature=within(0, 2),
    top_k=st.integers(0, (1 << 32) - 1),
    top_p=within(0, 1),
    min_p=within(0, 1),
    repetition_penalty=within(1e-300, 10),
    presence_penalty=within(-2, 2),
    frequency_penalty=within(-2, 2),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    logit_bias=st.dictionaries(st.integers(0, 31) | st.integers(0, (1 << 32) - 1), within(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, 20) | st.integers(0, (1 << 32) - 1),
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Generator[LiveNode, None, None]:
    with live_node(tmp_path_factory.mktemp("live")) as node:
        yield node


@settings(deadline=None, max_examples=examples(300))
@given(sampling=samplings)
def test_row_29_every_sampling_field_at_every_finite_extreme_is_answered_or_refused(
    live: LiveNode, sampling: generate_pb2.Sampling
) -> None:
    code, chunks = live.run(live.ask(request(sampling=sampling, n=2)))
    assert code in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}, sampling
    if code is grpc.StatusCode.OK:
        assert sorted(one.index for one in chunks if one.finish_reason) == [0, 1]
        assert {one.finish_reason for one in chunks if one.finish_reason} == {generate_pb2.FINISH_REASON_LENGTH}, (sampling, chunks)
    assert live.host.progress().error is None
    assert live.host.is_up


FILES = (control_pb2, fleet_pb2, generate_pb2, kv_pb2, propose_pb2, shard_pb2, weights_pb2)
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if service.name != "JoinService"  # on a port of its own
}


NONE: Any = None
REQUESTS = {
    f"/paceline.v1.{method}": limit
    for service in (
        capability_service(NONE, NONE, NONE),
        control_service(NONE, NONE, NONE),
        renewal_service(NONE, NONE),
        generate_service(NONE),
        proposer_service(NONE, NONE),
        shard_service(NONE, NONE),
        weights_service(NONE, NONE),
        kv_service(NONE),
    )
    for method, limit in service.limits.items()
}


def test_row_31_every_method_has_its_limit() -> None:
    assert set(REQUESTS) == set(METHODS)
    assert MAX_REQUEST_BYTES < 3 << 20
    assert EngineConfig(max_context=2).max_running + EngineConfig(max_context=2).max_waiting // SHARES < MAX_STREAMS


def smallest_parts(method: MethodDescriptor, nbytes: int) -> list[bytes]:
    """Requests of so many bytes, each made of the smallest parts of one of its fields, and of a field that no version has."""
    filled: list[bytes] = []
    for number, wire_type in [*((field.number, _wire_type(field)) for field in method.input_type.fields), (900, 2)]:
        tag = (number << 3) | wire_type
        head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
        part = head + b"\0"
        filled.append(part * (nbytes // len(part)))
        if wire_type == 2:  # one part, full of the smallest things that may be inside
            for inside in (b"\0", b"\x0a\0", b"\x4a\0", b"\x08\0"):
                for size in (nbytes - 16, min(nbytes - 16, 60 << 10)):
                    body = inside * (size // len(inside))
                    whole = head + _varint(len(body)) + body
                    filled.append(whole * (nbytes // len(whole)))
    return filled


def _wire_type(field: FieldDescriptor) -> int:
    match field.type:
        case FieldDescriptor.TYPE_STRING | FieldDescriptor.TYPE_BYTES | FieldDescriptor.TYPE_MESSAGE:
            return 2
        case FieldDescriptor.TYPE_DOUBLE:
            return 1
        case _:
            return 2 if field.is_repeated else 0


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


@pytest.mark.parametrize("path", sorted(METHODS))
def test_row_31_a_message_of_the_smallest_parts_is_refused_before_it_is_parsed_or_takes_little(path: str) -> None:
    method, limit, process = METHODS[path], REQUESTS[path], psutil.Process()
    read = _reader(grpc.unary_unary_rpc_method_handler(None, GetMessageClass(method.input_type).FromString), limit)
    for data in smallest_parts(method, min(limit.nbytes, MAX_REQUEST_BYTES)):
        before = process.memory_info().rss
        parsed = read(data)
        assert process.memory_info().rss - before < 16 * limit.nbytes + (8 << 20), (type(parsed), data[:8])
    assert isinstance(read(bytes(limit.nbytes + 1)).error, MessageTooLarge)


def test_row_31_sessions_that_end_by_the_million_end_the_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with live_node(tmp_path) as live:

        async def flood(ended: int) -> grpc.StatusCode:
            call = ProposerServiceStub(live.channel()).ProposeBlocks()
            await call.write(propose_pb2.ProposeBlocksRequest(ended_sessions=range(ended)))
            return await call.code()

        assert live.run(flood(10_000)) is grpc.StatusCode.INVALID_ARGUMENT
        assert live.run(flood(1_000_000 // 8)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [record for record in caplog.records if record.exc_info] == []


class Endless:
    """A library whose one model has pieces without end."""

    def describe(self, digest: str, examined: Callable[[int, int], None]) -> ModelManifest:
        raise ModelNotFound("none")

    def read(self, digest: str, file: int, piece: int) -> bytes:
        return bytes(PIECE)

    def read_runs(self, digest: str, runs: ByteRuns) -> bytes:
        return bytes(runs.nbytes)


def test_row_28_pieces_asked_for_and_not_read_leave_room_for_others(tmp_path: Path) -> None:
    everything = weights_pb2.FetchPiecesRequest(digest="a" * 64, ranges=[weights_pb2.PieceRange(count=1 << 31)] * MAX_RANGES)
    servicer = WeightsServicer(Endless(), lambda _: None, streams=4, write_s=60)
    service = weights_service(NONE, NONE)
    limits = {name: replace(limit, least=Trust.GUEST) for name, limit in service.limits.items()}
    service = replace(service, register=partial(add_WeightsServiceServicer_to_server, servicer), limits=limits)
    with live_node(tmp_path, services=(service,)) as live:

        async def work() -> None:
            unread = [WeightsServiceStub(live.channel()).FetchPieces(everything) for _ in range(4)]
            refused = [call for call in unread if await first(call) is None]
            assert [await call.code() for call in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
            honest = WeightsServiceStub(live.channel(live.member)).FetchPieces(everything)
            assert await first(honest) is not None
            for call in (*unread, honest):
                call.cancel()
            await until(lambda: servicer._free == 4)

            servicer._write_s = 0.05
            unread = [WeightsServiceStub(live.channel()).FetchPieces(everything) for _ in range(2)]
            assert all([await first(call) is not None for call in unread])
            await until(lambda: servicer._free == 4)  # those that do not read are left
            assert not any(call.done() for call in unread), "it was not the caller who ended them"

        async def first(call: Any) -> object | None:
            try:
                return await call.read()
            except grpc.aio.AioRpcError:
                return None

        live.run(work())


def test_row_35_one_node_that_fills_the_queue_leaves_room_for_others_and_for_own_clients() -> None:
    config = EngineConfig(max_context=64, max_running=8, max_waiting=64)
    most = config.max_running + config.max_waiting
    check_room(0, 64, config, 0)  # one request may be as large as the API takes
    share = most // SHARES
    check_room(share - 1, 1, config, share - 1)
    with pytest.raises(Overloaded, match="of that node"):
        check_room(share, 1, config, share)
    check_room(share, share, config, 0)
    with pytest.raises(Overloaded):
        check_room(most - share, 1, config, 0)  # what is left is this node's own clients'
    check_room(most - share, share, config)
    with pytest.raises(Overloaded):
        check_room(most, 1, config)


def test_row_35_own_clients_are_let_in_before_other_nodes_requests() -> None:
    bench = EngineBench(max_running=1)
    order: list[str] = []

    def asked(name: str, caller: str = "") -> GenerationRequest:
        return GenerationRequest(RequestId(name), (1, 2, 3), 2, SamplingParams(temperature=0), ignore_eos=True, caller=caller)

    bench.add(asked("guest 1", "visitor"))
    bench.step()
    bench.add(asked("guest 2", "visitor"), asked("guest 3", "visitor"), asked("own 1"), asked("own 2"))
    while bench.engine.has_work:
        order += [chunk.request_id for chunk in bench.step() if chunk.finish_reason]
    assert order == ["guest 1", "own 1", "own 2", "guest 2", "guest 3"]


def cached(bench: EngineBench, name: str, prompt: tuple[int, ...], **fields: str) -> int:
    asked = GenerationRequest(RequestId(name), prompt, 2, SamplingParams(temperature=0), ignore_eos=True, **fields)  # type: ignore[arg-type]
    return bench.run(asked)[asked.request_id, 0].cached_tokens


def test_row_54_a_guess_of_another_callers_prompt_is_not_told_apart() -> None:
    bench = EngineBench()
    secret = tuple(1 + i % 30 for i in range(24))
    assert cached(bench, "owner", secret) == 0
    assert cached(bench, "owner again", secret) > 0
    for number, fields in enumerate(({"caller": "visitor"}, {"cache_salt": "mine"}, {"caller": "visitor", "cache_salt": "mine"})):
        before = bench.runner.rows_run
        assert cached(bench, f"guess {number}", secret, **fields) == 0
        guessed = bench.runner.rows_run - before
        before = bench.runner.rows_run
        other = tuple(reversed(secret))
        assert cached(bench, f"other {number}", other, **fields) == 0
        assert bench.runner.rows_run - before == guessed  # nor by time
    assert cached(bench, "visitor again", secret, caller="visitor") > 0


def test_row_54_salts_are_not_confused() -> None:
    root = root_key("n", "d")
    keys = {salted_key(root, caller, salt) for caller, salt in (("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"))}
    assert len(keys) == 6
    assert salted_key(root, "", "") == root


STALL_S = 0.5
"""Of the processor's time in one piece, where it takes some 0.1 s. A flood of ended sessions took 2.5 s."""
TRIES = 3
"""Of which the best counts: a processor that others use too takes twice the time for the same work."""


@pytest.mark.parametrize("path", sorted(path for path in METHODS if "Shard" not in path))
def test_row_33_a_flood_holds_up_the_event_loop_for_no_more_than_a_moment(live: LiveNode, path: str) -> None:
    method, nbytes = METHODS[path], REQUESTS[path].nbytes

    async def work() -> float:
        longest, last, over = 0.0, time.thread_time(), asyncio.Event()

        async def ticking() -> None:
            nonlocal longest, last
            while not over.is_set():
                now = time.thread_time()
                longest, last = max(longest, now - last), now
                await asyncio.sleep(0)

        ticks = asyncio.create_task(ticking())
        open_call = live.channel().stream_stream if method.client_streaming else live.channel().unary_stream
        call = open_call(path)
        for data in smallest_parts(method, min(nbytes, MAX_REQUEST_BYTES)):
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                asked = call(timeout=10) if method.client_streaming else call(data, timeout=10)
                if method.client_streaming:
                    await asked.write(data)
                    await asked.done_writing()
                async for _ in asked:
                    pass
        over.set()
        await ticks
        return longest

    assert any(live.run(work()) < STALL_S for _ in range(TRIES))
    assert live.host.progress().error is None
