"""`paceline chat` with the bundled model: in a terminal, from a pipe, at an endpoint."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from tests.unit.cli.test_up import LOAD_S, SMALL, wait_ready

Start = Callable[..., "subprocess.Popen[str]"]
ALONE = ("chat", "--context", "512", "--temperature", "0")


class Typist:
    """A terminal's two ends."""

    def __init__(self) -> None:
        self._hands, self.stdin = os.openpty()

    def type(self, text: str) -> None:
        os.write(self._hands, text.encode())

    def close(self) -> None:
        os.close(self._hands)
        os.close(self.stdin)


@pytest.fixture
def typist() -> Iterator[Typist]:
    terminal = Typist()
    yield terminal
    terminal.close()


def test_a_chat_remembers_resets_and_says_what_a_command_is(start_paceline: Start, typist: Typist) -> None:
    process = start_paceline(*ALONE, stdin=typist.stdin)
    typist.type("/help\n/nonsense\nSay hi.\n/reset\nSay \\\nhi.\n/quit\nnever read\n")
    out, err = process.communicate(timeout=LOAD_S)
    assert process.returncode == 0, err
    assert "Chatting with smollm2-135m" in out
    assert "There is no /nonsense" in out
    before, after = out.split("Forgotten.")
    assert before.partition("lists what there is.")[2].replace(">>>", "").strip()
    assert after.replace(">>>", "").replace("...", "").strip()


def test_all_that_is_piped_in_is_one_message_and_only_the_answer_comes_out(start_paceline: Start) -> None:
    piped = "Name three colours.\n/reset\nAnd one more."
    alone, said = start_paceline(*ALONE).communicate(piped, timeout=LOAD_S)
    assert "Loaded in" in said
    url = wait_ready(start_paceline("up", *SMALL))
    there, err = start_paceline("chat", "--url", url, "--temperature", "0").communicate(piped, timeout=LOAD_S)
    assert err == ""
    assert there.strip()
    assert alone == there


def test_a_piped_message_that_cannot_be_answered_is_an_error(start_paceline: Start) -> None:
    process = start_paceline("chat", "--context", "64")
    out, err = process.communicate("word " * 100, timeout=LOAD_S)
    assert process.returncode == 1
    assert out == ""
    assert "context of 64 tokens" in err


def test_an_interrupt_during_a_piped_answer_ends_the_process(start_paceline: Start) -> None:
    process = start_paceline("chat", "--context", "4096", "--temperature", "0")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Write a very long poem with one hundred verses about the sea.\n")
    process.stdin.close()
    process.stdin = None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(LOAD_S) == 130
    assert "Traceback" not in process.communicate()[1]


def test_an_answer_whose_reader_leaves_is_no_traceback(start_paceline: Start) -> None:
    process = start_paceline("chat", "--context", "4096", "--temperature", "0")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Write a very long poem with one hundred verses about the sea.\n")
    process.stdin.close()
    process.stdin = None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    assert process.wait(LOAD_S) == 1


def test_a_terminal_without_the_characters_of_an_answer_shows_others(start_paceline: Start) -> None:
    process = start_paceline(*ALONE, PYTHONIOENCODING="ascii")
    out, err = process.communicate(
        "Repeat after me: \u2764 \u2764 \u2764".encode("ascii", "ignore").decode() + "Write three emoji.", timeout=LOAD_S
    )
    assert process.returncode == 0, err
    assert out.isascii()
