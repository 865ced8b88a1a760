"""Two machines that share a llama-server each, and a third that has no model: answers at its door outlive an engine."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes.foreign_engines import Running, llama_server
from tests.fleet.machines import EMPTY, Machine, free_port, machines, token_in, until
from tests.fleet.test_forwarding import client_of

from paceline.store.home import Home

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a long story about a line of riders in the wind."}],
    "temperature": 0,
    "max_tokens": 48,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}
CLIENTS = 3


@dataclass
class Shared:
    """A machine with its engine. The engine can be killed and started again on its port."""

    machine: Machine
    model: Path
    engine: Running | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        self.stack = ExitStack()
        port = None if self.engine is None else int(self.engine.url.rpartition(":")[2])
        self.engine = self.stack.enter_context(llama_server(self.model, port, n_ctx=4096, n_parallel=4))

    def strike(self, how: signal.Signals) -> None:
        assert self.engine is not None
        self.engine.process.send_signal(how)


@dataclass
class Fleet:
    door: Machine
    sharers: list[Shared]

    @property
    def client(self) -> openai.OpenAI:
        return client_of(self.door)

    @property
    def model(self) -> str:
        return next(iter(self.client.models.list())).id

    def holders(self) -> list[str]:
        """Machines whose engine the door may send requests to."""
        cards = [(one.machine.name, self.door.card_of(one.machine.name)) for one in self.sharers]
        return [name for name, card in cards if card is not None and any(offer.engine is not None for offer in card.models)]

    def running(self) -> list[Shared]:
        """Those whose engines answer something now."""
        return [one for one in self.sharers if one.engine is not None and _slots_busy(one.engine)]


def _slots_busy(engine: Running) -> int:
    import json
    from urllib.request import urlopen

    try:
        with urlopen(f"{engine.url}/slots", timeout=5) as page:
            return sum(bool(slot["is_processing"]) for slot in json.load(page))
    except OSError:
        return 0


@contextmanager
def sharing(root: Path, model: Path) -> Generator[Fleet]:
    with machines(root, Home.from_environment().kernels, "door", "b", "c") as (door, *others), ExitStack() as stack:
        door.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        door.up(*EMPTY)
        sharers = [Shared(machine, model) for machine in others]
        for one in sharers:
            one.start()
            stack.callback(lambda one=one: one.stack.close())
            assert one.engine is not None
            one.machine.run("join", token_in(door.run("token", "--address", "127.0.0.1")), "--name", one.machine.name)
            assert "1 model shared" in one.machine.run("share", one.engine.url)
            one.machine.up(*EMPTY)
        fleet = Fleet(door, sharers)
        until(lambda: len(fleet.holders()) == len(sharers))
        until(lambda: bool(list(fleet.client.models.list())))
        yield fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, bundled_gguf: Path) -> Iterator[Fleet]:
    with sharing(tmp_path_factory.mktemp("shared"), bundled_gguf) as made:
        yield made


def answers(fleet: Fleet, strike: Any) -> list[tuple[str, str | None, list[Any]]]:
    """Texts, endings and events of several answers at once; when each has begun, something happens."""
    begun: list[int] = []

    def one(index: int) -> tuple[str, str | None, list[Any]]:
        text, end, events = "", None, list[Any]()
        asked = {**LONG, "extra_body": {**LONG["extra_body"], "stream_options": {"include_events": True}}}
        for chunk in fleet.client.chat.completions.create(model=fleet.model, **asked):
            if not chunk.choices:
                events.append(chunk.model_extra)
                continue
            text += chunk.choices[0].delta.content or ""
            end = chunk.choices[0].finish_reason or end
            if text and index not in begun:
                begun.append(index)
                if len(begun) == CLIENTS:
                    strike()
        return text, end, events

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(CLIENTS)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_answers_outlive_an_engine(fleet: Fleet, how: signal.Signals) -> None:
    struck: list[Shared] = []

    def strike() -> None:
        struck.append(fleet.running()[0])
        struck[0].strike(how)

    done = answers(fleet, strike)
    assert [end for _, end, _ in done] == ["length"] * CLIENTS
    assert all(text for text, _, _ in done)
    changed = [event for _, _, events in done for event in events if event and event.get("event") == "numerics_changed"]
    assert changed
    assert {event["detail"]["matched_by"] for event in changed} == {"digest"}
    assert fleet.holders() == [one.machine.name for one in fleet.sharers if one is not struck[0]]
    if how is signal.SIGSTOP:
        struck[0].strike(signal.SIGCONT)
    else:
        struck[0].stack.close()
        struck[0].start()
    until(lambda: len(fleet.holders()) == len(fleet.sharers))
