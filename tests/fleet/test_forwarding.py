"""A fleet of which one machine has a model: it answers at every machine, with the same bytes, through the official client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from tests.fakes.api_clients import openai_client
from tests.fleet.machines import BOUND_S, EMPTY, Machine, until

MODEL = "smollm2-135m"
SMALL = ("--fleet-port", "0", "--context", "512", "--kv-tokens", "4096")
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0}


@dataclass(frozen=True, slots=True)
class Pair:
    """`asked` has no model; `runs` has one."""

    asked: Machine
    runs: Machine

    @property
    def client(self) -> openai.OpenAI:
        return client_of(self.asked)


def client_of(machine: Machine) -> openai.OpenAI:
    return openai_client(machine.node.url, timeout=300)


def metric(machine: Machine, name: str) -> float:
    with urlopen(f"{machine.node.url}/metrics", timeout=BOUND_S) as page:
        lines = [line for line in page.read().decode().splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].rpartition(" ")[2])


@pytest.fixture(scope="module")
def joined(members: tuple[Machine, Machine]) -> Pair:
    asked, runs = members
    if not asked.is_up:
        asked.up(*EMPTY)
    if runs.is_up:
        runs.node.stop()
    return Pair(asked, runs)


@pytest.fixture
def pair(joined: Pair) -> Pair:
    if not joined.runs.is_up:
        joined.runs.up(*SMALL)
    until(lambda: [model.id for model in joined.client.models.list()] == [MODEL])
    return joined


def test_status_says_who_would_run_it_and_of_what_runs_here_how(pair: Pair) -> None:
    said = pair.asked.status()
    # Which of two alike is faster was measured, on a processor that others used too.
    assert (said["running"], said["plans"]) in [([], [{"model": MODEL, "plan": f"{one.name} alone"}]) for one in (pair.runs, pair.asked)]
    said = pair.runs.status()
    assert ([one["model"] for one in said["running"]], said["plans"]) == ([MODEL], [])


def test_the_answer_is_the_one_that_the_other_machine_gives(pair: Pair) -> None:
    there, here = client_of(pair.runs), pair.client
    assert here.models.list().data[0].model_dump(exclude={"created"}) == there.models.list().data[0].model_dump(exclude={"created"})
    for extra in ({}, {"seed": 7, "temperature": 1.0, "n": 2}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["3"]}):
        asked = {**ASK, "max_tokens": 24, **extra}
        one, other = (client.chat.completions.create(**asked) for client in (there, here))
        assert one.choices == other.choices
        assert one.system_fingerprint == other.system_fingerprint
        assert (one.usage and one.usage.completion_tokens) == (other.usage and other.usage.completion_tokens)
    completions = [
        client.completions.create(model=MODEL, prompt=["One, two,", "A, b,"], max_tokens=8, temperature=0) for client in (there, here)
    ]
    assert completions[0].choices == completions[1].choices
    until(lambda: metric(pair.asked, "paceline_fleet_forwarded_total") >= 6 and metric(pair.runs, "paceline_fleet_served_total") >= 6)


def test_a_request_says_what_is_drafted_with_wherever_it_runs(pair: Pair) -> None:
    texts = {
        pair.client.completions.create(model=MODEL, prompt="a b c a b c a", max_tokens=16, temperature=0, extra_body=body).choices[0].text
        for body in ({}, {"draft": "off"}, {"draft": "ngram"})
    }
    assert len(texts) == 1
    with pytest.raises(openai.BadRequestError, match="auto, off, ngram"):
        pair.client.chat.completions.create(**ASK, extra_body={"draft": "no-such-model"})


def test_a_stream_arrives_piece_by_piece(pair: Pair) -> None:
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in pair.client.chat.completions.create(**ASK, max_tokens=32, stream=True)
        if chunk.choices
    ]
    whole = client_of(pair.runs).chat.completions.create(**ASK, max_tokens=32).choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 4
    assert "".join(pieces) == whole


def test_errors_keep_their_type(pair: Pair) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody-has-this"):
        pair.client.chat.completions.create(**{**ASK, "model": "nobody-has-this"})
    with pytest.raises(openai.BadRequestError, match="context"):
        pair.client.chat.completions.create(**ASK, max_tokens=5000)
    with pytest.raises(openai.BadRequestError) as refused:
        pair.client.chat.completions.create(**ASK, top_p=7)
    assert refused.value.param == "top_p"


def test_a_client_that_leaves_ends_the_generation_over_there(pair: Pair) -> None:
    def left_while_it_ran() -> bool:
        with pair.client.chat.completions.create(**ASK, max_tokens=400, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
            return metric(pair.runs, "paceline_requests_running") == 1

    until(left_while_it_ran)  # on a busy processor an answer may be over before it is looked at
    until(lambda: metric(pair.runs, "paceline_requests_running") == 0 and metric(pair.runs, "paceline_kv_blocks_used") == 0)


def test_a_machine_lost_in_mid_answer_is_waited_for_and_its_model_goes_with_its_card(pair: Pair) -> None:
    asked = {**ASK, "max_tokens": 450, "stream": True, "seed": 3, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    whole = [chunk.choices[0].delta.content for chunk in pair.client.chat.completions.create(**asked) if chunk.choices]
    stream = pair.client.chat.completions.create(**asked)
    pieces = [next(iter(stream)).choices[0].delta.content for _ in range(20)]
    pair.runs.node.kill()
    pair.runs.up(*SMALL)
    pieces += [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == "".join(piece or "" for piece in whole)
    pair.runs.node.kill()
    # Its card lives on for a while: what is asked meanwhile is an answer too.
    with pytest.raises(openai.APIStatusError):
        pair.client.chat.completions.create(**ASK, max_tokens=4)
    until(lambda: pair.client.models.list().data == [])
    # It may be back in a moment, which a client that retries finds out.
    with pytest.raises(openai.InternalServerError) as refused:
        pair.client.chat.completions.create(**ASK, max_tokens=4)
    assert (refused.value.status_code, refused.value.code) == (503, "no_machine")
    assert int(refused.value.response.headers["retry-after"]) > 0
    with pytest.raises(openai.NotFoundError):
        pair.client.models.retrieve("nobody-has-this")
