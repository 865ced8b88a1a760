"""Ctrl-C while something loads, at every step of the block that waits for it: real processes, real signals."""

from __future__ import annotations

import subprocess
import sys

import pytest

AT_STEP = """
import signal, sys
from paceline.cli import interrupts

steps = 0

def trace(frame, event, _argument):
    global steps
    if frame.f_code.co_name != "interrupts_end_now":
        return trace if frame.f_code.co_filename == interrupts.__file__ else None
    if event == "line":
        steps += 1
        if steps == {step}:
            signal.raise_signal(signal.{name})
    return trace

def load():
    with interrupts.interrupts_end_now(130):
        pass

sys.settrace(trace)
try:
    load()
except KeyboardInterrupt:
    sys.exit(130)
sys.settrace(None)
print("steps", steps)
"""


def outcome(step: int, name: str) -> tuple[int, str]:
    program = AT_STEP.format(step=step, name=name)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("name", "ends"), [("SIGINT", {130}), ("SIGTERM", {130, -15})])
def test_no_step_loses_the_signal(name: str, ends: set[int]) -> None:
    code, steps = outcome(0, name)
    assert code == 0
    n_steps = int(steps.split()[1])
    assert n_steps > 10
    for step in range(1, n_steps + 1):
        code, said = outcome(step, name)
        assert code in ends, f"step {step}: {said}"
