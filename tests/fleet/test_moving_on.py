"""A door and two machines that have the model: an answer that one of them can't go on with goes on at the other, with the same bytes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes.shallow_model import MODEL, write_shallow
from tests.fleet.machines import BOUND_S, EMPTY, Machine, free_port, machines, token_in, until
from tests.fleet.test_forwarding import ASK as PLAIN
from tests.fleet.test_forwarding import client_of, metric

from paceline.store.home import Home

SMALL = ("--fleet-port", "0", "--context", "2048", "--kv-tokens", "4096", "--threads", "1", "--drain-s", "0.1")
THINKER = "thinker"
"""The whole bundled model, whose template can begin an answer's reasoning: of what the first layers say nothing has a form."""
ALL_LAYERS = 30
THINKS = "{% if add_generation_prompt and enable_thinking %}{{ '<think>\\n' }}{% endif %}"
TOKENS = 600
"""So many last until a machine is struck, where none is guessed."""
SOON_FULL = 60
"""Fewer answers than one machine takes of another: none moves on for want of room."""
ASK: dict[str, Any] = {**PLAIN, "model": MODEL}
LONG: dict[str, Any] = {**ASK, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "draft": "off"}}
DRAWN = {**LONG, "temperature": 1.0, "seed": 5}
"""Of the first layers alone, what is likeliest is soon the same again and again, and a token too many would not be seen."""


class Trio:
    """`door` has no model; the others have."""

    def __init__(self, door: Machine, *runs: Machine) -> None:
        self.door, self.runs = door, runs
        self.model = Path()

    @property
    def client(self) -> openai.OpenAI:
        return client_of(self.door)

    def serving(self) -> Machine:
        """The one that runs an answer now. Another may still be ending the one before."""
        found: list[Machine] = []

        def is_alone() -> bool:
            found[:] = [machine for machine in self.runs if machine.is_up and metric(machine, "paceline_requests_running")]
            return len(found) == 1

        until(is_alone)
        return found[0]

    def heal(self, model: Path) -> None:
        """Have both run this model, and the door see them."""
        for machine in self.runs:
            if machine.is_up and model != self.model:
                machine.node.kill()
            if not machine.is_up:
                machine.up("--model", str(model), *SMALL)
        self.model = model
        until(lambda: all(self.offers(machine) for machine in self.runs))
        until(lambda: [each.id for each in self.client.models.list()] == [model.stem])

    def offers(self, machine: Machine) -> bool:
        """Whether the door sees what runs there now."""
        card = self.door.card_of(machine.name)
        return card is not None and machine.node.address in card.addresses and any(offer.warm for offer in card.models if offer.digest)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with machines(tmp_path_factory.mktemp("trio"), Home.from_environment().kernels, "door", "b", "c") as (door, b, c):
        door.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        door.up(*EMPTY)
        for machine in (b, c):
            machine.run("join", token_in(door.run("token", "--address", "127.0.0.1")), "--name", machine.name)
        yield Trio(door, b, c)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shallow(tmp_path_factory.mktemp("model"), ALL_LAYERS, THINKER, THINKS)


@pytest.fixture
def thinkers(joined: Trio, thinker: Path) -> Trio:
    joined.heal(thinker)
    return joined


@pytest.fixture
def trio(joined: Trio, shallow_gguf: Path) -> Trio:
    joined.heal(shallow_gguf)
    return joined


def collect(stream: openai.Stream[Any], at: dict[int, Any]) -> tuple[list[str], list[str | None], list[Any]]:
    """Texts, endings and logprobs of a stream's choices; at some pieces, something happens."""
    texts, ends, logprobs = ["", ""], [None, None], list[Any]()
    for number, chunk in enumerate(stream):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
            logprobs += (choice.logprobs and choice.logprobs.content) or []
        if number in at:
            at.pop(number)()
    assert not at, "the answer ended before its time"
    return texts, ends, logprobs


STEPS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 60},
        "steps": {"type": "array", "minItems": 9, "maxItems": 9, "items": {"type": "string", "maxLength": 60}},
    },
    "required": ["answer", "steps"],
    "additionalProperties": False,
}
THOUGHTS = (
    ("What do bees make?", "Bees visit flowers and take nectar home. So the answer is honey.", "Bees make honey."),
    ("What do cows give?", "Cows eat grass all day, and farmers milk them. So the answer is milk.", "Cows give milk."),
)
FORMED: dict[str, dict[str, Any]] = {
    "content": {"response_format": {"type": "json_schema", "json_schema": {"name": "steps", "schema": STEPS}}, "temperature": 0.7},
    "arguments": {"tools": [{"type": "function", "function": {"name": "reply", "parameters": STEPS}}], "tool_choice": "required"},
}


def thinking_chat(kind: str) -> list[dict[str, str]]:
    """A chat that shows how to think first, and what to write behind that."""
    said = {"content": "{}", "arguments": '<tool_call>\n{{"name": "reply", "arguments": {}}}\n</tool_call>'}[kind]
    turns: list[dict[str, str]] = []
    for question, thought, answer in THOUGHTS:
        written = said.format(json.dumps({"answer": answer, "steps": [answer] * 3}))
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{written}"},
        ]
    return [*turns, {"role": "user", "content": "What do hens lay?"}]


@pytest.mark.whole("the whole model answers for minutes on a busy machine")
@pytest.mark.parametrize(("kind", "in_mid"), [("content", "content"), ("arguments", "reasoning_content")])
def test_a_form_behind_reasoning_goes_on_where_its_machine_is_killed(thinkers: Trio, kind: str, in_mid: str) -> None:
    asked: dict[str, Any] = {
        **ASK,
        "model": THINKER,
        "messages": thinking_chat(kind),
        "seed": 11,
        "max_tokens": 400,
        "stream": True,
        **FORMED[kind],
    }
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    parts: list[dict[str, str]] = []
    moved = metric(thinkers.door, "paceline_fleet_retried_total")
    for kills in (False, True):
        seen = {"reasoning_content": "", "content": "", "name": "", "arguments": "", "ends": ""}
        for chunk in thinkers.client.chat.completions.create(**asked):
            for choice in chunk.choices:
                assert not seen["ends"], "something followed the end"
                said = choice.delta.to_dict()
                calls: Any = said.get("tool_calls") or []
                for part in (said, *(call["function"] for call in calls)):
                    for name in seen.keys() & part.keys():
                        seen[name] += part[name] or ""
                seen["ends"] += choice.finish_reason or ""
            if kills and seen[in_mid].count(" ") > 3:
                kills = False  # noqa: PLW2901  (once)
                thinkers.serving().node.kill()
        parts.append(seen)
    assert metric(thinkers.door, "paceline_fleet_retried_total") == moved + 1
    assert parts[1] == parts[0]
    assert parts[0]["reasoning_content"].endswith(".")
    assert (parts[0]["name"], parts[0]["ends"]) == (("", "stop") if kind == "content" else ("reply", "tool_calls"))
    assert len(json.loads(parts[0][kind])["steps"]) == 9
    assert not parts[0]["arguments" if kind == "content" else "content"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "extra",
    [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 2}, {"temperature": 0.8, "seed": 3, "n": 2}],
    ids=["greedy", "drawn", "two"],
)
def test_a_machine_killed_in_mid_answer_costs_no_byte(trio: Trio, extra: dict[str, Any]) -> None:
    asked = {**LONG, **extra, "stream": True}
    whole = collect(trio.client.chat.completions.create(**asked), {})
    moved = metric(trio.door, "paceline_fleet_retried_total")
    assert collect(trio.client.chat.completions.create(**asked), {25: lambda: trio.serving().node.kill()}) == whole
    assert metric(trio.door, "paceline_fleet_retried_total") == moved + 1
    assert all(metric(machine, "paceline_kv_blocks_used") == 0 for machine in trio.runs if machine.is_up)


def test_one_answer_moves_as_often_as_machines_are_lost(trio: Trio) -> None:
    asked = {**DRAWN, "stream": True, "max_tokens": 1500}
    whole = collect(trio.client.chat.completions.create(**asked), {})

    def doze() -> None:
        """The last one sleeps until the answer has left it, and is asked again."""
        left, machine = metric(trio.door, "paceline_fleet_retried_total"), trio.serving()
        asked_before = metric(machine, "paceline_prompt_tokens_total")
        machine.node.process.send_signal(signal.SIGSTOP)
        until(lambda: metric(trio.door, "paceline_fleet_retried_total") > left)
        machine.node.process.send_signal(signal.SIGCONT)
        until(lambda: metric(machine, "paceline_prompt_tokens_total") > asked_before and metric(machine, "paceline_requests_running") == 1)

    lost = {20: lambda: trio.serving().node.kill(), 40: doze, 41: doze}
    assert collect(trio.client.chat.completions.create(**asked), lost) == whole


def test_equal_machines_share_what_is_under_way(trio: Trio) -> None:
    with ExitStack() as streams:

        def both_run_some() -> bool:
            stream = streams.enter_context(trio.client.chat.completions.create(**{**LONG, "max_tokens": 1000}, stream=True))
            next(iter(stream))
            return all(metric(machine, "paceline_requests_running") for machine in trio.runs)

        # After how many goes by their measured speeds, which differ on a busy machine; none but the load makes the slower one the better.
        assert any(both_run_some() for _ in range(SOON_FULL))


def test_an_orderly_stop_in_mid_answer_costs_no_byte(trio: Trio) -> None:
    asked = {**DRAWN, "stream": True, "max_tokens": 800}
    whole = collect(trio.client.chat.completions.create(**asked), {})
    stopped: list[Machine] = []

    def stop() -> None:
        stopped.append(trio.serving())
        stopped[0].node.process.send_signal(signal.SIGTERM)

    # It is live for longer than the drain lasts, so it moves; what is asked meanwhile goes elsewhere.
    asked_meanwhile = {30: lambda: trio.client.chat.completions.create(**ASK, max_tokens=4)}
    assert collect(trio.client.chat.completions.create(**asked), {20: stop, **asked_meanwhile}) == whole
    assert stopped[0].node.process.wait(BOUND_S) == 0
    assert metric(trio.door, "paceline_fleet_retried_total") > 0


def test_an_answer_continues_on_a_machine_of_other_numerics_and_says_so(trio: Trio) -> None:
    unlike = trio.runs[1]
    unlike.node.kill()
    unlike.up("--model", str(trio.model), *SMALL, "--device", "torch-cpu")
    until(lambda: trio.offers(unlike))
    asked: dict[str, Any] = {
        **LONG,
        "extra_body": {**LONG["extra_body"], "stream_options": {"include_events": True, "include_usage": True}},
    }
    told, usage = list[Any](), None
    for number, chunk in enumerate(trio.client.chat.completions.create(**asked, stream=True)):
        told += [event for event in [chunk.model_extra or {}] if event.get("event") == "numerics_changed"]
        usage = chunk.usage or usage
        if number == 30:
            trio.serving().node.kill()
    (detail,) = [event["detail"] for event in told]
    assert usage is not None
    assert usage.completion_tokens == TOKENS
    assert 0 < detail["n_tokens"] < TOKENS
    assert detail["from"] != detail["to"]
    assert (detail["matched_by"], detail["index"]) == ("digest", 0)
    if unlike.is_up:  # the tests after this one want equal machines
        unlike.node.kill()


def test_what_is_drawn_without_a_seed_goes_on_as_it_began_and_counts_once(trio: Trio) -> None:
    stream = trio.client.chat.completions.create(**{**LONG, "temperature": 1.0}, stream=True, stream_options={"include_usage": True})
    usage, reasons = None, set[str]()
    for number, chunk in enumerate(stream):
        if number == 30:
            trio.serving().node.kill()
        reasons |= {choice.finish_reason for choice in chunk.choices if choice.finish_reason}
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == TOKENS
    assert reasons == {"length"}


def test_a_machine_that_sleeps_is_left_within_seconds_and_takes_no_answer_twice(trio: Trio) -> None:
    asked = {**DRAWN, "stream": True}
    whole = collect(trio.client.chat.completions.create(**asked), {})
    asleep: list[Machine] = []

    def sleep() -> None:
        asleep.append(trio.serving())
        asleep[0].node.process.send_signal(signal.SIGSTOP)

    try:
        assert collect(trio.client.chat.completions.create(**asked), {25: sleep}) == whole
        # While the door still sees its card, it is not the first to be asked.
        assert collect(trio.client.chat.completions.create(**asked), {}) == whole
    finally:
        asleep[0].node.process.send_signal(signal.SIGCONT)
    until(lambda: metric(asleep[0], "paceline_requests_running") == 0)


def test_the_last_machine_gone_is_an_error_with_its_code_in_the_stream(trio: Trio) -> None:
    stream = trio.client.chat.completions.create(**LONG, stream=True)
    for machine in trio.runs:
        next(iter(stream))
        machine.node.kill()
    with pytest.raises(openai.APIError) as broken:
        collect(stream, {})
    assert broken.value.code == "no_machine"
