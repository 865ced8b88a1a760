"""Blocks that another thread reads stay as they are until it gives them back, or it hears that they are void."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
from tests.fakes.engines import VOCAB, EngineBench

from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.kv_source import MOST_CHAINS, MOST_MARKS, KvLoan, KvLoans
from paceline.engine.prefix_cache import prompt_keys, root_key


def request(name: str, prompt: list[int], caller: str = "", *, shares_kv: bool = False) -> GenerationRequest:
    return GenerationRequest(RequestId(name), tuple(prompt), 4, SamplingParams(seed=1), caller=caller, shares_kv=shares_kv, ignore_eos=True)


def keys_of(prompt: list[int]) -> list[bytes]:
    return prompt_keys(root_key("null", ""), prompt, 4)


def content(bench: EngineBench, loan: KvLoan) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for key, block in loan.blocks.items():
        data = bytearray(bench.runner.block_bytes)
        bench.runner.export_block(block, memoryview(data))
        found[key] = bytes(data)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_what_is_lent_is_not_written_whatever_runs(seed: int) -> None:
    draw, loans = random.Random(seed), KvLoans()
    bench = EngineBench(n_blocks=draw.choice((20, 40)), loans=loans, lose=range(30, 400, 37) if draw.random() < 0.4 else ())
    prompts = [[draw.randrange(1, VOCAB) for _ in range(draw.randrange(8, 40))] for _ in range(12)]
    keys = [key for prompt in prompts for key in keys_of(prompt)]
    lent: dict[KvLoan, dict[bytes, bytes]] = {}
    asked: list[Future[KvLoan]] = []
    right: dict[bytes, bytes] = {}
    held = 0
    for number in range(200):
        if draw.random() < 0.4:
            bench.add(request(str(number), draw.choice(prompts)))
        if draw.random() < 0.3 and sum(len(loan.blocks) for loan in lent) < 6:
            asked.append(loans.ask(draw.sample(keys, 3)))
        if lent and draw.random() < 0.3:
            loan = draw.choice(list(lent))
            loans.give_back(loan)
            del lent[loan]
        if bench.engine.has_work:
            bench.step()
        for future in [one for one in asked if one.done()]:
            asked.remove(future)
            loan = future.result()
            if not loan.is_void:
                lent[loan] = content(bench, loan)
                for key, data in lent[loan].items():
                    assert right.setdefault(key, data) == data, "a name has other bytes than before"
                held += len(loan.blocks)
        for loan, before in lent.items():
            assert loan.is_void or content(bench, loan) == before
    for loan in lent:
        loans.give_back(loan)
    bench.run()
    assert held
    assert not loans.out


def test_what_was_asked_for_and_is_not_wanted_any_more_is_not_lent() -> None:
    loans = KvLoans()
    bench, prompt = EngineBench(loans=loans), list(range(1, 21))
    bench.run(request("a", prompt))
    assert loans.ask(keys_of(prompt)).cancel()
    bench.run()
    assert not loans.out
    found = loans.ask([*keys_of(prompt), bytes(16)])
    bench.engine.submit()
    assert list(found.result(0).blocks) == keys_of(prompt)
    loans.give_back(found.result(0))
    bench.run()


def test_what_a_failed_engine_lent_is_void_and_no_block_of_the_next_one() -> None:
    loans, prompt = KvLoans(), list(range(1, 21))
    bench = EngineBench(loans=loans)
    bench.run(request("a", prompt))
    asked = loans.ask(keys_of(prompt))
    bench.engine.submit()
    loans.void(None)
    assert asked.result(0).is_void
    another = EngineBench(loans=loans)
    loans.give_back(asked.result(0))
    another.run(request("a", prompt))
    assert not loans.prefixes.marks


def chain(name: int, length: int, begins: Sequence[bytes] = ()) -> list[bytes]:
    return [*begins, *((name << 32 | place).to_bytes(16, "big") for place in range(len(begins), length))]


def test_beginnings_of_two_conversations_are_told_with_their_ends_and_where_they_may_part_and_no_more_than_so_many() -> None:
    loans = KvLoans()
    told: list[int] = []
    loans.on_used = lambda: told.append(loans.prefixes.version)
    one = chain(1, 60)
    loans.used(one[:40], 35)
    assert not loans.prefixes.marks
    loans.used(chain(2, 40, one[:21]), 35)
    assert loans.prefixes.marks == (one[20], one[15], one[7], one[3])
    loans.used(one, 45)  # the first goes on
    assert loans.prefixes.marks == (one[20], one[15], one[7], one[3])
    loans.used(chain(3, 50, one[:30]), 35)
    assert loans.prefixes.marks == (one[29], one[15], one[7], one[3], one[20])
    for other in range(MOST_CHAINS):
        begins = chain(10 + other // 2, 30)
        loans.used(chain(100 + other, 40, begins), 40)
    assert len(loans.prefixes.marks) == MOST_MARKS
    assert told == list(range(1, loans.prefixes.version + 1))


@pytest.mark.parametrize(
    "others",
    [
        [chain(1, 30)],  # asked again
        [chain(2, 40, chain(1, 30))],  # gone on with
        [chain(2, 40, chain(1, 24))],  # answered otherwise
        [chain(1, 12)],  # cut
        [chain(2, 40, chain(1, 3)), chain(3, 40)],  # too short a beginning, and none
        [chain(2, 40, chain(1, 26)), chain(3, 60, chain(2, 40, chain(1, 26)))],
    ],
)
def test_one_conversation_is_told_to_none_but_the_node_that_asked(others: list[list[bytes]]) -> None:
    loans, own = KvLoans(), chain(1, 30)
    loans.used(own, 24, "member")
    for other in others:
        loans.used(other, max(24, len(other) - 6))
    assert loans.prefixes.marks == loans.prefixes.marks_for("another") == ()
    loans.used(own, 24, "member")
    assert loans.prefixes.marks_for("member")[0] == own[-1]
    assert loans.prefixes.marks == ()


def test_what_is_computed_for_others_is_told_only_where_they_share() -> None:
    loans = KvLoans()
    bench, prompt = EngineBench(loans=loans), list(range(1, 25))
    bench.run(request("a", prompt, "guest"))
    assert not loans.prefixes.marks
    bench.run(request("b", prompt, "member", shares_kv=True))
    assert not loans.prefixes.marks
    assert loans.prefixes.marks_for("member")[0] == keys_of(prompt)[-1]
    assert bench.run(request("c", prompt))[RequestId("c"), 0].cached_tokens > 0
    assert bench.run(request("d", prompt, "other"))[RequestId("d"), 0].cached_tokens == 0


def test_a_request_for_its_prompt_alone_leaves_every_whole_block() -> None:
    loans, prompt = KvLoans(), list(range(1, 21))
    bench = EngineBench(loans=loans)
    bench.run(replace(request("a", prompt), max_tokens=1))
    found = loans.ask(keys_of(prompt))
    bench.engine.submit()
    assert list(found.result(0).blocks) == keys_of(prompt)
    loans.give_back(found.result(0))
    bench.run()


def test_blocks_are_lent_as_soon_as_they_are_computed() -> None:
    loans, prompt = KvLoans(), list(range(1, 21))
    bench = EngineBench(loans=loans)
    keys = keys_of(prompt)
    asked = [loans.ask(keys[place:], when_computed=True) for place in range(len(keys))]
    gone = loans.ask(keys, when_computed=True)
    bench.run(request("b", prompt[::-1]))  # steps, and what is asked for stays away
    assert not any(one.done() for one in asked)
    assert gone.cancel()
    bench.add(replace(request("a", prompt), max_tokens=1))
    lent = list[int]()
    while bench.engine.has_work:
        bench.step()
        lent.append(sum(one.done() for one in asked))
    assert lent[0] == 2
    assert lent[-1] == len(keys), "a chunk of eight at a time"
    for one in asked:
        loans.give_back(one.result(0))
    bench.run()
    assert not loans.out
