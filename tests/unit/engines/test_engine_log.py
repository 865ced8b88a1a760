"""The output of an engine that this node started: what is kept, what is found in it, and what it costs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.engines import engine_log
from paceline.engines.engine_log import HEAD_BYTES, TAIL_BYTES, EngineLog, Memory

KEY = "Zk3_qVw8-YtR5mBx0LpJ7sNd"
LIMIT = HEAD_BYTES + TAIL_BYTES + 100


def log_in(folder: Path, secret: str = KEY) -> EngineLog:
    return EngineLog(folder, "llama-server", 1.0, secret)


def written(log: EngineLog) -> str:
    log.close()
    return log.path.read_text()


@pytest.mark.parametrize("shown", [KEY, KEY[:20], KEY[5:], KEY[:6], KEY[9:15], f"{KEY}{KEY}", f"{KEY[:8]} {KEY[8:]}"])
@pytest.mark.parametrize("before", [0, HEAD_BYTES + TAIL_BYTES])
def test_no_part_of_the_key_is_kept(tmp_path: Path, shown: str, before: int) -> None:
    log = log_in(tmp_path)
    log.write(b"x\n" * (before // 2))
    log.write(f"RuntimeError: it is '{shown}', see above\n".encode())
    for text in (log.cause, log.last_lines(), written(log)):
        assert "it is '[key]" in text
        assert "', see above" in text
        assert not any(KEY[at : at + 6] in text for at in range(len(KEY) - 5))


@pytest.mark.parametrize(("secret", "line"), [("", "any line"), (KEY, f"{KEY[:5]} is short"), ("abc", "ab is short"), (KEY, KEY[::-1])])
def test_other_words_stay(tmp_path: Path, secret: str, line: str) -> None:
    log = log_in(tmp_path, secret)
    log.write(f"{line}\n".encode())
    assert written(log) == f"{line}\n"


@pytest.mark.parametrize("before", [0, HEAD_BYTES - 50, 3 * HEAD_BYTES])
@pytest.mark.parametrize("end", ["\n", ""])
def test_the_end_says_why_however_long_the_output_is(tmp_path: Path, before: int, end: str) -> None:
    log = log_in(tmp_path)
    log.write(b"x" * 49 + b"\n")
    log.write(b"".join([b"x" * 49 + b"\n"] * (before // 50)))
    log.write(f"unable to allocate CUDA0 buffer\nRuntimeError: that was all{end}".encode())
    assert (log.cause, log.lacked) == ("that was all", Memory.DEVICE)
    log.close()
    assert log.last_lines().endswith("unable to allocate CUDA0 buffer\nRuntimeError: that was all")
    text = log.path.read_text()
    assert text.startswith("xxx")
    assert text.rstrip().endswith("that was all")
    assert len(text) <= LIMIT


@pytest.mark.parametrize("line", [
    "x" * 99 + "\n", "y" * 100, "\n", "\xff" * 3000 + "\n", "allocata " * 455 + "\n", "allocat" * 500 + "\n", "failed to allocate CPU " * 100 + "\n",
    "unable to allocate" + " CPU" * 900 + "\n", "unable to allocate" + " CUDA" * 900 + "\n", "Free memory on device " * 100 + "\n",
    "what(): " * 500 + "\n", "ValueError:" + " " * 4000 + "\n", KEY[:7] * 400 + "\n",
])  # fmt: skip
def test_no_line_makes_output_slow_or_its_log_long(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[int]()
    find = engine_log.memory_lacked

    def counted(text: str) -> Memory | None:
        searched.append(1)
        return find(text)

    monkeypatch.setattr(engine_log, "memory_lacked", counted)
    monkeypatch.setattr(engine_log, "HEAD_BYTES", 1 << 16)
    monkeypatch.setattr(engine_log, "TAIL_BYTES", 1 << 15)
    block = (line * (65536 // len(line) + 1)).encode("latin-1")[:65536]
    log = log_in(tmp_path)
    for _ in range(4):
        log.write(block)
    n_searched = len(searched)
    for _ in range(50):
        log.write(block)
    assert len(searched) == n_searched  # nothing is searched after the head
    assert log.lacked is None
    log.close()
    assert log.path.stat().st_size <= 100_000
    assert log.n_bytes == 54 * 65536


@pytest.mark.parametrize(
    "when", ["folder", "file", pytest.param("later", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux"))]
)
def test_a_full_disk_ends_the_file_and_is_said_once(tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    if when == "folder":
        folder.write_text("a file")
    elif when == "file":
        (folder / "llama-server-000000000001000.log").mkdir(parents=True)
    log = log_in(folder)
    if when == "later":
        file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)
        log._file, opened = file, log._file  # pyright: ignore[reportPrivateUsage]
        assert opened is not None
        opened.close()
    for _ in range(3):
        log.write(b"RuntimeError: no more room\n" * 40_000)
    assert log.cause == "no more room"
    assert "no more room" in log.last_lines()
    log.close()
    log.close()
    assert len(caplog.records) == 1
    assert str(log.path) in caplog.text
