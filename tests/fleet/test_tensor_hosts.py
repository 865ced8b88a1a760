"""`paceline up --ways tensor`: the plan picks a machine of the fleet for the other rank, and answers are those of one machine, also once it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fleet.machines import Machine, free_port, machines, until
from tests.fleet.test_forwarding import MODEL, client_of
from tests.fleet.test_pipeline import found_fleet

from paceline.backends import cpu
from paceline.store.home import Home

pytestmark = pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")

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
        b.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        until(lambda: (card := b.card_of("b")) is not None and any(offer.digest for offer in card.models))
        a.node.stop()
        a.up("--ways", "tensor", "--fleet-port", str(port), *SMALL)
        assert ranks_at(b) == 1
        assert answer(a, 1) == alone[0]
        b.node.kill()
        assert answer(a, 2) == alone[1]


def ranks_at(machine: Machine) -> int:
    """Processes that a machine's node has started to be ranks."""
    children = Path(f"/proc/{machine.node.process.pid}/task").glob("*/children")
    commands = [Path(f"/proc/{child}/cmdline").read_text() for found in children for child in found.read_text().split()]
    return sum("paceline.ways.tensor.rank" in command for command in commands)
