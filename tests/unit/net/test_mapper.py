"""What nodes say survives the wire whole; a table that forgets a field can't be made, and what is out of its bounds is refused by its name.

Cards, exchanges and generations have tests of their own beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import BadPipelineRequest, FleetError, MalformedMessage
from paceline.core.generation import Range
from paceline.core.ids import NodeId, Trust
from paceline.core.manifest import PIECE, FileEntry, ModelManifest, TensorAt
from paceline.core.model import ActivationDtype, LayerRange, WeightsFormat
from paceline.core.stats import DraftUse
from paceline.engine.drafts import BlockProposal
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import Clash, FleetView, LiveCard
from paceline.net.discovery import Failure
from paceline.net.mapper import Codec, Length, Mapped, or_none, refuse_with
from paceline.net.member.state import Sight, sight_of, write_sight
from paceline.net.weights_servicer import WeightsDescription, parts
from paceline.net.wire import control_pb2, fleet_pb2, propose_pb2, shard_pb2
from paceline.ways.draft.connection import read_block
from paceline.ways.draft.pool import BlockAsk, read_ask, write_ask, write_block
from paceline.ways.pipeline.codec import (
    read_connect,
    read_event,
    read_open,
    read_warm,
    write_connect,
    write_event,
    write_open,
    write_warm,
)
from paceline.ways.pipeline.executor.route import (
    NextStage,
    PipelineFault,
    StageEvent,
    StageLoading,
    StageOpened,
    StageReport,
    StageRequest,
)

short = st.integers(0, (1 << 32) - 1)
words = st.integers(0, (1 << 64) - 1)
reals = st.floats(allow_nan=False)
names = st.text("ab-9 é", max_size=9)
shown = st.text(st.characters(categories=["L", "N"]), max_size=20)
node_ids = st.text("abc9", min_size=1, max_size=9).map(NodeId)
sha = st.text("0123456789abcdef", min_size=64, max_size=64)
addresses = st.tuples(st.text("abc", min_size=1, max_size=5), st.integers(1, 65535)).map(lambda at: f"{at[0]}:{at[1]}")
tickets = st.binary(min_size=32, max_size=32)
# A millisecond more or less is what travels.
ages = short.map(lambda ms: ms / 1000)
blocks = st.integers(1, 1000)
spans = st.tuples(st.integers(0, 4000), st.integers(1, 90)).map(lambda at: LayerRange(at[0], at[0] + at[1]))
requests = st.builds(
    StageRequest,
    session_id=st.binary(min_size=16, max_size=16),
    model_id=st.text("abc/", min_size=1, max_size=9),
    digest=sha,
    weights=st.sampled_from(WeightsFormat),
    layers=spans,
    n_blocks=st.integers(1000, 1 << 20),
    least_blocks=blocks,
    max_rows=st.integers(1, 8192),
    dtype=st.sampled_from(ActivationDtype),
    report_s=st.integers(10, 60_000).map(lambda ms: ms / 1000),
    kv=st.sampled_from([b"", b"k" * 16]),
)
REQUEST = StageRequest(bytes(16), "m", "0" * 64, WeightsFormat.INT4, LayerRange(0, 3), 1000, 1, 1, kv=b"k" * 16)
opened = st.builds(
    StageOpened, st.integers(1, 65535), tickets, blocks, blocks, names, st.booleans(), st.booleans(), st.none() | st.booleans()
)
finite = st.floats(allow_nan=False, allow_infinity=False)
reports = st.builds(StageReport, words, words, words, short, finite, finite)
events = st.builds(StageLoading, words, words) | opened | reports | st.builds(PipelineFault, st.none() | node_ids, shown, shown)


@given(requests)
def test_a_stage_that_is_asked_for(request: StageRequest) -> None:
    assert read_open(shard_pb2.OpenStageRequest.FromString(write_open(request).SerializeToString())) == request
    plain = replace(request, session_id=bytes(16), dtype=ActivationDtype.BF16, report_s=0.25, kv=b"")
    assert read_warm(shard_pb2.WarmLayersRequest.FromString(write_warm(request).SerializeToString())) == plain


@given(events)
def test_what_a_stage_tells(event: StageEvent) -> None:
    assert read_event(shard_pb2.OpenStageResponse.FromString(write_event(event).SerializeToString()), REQUEST) == event


@given(st.builds(NextStage, node_ids, st.lists(addresses, min_size=1, max_size=32).map(tuple), tickets, st.none() | st.integers(0, 64)))
def test_the_way_to_the_next_stage(to: NextStage) -> None:
    assert read_connect(shard_pb2.ConnectStageRequest.FromString(write_connect(b"s", to).SerializeToString())) == to


@given(st.builds(BlockAsk, names, words, short, st.lists(short, max_size=9), short, short))
def test_a_draft_that_is_asked_for(ask: BlockAsk) -> None:
    assert read_ask(propose_pb2.ProposeBlockRequest.FromString(write_ask(ask).SerializeToString())) == ask


tokens = st.lists(short, max_size=9).map(tuple)


@given(st.none() | st.builds(BlockProposal, tokens, short, short, words), words)
def test_a_draft(block: BlockProposal | None, session: int) -> None:
    message = propose_pb2.ProposeBlockResponse.FromString(write_block(block, session).SerializeToString())
    assert (read_block(message), message.session) == (block, session)


files = st.builds(
    lambda name, size, digest, inside: FileEntry(name, size, digest, b"d" * 32 * -(-size // PIECE), inside),
    names,
    st.integers(0, 5 * PIECE),
    sha,
    st.booleans(),
)


@given(st.lists(files, min_size=1, max_size=3).map(tuple), st.lists(names, max_size=4))
def test_a_description_of_weights(entries: tuple[FileEntry, ...], named: list[str]) -> None:
    manifest = ModelManifest("d", entries, tuple(TensorAt(name, 0, 0, entries[0].size) for name in named))
    described = WeightsDescription("d")
    for part in parts(manifest):
        described.add(type(part).FromString(part.SerializeToString()))
    assert described.manifest() == manifest


drafts = st.builds(DraftUse, names, words, words, words, names, names, words, reals, words, names)
live = st.builds(
    LiveCard,
    st.builds(NodeCard, node_ids, st.integers(1, 9), st.just(()), st.just(b""), short, short),
    ages,
    trust=st.sampled_from(Trust),
)
clashes = st.builds(Clash, node_ids, st.lists(addresses, max_size=2).map(tuple), st.lists(addresses, max_size=2).map(tuple), ages)
views = st.builds(
    FleetView,
    node_ids,
    st.lists(live, max_size=3).map(tuple),
    st.lists(clashes, max_size=2).map(tuple),
    st.lists(node_ids, max_size=2).map(tuple),
)
failures = st.builds(Failure, addresses, names, ages.map(lambda age: -age))
sights = st.builds(Sight, views, st.lists(failures, max_size=2).map(tuple), words, st.lists(drafts, max_size=2).map(tuple), short, short)


@given(sights)
def test_what_a_node_sees(sight: Sight) -> None:
    assert sight_of(control_pb2.GetFleetViewResponse.FromString(write_sight("f", sight).SerializeToString())) == sight


@dataclass(frozen=True)
class Way:
    to_node_id: str
    address: str
    rtt_seconds: float
    bytes_per_second: float | None
    network_seconds: float = 0.0


refuse = refuse_with(MalformedMessage)
LINK = fleet_pb2.Link(to_node_id="a", address="h", rtt_seconds=0.5)


@pytest.mark.parametrize("fields", [{"address": "adress"}, {"nowhere": "address"}])
def test_a_table_that_does_not_fit_cannot_be_made(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="don't fit together"):
        Codec(Way, fleet_pb2.Link, refuse, dict(fields))
    with pytest.raises(ValueError, match=r"\['bytes_per_second'\]"):
        Codec(Way, fleet_pb2.Link, refuse, given=["bytes_per_second"])


def test_a_field_that_one_side_alone_has_is_given_by_who_writes_or_reads() -> None:
    codec = Codec(Way, fleet_pb2.Link, refuse, given=["rtt_seconds", "bytes_per_second"], beside=["rtt_seconds", "bytes_per_second"])
    way = Way("a", "h", 7.0, 8.0)
    assert codec.write(way, rtt_seconds=0.5) == LINK
    assert codec.read(LINK, rtt_seconds=7.0, bytes_per_second=8.0) == way


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (Way("a", "h", 2.0, None), "A way: rtt_seconds is 2.0, and 0 to 1 is taken"),
        (Way("a", "h", float("nan"), None), "rtt_seconds is nan"),
        (Way("a" * 10, "h", 0.5, None), "to_node_id has a length of 10, and 1 to 9 is taken"),
        (Way("a", "H", 0.5, None), "A way: host can't be 'H'"),
        (Way("a", "h", 0.5, 0.25), "A way: it is slower than it is far"),
    ],
)
def test_what_is_out_of_its_bounds_is_refused_by_its_name(way: Way, said: str) -> None:
    def at_odds(way: Way) -> str:
        return "it is slower than it is far" if (way.bytes_per_second or 1) < way.rtt_seconds else ""

    fields = {
        "to_node_id": Length(1, 9),
        "address": Mapped(bound=str.islower, called="host"),
        "rtt_seconds": Range(0, 1),
        "bytes_per_second": or_none(),
    }
    codec = Codec(Way, fleet_pb2.Link, refuse, fields, also=at_odds)
    assert codec.read_checked(LINK, "A way") == Way("a", "h", 0.5, None)
    with pytest.raises(MalformedMessage) as refused:
        codec.read_checked(codec.write(way), "A way")
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization": "int3"}, "int3"),
        ({"activation_dtype": ""}, "ActivationDtype"),
        ({"least_blocks": 1001}, "least_blocks are more"),
        ({"report_ms": 9}, "report_s"),
        ({"kv": b"k"}, "kv"),
        ({"session_id": b""}, "session_id"),
        ({"digest": "0" * 63}, "digest"),
        ({"max_rows": 8193}, "max_rows"),
        ({"stop_layer": 4097}, "layers"),
        ({"model_id": ""}, "model_id"),
    ],
)
def test_a_stage_that_no_stage_could_be_is_refused(change: dict[str, object], said: str) -> None:
    message = write_open(REQUEST)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(BadPipelineRequest, match=said):
        read_open(message)


@pytest.mark.parametrize(
    "told",
    [
        StageOpened(0, bytes(32), 1, 1, "", False, False),
        StageOpened(1, bytes(31), 1, 1, "", False, False),
        StageOpened(1, bytes(32), 1001, 1, "", False, False),
        StageOpened(1, bytes(32), 1, 0, "", False, False),
        StageReport(busy_s=float("inf")),
    ],
)
def test_what_makes_no_sense_of_a_stage_is_refused(told: StageEvent) -> None:
    with pytest.raises(FleetError, match="A stage"):
        read_event(write_event(told), REQUEST)
    with pytest.raises(FleetError, match="no sense"):
        read_event(shard_pb2.OpenStageResponse(), REQUEST)


def test_a_stage_has_no_kv_that_was_not_asked_for() -> None:
    told = write_event(StageOpened(1, bytes(32), 1, 1, "", False, False, True))
    with pytest.raises(FleetError, match="something else"):
        read_event(told, replace(REQUEST, kv=b""))
