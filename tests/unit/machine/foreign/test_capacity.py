"""Capacity and rates from answers that pass, with engines of known slots and a clock of their own."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from paceline.machine.foreign.capacity import WINDOW, Capacity, FirstToken
from paceline.machine.foreign.rates import FLOOR_S, Rates, Timed


@dataclass
class SimulatedEngine:
    """An engine with slots and a queue; or one that batches, and gets slower by `slower` with each other request."""

    slots: int
    speed: float = 1.0
    read_per_s: float = 1000.0
    pace_s: float = 0.05
    fixed_s: float = 0.1
    slower: float = 0.0
    noise: float = 0.2
    others: int = 0
    """Requests of other programs, which hold a slot all the time."""
    now_s: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    _live: list[tuple[float, int, Timed, int]] = field(default_factory=list)
    _sent: int = 0

    @property
    def in_flight(self) -> int:
        return len(self._live) + self.others

    def send(self, tokens: int, answer: int = 40) -> None:
        before, noise = self.in_flight, self.draw.uniform(1 - self.noise, 1 + self.noise)
        free = [self.now_s] if before < self.slots else sorted(end for end, *_ in self._live)[before - self.slots :]
        share = 1 + self.slower * before
        first_s = max(self.now_s, free[0]) - self.now_s + share * noise * (self.fixed_s + tokens / self.read_per_s) / self.speed
        rest_s = noise * answer * self.pace_s * share / self.speed
        self._sent += 1
        timed = Timed(tokens, first_s, answer, rest_s)
        heapq.heappush(self._live, (self.now_s + first_s + rest_s, self._sent, timed, before + 1))

    def next(self) -> tuple[Timed, int]:
        """Let the answer that ends first end. Return it with what was in flight at its start."""
        self.now_s, _, timed, in_flight = heapq.heappop(self._live)
        return timed, in_flight


def traffic(engine: SimulatedEngine, clients: Iterable[int], length: Callable[[], int] = lambda: 200) -> Iterator[tuple[Timed, int]]:
    """Keep as many requests of this node in flight as `clients` says, and yield the answers in the order in which they end."""
    for wanted in clients:
        while engine.in_flight - engine.others < wanted:
            engine.send(length())
        yield engine.next()


def waves(most: int, answers: int) -> list[int]:
    """Return a number of clients for each answer, that rises and falls between 1 and `most`."""
    rising = [*range(1, most + 1), *range(most - 1, 1, -1)]
    return (rising * answers)[:answers]


def learned(rates: Rates, answers: Iterable[tuple[Timed, int]]) -> Rates:
    for timed, in_flight in answers:
        rates.learn(timed, in_flight)
    return rates


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("told", [0, 5])
def test_slots_are_found_where_first_tokens_begin_to_wait(slots: int, told: int) -> None:
    engine = SimulatedEngine(slots)
    rates = learned(Rates(), traffic(engine, waves(2 * slots + 2, 80)))
    # With many slots, one is free soon: the first token is clearly later only behind several others.
    assert max(1, slots - 1) <= rates.at_once(told) <= slots + max(1, slots // 2)
    assert rates.at_once(told) >= rates.at_once(0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_rates_and_capacity_follow_a_change_of_speed_within_twenty_answers(speed: float, seed: int) -> None:
    engine = SimulatedEngine(3, draw=random.Random(seed))
    rates = learned(Rates(), traffic(engine, waves(6, 60)))
    before = rates.tokens_per_s, rates.prompt_per_s, rates.first_s
    engine.speed = speed
    learned(rates, traffic(engine, waves(6, 20)))
    for now, was in ((rates.tokens_per_s, before[0]), (rates.prompt_per_s, before[1]), (1 / rates.first_s, 1 / before[2])):
        assert now / was == pytest.approx(speed, rel=0.25)
    assert 2 <= rates.at_once(0) <= 5


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 3), (6, 1)])
def test_capacity_follows_a_change_of_slots(before: int, after: int) -> None:
    engine = SimulatedEngine(before)
    rates = learned(Rates(), traffic(engine, waves(8, 60)))
    engine.slots = after
    learned(rates, traffic(engine, waves(8, 2 * WINDOW)))
    assert rates.at_once(0) in range(after, after + 2) or rates.at_once(0) == 0 < after - before


def test_an_engine_that_batches_takes_as_many_as_its_first_token_allows() -> None:
    rates = learned(Rates(), traffic(SimulatedEngine(1000, slower=0.1), waves(40, 160)))
    assert 10 <= rates.at_once(0) <= 24  # 2.5 times with 16
    assert learned(Rates(), traffic(SimulatedEngine(1000, slower=0.01), waves(40, 160))).at_once(0) == 0


@pytest.mark.parametrize("clients", [[1] * 60, [4] * 60, [8] * 60])
def test_no_capacity_without_evidence(clients: list[int]) -> None:
    assert learned(Rates(), traffic(SimulatedEngine(100, noise=0.5), clients)).at_once(0) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_mix_of_prompts_is_no_queue(seed: int) -> None:
    draw = random.Random(seed)
    engine = SimulatedEngine(100, draw=draw)
    rates = learned(Rates(), traffic(engine, waves(8, 100), lambda: draw.choice([0, 20, 200, 2000, 20_000])))
    assert rates.at_once(0) == 0


def test_requests_of_other_programs_count() -> None:
    rates = learned(Rates(), traffic(SimulatedEngine(4, others=1), waves(8, 80)))
    assert rates.at_once(0) in {4, 5}


def test_a_known_capacity_stays_while_nothing_contradicts_it() -> None:
    engine = SimulatedEngine(3)
    rates = learned(Rates(), traffic(engine, waves(8, 60)))
    known = rates.at_once(0)
    for clients in ([1] * 40, [8] * 40, [2] * 40):
        assert learned(rates, traffic(engine, clients)).at_once(0) == known
    assert learned(rates, traffic(SimulatedEngine(100), waves(8, 40))).at_once(0) == 0  # no answer waits any more


@pytest.mark.parametrize("clients", [[1] * 20, [8] * 20], ids=["idle", "always full"])
def test_first_tokens_follow_whatever_the_load_is(clients: list[int]) -> None:
    engine = SimulatedEngine(3)
    rates = learned(Rates(), traffic(engine, waves(8, 60)))
    learned(rates, traffic(engine, clients))
    before = rates.first_s, rates.tokens_per_s
    engine.speed = 0.5
    learned(rates, traffic(engine, clients))
    assert (rates.first_s / before[0], before[1] / rates.tokens_per_s) == (pytest.approx(2.0, rel=0.25), pytest.approx(2.0, rel=0.2))


def test_an_answer_that_had_its_model_loaded_says_nothing_about_first_tokens() -> None:
    rates = learned(Rates(), [(Timed(100, 60.0, 40, 2.0, loaded=False), 1)])
    assert (rates.first_s, rates.prompt_per_s, rates.silence_s(10)) == (0.0, 0.0, None)
    assert rates.tokens_per_s == pytest.approx(19.5)


@pytest.mark.parametrize(
    ("seen", "tokens", "expected"),
    [
        ([], 10, None),
        ([(50, 0.3)], 50, FLOOR_S + 1.2),
        ([(50, 0.3)], 200, FLOOR_S + 4.8),
        ([(50, 0.3)], 201, None),
        ([(2000, 10.0), (50, 0.3)], 1000, FLOOR_S + 40.0),
        ([(1000, 10.0), *[(1000, 0.1)] * 30], 1000, FLOOR_S + 40.0),
        ([(1, 0.2)], 16, FLOOR_S + 0.8),
    ],
    ids=["nothing", "alike", "longer", "much longer", "slowest by the token", "kept in memory", "kept in memory whole"],
)
def test_silence_is_bounded_where_a_prompt_s_time_is_known(seen: list[tuple[int, float]], tokens: int, expected: float | None) -> None:
    rates = learned(Rates(), [(Timed(read, first_s, 20, 1.0, read), 1) for read, first_s in seen])
    assert rates.silence_s(tokens) == (None if expected is None else pytest.approx(expected))


def test_an_outlier_is_no_queue() -> None:
    capacity = Capacity()
    for number in range(60):
        capacity.learn(FirstToken(1 + number % 4, 100, 9.0 if number % 15 == 0 else 0.2))
    assert capacity.at_once() == 0
