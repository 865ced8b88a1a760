"""KV of a pipeline on the disks of its machines: after all of them were killed a prefix is restored, each span from its own disk, with the bytes of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import Machine, free_port, have_shallow, machines, until
from tests.fleet.test_forwarding import client_of, metric
from tests.fleet.test_pipeline import SMALL, found_fleet

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="KV between machines")

PROMPT = "A list of rivers: " + "the Rhine, the Rhone, the Oder, " * 24
ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 1, "seed": 5, "max_tokens": 24}
DISK = ("--kv-disk", "200MB")


@dataclass(slots=True)
class Spread:
    """An orchestrator with a layer, and two hosts."""

    alone: str
    o: Machine
    hosts: list[Machine]
    port: int = 0

    def start(self) -> None:
        """Every machine."""
        self.port = free_port()
        with ThreadPoolExecutor() as together:
            for started in [together.submit(self.start_host, place) for place in range(len(self.hosts))]:
                started.result()
        pins = ("--pin", "o:0-0", "--pin", "g:1-1", "--pin", "h:2-2")
        self.o.up(
            "--model", MODEL, "--pipeline", *pins, "--draft", "off", "--fleet-port", "0", "--peer", f"127.0.0.1:{self.port}", *DISK, *SMALL
        )

    def start_host(self, place: int) -> None:
        peer = ("--fleet-port", str(self.port)) if place == 0 else ("--fleet-port", "0", "--peer", f"127.0.0.1:{self.port}")
        self.hosts[place].up("--no-model", "--serve-shards", "--threads", "1", *peer, *DISK)

    def kill(self) -> None:
        for machine in (self.o, *self.hosts):
            machine.node.kill()

    def ask(self) -> int:
        """The answer is that of one machine. Returns how many tokens of its prompt were not computed."""
        answer = client_of(self.o).completions.create(**ASK)
        assert answer.choices[0].text == self.alone
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    def until_kept(self) -> None:
        until(lambda: all(len(blocks_of(machine)) > 15 for machine in (self.o, *self.hosts)))


def blocks_of(machine: Machine) -> list[Path]:
    return sorted(path for path in Home(machine.home).kv.rglob("*") if path.is_file() and not path.name.startswith("."))


def prompts_on_disk(machine: Machine, what: str) -> float:
    return metric(machine, f'paceline_shard_kv_disk_blocks_total{{what="{what}"}}')


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    with machines(tmp_path_factory.mktemp("kv"), Home.from_environment().kernels, "alone", "o", "g", "h") as (alone, o, *hosts):
        found_fleet(o, *hosts)
        have_shallow(alone, o)
        (o.home / "config.toml").write_text("[pipeline]\nkeep_spares = false\nsearch_seconds = 150\n")
        alone.up("--model", MODEL, "--fleet-port", "0", *SMALL)
        told = client_of(alone).completions.create(**ASK).choices[0].text
        alone.node.kill()
        yield Spread(told, o, hosts)


def test_after_a_restart_of_every_machine_each_restores_its_span_as_far_as_all_have_it(spread: Spread) -> None:
    spread.start()
    assert spread.ask() == 0
    spread.until_kept()
    spread.kill()
    # Some that one machine wrote last are damaged: those are misses on all.
    kept = sorted(blocks_of(spread.hosts[1]), key=lambda path: path.stat().st_mtime_ns)
    for victim in kept[-8:]:
        victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    spread.start()
    restored = spread.ask()
    assert restored in {16 * blocks for blocks in range(1, len(kept) - 7)}
    until(lambda: all(prompts_on_disk(host, "read") >= restored // 16 for host in spread.hosts))
    until(lambda: prompts_on_disk(spread.hosts[1], "damaged") >= 1)
    shown = spread.o.status()["endpoints"][0]["kv_disk"]
    assert shown["read"] >= restored // 16
    assert shown["n_bytes"] > 0
    # What was restored is computed anew where its machine is lost: no input of it ever went through the pipeline.
    with client_of(spread.o).completions.create(**ASK, stream=True) as chunks:
        text = "".join(next(chunks).choices[0].text for _ in range(4))
        spread.hosts[1].node.kill()
        spread.start_host(1)
        assert text + "".join(chunk.choices[0].text for chunk in chunks) == spread.alone
    spread.kill()
