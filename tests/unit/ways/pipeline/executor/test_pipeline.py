"""One model over several machines gives the bytes of one machine, whichever of them break, and ends where none are left."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Self

import numpy as np
import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import UnsteadySource
from tests.fakes.null_backend import ByteVocabulary
from tests.fakes.pipelines import Machine, MemoryRouter

from paceline.backends import cpu
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.clock import SystemClock
from paceline.core.errors import ExecutorLost, ExecutorUnavailable, NodeStopping, OutOfMemory, WayNotAllowed
from paceline.core.generation import NUMERICS_CHANGED, FinishReason, GenerationChunk, GenerationRequest, Notice, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.core.model import LayerRange, LayerSpan, ModelSpec, RopeSpec, WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.ways.pipeline.executor import events as news
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.route import Opening, PipelineFault, RouteStage
from paceline.ways.pipeline.executor.search import FORGET_S, Fallback, LocalRoute, PipelineLimits

SPEC = ModelSpec(
    model_type="llama", n_layers=6, hidden=64, n_heads=3, n_kv_heads=1, head_dim=32, ffn=96, vocab=256, max_context=512, rms_eps=1e-5,
    rope=RopeSpec(10000.0), tied_head=True,
)  # fmt: skip
ALL = SPEC.all_layers
VOCABULARY = ByteVocabulary(SPEC.vocab)
LIMITS = PipelineLimits(stall_s=3.0, search_s=5.0, look_s=0.01)
BLOCKS = 96


def load(layers: LayerRange, *, edges: bool = True) -> LayerRunner[Any]:
    options = LoadOptions(layers, WeightsFormat.INT4, BLOCKS, edges=edges)
    return cpu.load(SeededWeights(SPEC), options)


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, LayerRunner[Any]]]:
    """Two machines with all layers, and heads that hold some of their own."""
    found = {
        "one": load(ALL, edges=False),
        "two": load(ALL, edges=False),
        "three": load(ALL, edges=False),
        "four": load(ALL, edges=False),
        "head": load(LayerRange(0, 0)),
        "head2": load(LayerRange(0, 2)),
        "whole": load(ALL),
    }
    yield found
    for runner in found.values():
        runner.close()


def requests(n: int = 5, max_tokens: int | None = 12) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            RequestId(f"r{i}"),
            tuple((i * 37 + j * j * 11) % 250 + 1 for j in range(9 + 23 * i)),
            max_tokens,
            SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i),
            ignore_eos=True,
        )
        for i in range(n)
    ]


class Run:
    """An engine over an executor, and what it said."""

    def __init__(self, executor: Any, *, prefix_cache: bool = True, drafting: DraftingConfig | None = None) -> None:
        config = EngineConfig(max_context=256, max_running=8, prefill_chunk=32, prefix_cache=prefix_cache)
        self.engine = Engine(executor, VOCABULARY, config, SystemClock(), drafting=drafting)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, str | None]] = {}
        self.notices: list[Notice] = []

    def step(self) -> None:
        for chunk in self.engine.step():
            self.read(chunk)
        self.engine.check_invariants()

    def read(self, chunk: GenerationChunk) -> None:
        self.tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        self.notices += chunk.notices
        if chunk.finish_reason is not None:
            self.ends[chunk.request_id] = (chunk.finish_reason, chunk.code)

    def all(self, wanted: Sequence[GenerationRequest]) -> dict[str, list[int]]:
        for request in wanted:
            self.engine.add(request)
        while self.engine.has_work:
            self.step()
        return self.tokens


@pytest.fixture(scope="module")
def expected(runners: dict[str, LayerRunner[Any]]) -> dict[str, list[int]]:
    executor = LocalExecutor(runners["whole"])
    return Run(executor, prefix_cache=False).all(requests())


def machines(runners: dict[str, LayerRunner[Any]], *names: str) -> list[Machine]:
    return [Machine(name, runners[name], SPEC.hidden) for name in names]


class Bench:
    """A pipeline over machines; closes its routes, and leaves the runners to their fixture."""

    def __init__(
        self, runners: dict[str, LayerRunner[Any]], head: str, names: Sequence[str], splits: Sequence[tuple[int, int]], inexact: str = ""
    ) -> None:
        self.machines = {machine.node_id: machine for machine in machines(runners, *names)}
        for name, machine in self.machines.items():
            machine.holds_identity = name != inexact
        self.router = MemoryRouter(list(self.machines.values()), [LayerRange(*span) for span in splits])
        self.executor = PipelineExecutor(runners[head], SPEC.n_layers, self.router, LIMITS, SystemClock())
        self.run = Run(self.executor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close()


ROUTES = [
    ("head", ["one"], [(0, 6)]),
    ("head", ["one", "two"], [(0, 3), (3, 6)]),
    ("head2", ["one"], [(2, 6)]),
    ("head2", ["one", "two", "three"], [(2, 3), (3, 5), (5, 6)]),
]


@pytest.mark.parametrize(("head", "names", "splits"), ROUTES)
def test_any_number_of_stages_gives_the_same_bytes(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], head: str, names: list[str], splits: list[tuple[int, int]]
) -> None:
    with Bench(runners, head, names, splits) as bench:
        assert bench.executor.depth == len(splits) + (head != "head")
        assert bench.run.all(requests()) == expected
        again = Run(bench.executor)
        assert again.all(requests()) == expected
        assert not bench.run.notices


@pytest.mark.parametrize("streams", [1, 5])
@pytest.mark.parametrize("dies_at", [None, 6])
@pytest.mark.parametrize(("head", "splits"), [("head2", [(2, 6)]), ("head", [(0, 3), (3, 6)]), ("head2", [(2, 4), (4, 6)])])
def test_drafts_through_a_pipeline_change_no_byte(
    runners: dict[str, LayerRunner[Any]],
    expected: dict[str, list[int]],
    head: str,
    splits: list[tuple[int, int]],
    dies_at: int | None,
    streams: int,
) -> None:
    """Right and wrong guesses, guesses on guesses, rows that are taken back on every stage, and a machine that dies amid them."""
    wanted = requests()[-streams:]
    truths = [[*request.prompt_ids, *expected[request.request_id]] for request in wanted]
    with Bench(runners, head, ["one", "two", "three"], splits) as bench:
        if dies_at is not None:
            bench.machines["one"].dies_at = dies_at
        source = UnsteadySource(lambda sequence: truths[sequence], Random(streams), SPEC.vocab)
        run = Run(bench.executor, drafting=DraftingConfig("knowing", {"knowing": source}))
        assert run.all(wanted) == {request.request_id: expected[request.request_id] for request in wanted}
        assert run.engine.stats().accepted_tokens["knowing"] > 0
        assert bench.executor.failovers == (dies_at is not None)


@pytest.mark.parametrize("names", [("three", "one", "two"), ("one", "three", "two"), ("one", "two", "three")])
def test_nothing_is_drafted_while_a_stage_gives_other_bytes_for_other_batches(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], names: tuple[str, ...]
) -> None:
    """From the start, from the loss of another with drafts in flight, and no longer than it takes part."""
    wanted = requests()
    truths = [[*request.prompt_ids, *expected[request.request_id]] for request in wanted]
    with Bench(runners, "head2", names, [(2, 6)], inexact="three") as bench:
        for machine in bench.machines.values():
            machine.dies_at = 10
        bench.machines[names[-1]].dies_at = None
        source = UnsteadySource(lambda sequence: truths[sequence], Random(3), SPEC.vocab)
        run = Run(bench.executor, drafting=DraftingConfig("knowing", {"knowing": source}))
        for request in wanted:
            run.engine.add(request)
        drafted = dict.fromkeys(names, 0)
        asked = dict.fromkeys(names, 0)
        off = set[str]()
        while run.engine.has_work:
            before, asks = sum(run.engine.stats().drafted_tokens.values()), source.asks
            run.step()
            (stage,) = bench.router.routes[-1].stages
            drafted[stage.node_id] += sum(run.engine.stats().drafted_tokens.values()) - before
            asked[stage.node_id] += source.asks - asks
            off |= {stage.node_id} if run.engine.stats().drafts_off else set()
        assert run.tokens == expected
        assert bench.executor.failovers == 2
        assert {name for name in names if drafted[name]} == {"one", "two"}
        assert {name for name in names if asked[name]} <= {"one", "two"}
        assert off == {"three"}
        assert not source.told


@pytest.mark.parametrize("dies_at", [1, 2, 5, 9, 17])
@pytest.mark.parametrize(("head", "first"), [("head", 0), ("head2", 2)])
def test_a_machine_that_dies_costs_no_byte(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], head: str, first: int, dies_at: int
) -> None:
    with Bench(runners, head, ["one", "two", "three"], [(first, 4), (4, 6)]) as bench:
        bench.machines["two"].dies_at = dies_at
        assert bench.run.all(requests()) == expected
        assert bench.executor.failovers == 1
        assert {notice.kind for notice in bench.run.notices} == {"shard_status", "shard_failover"}
        assert {stage.node_id for stage in bench.router.routes[-1].stages} == {"one", "three"}


class Unlike(Bench):
    """The second machine computes other bytes than the others, and takes over from the first; the third takes over from the second."""

    def __init__(self, runners: dict[str, LayerRunner[Any]], dies_at: Sequence[int]) -> None:
        super().__init__(runners, "head2", ["one", "two", "three"], [(2, 6)])
        one, two, _ = self.machines.values()
        two.numerics_id, two.tamper = "others", lambda _, out_TD: out_TD ^ 0x30
        one.dies_at, two.dies_at = (*dies_at, None, None)[:2]

    def through(self, wanted: Sequence[GenerationRequest]) -> dict[str, list[int]]:
        """Tokens of requests after those so far, from a pipeline that the second machine runs from its beginning."""
        self.machines["two"].dies_at = None
        router = MemoryRouter([self.machines["two"]], [LayerRange(2, 6)])
        executor = PipelineExecutor(self.executor._head, SPEC.n_layers, router, LIMITS, SystemClock())  # pyright: ignore[reportPrivateUsage]
        found = Run(executor).all(wanted)
        router.close()
        return found


def changes(notices: Sequence[Notice]) -> list[dict[str, object]]:
    return [dict(notice.detail) for notice in notices if notice.kind == NUMERICS_CHANGED]


def test_an_answer_that_an_unlike_machine_continues_says_so_and_follows_from_its_token_ids(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]
) -> None:
    wanted, own = requests(3), runners["head2"].numerics_id
    with Unlike(runners, [6]) as bench:
        tokens = bench.run.all(wanted)
        told = changes(bench.run.notices)
        assert told
        assert {(each["node"], each["from"], each["to"], each["matched_by"]) for each in told} == {("two", own, "", "digest")}
        stats = bench.run.engine.stats()
        assert stats.numerics_id == ""
        places = dict.fromkeys((request.request_id for request in wanted), 0)
        # Requests are told in their order, and those alone that have begun.
        begun = [request for request in wanted if tokens[request.request_id][:1] == expected[request.request_id][:1]][: len(told)]
        places |= {request.request_id: int(str(each["n_tokens"])) for request, each in zip(begun, told, strict=True)}
        for request in wanted:
            place = places[request.request_id]
            assert tokens[request.request_id][:place] == expected[request.request_id][:place]
        so_far = [replace(one, so_far={0: tuple(tokens[one.request_id][: places[one.request_id]])}) for one in wanted]
        after = bench.through(so_far)
        assert {name: tokens[name][place:] for name, place in places.items()} == after
        assert after != {name: expected[name][place:] for name, place in places.items()}, "the machine computes other bytes"


def test_blocks_of_unlike_machines_are_never_found_once_machines_are_alike_again(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]
) -> None:
    with Unlike(runners, [6, 16]) as bench:
        tokens = bench.run.all(requests())
        assert tokens != expected
        assert [(each["from"], each["to"]) for each in changes(bench.run.notices)][-1][0] == ""
        assert bench.run.engine.stats().numerics_id == runners["head2"].numerics_id
        hits = bench.run.engine.stats().prefix_hits_tokens
        again = [replace(request, request_id=RequestId(f"again-{request.request_id}"), exact=True) for request in requests()]
        assert {name: tokens for name, tokens in bench.run.all(again).items() if name.startswith("again")} == {
            f"again-{name}": tokens for name, tokens in expected.items()
        }
        assert bench.run.engine.stats().prefix_hits_tokens >= hits


def test_an_exact_answer_ends_where_an_unlike_machine_takes_over_and_none_begins(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]
) -> None:
    exact = [replace(request, exact=request.request_id == "r0") for request in requests(2)]
    with Unlike(runners, [6]) as bench:
        tokens = bench.run.all(exact)
        assert bench.run.ends["r0"] == (FinishReason.ERROR, NUMERICS_CHANGED)
        assert tokens["r0"] == expected["r0"][: len(tokens["r0"])]
        assert bench.run.ends["r1"][0] is FinishReason.LENGTH
        with pytest.raises(WayNotAllowed) as refused:
            bench.run.engine.add(exact[0])
        assert refused.value.field == "exact"


@pytest.mark.parametrize("promises", [True, False])
def test_a_pipeline_promises_bytes_if_its_stages_and_what_crosses_between_them_do(
    runners: dict[str, LayerRunner[Any]], promises: bool
) -> None:
    router = MemoryRouter(machines(runners, "one"), [LayerRange(2, 6)])
    executor = PipelineExecutor(runners["head2"], SPEC.n_layers, router, LIMITS, SystemClock(), promises=promises)
    assert executor.numerics_id == (runners["head2"].numerics_id if promises else "")
    router.close()


@pytest.mark.parametrize(("blamed", "spans"), [("two", [("two", 4, 6)]), (None, [("one", 2, 4), ("two", 4, 6)])])
def test_a_loss_names_the_spans_whose_kv_is_void(
    runners: dict[str, LayerRunner[Any]], blamed: NodeId | None, spans: list[tuple[NodeId, int, int]]
) -> None:
    with Bench(runners, "head2", ["one", "two"], [(2, 4), (4, 6)]) as bench:
        bench.router.routes[-1]._faults.append(PipelineFault(blamed, "shard_unavailable", "gone"))  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(ExecutorLost) as lost:
            bench.executor.restore(())
        assert lost.value.spans == tuple(LayerSpan(node_id, LayerRange(start, stop)) for node_id, start, stop in spans)


def rows_run(bench: Bench) -> dict[tuple[str, LayerRange], int]:
    return {(name, layers): rows for name, machine in bench.machines.items() for layers, rows in machine.rows.items()}


@pytest.mark.parametrize(("head", "splits"), [("head2", [(2, 4), (4, 6)]), ("head", [(0, 2), (2, 5), (5, 6)])])
@pytest.mark.parametrize("dies_at", [5, 14, 30])
@pytest.mark.parametrize("place", [0, -1])
def test_those_behind_a_lost_stage_compute_nothing_anew_and_this_machine_neither(
    runners: dict[str, LayerRunner[Any]],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    splits: list[tuple[int, int]],
    dies_at: int,
    place: int,
) -> None:
    own, own_rows = runners[head], 0
    run_layers = own.run_layers

    def counted(x_TD: Any, plan: Any, part: LayerRange | None = None) -> Any:
        nonlocal own_rows
        own_rows += int(plan.n_rows_S.sum())
        return run_layers(x_TD, plan, part)

    monkeypatch.setattr(own, "run_layers", counted)
    wanted = requests(5, max_tokens=30)
    rows = dict[bool, tuple[int, dict[LayerRange, int]]]()
    for breaks in (False, True):
        own_rows = 0
        with Bench(runners, head, ["one", "two", "three", "four"], splits) as bench:
            victim = bench.machines[bench.executor.stages[place].node_id]
            victim.dies_at = dies_at if breaks else None
            answers = bench.run.all(wanted)
            assert {name: tokens[:12] for name, tokens in answers.items()} == expected
            spans = [LayerRange(*span) for span in splits]
            rows[breaks] = own_rows, {span: sum(machine.rows.get(span, 0) for machine in bench.machines.values()) for span in spans}
            assert bench.executor.failovers == breaks
    (own_before, before), (own_after, after) = rows[False], rows[True]
    in_flight = sum(len(request.prompt_ids) for request in wanted) // 4
    spans = list(before)
    for span in spans[spans.index(LayerRange(*splits[place])) + 1 :]:
        assert after[span] <= before[span] + in_flight
    assert own_after <= own_before + in_flight
    if dies_at == 30:
        assert after[LayerRange(*splits[place])] > before[LayerRange(*splits[place])] + in_flight


def test_several_die_one_after_another(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]) -> None:
    with Bench(runners, "head2", ["one", "two", "three"], [(2, 6)]) as bench:
        bench.machines["one"].dies_at = 4
        bench.machines["two"].dies_at = 7
        assert bench.run.all(requests()) == expected
        assert bench.executor.failovers == 2


def test_several_die_at_once(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]) -> None:
    with Bench(runners, "head2", ["one", "two", "three"], [(2, 4), (4, 6)]) as bench:

        def back(look: int) -> None:
            if look == 4:  # one of them is started again while requests wait
                bench.machines["one"].alive, bench.machines["one"].dies_at = True, None
                bench.router.quarantined.clear()

        bench.machines["one"].dies_at = bench.machines["two"].dies_at = 3
        bench.router.on_look = back
        assert bench.run.all(requests()) == expected


def test_a_machine_that_hangs_is_found(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]) -> None:
    with Bench(runners, "head", ["one", "two", "three"], [(0, 3), (3, 6)]) as bench:
        for request in requests():
            bench.run.engine.add(request)
        bench.run.step()
        bench.machines["two"].hangs = True
        while bench.run.engine.has_work:
            bench.run.step()
        assert bench.run.tokens == expected
        (fault,) = [notice for notice in bench.run.notices if notice.kind == "shard_failover"][:1]
        assert fault.detail["lost"] == "two"


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F00])
def test_garbage_is_noticed_by_whom_it_is_sent_to(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], bits: int) -> None:
    with Bench(runners, "head", ["one", "two"], [(0, 6)]) as bench:

        def spoil(_: object, x_TD: Any) -> Any:
            x_TD[-1, 7] = bits
            return x_TD

        bench.machines["one"].tamper = spoil
        assert bench.run.all(requests()) == expected
        assert any(notice.detail.get("code") == "shard_corrupt" for notice in bench.run.notices)
        assert bench.router.quarantined == {"one"}


def test_rows_that_are_missing_are_noticed(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]) -> None:
    with Bench(runners, "head", ["one", "two"], [(0, 6)]) as bench:
        bench.machines["one"].tamper = lambda _, x_TD: x_TD[:-1]
        assert bench.run.all(requests()) == expected


def test_where_none_are_left_answers_end_and_later_ones_are_served(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.LIMITS", PipelineLimits(stall_s=3.0, search_s=0.0, look_s=0.01))
    with Bench(runners, "head2", ["one"], [(2, 6)]) as bench:
        bench.machines["one"].dies_at = 3
        bench.run.all(requests())
        assert len(bench.run.ends) == 5
        assert {*bench.run.ends.values()} == {(FinishReason.ERROR, "shard_unavailable")}
        assert bench.run.notices[-1].kind == "pipeline_aborted"
        assert bench.executor.lacks == "No machines are left for layers 2 to 5: No machine has layers 2 to 5"
        bench.machines["one"].alive, bench.machines["one"].dies_at = True, None
        bench.router.quarantined.clear()
        assert bench.executor.lacks is None, "a request may find it"
        later = Run(bench.executor)
        bench.run.engine = later.engine
        assert later.all(requests()) == expected


def test_answers_of_a_pipeline_that_stalls_end_with_that_code_where_no_others_are(
    runners: dict[str, LayerRunner[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.LIMITS", PipelineLimits(stall_s=0.2, search_s=0.0, look_s=0.01))
    with Bench(runners, "head2", ["one"], [(2, 6)]) as bench:
        for request in requests():
            bench.run.engine.add(request)
        bench.run.step()
        bench.machines["one"].hangs = True
        while bench.run.engine.has_work:
            bench.run.step()
        assert {*bench.run.ends.values()} == {(FinishReason.ERROR, "pipeline_stalled")}
        told = {(notice.kind, notice.detail["code"]) for notice in bench.run.notices}
        assert told == {("shard_status", "pipeline_stalled"), ("pipeline_aborted", "pipeline_stalled")}


class Counted:
    """A `PipelineWatch` that lists what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.steps = 0
        self.on_fell_back: Callable[[], None] = lambda: None
        self.hops = Counter[str]()

    def constructed(self, seconds: float, *, failover: bool) -> None:
        assert seconds >= 0
        self.told += ["constructed", "failed over"][: 1 + failover]

    def stepped(self, seconds: float) -> None:
        self.steps += 1

    def hopped(self, stage: RouteStage, seconds: float, batches: int) -> None:
        assert seconds == pytest.approx(0.002)
        self.hops[stage.shard_id] += batches

    def lost(self, fault: PipelineFault) -> None:
        self.told.append(f"lost {fault.node_id}")

    def fell_back(self) -> None:
        self.told.append("fell back")
        self.on_fell_back()


class Alone(Bench):
    """A pipeline that may go on here, on layers loaded when they are wanted."""

    def __init__(
        self, runners: dict[str, LayerRunner[Any]], head: str, names: Sequence[str], *, after: int | None = None, **limits: float
    ) -> None:
        self.machines = {machine.node_id: machine for machine in machines(runners, *names)}
        own, self.loaded = runners[head].layers.stop, list[LocalRoute]()
        self.router = MemoryRouter(list(self.machines.values()), [LayerRange(own, 6)])
        self.error: Exception | None = None
        self.counted = Counted()
        self.fallback = Fallback(lambda: self.load(own), after, SystemClock())
        bounds = PipelineLimits(**{"stall_s": 3.0, "search_s": 0.0 if after is None else 3600.0, "look_s": 0.001, **limits})
        clock = SystemClock()
        self.executor = PipelineExecutor(runners[head], 6, self.router, bounds, clock, fallback=self.fallback, watch=self.counted)
        self.run = Run(self.executor)

    def load(self, own: int) -> LocalRoute:
        if self.error is not None:
            raise self.error
        runner = load(LayerRange(own, 6), edges=False)
        self.loaded.append(LocalRoute(NodeId("here"), "m", runner, max_rows=1024, max_context=1 << 20, width=SPEC.hidden))
        return self.loaded[-1]

    def __exit__(self, *_: object) -> None:
        for route in self.loaded:
            route.close()
        super().__exit__()


@pytest.mark.parametrize("head", ["head", "head2"])
def test_where_it_may_this_machine_goes_on_alone_with_the_same_bytes(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], head: str
) -> None:
    with Alone(runners, head, ["one", "two"]) as bench:
        bench.machines["one"].dies_at, bench.machines["two"].dies_at = 4, 3
        assert bench.run.all(requests()) == expected
        assert bench.counted.told == ["constructed", "lost one", "constructed", "failed over", "lost two", "fell back"]
        shard = "m:0-5" if head == "head" else "m:2-5"
        assert bench.counted.hops.keys() == {shard}, "of both machines that ran them, and not of this one"
        assert 0 < bench.counted.steps <= bench.counted.hops[shard]
        notice = next(notice for notice in bench.run.notices if notice.kind == "local_fallback")
        assert notice.detail["layers"] == ("0 to 5" if head == "head" else "2 to 5")
        assert bench.executor.depth == 1
        assert Run(bench.executor).all(requests()) == expected
        assert len(bench.loaded) == 1


class AloneAWhile(Alone):
    """The machine that went away is back once this machine goes on alone."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.counted.on_fell_back = self._come_back

    def _come_back(self) -> None:
        one = self.machines["one"]
        one.alive, one.dies_at = True, None
        self.router.quarantined.clear()


@pytest.mark.parametrize("n_blocks", [BLOCKS, BLOCKS // 2])
def test_machines_that_come_back_take_over_again_in_the_middle_of_answers(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], n_blocks: int
) -> None:
    with AloneAWhile(runners, "head2", ["one"], alone_s=0.0) as bench:
        bench.machines["one"].n_blocks = n_blocks
        bench.machines["one"].dies_at = 4
        run = bench.run
        assert run.all(requests()) == expected
        assert [stage.node_id for stage in bench.executor.stages] == ["one"]
        assert bench.executor.depth == 2
        assert bench.counted.told == ["constructed", "lost one", "fell back"]
        told = [notice.detail["status"] for notice in run.notices if notice.kind == "shard_status"]
        assert list(dict.fromkeys(told)) == ["degraded", "restored"]
        run.engine.check_invariants()
        # The same once more: what was let go is loaded anew.
        bench.machines["one"].dies_at = 1
        assert Run(bench.executor).all(requests()) == expected
        assert len(bench.loaded) == 2


@pytest.mark.parametrize("lacks", ["memory", "numerics", "identity"])
def test_machines_that_answers_could_not_go_on_over_do_not_take_over(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], lacks: str
) -> None:
    with AloneAWhile(runners, "head2", ["one"], alone_s=0.0) as bench:
        one = bench.machines["one"]
        one.dies_at = 4
        match lacks:
            case "memory":
                one.n_blocks = 5
            case "numerics":
                one.numerics_id = "others"
            case _:
                one.holds_identity = False
        opened = bench.router.looks
        assert bench.run.all(requests()) == expected
        assert bench.router.looks > opened
        assert [stage.node_id for stage in bench.executor.stages] == ["here"]


def test_losses_end_the_search_where_that_was_asked_for(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]) -> None:
    with Alone(runners, "head2", ["one", "two", "three"], after=2) as bench:
        bench.machines["one"].dies_at, bench.machines["two"].dies_at = 4, 3
        assert bench.run.all(requests()) == expected
        assert bench.counted.told[-2:] == ["lost two", "fell back"]
        assert bench.router.looks == 2, "nobody else was looked for"


def test_where_this_machine_can_t_either_requests_end_and_machines_that_come_back_are_used(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]
) -> None:
    with Alone(runners, "head2", ["one"]) as bench:
        bench.error = OutOfMemory("The weights need 9 GiB")
        bench.machines["one"].dies_at = 4
        bench.run.all(requests())
        assert {*bench.run.ends.values()} == {(FinishReason.ERROR, "shard_unavailable")}
        assert "9 GiB" in str(bench.run.notices[-1].detail["reason"])
        assert bench.executor.lacks is None, "the next request tries this machine again"
        bench.machines["one"].alive, bench.machines["one"].dies_at = True, None
        bench.router.quarantined.clear()
        assert Run(bench.executor).all(requests()) == expected


def test_where_this_machine_can_t_others_are_looked_for_however_many_were_lost(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]
) -> None:
    with Alone(runners, "head2", ["one", "two"], after=1) as bench:
        bench.error = MemoryError()
        bench.machines["one"].dies_at = 4
        assert bench.run.all(requests()) == expected
        assert bench.counted.told[-1] == "failed over"


def test_layers_that_are_loaded_for_nobody_are_closed() -> None:
    begin, closed = threading.Event(), threading.Event()

    class Loaded(LocalRoute):
        def close(self) -> None:
            super().close()
            closed.set()

    def slowly() -> LocalRoute:
        begin.wait(60)
        return Loaded(NodeId("here"), "m", load(LayerRange(2, 6), edges=False), max_rows=64, max_context=512, width=SPEC.hidden)

    fallback = Fallback(slowly, None, SystemClock())
    assert fallback.wait(0.0) is None
    assert fallback.has_begun
    fallback.close()
    begin.set()
    assert closed.wait(60)


def test_losses_of_long_ago_do_not_count() -> None:
    clock = FakeClock()
    fallback = Fallback(lambda: pytest.fail("nothing is to be loaded"), 2, clock)
    fallback.lost()
    clock.advance(FORGET_S)
    fallback.lost()
    assert not fallback.is_due
    fallback.lost()
    assert fallback.is_due


def test_while_others_load_answers_wait_and_clients_are_told_how_far_they_are(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "LOADING_S", 0.0)
    with Alone(runners, "head2", ["one", "two"], after=5, search_s=3600.0) as bench:
        bench.machines["one"].dies_at = 4
        bench.router.loading = [Opening(done, 100, done, 9.6, (NodeId("two"),)) for done in (0, 41, 80)]
        assert bench.run.all(requests()) == expected
        loading = [notice.detail for notice in bench.run.notices if notice.detail.get("status") == "loading"]
        assert {"status": "loading", "nodes": "two", "percent": "41", "seconds_left": "10"} in loading
        assert bench.counted.told[-2:] == ["constructed", "failed over"]


def test_what_loads_before_the_first_answer_is_no_news_to_clients_and_what_loads_later_none_to_who_built_it(
    runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "LOADING_S", 0.0)
    one, two = machines(runners, "one", "two")
    router, heard = MemoryRouter([one, two], [LayerRange(2, 6)]), list[Opening]()
    router.loading = [first := Opening(41, 100, 41, None, (NodeId("one"),))]
    executor = PipelineExecutor(runners["head2"], SPEC.n_layers, router, LIMITS, SystemClock(), on_opening=heard.append)
    assert not executor.notices()
    one.dies_at, router.loading = 4, [Opening(80, 100, 80, None, (NodeId("two"),))]
    run = Run(executor)
    assert run.all(requests()) == expected
    assert "80" in {notice.detail.get("percent") for notice in run.notices}
    assert heard == [first]
    router.close()


def test_a_load_that_is_called_off_ends_as_its_machines_say_how_far_they_are(runners: dict[str, LayerRunner[Any]]) -> None:
    def stopping(_: Opening) -> None:
        raise NodeStopping("This machine is being stopped")

    router = MemoryRouter(machines(runners, "one"), [LayerRange(2, 6)])
    router.loading = [Opening(41, 100, 41, None, (NodeId("one"),))]
    with pytest.raises(NodeStopping):
        PipelineExecutor(runners["head2"], SPEC.n_layers, router, LIMITS, SystemClock(), on_opening=stopping)
    router.close()


def test_less_memory_after_a_loss_is_lived_with(runners: dict[str, LayerRunner[Any]], expected: dict[str, list[int]]) -> None:
    with Bench(runners, "head2", ["one", "two"], [(2, 6)]) as bench:
        bench.machines["one"].dies_at = 6
        bench.machines["two"].n_blocks = 12
        assert bench.run.all(requests()) == expected
        assert bench.executor.n_blocks == 12


@pytest.mark.parametrize("asked", [97, None])
def test_an_answer_that_began_goes_on_over_less_memory_until_that_is_full(runners: dict[str, LayerRunner[Any]], asked: int | None) -> None:
    short, long = requests(2, max_tokens=None if asked is None else asked)
    whole = Run(LocalExecutor(runners["whole"]), prefix_cache=False).all([replace(each, max_tokens=97) for each in (short, long)])
    with Bench(runners, "head2", ["one", "two"], [(2, 6)]) as bench:
        bench.machines["one"].dies_at = 6
        bench.machines["two"].n_blocks = 5
        run = bench.run
        found = run.all([short, long])
        most = 5 * bench.executor.block_size + 1
        assert run.engine.stats().max_context == most
    for each in (short, long):
        name = each.request_id
        assert found[name] == whole[name][: most - len(each.prompt_ids)], "no byte differs"
        assert run.ends[name] == (FinishReason.LENGTH, None)


def test_who_does_not_fit_any_more_ends_with_an_error_and_no_other(runners: dict[str, LayerRunner[Any]]) -> None:
    short, _, _, _, long = requests(5, max_tokens=40)
    with Bench(runners, "head2", ["one", "two"], [(2, 6)]) as bench:
        bench.machines["one"].dies_at = 12
        bench.machines["two"].n_blocks = 5
        bench.run.all([short, long])
        assert bench.run.ends[long.request_id] == (FinishReason.ERROR, "shard_unavailable")
        assert bench.run.ends[short.request_id] == (FinishReason.LENGTH, None)
        assert len(bench.run.tokens[short.request_id]) == 40


def test_without_a_route_there_is_no_pipeline(runners: dict[str, LayerRunner[Any]]) -> None:
    router = MemoryRouter(machines(runners, "head2"), [LayerRange(2, 6)])
    with pytest.raises(ExecutorUnavailable, match="2 to 5") as caught:
        PipelineExecutor(runners["head"], SPEC.n_layers, router, PipelineLimits(search_s=0.0), SystemClock())
    router.close()
    assert caught.value.code == "shard_unavailable"


def test_a_batch_is_given_its_own_time_while_it_is_sent(runners: dict[str, LayerRunner[Any]]) -> None:
    router = MemoryRouter(machines(runners, "one"), [LayerRange(2, 6)])
    limits = PipelineLimits(row_s=1e6)
    executor = PipelineExecutor(runners["head2"], SPEC.n_layers, router, limits, SystemClock())
    stage, bounds = router.routes[0], list[float]()
    send = stage.sink.send
    stage.sink.send = lambda batch, x_TD, deadline: (bounds.append(deadline), send(batch, x_TD, deadline))[1]  # type: ignore[method-assign]
    Run(executor).all(requests(1, max_tokens=1))
    router.close()
    assert bounds[0] - SystemClock().monotonic() > 1e6


def test_activations_are_no_tokens(runners: dict[str, LayerRunner[Any]]) -> None:
    """What stages are sent: bf16 rows, and no ids."""
    with Bench(runners, "head", ["one"], [(0, 6)]) as bench:
        seen: list[Any] = []
        stage = bench.router.routes[0]
        send = stage.sink.send
        stage.sink.send = lambda batch, x_TD, deadline: (seen.append((batch, np.array(x_TD))), send(batch, x_TD, deadline))[1]  # type: ignore[method-assign]
        bench.run.all(requests(1))
        assert seen
        assert all(x_TD.dtype == np.uint16 and x_TD.shape == (batch.n_rows, SPEC.hidden) for batch, x_TD in seen)
        assert not any(hasattr(batch, "token_ids") for batch, _ in seen)
