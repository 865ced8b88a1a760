"""Tensor ranks of real nodes: the plan picks a machine of the fleet for one, or they share a stage of a pipeline; answers are those of one machine, also once one
is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.shallow_model import MODEL as SHALLOW
from tests.fakes.shallow_model import write_shallow
from tests.fleet.machines import Machine, free_port, machines, until
from tests.fleet.test_forwarding import MODEL, client_of
from tests.fleet.test_pipeline import found_fleet

from paceline.backends import cpu
from paceline.store.home import Home

pytestmark = [
    pytest.mark.sampled(1, by="file", among="models over machines"),
    pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2"),
]

SMALL = ("--context", "1024", "--kv-tokens", "4096", "--threads", "1", "--draft", "off")


def answer(machine: Machine, seed: int) -> str:
    said = client_of(machine).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me of the sea."}], max_tokens=40, seed=seed
    )
    return said.choices[0].message.content or ""


def test_a_machine_of_the_fleet_runs_the_other_rank(tmp_path: Path) -> None:
    with machines(tmp_path, Home.from_environment().kernels, "a", "b") as (a, b):
        found_fleet(a, b)
        port = free_port()
        a.up("--fleet-port", str(port), *SMALL)
        alone = [answer(a, seed) for seed in (1, 2)]
        least = ("--device", f"cpu-{cpu.lowerings_here()[-1]}")  # a may well have more
        b.up("--no-model", "--serve-shards", "--threads", "1", *least, "--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        until(lambda: (card := b.card_of("b")) is not None and any(offer.digest for offer in card.models))
        a.node.stop()
        a.up("--ways", "tensor", "--fleet-port", str(port), *SMALL)
        assert len(ranks_at(b)) == 1
        assert answer(a, 1) == alone[0]
        b.node.kill()
        assert answer(a, 2) == alone[1]


def ranks_at(machine: Machine) -> list[int]:
    """Processes that a machine's node has started to be ranks."""
    children = Path(f"/proc/{machine.node.process.pid}/task").glob("*/children")
    pids = [int(child) for found in children for child in found.read_text().split()]
    return [pid for pid in pids if "paceline.ways.tensor.rank" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_stage_of_a_pipeline_that_ranks_share_loses_one_and_the_answer_goes_on(tmp_path: Path) -> None:
    model = str(write_shallow(tmp_path))
    pipelined = ("--pipeline", "--own-layers", "1", "--context", "512", "--kv-tokens", "2048", "--threads", "1", "--draft", "off")
    with machines(tmp_path, Home.from_environment().kernels, "alone", "o", "h") as (alone, o, h):
        alone.up("--model", model, "--fleet-port", "0", *pipelined[3:])
        expected = text_of(alone)
        alone.node.stop()
        found_fleet(o, h)
        port = free_port()
        h.up("--no-model", "--serve-shards", "--tensor", "2", "--threads", "2", "--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        o.up("--model", model, "--fleet-port", str(port), *pipelined)
        (rank,) = ranks_at(h)
        assert text_of(o, lambda: os.kill(rank, signal.SIGKILL)) == expected
        assert ranks_at(h)
        assert rank not in ranks_at(h)


def text_of(machine: Machine, strike: Callable[[], None] = lambda: None) -> str:
    """An answer; `strike` is called in its middle."""
    asked: dict[str, Any] = {
        "model": SHALLOW,
        "prompt": "The history of bicycle racing begins",
        "temperature": 1,
        "seed": 5,
        "max_tokens": 60,
    }
    with client_of(machine).completions.create(**asked, stream=True) as chunks:
        pieces = (chunk.choices[0].text for chunk in chunks if chunk.choices)
        text = "".join(next(pieces) for _ in range(5))
        strike()
        return text + "".join(pieces)
