"""`paceline up` and `paceline chat` with the bundled model: a real process, a real socket, real signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

Start = Callable[..., "subprocess.Popen[str]"]

ORDERLY_S = 2.0
LOAD_S = 150
"""The first load on a machine compiles kernels."""
SMALL = ("--port", "0", "--context", "512", "--kv-tokens", "4096")


def wait_ready(process: subprocess.Popen[str]) -> str:
    """Read until the URL is printed."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        found = re.search(r"Ready at (http://\S+)/v1", line)
        if found:
            return found[1]
    pytest.fail(f"ended before it was ready: {''.join(seen)}{process.communicate()[1]}")


def ask(url: str, key: str | None = None, **fields: Any) -> Iterator[bytes]:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Count to twenty."}], "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=LOAD_S) as response:
        yield from response


def test_up_answers_and_one_interrupt_ends_it_in_order(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL)
    url = wait_ready(process)
    (answer,) = [json.loads(line) for line in ask(url, max_tokens=8)]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["message"]["content"]
    process.send_signal(signal.SIGINT)
    # The bound is the promise: a wait that expires fails the test.
    assert process.wait(ORDERLY_S) == 0
    assert "Traceback" not in process.communicate()[1]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_the_middle_of_streams_ends_them_and_the_process(start_paceline: Start, stop: signal.Signals) -> None:
    process = start_paceline("up", *SMALL)
    url = wait_ready(process)
    stream = ask(url, stream=True, max_tokens=450, ignore_eos=True)
    assert next(stream).startswith(b"data: ")
    process.send_signal(stop)
    assert process.wait(ORDERLY_S) == 0
    rest = b"".join(stream)
    assert b"error" in rest
    assert b"[DONE]" not in rest


def test_two_interrupts_end_it_where_it_stands(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL)
    url = wait_ready(process)
    stream = ask(url, stream=True, max_tokens=450, ignore_eos=True)
    next(stream)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if "Stopping" in line:
            break
    process.send_signal(signal.SIGINT)
    # Orderly, if it was quicker than the second signal.
    assert process.wait(ORDERLY_S) in {0, 130}


def test_an_interrupt_while_loading_ends_it(start_paceline: Start, tmp_path: Path) -> None:
    # A home of its own has no compiled kernels: the main thread is deep in a compiler.
    process = start_paceline("up", *SMALL, PACELINE_HOME=str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "Loading smollm2-135m\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(ORDERLY_S) == 130
    assert "Traceback" not in process.communicate()[1]


def test_a_key_is_asked_for(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, PACELINE_API_KEY="secret")
    url = wait_ready(process)
    with pytest.raises(OSError, match="401"):
        next(ask(url))
    assert b"usage" in b"".join(ask(url, "secret", max_tokens=2))
    chat = start_paceline("chat", "--url", url)
    assert chat.wait(LOAD_S) == 2
    assert "--api-key" in chat.communicate()[1]


def test_greet_answers_through_the_endpoint(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--greet")
    wait_ready(process)
    assert process.stdout is not None
    lines = iter(process.stdout)
    while not next(lines).startswith("> "):
        pass
    assert next(lines).strip()


def test_chat_remembers_resets_and_says_what_a_command_is(start_paceline: Start) -> None:
    process = start_paceline("chat", "--context", "512", "--temperature", "0")
    typed = "/help\n/nonsense\nSay hi.\n/reset\nSay \\\nhi.\n/quit\nnever read\n"
    out, err = process.communicate(typed, timeout=LOAD_S)
    assert process.returncode == 0, err
    assert "/reset" in out
    assert "There is no /nonsense" in out
    assert "Forgotten." in out
    before, after = out.split("Forgotten.")
    assert before.partition("lists what there is.")[2].strip()
    assert after.strip()


def test_chat_at_an_endpoint_gives_the_same_bytes_as_alone(start_paceline: Start) -> None:
    typed = "Name three colours.\nAnd one more.\n"
    alone = start_paceline("chat", "--context", "512", "--temperature", "0").communicate(typed, timeout=LOAD_S)[0]
    url = wait_ready(start_paceline("up", *SMALL))
    there, err = start_paceline("chat", "--url", url, "--temperature", "0").communicate(typed, timeout=LOAD_S)
    assert err == ""
    assert there.strip()
    # Alone, what was loaded is said first.
    assert re.sub(r"^(Loading|First start|Loaded).*\n", "", alone, flags=re.MULTILINE).strip() == there.strip()


def test_an_interrupt_during_an_answer_ends_the_answer_and_not_the_chat(start_paceline: Start) -> None:
    process = start_paceline("chat", "--context", "4096", "--temperature", "0")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Write a very long poem with one hundred verses about the sea.\n")
    process.stdin.flush()
    while not process.stdout.readline().startswith("Loaded"):
        pass
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/reset\n/quit\n", timeout=LOAD_S)
    assert process.returncode == 0, err
    assert "(stopped)" in out
    assert "Forgotten." in out
