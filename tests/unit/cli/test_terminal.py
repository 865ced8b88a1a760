"""What is left on a terminal: bars that end, and nothing half drawn after Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from paceline.cli.progress import byte_bar
from paceline.cli.terminal import counted

INTERRUPTED = """
import signal, sys, threading
from paceline.cli.terminal import interrupts_end_now
from paceline.cli.progress import byte_bar
from paceline.cli.terminal import Terminal

with interrupts_end_now(130), byte_bar(Terminal(stderr=sys.argv[1] == "2"), "Loading x", "Preparing x") as show:
    show(1, 2)
    signal.raise_signal(signal.SIGINT)
    threading.Event().wait()
"""


@pytest.mark.parametrize("stream", ["1", "2"])
def test_an_interrupt_leaves_no_bar_and_a_cursor(stream: str) -> None:
    reader, terminal = os.openpty()
    try:
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, stream], stdout=terminal, stderr=terminal)
        assert process.wait(60) == 130
        shown = os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
        os.close(terminal)
    assert "Loading x" in shown
    assert shown.endswith("\r\x1b[2K\x1b[?25h")


def screen() -> Console:
    return Console(file=StringIO(), width=100, force_terminal=True)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_full_bar_says_what_comes_next() -> None:
    console = screen()
    with byte_bar(console, "Loading x", "Preparing x") as show:
        show(1 << 20, 4 << 20)
        show(4 << 20, 4 << 20)
    last = shown(console).rpartition("Preparing x")[2]
    assert "Loading x" in shown(console)
    assert "4.0" not in last
    assert "0:00:00" not in last


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    console = screen()
    with byte_bar(console, "Loading [x]", "Preparing [x]"):
        pass
    assert "Loading [x]" in shown(console)


def test_counts() -> None:
    assert [counted(number, "thread") for number in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
