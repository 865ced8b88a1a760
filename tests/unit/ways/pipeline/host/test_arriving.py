"""Layers that come from another node are read while they come: a tensor once its pieces are here, and never before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.seeded_models import write_gguf
from tests.unit.machine.weights.nodes import Fleet, Node, dialer
from tests.unit.net.member.nodes import BOUND_S, in_loop, until
from tests.unit.ways.pipeline.host.hosts import in_thread, wanted

from paceline.core.errors import BadPipelineRequest, PacelineError
from paceline.core.ids import NodeId
from paceline.core.model import ModelSpec, RopeSpec
from paceline.core.weights import BlockTensor, WeightSource
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import Eligible, MayGiveWeights, Use
from paceline.store import partial as arriving
from paceline.store.catalog import open_model
from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.store.pull import pull
from paceline.store.tensor_files import TensorFiles
from paceline.ways.pipeline.executor.route import StageRequest
from paceline.ways.pipeline.host.loading import FleetWeights, LoadMeter

SPEC = ModelSpec(
    model_type="llama", n_layers=4, hidden=512, n_heads=8, n_kv_heads=2, head_dim=64, ffn=1024, vocab=512, max_context=256, rms_eps=1e-5,
    rope=RopeSpec(10_000.0), tied_head=True,
)  # fmt: skip
FIRST, LAST = "model.layers.0.mlp.gate_proj.weight", "model.layers.3.mlp.gate_proj.weight"


@dataclass(slots=True)
class Giver:
    """A node that has the model, and gives so many pieces of it until it is told to go on."""

    node: Node
    whole: WeightSource
    weights: FleetWeights
    goes_on: threading.Event

    def request(self) -> StageRequest:
        return wanted(0, 4, model_id="seeded", digest=self.whole.digest)

    async def find(self) -> tuple[WeightSource, LoadMeter]:
        meter = LoadMeter()
        return (await self.weights.find(self.request(), meter)).source, meter


@asynccontextmanager
async def giver(tmp_path: Path, pieces: int) -> AsyncIterator[Giver]:
    home, taker, fleet, goes_on = Home(tmp_path / "giver"), Home(tmp_path / "taker"), Fleet(), threading.Event()
    pull(str(write_gguf(tmp_path / "seeded.gguf", SPEC, "Q8_0")), home, lambda done, total: None)
    whole = open_model("seeded", home).weights
    offer = ModelOffer("seeded", Role.VERIFIER, "int8", digest=whole.digest, size_bytes=1)
    async with fleet.node(home) as node:
        node.library.before_read = lambda count: None if count < pieces or goes_on.wait(BOUND_S) else pytest.fail("never told")
        card = NodeCard(NodeId(node.name), 1, (node.address,), b"i", 120, 0, backend="cpu", models=(offer,))
        givers: MayGiveWeights = Eligible(Use.GIVE_WEIGHTS, NodeId("taker-1"), (card,))
        weights = FleetWeights(taker, lambda: givers, dialer(fleet.trust.member("taker-1")))
        try:
            yield Giver(node, whole, weights, goes_on)
        finally:
            goes_on.set()
            await weights.close()


def same(one: WeightSource, other: WeightSource, name: str) -> bool:
    mine, theirs = one.read(name), other.read(name)
    assert isinstance(mine, BlockTensor)
    assert isinstance(theirs, BlockTensor)
    return np.array_equal(mine.rows_NB, theirs.rows_NB)


@in_loop
async def test_the_first_layers_are_read_before_the_last_have_come(tmp_path: Path) -> None:
    async with giver(tmp_path, pieces=6) as given:
        source, meter = await given.find()
        assert await in_thread(same, source, given.whole, FIRST)
        late = asyncio.create_task(in_thread(same, source, given.whole, LAST))
        await until(lambda: len(given.node.library.reads) >= 5)
        assert not late.done()
        given.goes_on.set()
        assert await late
        assert {*source.names()} == {name for name in given.whole.names() if name.startswith("model.layers.")}
        await until(lambda: 0 < meter.fetched.total == meter.fetched.done)
        # All of it is on disk by then, and opened from there.
        again, meter = await given.find()
        assert await in_thread(same, again, given.whole, LAST)
        assert not meter.fetched.total


@in_loop
async def test_several_who_want_other_layers_of_a_model_at_once_all_get_them(tmp_path: Path) -> None:
    async with giver(tmp_path, pieces=1 << 30) as given:
        requests = [wanted(first, first + 1, model_id="seeded", digest=given.whole.digest) for first in range(4)]
        found = await asyncio.gather(*(given.weights.find(request, LoadMeter()) for request in requests))
        for layer, each in enumerate(found):
            assert await in_thread(same, each.source, given.whole, f"model.layers.{layer}.mlp.gate_proj.weight")


@in_loop
async def test_who_waits_for_a_fetch_of_other_layers_says_how_far_it_is(tmp_path: Path) -> None:
    async with giver(tmp_path, pieces=6) as given:
        _, fetching = await given.find()
        waits = LoadMeter()
        waiting = asyncio.create_task(given.weights.find(wanted(0, 2, model_id="seeded", digest=given.whole.digest), waits))
        await until(lambda: 0 < waits.progress[0] == fetching.fetched.done)
        given.goes_on.set()
        await waiting


@in_loop
async def test_files_that_can_not_be_opened_end_their_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, digests: DigestCache) -> TensorFiles:
        raise PermissionError(path)

    monkeypatch.setattr(arriving, "open_weights", fails)
    async with giver(tmp_path, pieces=6) as given:
        with pytest.raises(PermissionError):
            await given.find()
        await until(lambda: not given.weights._fetching)  # though its source gives nothing more
        monkeypatch.undo()
        given.goes_on.set()  # how many pieces the first fetch took is chance
        assert await in_thread(same, (await given.find())[0], given.whole, FIRST)


@in_loop
async def test_files_that_the_source_reads_first_are_progress_for_all_who_wait(tmp_path: Path) -> None:
    async with giver(tmp_path, pieces=1 << 30) as given:
        library, meters, described = given.node.library, [LoadMeter(), LoadMeter()], threading.Event()
        library.describe_as = lambda manifest: manifest if described.wait(BOUND_S) else pytest.fail("never told")
        for sums in Home(tmp_path / "giver").digests.glob("*.sums"):
            sums.unlink()
        finding = [asyncio.create_task(given.weights.find(given.request(), meter)) for meter in meters]
        try:
            await until(lambda: all(meter.progress[0] for meter in meters))
            size = (tmp_path / "seeded.gguf").stat().st_size
            assert [meter.progress for meter in meters] == [(size, size)] * 2
        finally:
            described.set()
        await asyncio.gather(*finding)


@in_loop
async def test_where_the_source_goes_away_reads_that_wait_end(tmp_path: Path) -> None:
    async with giver(tmp_path, pieces=1 << 30) as given:
        given.node.dies_after(6)
        source, _ = await given.find()
        with pytest.raises(PacelineError):
            await in_thread(source.read, LAST)


@in_loop
async def test_a_load_that_is_given_up_ends_its_reads_and_its_fetch(tmp_path: Path) -> None:
    async with giver(tmp_path, pieces=6) as given:
        found = await given.weights.find(given.request(), LoadMeter())
        reading = asyncio.create_task(in_thread(found.source.read, LAST))
        await until(lambda: len(given.node.library.reads) >= 5)
        found.stop()
        with pytest.raises(PacelineError, match="given up"):
            await reading


@in_loop
async def test_the_fleet_is_looked_at_on_the_event_loop_alone_also_for_a_refusal(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    def givers() -> MayGiveWeights:
        assert asyncio.get_running_loop() is loop
        return Eligible(Use.GIVE_WEIGHTS, NodeId("taker-1"), ())

    weights = FleetWeights(Home(tmp_path), givers, dialer(Fleet().trust.member("taker-1")))
    with pytest.raises(BadPipelineRequest):
        await weights.find(wanted(0, 1, model_id="seeded", digest="1" * 64), LoadMeter())
