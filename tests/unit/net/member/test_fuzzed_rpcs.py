"""Bytes of a member's choice on every RPC of a node's port: each is answered or refused, in a type, and the node goes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from tests.fakes.fleets import TestFleet, sealed_card
from tests.fakes.scripted_encoder import ScriptedEncoder
from tests.fakes.scripted_inference import ScriptedInference
from tests.unit.net.member.nodes import in_loop, make_node

from paceline.core.clock import SystemClock
from paceline.core.model import ModelRef
from paceline.fleet.card import ModelOffer
from paceline.fleet.messages import PassedCard
from paceline.machine.encoders import LocalEncoders
from paceline.machine.weights import give_weights
from paceline.net.channels import Purpose
from paceline.net.exchange_codec import write_passed
from paceline.net.member.node import FleetNode
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.wire import control_pb2, encode_pb2, fleet_pb2, generate_pb2, kv_pb2, propose_pb2, shard_pb2, weights_pb2
from paceline.store.home import Home
from paceline.ways.draft.service import DraftService
from paceline.ways.forward.encode_service import encode_service
from paceline.ways.forward.service import LoadedModel, LocalModels, generate_service
from paceline.ways.kv.service import KvSharing
from paceline.ways.pipeline.host.serving import Hosting, ShardServing

TIMES = 40
"""Of each kind, a method."""


def messages(fleet: TestFleet) -> dict[str, Message]:
    """A sound request for each method, to be damaged."""
    card = write_passed(PassedCard(sealed_card(fleet.member("x"))))
    return {
        "CapabilityService/ExchangeCapabilities": fleet_pb2.ExchangeCapabilitiesRequest(
            protocol=PROTOCOL_VERSION,
            cards=[card, fleet_pb2.PassedCard(node_key=1, version=3, card=fleet_pb2.SignedCard(beat=1, signature=bytes(71)))],
            digests=fleet_pb2.CardDigests(node_keys=[1, 2], versions=[3, 4], beats=[5, 6]),
            revocations=[fleet_pb2.SignedRevocation.FromString(fleet.revoke("x").sealed)],
        ),
        "CapabilityService/GetNodeCapability": fleet_pb2.GetNodeCapabilityRequest(),
        "CapabilityService/MeasureLink": fleet_pb2.MeasureLinkRequest(response_bytes=1000, payload=bytes(1000)),
        "ProposerService/ProposeBlock": propose_pb2.ProposeBlockRequest(committed_token_ids=[1, 2, 1], block_size=4, model_id="ngram"),
        "ControlService/GetFleetView": control_pb2.GetFleetViewRequest(),
        "GenerateService/Generate": generate_pb2.GenerateRequest(
            model_id="echo", digest="d", prompt_ids=[65, 66], max_tokens=4, n=1, sampling=generate_pb2.Sampling(seed=1)
        ),
        "GenerateService/DescribeModel": generate_pb2.DescribeModelRequest(model_id="echo"),
        "EncodeService/Encode": encode_pb2.EncodeRequest(model_id="counts", texts=["a", "b"], field="input", via=["0" * 16]),
        "ShardService/OpenStage": shard_pb2.OpenStageRequest(
            session_id=bytes(16),
            model_id="m",
            digest="0" * 64,
            quantization="bf16",
            first_layer=0,
            stop_layer=2,
            n_blocks=8,
            least_blocks=1,
            max_rows=16,
            activation_dtype="bf16",
            report_ms=50,
        ),
        "ShardService/ConnectStage": shard_pb2.ConnectStageRequest(
            session_id=bytes(16), node_id="a", tensor_addresses=["127.0.0.1:1"], ticket=bytes(32)
        ),
        "KvService/WatchPrefixes": kv_pb2.WatchPrefixesRequest(digest="0" * 64, numerics_id="n"),
        "KvService/FetchBlocks": kv_pb2.FetchBlocksRequest(
            digest="0" * 64,
            layout=bytes(16),
            keys=bytes(32),
            tensor_port=1,
            ticket=bytes(32),
            nixl=kv_pb2.NixlOffer(version="1.5.1", door="0" * 32),
        ),
        "KvService/Prefill": kv_pb2.PrefillRequest(
            request_id="r",
            epoch=1,
            digest="0" * 64,
            layout=bytes(16),
            prompt_ids=range(16),
            keys=bytes(16),
            tensor_port=1,
            ticket=bytes(32),
        ),
        "WeightsService/DescribeWeights": weights_pb2.DescribeWeightsRequest(digest="0" * 64),
        "WeightsService/FetchPieces": weights_pb2.FetchPiecesRequest(digest="0" * 64, ranges=[weights_pb2.PieceRange(count=1)]),
    }


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same, with some bytes changed, left out, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = rng.randbytes(1)
            case 1:
                del changed[at : at + rng.randint(1, 8)]
            case 2:
                changed[at:at] = changed[: rng.randint(1, 32)]
            case _:
                changed = changed[:at] + rng.randbytes(rng.randint(0, 8))
    return bytes(changed)


class Unseen:
    """A portrait that says nothing of shards."""

    def show_shards(self, shards: tuple[ModelOffer, ...], memory_bytes: Sequence[int] | None) -> bool:
        return False


def serving(node: FleetNode, home: Home) -> list[object]:
    models = LocalModels(ScriptedInference(), (LoadedModel(ModelRef("d", "", "echo"), "", 0, 4096),), node.meter)
    shards = ShardServing(node, Unseen(), Hosting(threads=1), home, SystemClock())
    return [
        lambda _: generate_service(models),
        lambda _: encode_service(LocalEncoders(ScriptedEncoder()), node.meter),
        DraftService(node, ()).service,
        KvSharing(node, SystemClock()).service,
        lambda guard: give_weights(home, guard, node.trust),
        shards.service,
    ]


@in_loop
async def test_every_rpc_answers_or_refuses_whatever_it_is_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet, rng = TestFleet(), random.Random(7)
    preset = "desk,ttl_s=600,exchange_s=0.01,restamp_s=500"  # a share of many requests a second
    node, member = make_node(fleet, tmp_path, "a", preset=preset), make_node(fleet, tmp_path, "b")
    await node.start(*serving(node, Home(tmp_path / "home")))
    try:
        for method, sound in messages(fleet).items():
            channel = member.pool.get(Purpose.EXCHANGE, node.addresses[0], node.identity.member)
            call = channel.unary_stream(f"/paceline.v1.{method}")
            sent = [sound.SerializeToString(), *(rng.randbytes(rng.randint(0, 64)) for _ in range(TIMES))]
            sent += [damaged(sent[0], rng) for _ in range(TIMES)]
            codes: set[grpc.StatusCode] = set()
            for data in sent:
                answer = call(data, timeout=100)
                try:
                    async for _ in answer:
                        pass
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
            # UNKNOWN is what an exception of ours would become, and a deadline a call that hangs.
            assert not codes & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}, (method, codes)
        assert node.view().ids == ("a",)
        assert [record for record in caplog.records if record.exc_info] == []
    finally:
        await member.pool.close()
        await node.stop()
