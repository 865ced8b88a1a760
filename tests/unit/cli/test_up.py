"""`paceline up` with the bundled model: a real process, a real socket, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from rich.console import Console

from paceline.cli import up

Start = Callable[..., "subprocess.Popen[str]"]

ENDS_S = 300
"""Far more than an orderly end takes, and than is left of no process that goes on serving."""
LOAD_S = 500
"""The first load on a machine compiles kernels."""
KEY = "open-sesame-open-sesame"
SMALL = ("--port", "0", "--context", "512", "--kv-tokens", "4096")


def wait_ready(process: subprocess.Popen[str]) -> str:
    """Read until the URL is printed."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        found = re.search(r"Ready at (https?://\S+)/v1", line)
        if found:
            return found[1]
    pytest.fail(f"ended before it was ready: {''.join(seen)}{process.communicate()[1]}")


def until(process: subprocess.Popen[str], end: str) -> list[str]:
    """The lines up to the one that has `end` in it."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if end in line:
            return lines
    pytest.fail(f"ended before {end!r}: {''.join(lines)}")


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
    assert process.wait(ENDS_S) == 0
    assert "Traceback" not in process.communicate()[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_answers_end_and_begins_no_more(start_paceline: Start, stop: signal.Signals) -> None:
    process = start_paceline("up", *SMALL)
    url = wait_ready(process)
    stream = ask(url, stream=True, max_tokens=450, ignore_eos=True)
    assert next(stream).startswith(b"data: ")
    process.send_signal(stop)
    until(process, "Stopping once")
    with pytest.raises(HTTPError) as refused:
        next(ask(url))
    assert (refused.value.code, json.load(refused.value)["error"]["code"]) == (503, "server_stopping")
    assert int(refused.value.headers["Retry-After"]) > 0
    with pytest.raises(HTTPError) as unhealthy:
        urlopen(f"{url}/health", timeout=LOAD_S)
    assert json.load(unhealthy.value)["status"] == "stopping"
    assert b"".join(stream).endswith(b"data: [DONE]\n\n")
    assert process.wait(ENDS_S) == 0


def test_answers_that_outlast_the_drain_end_with_an_error(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--drain-s", "0")
    url = wait_ready(process)
    stream = ask(url, stream=True, max_tokens=450, ignore_eos=True)
    assert next(stream).startswith(b"data: ")
    process.send_signal(signal.SIGINT)
    assert process.wait(ENDS_S) == 0
    rest = b"".join(stream)
    assert b"server_stopping" in rest
    assert b"[DONE]" not in rest


def test_a_second_interrupt_ends_answers_with_an_error_and_then_the_process(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--drain-s", "3000")
    url = wait_ready(process)
    stream = ask(url, stream=True, max_tokens=450, ignore_eos=True)
    assert next(stream).startswith(b"data: ")
    process.send_signal(signal.SIGINT)
    until(process, "Stopping once")
    process.send_signal(signal.SIGINT)
    rest = b"".join(stream)
    assert b"server_stopping" in rest
    assert b"[DONE]" not in rest
    assert process.wait(ENDS_S) == 130
    assert "Traceback" not in process.communicate()[1]


def test_an_interrupt_while_loading_ends_it(start_paceline: Start, tmp_path: Path) -> None:
    # A home of its own has no compiled kernels: the main thread is deep in a compiler.
    process = start_paceline("up", *SMALL, PACELINE_HOME=str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "Loading smollm2-135m\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(ENDS_S) == 130
    assert "Traceback" not in process.communicate()[1]


def test_an_encoder_that_is_not_here_is_missed_before_a_model_is_loaded(start_paceline: Start) -> None:
    said, error = start_paceline("up", *SMALL, "--embeddings", "nobody-has-it").communicate(timeout=LOAD_S)
    assert "no model 'nobody-has-it'" in error
    assert "Loading" not in said


def test_a_key_is_asked_for(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, PACELINE_API_KEY=KEY)
    url = wait_ready(process)
    with pytest.raises(OSError, match="401"):
        next(ask(url))
    assert b"usage" in b"".join(ask(url, KEY, max_tokens=2))
    chat = start_paceline("chat", "--url", url)
    assert "--api-key" in chat.communicate("Hi.", timeout=LOAD_S)[1]
    assert chat.returncode == 2


def test_greet_answers_through_the_endpoint_and_then_says_what_to_try(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--greet")
    url = wait_ready(process)
    question, answer, _, heading, curl, chat = until(process, "chat --url")
    assert question.startswith("> ")
    assert answer.strip()
    assert heading == "Try:\n"
    assert chat.strip().endswith(f"paceline chat --url {url}")
    # What is said to try has an end, and is what a shell would run.
    command = shlex.split(curl)
    assert command[:2] == ["curl", f"{url}/v1/chat/completions"]
    body = json.loads(command[command.index("-d") + 1])
    (tried,) = [json.loads(line) for line in ask(url, **body)]
    assert tried["usage"]["completion_tokens"] <= 100


@pytest.mark.parametrize(
    ("template", "path", "chats"), [("{{ messages }}", "/v1/chat/completions", True), (None, "/v1/completions", False)]
)
def test_what_to_try_is_served_by_the_model(capsys: pytest.CaptureFixture[str], template: str | None, path: str, chats: bool) -> None:
    model = SimpleNamespace(name="base", tokenizer=SimpleNamespace(chat_template=template), chats=None)
    up._welcome(Console(), model, "http://127.0.0.1:1", None, None, greet=False)  # pyright: ignore[reportArgumentType, reportPrivateUsage]
    said = capsys.readouterr().out
    assert f"http://127.0.0.1:1{path} " in said
    assert ("chat --url" in said) is chats


def test_what_to_try_names_the_key_that_was_given(start_paceline: Start) -> None:
    given = start_paceline("up", *SMALL, "--host", "0.0.0.0", "--api-key", "se cret of a dozen")
    # Where 0.0.0.0 is listened to, the address that is shown is one that can be connected to.
    assert wait_ready(given).startswith("http://127.0.0.1:")
    tries = "".join(until(given, "chat --url"))
    assert "se cret of a dozen" not in tries
    assert "Try, with the key in PACELINE_API_KEY:" in tries
    assert "Bearer $PACELINE_API_KEY" in tries


def test_tls_is_served_and_the_chat_that_is_said_to_try_trusts_it(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--tls", "--host", "0.0.0.0", PACELINE_API_KEY=KEY)
    url = wait_ready(process)
    assert url.startswith("https://127.0.0.1:")
    command = shlex.split(until(process, "chat --url")[-1])
    chat = start_paceline(*command[command.index("chat") :], PACELINE_API_KEY=KEY)
    answer, faults = chat.communicate("Hi.", timeout=LOAD_S)
    assert (chat.returncode, faults) == (0, "")
    assert answer.strip()
    stranger = start_paceline("chat", "--url", url, PACELINE_API_KEY=KEY)
    assert "certificate" in stranger.communicate("Hi.", timeout=LOAD_S)[1]


def test_plain_http_on_a_network_is_warned_of(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--host", "0.0.0.0", PACELINE_API_KEY=KEY)
    assert "warning: the API is plain HTTP" in "".join(until(process, "warning"))


def test_a_server_whose_output_nobody_reads_goes_on(start_paceline: Start) -> None:
    process = start_paceline("up", *SMALL, "--greet")
    url = wait_ready(process)
    assert process.stdout is not None
    process.stdout.close()
    (answer,) = [json.loads(line) for line in ask(url, max_tokens=100, ignore_eos=True)]
    assert answer["usage"]["completion_tokens"] == 100
    process.send_signal(signal.SIGINT)
    assert process.wait(ENDS_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def fill(disk: Path) -> set[Path]:
    """Leave no byte on a disk; returns what is on it."""
    with (disk / "all").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    return set(disk.rglob("*"))


def test_on_a_full_disk_it_answers_and_says_what_is_not_kept(start_paceline: Start, small_disk: Path) -> None:
    home = small_disk / "home"
    (home / "cache").mkdir(parents=True)
    (home / "cache" / "kernels").symlink_to((Path(os.environ["PACELINE_HOME"]) / "cache" / "kernels").resolve())
    before = fill(small_disk)
    process = start_paceline("up", *SMALL, PACELINE_HOME=str(home))
    assert b"".join(ask(wait_ready(process), max_tokens=4))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0
    assert "for the next start: No space left on device" in said
    assert "Traceback" not in said
    assert [path for path in small_disk.rglob("*") if path not in before and path.is_file()] == [], "nothing is half written"


def test_a_fleet_s_node_says_that_its_disk_is_full_before_a_model_is_loaded(start_paceline: Start, small_disk: Path) -> None:
    home = small_disk / "home"
    initialised = start_paceline("init", PACELINE_HOME=str(home))
    initialised.communicate(timeout=ENDS_S)
    assert initialised.returncode == 0
    before = {path: path.read_bytes() for path in fill(small_disk) if path.is_file()}
    process = start_paceline("up", *SMALL, "--fleet-port", "0", "--no-mdns", PACELINE_HOME=str(home))
    out, said = process.communicate(timeout=ENDS_S)
    assert (process.returncode, out) == (2, "")
    assert said.splitlines()[-2:] == [
        f"error: {home / 'fleet' / 'version'} can't be written: No space left on device",
        "hint:  Free some space on its disk, and try again.",
    ]
    assert {path: path.read_bytes() for path in before} == before


def test_kv_on_the_disk_outlives_a_kill_with_the_same_bytes(start_paceline: Start, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "cache").mkdir(parents=True)
    (home / "cache" / "kernels").symlink_to((Path(os.environ["PACELINE_HOME"]) / "cache" / "kernels").resolve())
    told: list[tuple[str, int]] = []
    rivers = [{"role": "user", "content": "A list of rivers: " + "the Rhine, the Rhone, " * 30}]
    for kept in (False, True):
        process = start_paceline("up", *SMALL, "--kv-disk", "100MB", PACELINE_HOME=str(home))
        url = wait_ready(process)
        (line,) = ask(url, messages=rivers, max_tokens=16)
        answer = json.loads(line)
        told.append((answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
        assert (told[-1][1] > 200) == kept
        blocks = answer["usage"]["prompt_tokens"] // 16
        while not kept and metric(url, 'paceline_kv_disk_blocks_total{what="written"}') < blocks:
            pass
        process.kill()
        process.communicate()
    assert told[0][0] == told[1][0]


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics", timeout=LOAD_S) as page:
        return next(float(line.rpartition(b" ")[2]) for line in page if line.startswith(name.encode() + b" "))


def test_a_size_that_is_none_is_refused(start_paceline: Start) -> None:
    for size in ("much", "-1GB", "3"):
        process = start_paceline("up", *SMALL, "--kv-disk", size)
        _, said = process.communicate(timeout=ENDS_S)
        assert process.returncode == 2
        assert said.startswith("error: --kv-disk")


def test_a_full_disk_keeps_no_kv_and_answers(start_paceline: Start, small_disk: Path) -> None:
    home = small_disk / "home"
    (home / "cache" / "kv").mkdir(parents=True)
    (home / "cache" / "kernels").symlink_to((Path(os.environ["PACELINE_HOME"]) / "cache" / "kernels").resolve())
    before = fill(small_disk)
    process = start_paceline("up", *SMALL, "--kv-disk", "1GB", PACELINE_HOME=str(home))
    assert "--kv-disk may take 954 MiB, and" in until(process, "note:")[-1]
    url = wait_ready(process)
    assert b"".join(ask(url, max_tokens=40))
    while metric(url, 'paceline_kv_disk_blocks_total{what="failed"}') < 1:
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert [path for path in small_disk.rglob("*") if path not in before and path.is_file()] == []
