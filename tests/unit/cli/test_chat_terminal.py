"""`paceline chat` as a person meets it: both ends of a terminal, keys, and an endpoint that runs on this machine."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest
from tests.unit.cli.test_up import LOAD_S, wait_ready

PROMPT = ">>>"
SHOWN_S = 60
"""Far more than anything takes here."""
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
LONG = "Write a very long poem with one hundred verses about the sea."


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose home has an endpoint that runs."""
    kernels = Path(os.environ["PACELINE_HOME"]) / "cache"
    root = tmp_path_factory.mktemp("home")
    kernels.mkdir(parents=True, exist_ok=True)
    (root / "cache").symlink_to(kernels)
    return {**os.environ, "PACELINE_HOME": str(root), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.fixture(scope="module")
def endpoint(home: dict[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", "paceline", "up", "--port", "0", "--context", "2048", "--kv-tokens", "4096"]
    process = subprocess.Popen(command, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield wait_ready(process)
    finally:
        process.kill()
        process.communicate()


class Screen:
    """A terminal with a program in it."""

    def __init__(self, home: dict[str, str], *args: str) -> None:
        self.process, self._hands = pty.fork()
        if not self.process:
            os.execve(sys.executable, [sys.executable, "-m", "paceline", "chat", *args], home)
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._hands, keys.encode())

    def until(self, text: str) -> str:
        """What was shown up to some text, which must come."""
        while text not in self._seen:
            ready, _, _ = select([self._hands], [], [], SHOWN_S)
            assert ready, f"never showed {text!r}: {self._seen}"
            try:
                self._seen += os.read(self._hands, 1 << 16).decode(errors="replace")
            except OSError:
                pytest.fail(f"ended before it showed {text!r}: {self._seen}")
        before, found, self._seen = self._seen.partition(text)
        return before + found

    def end(self) -> int:
        """The exit code, once it ends."""
        try:
            while select([self._hands], [], [], SHOWN_S)[0] and os.read(self._hands, 1 << 16):
                pass
        except OSError:
            return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        pytest.fail("it goes on")

    def close(self) -> None:
        try:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._hands)


@pytest.fixture
def screen(home: dict[str, str], endpoint: str) -> Iterator[Screen]:
    terminal = Screen(home, "--temperature", "0")
    assert endpoint in terminal.until("it answers"), "the endpoint that runs here answers, and nothing is loaded"
    terminal.until(PROMPT)
    yield terminal
    terminal.close()


def test_ctrl_c_clears_a_half_typed_line_and_keeps_the_conversation(screen: Screen) -> None:
    screen.type("a question that is nev")
    screen.until("nev")
    screen.type(CTRL_C)
    screen.until(PROMPT)
    screen.type("/drop\r")
    screen.until("nothing to forget")
    screen.until(PROMPT)
    screen.type(CTRL_C)
    screen.until("once more")
    screen.until(PROMPT)
    screen.type(CTRL_C)
    assert screen.end() == 0


def test_ctrl_c_during_an_answer_ends_the_answer_and_not_the_chat(screen: Screen) -> None:
    screen.type(LONG + "\r")
    screen.until("sea.")
    for _ in range(3):
        screen.until("\n")
    os.kill(screen.process, signal.SIGINT)
    screen.until("(stopped)")
    screen.type("/reset\r")
    screen.until("Forgotten.")
    screen.until(PROMPT)
    screen.type(CTRL_D)
    assert screen.end() == 0


def test_pasted_lines_are_one_message(screen: Screen) -> None:
    screen.type("\x1b[200~first line\nsecond line\nthird line\x1b[201~")
    screen.until("third line")
    screen.type("\r")
    screen.until(PROMPT)
    screen.type("/drop\r")
    screen.until("Forgot the oldest; 0 left.")


def test_a_slash_word_with_words_behind_it_is_no_message(screen: Screen) -> None:
    screen.type("/set temperature 0\r")
    screen.until("There is no /set temperature 0")
    screen.type("/bye\r")
    assert screen.end() == 0


def test_what_was_typed_is_there_in_the_next_chat(screen: Screen, home: dict[str, str]) -> None:
    screen.type("/remember-me\r")
    screen.until("There is no")
    screen.until(PROMPT)
    screen.type(CTRL_D)
    assert screen.end() == 0
    later = Screen(home, "--temperature", "0")
    try:
        later.until(PROMPT)
        later.type(UP)
        later.until("/remember-me")
    finally:
        later.close()
    assert (Path(home["PACELINE_HOME"]) / "chat_history").stat().st_mode & 0o777 == 0o600


def test_a_full_context_is_said(screen: Screen) -> None:
    screen.type(LONG + "\r")
    screen.until("(cut: the context is full.")
    screen.type("And another one.\r")
    screen.until("longer than the model's context")
    assert "Shorten" not in screen.until("/drop forgets the oldest"), "it says once what can be done"
    screen.type("/drop\r")
    screen.until("0 left.")


def test_a_question_on_the_command_line_is_answered_once(home: dict[str, str], endpoint: str) -> None:
    command = [sys.executable, "-m", "paceline", "chat", "--temperature", "0", "Name a colour."]
    done = subprocess.run(command, env=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOAD_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert endpoint in done.stderr
    assert "Loading" not in done.stderr


def test_a_chat_outlives_its_endpoint(home: dict[str, str]) -> None:
    command = [sys.executable, "-m", "paceline", "up", "--port", "0", "--context", "2048", "--kv-tokens", "4096"]
    process = subprocess.Popen(command, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = wait_ready(process)
        screen = Screen(home, "--url", url, "--temperature", "0")
        screen.until(PROMPT)
        screen.type(LONG + "\r")
        screen.until("sea.")
        for _ in range(3):
            screen.until("\n")
    finally:
        process.kill()
        process.communicate()
    screen.until(f"{url}/v1 went away: it ended the connection")
    screen.until(PROMPT)
    screen.type("Are you there?\r")
    screen.until("Connection refused")
    screen.until(PROMPT)
    screen.type("/drop\r")
    screen.until("nothing to forget")
    screen.until(PROMPT)
    screen.type(CTRL_D)
    assert screen.end() == 0
