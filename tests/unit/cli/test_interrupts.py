"""Ctrl-C while something loads, at every step of the block that waits for it: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

AT_STEP = """
import signal, sys
from paceline.cli import terminal

steps = 0

def trace(frame, event, _argument):
    global steps
    if frame.f_code.co_name != "interrupts_end_now":
        return trace if frame.f_code.co_filename == terminal.__file__ else None
    if event == "line":
        steps += 1
        if steps == {step}:
            signal.raise_signal(signal.{name})
    return trace

def load():
    with terminal.interrupts_end_now(130):
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
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
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


UNREAD = """
import os, sys, threading
from paceline.cli.terminal import interrupts_end_now

with interrupts_end_now(130):
    sys.stdout.write("x")
    os.write(2, b"loading")
    {then}
    threading.Event().wait()
"""


@pytest.mark.parametrize("reads", [False, True])
def test_a_reader_that_is_gone_or_reads_no_more_keeps_nobody(reads: bool) -> None:
    then = 'sys.stdout.write("y" * (1 << 22)); sys.stdout.flush()' if reads else "pass"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD.format(then=then)], stdout=write, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(write)
        assert process.stderr is not None
        assert process.stderr.read(7) == b"loading"
        if reads:
            os.read(read, 1)  # it is within its flush now, and most of it will never be read
        else:
            os.close(read)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
    if reads:
        os.close(read)


IMPATIENT = """
import signal, threading
from paceline.cli.terminal import end_now

threading.Thread.join = lambda *_: signal.raise_signal(signal.SIGINT)
end_now(130)
"""


def test_a_second_signal_ends_what_is_ending_with_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", IMPATIENT], check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "")


ENDING = """
import asyncio, os, signal
from types import SimpleNamespace
from rich.console import Console
from paceline.cli import up

late = []

class Held:
    def __init__(self, seconds, call, args=()):
        late.append(lambda: call(*args))
    def start(self):
        pass

up.threading = SimpleNamespace(Timer=Held)

async def main():
    ending = up.Ending(Console(), 0.0, lambda: print("last", flush=True))
    ending.wait_for(SimpleNamespace(is_quiet=True), SimpleNamespace(live=0, drain=lambda: None))
    os.kill(os.getpid(), signal.{first})
    await ending.stop.wait()
    for _ in range({more}):
        os.kill(os.getpid(), signal.SIGINT)
        while len(late) == 1:
            await asyncio.sleep(0)
    late[0]()

asyncio.run(main())
"""


@pytest.mark.parametrize(("first", "more", "code"), [("SIGINT", 0, 0), ("SIGINT", 1, 130), ("SIGTERM", 0, 0), ("SIGTERM", 1, 130)])
def test_a_second_signal_in_an_orderly_stop_is_what_it_ends_with_where_the_stop_is_late(first: str, more: int, code: int) -> None:
    program = ENDING.format(first=first, more=more)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.endswith("last\n")
