"""A model that fits on none of three machines runs on the three: each is in a control group whose limit bites, loads while one watches, and may be lost."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.memory_limit import MemoryLimit, NoMemoryLimitsError
from tests.fakes.seeded_models import shape, write_gguf
from tests.fleet.machines import Machine, free_port, machines, until
from tests.fleet.test_forwarding import client_of
from tests.fleet.test_pipeline import found_fleet

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

MIB = 1 << 20
LIMIT_BYTES = 640 * MIB
"""Of each machine. A process takes some 300 MiB of it beside weights and KV, most of it only while it loads."""
SHAPE = shape("llama-1b", n_layers=30, hidden=1024, n_heads=16, n_kv_heads=4, ffn=8192, vocab=2048)
"""Wide matrices; 480 MiB."""
SMALL = ("--context", "512", "--kv-tokens", "1024", "--threads", "1", "--draft", "off")
NAMES = ("one", "two", "three", "four")
ASK: dict[str, Any] = {
    "prompt": "The history of bicycle racing begins",
    "temperature": 0,
    "max_tokens": 40,
    "extra_body": {"ignore_eos": True},
}
KILL_AT = 12
OWN = "14"
"""Layers of `one`: the rest (310 MiB) is more than one of the others has room for (200 to 220 MiB), so that two must hold it; a half of it is so much less
that it fits wherever the machines are cut: with 18 layers, spans of 9 each fitted beside a few MiB more or less."""


@dataclass(frozen=True, slots=True)
class Limited:
    """Machines of one fleet, each in a group of its own. `one` has the model, and a pipeline of it over `two` and `three`."""

    small: Machine
    """A machine in the group of `four`, and in no fleet."""
    nodes: dict[str, Machine]
    limits: dict[str, MemoryLimit]
    model: Path
    alone: str
    """The answer of one machine without a limit."""
    peer: str

    @property
    def route(self) -> set[str]:
        """Whom the pipeline runs over beside `one`."""
        found = [line for line in self.nodes["one"].node.said if re.search(r"goes on over|^Loaded in", line)]
        return set(re.findall(r" on ([a-z]+)\b", found[-1].rpartition("goes on over")[2]))

    def host(self, name: str) -> None:
        self.nodes[name].up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", "0", "--peer", self.peer)

    def has_layers(self, name: str) -> bool:
        """Whether it has layers in memory for others."""
        card = self.nodes["one"].card_of(name)
        return card is not None and any(offer.shard is not None and offer.warm for offer in card.models)

    @property
    def kills(self) -> dict[str, int]:
        """Processes ended for want of memory."""
        return {name: limit.kills for name, limit in self.limits.items()}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    root, port = tmp_path_factory.mktemp("size"), free_port()
    model, kernels = root / "model-Q4_K_M.gguf", root / "kernels"
    # Of its own: what other processes compile meanwhile would have to be compiled again, which takes more memory than is planned here.
    shared = Home.from_environment().kernels
    if shared.is_dir():
        shutil.copytree(shared, kernels)
    kernels.mkdir(exist_ok=True)
    write_gguf(model, SHAPE)
    with ExitStack() as stack:
        try:
            limits = {name: stack.enter_context(MemoryLimit(name, LIMIT_BYTES)) for name in NAMES}
        except NoMemoryLimitsError as error:
            pytest.skip(str(error))
        alone, small, *made = stack.enter_context(machines(root, kernels, "alone", "small", *NAMES))
        small.prefix = limits["four"].prefix
        found_fleet(*made)
        for machine in made:
            machine.prefix = limits[machine.name].prefix
        # First: it compiles what kernels are missing, which takes more memory than the others have.
        alone.up("--model", str(model), "--fleet-port", "0", *SMALL)
        right = answer(alone)
        alone.node.kill()
        at = Limited(small, dict(zip(NAMES, made, strict=True)), limits, model, right, f"127.0.0.1:{port}")
        with ThreadPoolExecutor() as together:
            hosts = [together.submit(at.host, name) for name in ("two", "three")]
            at.nodes["one"].up("--model", str(model), "--pipeline", "--own-layers", OWN, "--fleet-port", str(port), *SMALL)
            for host in hosts:
                host.result()
        yield at


def answer(machine: Machine, kill: Machine | None = None) -> str:
    """Of a machine; a few tokens into it, `kill` ends as in a power cut."""
    client, pieces = client_of(machine), list[str]()
    name = client.models.list().data[0].id
    with client.completions.create(model=name, **ASK, stream=True) as chunks:
        for chunk in chunks:
            pieces.append(chunk.choices[0].text)
            if kill is not None and len(pieces) == KILL_AT:
                kill.node.kill()
    return "".join(pieces)


def test_no_machine_has_room_for_it_alone(limited: Limited) -> None:
    """Else the other tests would show nothing. It is refused before a byte is loaded, and not by the kernel's killing."""
    said = limited.small.run("up", "--port", "0", "--model", str(limited.model), *SMALL, code=2)
    assert "of memory is free" in said
    assert limited.kills["four"] == 0


def test_it_runs_on_three_and_one_sees_it_load(limited: Limited) -> None:
    assert limited.route == {"two", "three"}
    said = "".join(limited.nodes["one"].node.said)
    assert len(set(re.findall(r"\d+ %", said))) > 2
    assert answer(limited.nodes["one"]) == limited.alone
    assert not any(limited.kills.values())


@pytest.mark.parametrize("loaded", [False, True])
def test_a_stage_is_killed_in_the_middle_of_an_answer(limited: Limited, *, loaded: bool) -> None:
    """Its layers go on on a machine that stood by, whether it has loaded them or not."""
    one, lost = limited.nodes["one"], max(limited.route)
    spare = next(name for name in NAMES[1:] if name not in limited.route)
    limited.host(spare)
    until(lambda: limited.has_layers(spare) if loaded else spare in one.sees())
    assert answer(one, kill=limited.nodes[lost]) == limited.alone
    assert spare in limited.route
    assert lost not in limited.route
    assert not any(limited.kills.values())
