"""One rich and one minimal example of each message that nodes send, as values, with the codec that writes and reads it.

What has no codec of its own (a join, a renewal, a measured link) is written as the message itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from paceline.core.generation import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Notice,
    SamplingParams,
    TokenLogprob,
)
from paceline.core.ids import BatchId, NodeId, RequestId, SequenceId, Trust
from paceline.core.manifest import FileEntry, ModelManifest, TensorAt
from paceline.core.model import ActivationDtype, LayerRange, ModelRef, WeightsFormat
from paceline.core.stats import DraftUse
from paceline.engine.drafts import BlockProposal
from paceline.engine.grammar import VERSION
from paceline.fleet.card import (
    Device,
    DividedShape,
    EngineOffer,
    Link,
    MeasuredDraft,
    ModelOffer,
    ModelShape,
    NodeCard,
    Revocation,
    RevocationList,
    Role,
    SealedCard,
    SealedList,
    SealedRevocation,
    ShardState,
    StepTime,
)
from paceline.fleet.eligibility import Clash, FleetView, LiveCard
from paceline.fleet.messages import Digest, ExchangeRequest, PassedCard, Reply
from paceline.machine.kv_spans import KvMove
from paceline.net.card_codec import read_card, write_card
from paceline.net.discovery import Failure
from paceline.net.exchange_codec import read_reply, read_request, write_reply, write_request
from paceline.net.member.state import Sight, sight_of, write_sight
from paceline.net.protocol import OtherVersion
from paceline.net.tensor import frames
from paceline.net.tensor.incoming import FROM_RECEIVER, FROM_SENDER, IncomingBytes, TensorMessage
from paceline.net.weights_servicer import WeightsDescription, parts
from paceline.net.wire import control_pb2, fleet_pb2, generate_pb2, kv_pb2, propose_pb2, rank_pb2, shard_pb2, weights_pb2
from paceline.ways.draft.connection import read_block
from paceline.ways.draft.pool import BlockAsk, read_ask, write_ask, write_block
from paceline.ways.forward import codec as generate
from paceline.ways.pipeline import codec as shards
from paceline.ways.pipeline.executor.route import (
    BlocksAsked,
    BlocksUse,
    NextStage,
    PipelineFault,
    StageLoading,
    StageOpened,
    StageReport,
    StageRequest,
)
from paceline.ways.pipeline.executor.stage import StageBatch
from paceline.ways.pipeline.host.ends import read_batch, write_batch
from paceline.ways.tensor import codec as ranks
from paceline.ways.tensor.codec import RankFault, RankLoading, RankOpened, RankRequest, Stops

M = TypeVar("M", bound=Message)
V = TypeVar("V")


@dataclass(frozen=True)
class Example:
    """A message, and what it means."""

    name: str
    """Its type, and which of its examples it is."""
    value: object
    write: Callable[[], bytes]
    read: Callable[[bytes], object]
    message: type[Message] | None = None
    """None: it is not protobuf's."""


class Trusting:
    """A `CardOpener` that believes what it is told."""

    def card(self, passed: fleet_pb2.PassedCard) -> SealedCard:
        signed = passed.card
        sealed = fleet_pb2.SignedCard(card=signed.card, beat=signed.beat, signature=signed.signature)
        return SealedCard(read_card(signed.card), sealed.SerializeToString(deterministic=True), signed.beat, signed.certificate)

    def revocation(self, signed: fleet_pb2.SignedRevocation) -> SealedRevocation:
        said = fleet_pb2.Revocation.FromString(signed.revocation)
        revocation = Revocation(NodeId(said.node_id), said.revoked_at_unix, said.not_after_unix)
        return SealedRevocation(revocation, signed.SerializeToString(deterministic=True))

    def revocation_list(self, signed: fleet_pb2.SignedRevocationList) -> SealedList:
        said = fleet_pb2.RevocationList.FromString(signed.list)
        return SealedList(
            RevocationList(said.signed_at_unix, said.digest, NodeId(said.issuer_node_id)), signed.SerializeToString(deterministic=True)
        )


def fail(error: Exception) -> None:
    raise AssertionError(error)


def bytes_of(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def coded(name: str, kind: type[M], value: V, write: Callable[[V], M], read: Callable[[M], object]) -> Example:
    """A value with a codec."""
    return Example(f"{kind.DESCRIPTOR.name}/{name}", value, lambda: bytes_of(write(value)), lambda data: read(kind.FromString(data)), kind)


def plain(name: str, message: Message) -> Example:
    """A message that is its own value."""
    kind = type(message)
    return Example(f"{kind.DESCRIPTOR.name}/{name}", message, lambda: bytes_of(message), kind.FromString, kind)


SHA = "0123456789abcdef" * 4
MINIMAL_CARD = NodeCard(NodeId("a"), 1, (), b"", 0, 0)
RICH_CARD = NodeCard(
    node_id=NodeId("node-1"),
    version=(1 << 40) + 7,
    addresses=("10.0.0.1:7500", "[fe80::1]:7500"),
    instance=b"0123456789abcdef",
    ttl_s=45,
    announced_at=1_760_000_000,
    platform="linux x86_64",
    backend="cpu-avx512bf16",
    device="EPYC, 2 of 64 cores",
    memory_total_bytes=64 << 30,
    memory_free_bytes=48 << 30,
    memory_bytes_per_s=90_000_000_000,
    models=(
        ModelOffer(
            model_id="smollm2-135m",
            role=Role.VERIFIER,
            weights="int4",
            tokens_per_second=110.0,
            prefill_tokens_per_second=1900.0,
            digest=SHA,
            warm=True,
            numerics_id="cpu-avx512bf16/1",
            holds_identity=True,
            size_bytes=91_000_000,
            shape=ModelShape(30, 576, 2_000_000, 31_000_000, 768, 8192, 40_000),
            vocabulary=SHA[::-1],
            tokenizer=SHA[1:] + "0",
            under_way=4,
            files=SHA[2:] + "01",
        ),
        ModelOffer(model_id="ngram", role=Role.PROPOSER, weights=""),
        ModelOffer(
            model_id="large",
            role=Role.SHARD,
            weights="bf16",
            digest=SHA,
            shape=ModelShape(80, 8192, 1 << 30, 2 << 30, 4096, 131072, divided=DividedShape(8, 28672, 128256, 150 << 20)),
            shard=ShardState(LayerRange(4, 20), 8, 2, 3, 5 << 30, 65),
        ),
        *(ModelOffer(str(role), role, "int8") for role in (Role.EMBEDDER, Role.TOOL, Role.PREFILL)),
    ),
    links=(Link(NodeId("node-2"), "10.0.0.2:7500", 0.0023, 1.1e9, 0.0011),),
    ring_address="node-1:0",
    mlx_version="0.29",
    software="0.9.0",
    leaving=True,
    serves_shards=True,
    shard_memory_bytes=40 << 30,
    devices=(Device("torch-cuda", "H100", 80 << 30, 70 << 30, 3_350_000_000_000, 60 << 30, ("bf16", "int8")),),
)


def sealed(card: NodeCard, certificate: bytes, beat: int = 0) -> SealedCard:
    return SealedCard(card, bytes_of(fleet_pb2.SignedCard(card=write_card(card), beat=beat, signature=b"signature")), beat, certificate)


def revoked() -> SealedRevocation:
    data = bytes_of(fleet_pb2.Revocation(node_id="node-9", revoked_at_unix=1_750_000_000, not_after_unix=1_750_000_100))
    return SealedRevocation(
        Revocation(NodeId("node-9"), 1_750_000_000, 1_750_000_100), bytes_of(fleet_pb2.SignedRevocation(revocation=data, signature=b"ca"))
    )


def listed() -> SealedList:
    data = bytes_of(fleet_pb2.RevocationList(signed_at_unix=1_760_000_000, digest=b"digest", issuer_node_id="node-1"))
    return SealedList(
        RevocationList(1_760_000_000, b"digest", NodeId("node-1")), bytes_of(fleet_pb2.SignedRevocationList(list=data, signature=b"ca"))
    )


SERVED_CARD = replace(
    MINIMAL_CARD,
    models=(
        ModelOffer(
            "served",
            Role.VERIFIER,
            "int4",
            steps=(StepTime(1, 0.0091), StepTime(4, 0.012)),
            drafts=(MeasuredDraft(NodeId("node-2"), "tiny", 0.63),),
            engine=EngineOffer(
                "llama-server b9000",
                ("ids", "messages"),
                "Q4_K_M",
                4,
                ("images",),
                True,
                True,
                ("desk~00112233445566ff", "0011223344556677"),
                context=4096,
                load_s=3.5,
                capacity=6,
                first_token_s=0.3,
            ),
        ),
    ),
)
PASSED = (PassedCard(sealed(RICH_CARD, b"certificate", 3), 0.5), PassedCard(sealed(MINIMAL_CARD, b""), with_certificate=True))


def fleet_examples() -> Iterator[Example]:
    for name, card in (("rich", RICH_CARD), ("minimal", MINIMAL_CARD), ("served", SERVED_CARD)):
        yield Example(f"NodeCapability/{name}", card, partial(write_card, card), read_card, fleet_pb2.NodeCapability)
    rich = ExchangeRequest(frozenset({Digest(1 << 60, 9, 2)}), PASSED, (revoked(),), b"set", listed())
    reply = Reply(PASSED, (Digest(7, 0), Digest(8, 2, 1)), (revoked(),), b"set", more=True, revocation_list=listed())

    def request_of(message: fleet_pb2.ExchangeCapabilitiesRequest) -> ExchangeRequest:
        return asyncio.run(read_request(message, Trusting(), fail))

    def reply_of(message: fleet_pb2.ExchangeCapabilitiesResponse) -> Reply:
        return asyncio.run(read_reply(message, Trusting(), fail))

    for name, request in (("rich", rich), ("minimal", ExchangeRequest())):
        yield coded(name, fleet_pb2.ExchangeCapabilitiesRequest, request, write_request, request_of)
    for name, answer in (("rich", reply), ("minimal", Reply())):
        yield coded(name, fleet_pb2.ExchangeCapabilitiesResponse, answer, write_reply, reply_of)
    signed = fleet_pb2.SignedRevocation.FromString(revoked().sealed)
    passed = fleet_pb2.PassedCard(
        card=fleet_pb2.SignedCard(card=b"card", signature=b"s", certificate=b"c", beat=1), node_key=5, version=6, age_ms=9
    )
    for message in (
        fleet_pb2.Revocation.FromString(signed.revocation),
        fleet_pb2.RevocationList.FromString(fleet_pb2.SignedRevocationList.FromString(listed().sealed).list),
        fleet_pb2.GetNodeCapabilityResponse(card=passed, protocol=3),
        fleet_pb2.MeasureLinkRequest(response_bytes=4096, payload=b"\0" * 8),
        fleet_pb2.MeasureLinkResponse(payload=b"\0" * 8),
        fleet_pb2.RenewRequest(certificate_request=b"request"),
        fleet_pb2.RenewResponse(certificate=b"certificate"),
        fleet_pb2.JoinRequest(certificate_request=b"request", token_id="token", proof=b"proof", nonce=b"nonce", protocol=3),
        fleet_pb2.JoinResponse(certificate=b"node", ca_certificate=b"ca", peer_addresses=["10.0.0.1:7500"], revocations=[signed]),
    ):
        yield plain("rich", message)
        yield plain("minimal", type(message)())
    yield plain("minimal", fleet_pb2.GetNodeCapabilityRequest())
    yield plain("rich", fleet_pb2.GetNodeCapabilityRequest(protocol=3))
    facts = fleet_pb2.NodeFacts(clock_unix_us=1_800_000_000_000_000, tensor_port=40001, arithmetic=2, python="3.11.2", numba="0.62.0")
    yield plain("facts", fleet_pb2.GetNodeCapabilityResponse(card=passed, facts=facts))


def control_examples() -> Iterator[Example]:
    view = FleetView(
        own=NodeId("node-1"),
        nodes=(LiveCard(MINIMAL_CARD, 1.5, trust=Trust.GUEST), LiveCard(RICH_CARD, 0.0, trust=Trust.TRUSTED)),
        clashes=(Clash(NodeId("b"), ("10.0.0.3:1",), ("10.0.0.4:1", "10.0.0.5:1"), 2.25),),
        revoked=(NodeId("node-9"),),
    )
    drafts = (DraftUse("ngram", 10, 40, 25, "node-2", "small", 12, 0.0035, 1, "it is slow"),)
    rich = Sight(
        view,
        (Failure("10.0.0.9:7500", "refused", -3.5),),
        77,
        drafts,
        1_760_000_000,
        1_790_000_000,
        (("m", "node-1 alone: 20 tokens/s"),),
        (OtherVersion(NodeId("node-9"), 2, 1),),
    )
    for name, sight in (("rich", rich), ("minimal", Sight(FleetView(NodeId(""), ()), (), 0))):
        yield coded(name, control_pb2.GetFleetViewResponse, sight, partial(write_sight, "fleet" * (name == "rich")), sight_of)
    yield plain("minimal", control_pb2.GetFleetViewRequest())


def generate_examples() -> Iterator[Example]:
    own = RequestId("r")
    sampling = SamplingParams(0.7, 40, 0.9, 0.05, 1.1, 0.5, -0.5, (1 << 64) - 1, {7: -100.0, 9: 1.5}, 5)
    rich = GenerationRequest(
        own, (1, 200, 49151), 64, sampling, 3, ("END", "ü"), frozenset({2, 5}), True, "auto", {0: (4, 5), 2: ()},
        grammar=Grammar(GrammarKind.REGEX, "a+"), cache_salt="salt", scores_prompt=True, ways=frozenset({"alone"}), exact=True,
    )  # fmt: skip
    scored = GenerationRequest(own, (1,), 0, scores_prompt=True)
    passed = GenerationRequest(own, (), 16, chat='{"messages":[]}', via=("a~00000000000000aa",))

    def write(request: GenerationRequest) -> generate_pb2.GenerateRequest:
        message = generate.write_request(ModelRef(SHA, "int4", "m"), "cpu/1", request)
        if message.HasField("grammar"):  # which library follows it is no business of these examples
            message.numerics_id = message.numerics_id.replace(VERSION, "grammars 1")
            message.grammar.version = message.grammar.version.replace(VERSION, "grammars 1")
        return message

    def read(message: generate_pb2.GenerateRequest) -> GenerationRequest:
        return generate.read_request(message, own)

    for name, request in (("rich", rich), ("scored", scored), ("passed", passed), ("minimal", GenerationRequest(own, (0,), None))):
        yield coded(name, generate_pb2.GenerateRequest, request, write, read)
    chunks = [
        GenerationChunk(own, 1, (5, 6), "hé", (TokenLogprob(5, -0.5, ((5, -0.5), (8, -1.5))), TokenLogprob(6, -2.0)), cached_tokens=16),
        GenerationChunk(own, 0, (), "", prompt_logprobs=(TokenLogprob(3, -0.25),)),
        GenerationChunk(own, 0, (), "", deltas=('{"content":"hi"}',), n_tokens=1, prompt_tokens=9),
        GenerationChunk(own, 2, (), "", finish_reason=FinishReason.ERROR, error="no machine has layers 3 to 9", code="shard_unavailable"),
        GenerationChunk(own, 0, (), "", notices=(Notice("shard_failover", {"lost": "b", "layer": -3, "after_s": 0.5}),)),
        *(GenerationChunk(own, 0, (1,), "x", finish_reason=reason) for reason in FinishReason if reason is not FinishReason.ERROR),
    ]
    for name, gained in (("rich", chunks), ("minimal", [])):
        yield coded(name, generate_pb2.GenerateResponse, gained, generate.write_chunks, lambda told: generate.read_chunks(told, own))
    described = generate_pb2.DescribeModelResponse(
        digest=SHA, quantization="int4", numerics_id="cpu/1", created_unix=1_760_000_000, max_context=8192, tokenizer_sha256=SHA,
        tokenizer_part=b"part",
    )  # fmt: skip
    for message in (generate_pb2.DescribeModelRequest(model_id="m"), described):
        yield plain("rich", message)
        yield plain("minimal", type(message)())


def propose_examples() -> Iterator[Example]:
    ask = BlockAsk("ngram", (1 << 63) + 1, 17, [5, 6, 7], 8, 3)
    for name, asked in (("rich", ask), ("minimal", BlockAsk("", 0, 0, [], 0))):
        yield coded(name, propose_pb2.ProposeBlockRequest, asked, write_ask, read_ask)
    block = BlockProposal((1, 2, 3), 4, 5, 1 << 33)
    for name, made in (("rich", block), ("minimal", BlockProposal(())), ("lost", None)):
        session = 9 if name != "minimal" else 0
        yield coded(name, propose_pb2.ProposeBlockResponse, made, lambda made, session=session: write_block(made, session), read_block)
    yield plain("rich", propose_pb2.ProposeBlocksRequest(block=write_ask(ask), ended_sessions=[4, 1 << 63]))
    yield plain("minimal", propose_pb2.ProposeBlocksRequest())
    yield plain("rich", propose_pb2.ProposeBlocksResponse(block=write_block(block, 9)))
    yield plain("minimal", propose_pb2.ProposeBlocksResponse())


def shard_examples() -> Iterator[Example]:
    least = StageRequest(bytes(16), "m", SHA, WeightsFormat.INT4, LayerRange(0, 1), 1, 1, 1, report_s=0.01)
    rich = replace(
        least, session_id=b"session-id-16-by", weights=WeightsFormat.BF16, layers=LayerRange(3, 30), n_blocks=900, least_blocks=20, max_rows=512,
        dtype=ActivationDtype.FP32, report_s=0.25, kv=b"kv-name-16-bytes",
    )  # fmt: skip
    for name, request in (("rich", rich), ("minimal", least)):
        yield coded(name, shard_pb2.OpenStageRequest, request, shards.write_open, shards.read_open)
    warm = replace(rich, session_id=bytes(16), dtype=ActivationDtype.BF16, report_s=0.25, kv=b"")
    for name, request in (("rich", warm), ("minimal", replace(least, report_s=0.25))):
        yield coded(name, shard_pb2.WarmLayersRequest, request, shards.write_warm, shards.read_warm)
    ticket = b"t" * 32
    for name, event in (
        ("loading", StageLoading(1 << 30, 3 << 30)),
        ("opened", StageOpened(7501, ticket, 100, 32, "cpu/1", True, True, True)),
        ("opened with a disk", StageOpened(7501, ticket, 100, 32, "cpu/1", True, True, True, kv_blocks=True)),
        ("opened afresh", StageOpened(7501, ticket, 100, 32, "cpu/1", False, False, False)),
        ("opened that moves blocks", StageOpened(7501, ticket, 100, 32, "cpu/1", True, True, True, kv_moves=True)),
        ("opened that takes prompts", StageOpened(7501, ticket, 100, 32, "cpu/1", True, True, True, kv_moves=True, kv_under_way=True)),
        ("minimal", StageOpened(1, ticket, 20, 1, "", False, False)),
        ("report", StageReport(9, 8, 7, 1, 12.5, 3.25)),
        ("report of latency", StageReport(9, 8, 7, 1, 12.5, 3.25, 4.5)),
        ("first report", StageReport()),
        ("fault", PipelineFault(NodeId("node-2"), "pipeline_stalled", "nothing came")),
        ("own fault", PipelineFault(None, "activation_garbage", "")),
    ):
        yield coded(name, shard_pb2.OpenStageResponse, event, shards.write_event, lambda told: shards.read_event(told, rich))
    to = NextStage(NodeId("node-2"), ("10.0.0.2:7501", "10.1.0.2:7501"), ticket, 64)
    for name, way in (("rich", to), ("minimal", NextStage(NodeId("b"), ("h:1",), ticket))):
        yield coded(name, shard_pb2.ConnectStageRequest, way, partial(shards.write_connect, rich.session_id), shards.read_connect)
    found = BlocksAsked(BlocksUse.FIND, (b"key-of-16-bytes!",))
    kept = BlocksAsked(BlocksUse.KEEP, (b"key-of-16-bytes!", b"another-16-bytes"), (7, 0), 2.5)
    chained = replace(kept, parents=(None, kept.keys[0]))
    had = KvMove(NodeId("node-2"), b"layout-of-blocks", (10, 30), 2)
    asks = KvMove(NodeId("node-2"), b"layout-of-blocks", layers=LayerRange(4, 9), tensor_port=8155, ticket=ticket)
    moved = (
        ("fetch", replace(kept, use=BlocksUse.FETCH, move=had)),
        ("give", replace(kept, use=BlocksUse.GIVE, move=asks)),
        ("compare", replace(kept, use=BlocksUse.COMPARE)),
    )
    for name, asked in (
        ("rich", kept),
        ("minimal", found),
        ("restore", replace(kept, use=BlocksUse.RESTORE)),
        ("chained", chained),
        *moved,
    ):
        yield coded(name, shard_pb2.KvBlocksRequest, asked, partial(shards.write_blocks, session_id=rich.session_id), shards.read_blocks)
    loading = shard_pb2.StageLoading(bytes_done=3, bytes_total=9)
    for message in (
        shard_pb2.WarmLayersResponse(loaded=True, loading=loading),
        shard_pb2.KvBlocksResponse(n_blocks=2),
    ):
        yield plain("rich", message)
        yield plain("minimal", type(message)())
    yield plain("minimal", shard_pb2.ConnectStageResponse())
    yield plain("wrong", shard_pb2.KvBlocksResponse(n_blocks=2, is_wrong=True))


def weights_examples() -> Iterator[Example]:
    files = (FileEntry("sub/empty.json", 0, SHA, b"", False), FileEntry("model.safetensors", (1 << 20) + 5, SHA, b"d" * 64, True))
    manifest = ModelManifest(SHA, files, (TensorAt("model.norm", 1, 4096, 512), TensorAt("x", 1, 0, 1)))

    def read(data: bytes) -> ModelManifest:
        described = WeightsDescription(SHA)
        described.add(weights_pb2.DescribeWeightsResponse.FromString(data))
        return described.manifest()

    # Parts may be appended to one another, and so may their bytes.
    yield Example(
        "DescribeWeightsResponse/rich",
        manifest,
        lambda: b"".join(map(bytes_of, parts(manifest))),
        read,
        weights_pb2.DescribeWeightsResponse,
    )
    for message in (
        weights_pb2.DescribeWeightsRequest(digest=SHA),
        weights_pb2.DescribeWeightsResponse(examined_bytes=3, bytes_to_examine=9),
        weights_pb2.FetchPiecesRequest(digest=SHA, ranges=[weights_pb2.PieceRange(file=1, first=2, count=3)]),
        weights_pb2.FetchPiecesRequest(digest=SHA, runs=[weights_pb2.ByteRuns(file=1, offset=4096, length=288, stride=576, count=16)]),
        weights_pb2.FetchPiecesResponse(file=1, piece=2, data=b"data"),
    ):
        runs = isinstance(message, weights_pb2.FetchPiecesRequest) and message.runs
        yield plain("progress" if isinstance(message, weights_pb2.DescribeWeightsResponse) else "runs" if runs else "rich", message)
        if not runs:
            yield plain("minimal", type(message)())


def kv_examples() -> Iterator[Example]:
    for message in (
        kv_pb2.WatchPrefixesRequest(digest=SHA, numerics_id="n"),
        kv_pb2.WatchPrefixesResponse(version=7, block_tokens=16, layout=bytes(16), marks=bytes(range(16)), prefills=True),
        kv_pb2.FetchBlocksRequest(digest=SHA, numerics_id="n", layout=bytes(16), keys=bytes(range(32)), tensor_port=8155, ticket=bytes(32)),
        kv_pb2.FetchBlocksResponse(n_blocks=2),
        kv_pb2.PrefillRequest(
            request_id="r",
            epoch=7,
            digest=SHA,
            numerics_id="n",
            layout=bytes(16),
            prompt_ids=range(32),
            keys=bytes(range(32)),
            tp_size=1,
            tensor_port=8155,
            ticket=bytes(32),
            lease_ms=30_000,
        ),
        kv_pb2.PrefillResponse(epoch=7, n_blocks=2, completion="r:1"),
    ):
        yield plain("rich", message)
        yield plain("minimal", type(message)())
    yield plain("ended", kv_pb2.PrefillResponse(epoch=7, n_blocks=2, status=5))
    offer = kv_pb2.NixlOffer(version="1.5.1", door="0123456789abcdef" * 2)
    for asked in (kv_pb2.FetchBlocksRequest(nixl=offer), kv_pb2.PrefillRequest(request_id="r", epoch=7, nixl=offer)):
        yield plain("nixl", asked)
    span = kv_pb2.KvSpan(first_layer=10, stop_layer=20, node_id="g")
    yield plain("spans", kv_pb2.WatchPrefixesResponse(version=7, block_tokens=16, layout=bytes(16), spans=[span]))
    yield plain("part", kv_pb2.FetchBlocksRequest(digest=SHA, numerics_id="n", layout=bytes(16), first_layer=10, stop_layer=20))
    yield plain("in turns", kv_pb2.FetchBlocksResponse(n_blocks=2, from_node_id="g", in_turns=True))
    yield plain("routed", kv_pb2.PrefillRequest(request_id="r", remote_engine_id="p", remote_request_id="s", remote_tp_size=1))
    yield plain("pushed in parts", kv_pb2.WatchPrefixesResponse(version=7, spans=[span], prefills_in_parts=True, prompts_per_s=400.0))
    yield plain("of a prompt", kv_pb2.FetchBlocksRequest(digest=SHA, numerics_id="n", layout=bytes(16), prefill=bytes(32)))
    yield plain("in parts", kv_pb2.PrefillRequest(request_id="r", epoch=7, ticket=bytes(32), in_parts=True))
    yield plain("has all", kv_pb2.PrefillRequest(request_id="r", epoch=7, has_all=True))


def tensor_examples() -> Iterator[Example]:
    """Frames of the tensor stream, and the batch that goes before activations, which are not protobuf's."""
    ids = [SequenceId(3), SequenceId(1 << 40)]
    rich = StageBatch(BatchId(9), ids, [1, 5], [40, 0], [1, 2], [0, 2], [7, 8], [SequenceId(2)], 6)
    for name, batch in (("rich", rich), ("minimal", StageBatch(BatchId(0), [], [], [], [], [], [], [], 0))):
        yield Example(f"StageBatch/{name}", batch, partial(write_batch, batch), read_batch)
    data = np.arange(6, dtype=np.uint16).tobytes()
    sent = [
        frames.hello(b"t" * 32),
        frames.tensor_start(LAST_SEQ, 4, len(data), frames.BF16, (2, 3), len(data)) + b"head" + data,
        frames.tensor_start(0, 0, len(data), frames.FP32, (3,), 4) + data[:4],
        frames.chunk_start(1, 8) + data[4:],
        frames.close(frames.CloseCode.DONE, ""),
    ]
    tensors = (("head", "uint16", (2, 3), data), ("", "float32", (3,), data))
    told = ("Hello(ticket=" + repr(b"t" * 32) + ")", tensors[0], tensors[1], "Closed(code=0, message='')")
    yield Example("frames/of a sender", told, partial(b"".join, sent), read_sender)
    answered = [frames.WELCOME, frames.close(frames.CloseCode.STALLED, "nothing came")]
    yield Example(
        "frames/of a receiver", ("Welcome()", "Closed(code=4, message='nothing came')"), partial(b"".join, answered), read_receiver
    )


def rank_examples() -> Iterator[Example]:
    ticket = b"t" * 32
    least = RankRequest("m", SHA, WeightsFormat.INT4, 1, (Stops(1, 0, 1), Stops(2, 4, 8)), 1, 1, 1, 1, ("h:1",), ticket)
    rich = replace(
        least, weights=WeightsFormat.BF16, rank=2, stops=(Stops(1, 2, 3), Stops(2, 4, 6), Stops(3, 6, 9)), n_blocks=900, max_rows=512,
        logits_rows=64, max_blocks=512, addresses=("10.0.0.2:7501", "10.1.0.2:7501"),
    )  # fmt: skip
    for name, request in (("rich", rich), ("minimal", least)):
        yield coded(name, rank_pb2.OpenRankRequest, request, ranks.write_open, ranks.read_open)
    for name, event in (
        ("loading", RankLoading(1 << 30, 3 << 30)),
        ("opened", RankOpened(7501, ticket, "cpu/1")),
        ("fault", RankFault("ended, with -9")),
    ):
        yield coded(name, rank_pb2.OpenRankResponse, event, ranks.write_event, ranks.read_event)


LAST_SEQ = 0xFFFFFFFF


def read_sender(data: bytes) -> object:
    conversation = frames.Conversation(LAST_SEQ)
    incoming = IncomingBytes(conversation, FROM_SENDER)
    return events(incoming, data, lambda: conversation.on(frames.Event.WELCOME))


def read_receiver(data: bytes) -> object:
    conversation = frames.Conversation(LAST_SEQ)
    conversation.on(frames.Event.HELLO)
    incoming = IncomingBytes(conversation, FROM_RECEIVER)
    return events(incoming, data, lambda: conversation.tensor(LAST_SEQ, 4, 4))


def events(incoming: IncomingBytes, data: bytes, after_first: Callable[[], None]) -> object:
    """What one end hears, as values that can be compared."""
    incoming.space()[: len(data)] = data
    incoming.filled(len(data))
    heard: list[object] = []
    while (event := incoming.next()) is not None:
        match event:
            case TensorMessage(header, array):
                heard.append((header.decode(), str(array.dtype), array.shape, array.tobytes()))
            case _:
                heard.append(repr(event))
        if len(heard) == 1:
            after_first()
    return tuple(heard)


def examples() -> tuple[Example, ...]:
    """All of them."""
    return (
        *fleet_examples(), *control_examples(), *generate_examples(), *propose_examples(), *shard_examples(), *weights_examples(), *kv_examples(),
        *tensor_examples(), *rank_examples(),
    )  # fmt: skip


MODULES = (control_pb2, fleet_pb2, generate_pb2, kv_pb2, propose_pb2, rank_pb2, shard_pb2, weights_pb2)
