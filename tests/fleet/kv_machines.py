"""Machines of one fleet that share KV, whose freed blocks are poisoned, and that can be told to give KV badly (`kv_saboteur.py`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fleet.machines import Machine, free_port, have_shallow, machines, token_in
from tests.fleet.test_kv_moves import SMALL, counted

from paceline.store.home import Home
from paceline.ways.kv.lease import LeaseEnd
from paceline.ways.kv.pushing import PushEnd


class Saboteur(Machine):
    """A machine that can be told to give KV badly."""

    def command(self, *arguments: str) -> list[str]:
        return [*self.prefix, sys.executable, str(Path(__file__).parent / "kv_saboteur.py"), *arguments]

    def will(self, deed: str) -> None:
        for left in ("held", "done"):
            (self.home / left).unlink(missing_ok=True)
        (self.home / "deed.new").write_text(deed)
        (self.home / "deed.new").rename(self.home / "deed")

    def goes_on(self) -> None:
        (self.home / "held").unlink(missing_ok=True)

    @property
    def did(self) -> bool:
        return (self.home / "held").exists() or (self.home / "done").exists()

    @property
    def violations(self) -> str:
        found = self.home / "violations"
        return found.read_text() if found.exists() else ""


@contextmanager
def saboteurs(
    root: Path, speeds: Mapping[str, float], start: Callable[[Saboteur], None], alone: Callable[[Saboteur], None] = lambda _: None
) -> Iterator[list[Saboteur]]:
    """Machines of one fleet, which run.

    Args:
        speeds: tokens of prompts a second that each is said to compute, whatever this machine does.
        start: how one is started.
        alone: called with the first, before there are others.
    """
    with machines(root, Home.from_environment().kernels, *speeds) as plain:
        made = [Saboteur(one.name, one.home, warm=one.warm, running=one.running) for one in plain]
        first, *others = made
        have_shallow(*made)
        first.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        first.up(*SMALL)
        alone(first)
        first.node.stop()
        for measured in tuple((first.home / "cache" / "speeds").iterdir()):
            said = json.loads(measured.read_text())
            for machine in made:
                for each in said["speeds"].values():
                    each |= {"prefill_tokens_per_second": speeds[machine.name], "disturbed": False}
                (machine.home / "cache" / "speeds").mkdir(parents=True, exist_ok=True)
                (machine.home / "cache" / "speeds" / measured.name).write_text(json.dumps(said))
        start(first)
        for other in others:
            other.run("join", token_in(first.run("token", "--address", "127.0.0.1")), "--name", other.name)
            start(other)
        yield made


def pushed(d: Machine, end: PushEnd) -> float:
    return counted(d, f'paceline_kv_pushes_total{{outcome="{end}"}}')


def prefilled(p: Machine, end: LeaseEnd) -> float:
    return counted(p, f'paceline_kv_prefills_total{{outcome="{end}"}}')
