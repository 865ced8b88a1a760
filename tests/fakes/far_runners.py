"""A runner of layers in a process of its own, which may compute with other instructions than this one: a process has kernels of one lowering."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.backends import cpu
from paceline.backends.cpu import Lowering
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.engine.local import RowPlan, WireBits


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a runner as soon as it is loaded."""

    layers: LayerRange
    n_blocks: int
    block_size: int
    numerics_id: str
    holds_identity: bool
    lowering: Lowering | None


class FarRunner:
    """All layers of a seeded model, for `Stage`s: rows go to the process and come back as they go over a wire.

    Raises:
        EOFError: the process ended; its standard error says why.
    """

    def __init__(self, spec: ModelSpec, lowering: Lowering, n_blocks: int) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        command = [sys.executable, "-m", "tests.fakes.far_runners", lowering]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        self._send((spec, n_blocks))

    def wait(self) -> Facts:
        """For its layers to be loaded."""
        facts: Facts = self._receive()
        self.layers, self.n_blocks, self.block_size = facts.layers, facts.n_blocks, facts.block_size
        self.numerics_id, self.holds_identity = facts.numerics_id, facts.holds_identity
        return facts

    def run_layers(self, x_TD: WireBits, plan: RowPlan, part: LayerRange | None = None) -> WireBits:
        self._send((x_TD, plan, part))
        return self._receive()

    def to_wire(self, x_TD: WireBits) -> WireBits:
        return x_TD

    def from_wire(self, x_TD: WireBits) -> WireBits:
        return x_TD

    def close(self) -> None:
        self._process.communicate()

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)


def main() -> None:
    """Run what comes on standard input, until it ends."""
    cpu.use_lowering(Lowering(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from paceline.backends.numerics import SeededWeights
    from paceline.backends.options import LoadOptions
    from paceline.backends.table import Kernels
    from paceline.machine.setup import load_runner
    from paceline.store.home import Home

    spec, n_blocks = pickle.load(sys.stdin.buffer)
    options = LoadOptions(
        spec.all_layers, WeightsFormat.INT4, n_blocks, threads=1, edges=False, kernel_cache=Home.from_environment().kernels
    )
    runner = load_runner(Kernels(f"cpu-{sys.argv[1]}"), SeededWeights(spec), options)
    answer: Any = Facts(runner.layers, runner.n_blocks, runner.block_size, runner.numerics_id, runner.holds_identity, cpu.lowering_in_use())
    try:
        while True:
            pickle.dump(answer, answers)
            answers.flush()
            x_TD, plan, part = pickle.load(sys.stdin.buffer)
            answer = runner.to_wire(runner.run_layers(runner.from_wire(x_TD), plan, part))
    except EOFError:
        runner.close()


if __name__ == "__main__":
    from tests.fakes import far_runners  # under this name what it answers is known elsewhere

    far_runners.main()
