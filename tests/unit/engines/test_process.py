"""An engine that a node starts: loads, failures and ends. The processes are real; the time is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fakes import engine_program
from tests.fakes.clock import FakeClock

from paceline.core.errors import EngineGone, OutOfMemory, PacelineError
from paceline.core.ports import find_port
from paceline.core.processes import python_command
from paceline.engines import folders
from paceline.engines.contract import Door, EngineIdentity
from paceline.engines.family import MARK
from paceline.engines.folders import EngineFolder
from paceline.engines.loading import LoadPatience, LoadSigns, LoadWatch, fewer_layers
from paceline.engines.process import MOST_CRASHES, EngineExit, EngineProcess, Launch, ProcessState
from paceline.engines.table import open_engine

PATIENCE = LoadPatience(grace_s=0.2, look_s=50.0)
KEYS = (f"{n}-a-random-key" for n in itertools.count(1))


def launch(mode: str, state: Path, n_layers: int = 0, port: Callable[[], int] | None = None) -> Launch:
    """Return how the fake engine is started.

    Args:
        state: folder where it counts its starts.
        port: returns the port of each start; None: it listens on a socket.
    """

    def open_door(folder: Path) -> Door:
        return (
            Door("http://127.0.0.1", next(KEYS), folder / "engine.sock") if port is None else Door(f"http://127.0.0.1:{port()}", next(KEYS))
        )

    def command(door: Door, layers: int | None) -> list[str]:
        at = door.url.rpartition("/")[2] if door.socket is None else str(door.socket)
        return [sys.executable, "-S", engine_program.__file__, mode, at, *([] if layers is None else [str(layers)])]

    def environment(door: Door, folder: Path) -> dict[str, str]:
        assert folder.stat().st_mode & 0o077 == 0
        passed = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        return {**passed, "LLAMA_API_KEY": door.api_key, "FOLDER": str(state)}

    return Launch(EngineIdentity("llama-server", "b1"), open_door, command, environment, n_layers=n_layers)


class Bench:
    """An engine, the test's clock, and what was said."""

    def __init__(
        self,
        mode: str,
        logs: Path,
        n_layers: int = 0,
        wait: Callable[[Bench], Awaitable[object]] | None = None,
        port: Callable[[], int] | None = None,
    ) -> None:
        self.clock, self.notes, self.exits, self.pauses = FakeClock(), list[str](), list[EngineExit](), list[float]()
        self._wait = wait
        launched = launch(mode, logs, n_layers, port)
        self.engine = EngineProcess(launched, logs, self.clock, patience=PATIENCE, on_exit=self.exits.append, pause=self._pause)
        self.doors: list[Door] = []

        async def on_ready(door: Door) -> None:
            self.doors.append(door)

        self.engine.on_ready = on_ready

    @property
    def folder(self) -> Path:
        """Folder of the start that runs."""
        assert self.engine.pid is not None
        return Path(psutil.Process(self.engine.pid).environ()[MARK])

    async def _pause(self, seconds: float) -> None:
        """Let the clock run, and processes for a moment."""
        self.pauses.append(seconds)
        if self._wait is not None:
            await self._wait(self)
        else:
            await asyncio.sleep(0.005)
        if self._wait is not None or seconds != PATIENCE.look_s:
            self.clock.advance(seconds)

    async def ready(self) -> PacelineError | None:
        """Start it and wait. Returns the error, if there is one."""
        await self.engine.start()
        try:
            await self.engine.wait_ready(self.notes.append)
        except PacelineError as error:
            return error
        return None


async def settle(bench: Bench) -> None:
    """Let processes run, in a load in which the clock never stands still."""
    await asyncio.sleep(0.02)


def run(bench: Bench, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        try:
            async with asyncio.timeout(30):
                await test()
        finally:
            folder = None
            with contextlib.suppress(psutil.Error, AssertionError):
                folder = bench.folder
            await bench.engine.stop()
        assert folder is None or not folder.exists()

    asyncio.run(whole())


def family(bench: Bench) -> list[psutil.Process]:
    assert bench.engine.pid is not None
    return psutil.Process(bench.engine.pid).children(recursive=True)


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - processes set no event
        await asyncio.sleep(0.002)


async def gone(processes: list[psutil.Process]) -> None:
    await until(lambda: not any(map(runs, processes)))


def test_it_serves_with_a_key_that_no_command_line_shows(tmp_path: Path) -> None:
    bench = Bench("serve", tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        assert bench.engine.state is ProcessState.READY
        processes, key = family(bench), bench.engine.door.api_key
        assert key not in " ".join(word for process in [psutil.Process(bench.engine.pid), *processes] for word in process.cmdline())
        await bench.engine.stop()
        await gone(processes)
        assert bench.engine.state is ProcessState.STOPPED
        log = bench.engine.log
        assert log is not None
        assert "key [key]" in log.path.read_text()  # the engine printed it
        assert log.path.stat().st_mode & 0o077 == 0

    run(bench, test)


def test_without_sockets_it_serves_on_a_port(tmp_path: Path) -> None:
    bench = Bench("serve", tmp_path, port=lambda: find_port("127.0.0.1"))

    async def test() -> None:
        assert await bench.ready() is None

    run(bench, test)


class Stranger:
    """A program of another user that takes a port, and keeps what it is sent."""

    def __init__(self) -> None:
        self.connections, self.open, self.heard = 0, 0, b""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        with contextlib.suppress(OSError):
            self.heard += await reader.read(4096)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            await writer.wait_closed()
        self.open -= 1

    @contextlib.asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[int]:
        """Listen at a port; 0: any. Yields it."""
        async with await asyncio.start_server(self.take, "127.0.0.1", port) as server:
            yield server.sockets[0].getsockname()[1]
        await until(lambda: not self.open)


def test_a_program_that_took_the_port_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    stranger = Stranger()

    async def test() -> None:
        async with stranger.at(0) as taken:
            bench = Bench("silent", tmp_path, wait=settle, port=lambda: taken)
            try:
                assert await bench.ready() is not None
            finally:
                await bench.engine.stop()
        assert not stranger.heard  # it would have read the key

    asyncio.run(test())


def test_nothing_is_sent_to_the_port_of_an_engine_that_is_down_and_the_next_start_has_another(tmp_path: Path) -> None:
    stranger, ports = Stranger(), list[int]()
    paused, goes_on = asyncio.Event(), asyncio.Event()

    def port() -> int:
        ports.append(find_port("127.0.0.1"))
        return ports[-1]

    async def pause(_: float) -> None:
        if bench.engine.state is ProcessState.PAUSED:
            paused.set()
            await goes_on.wait()
        await asyncio.sleep(0.005)

    bench = Bench("serve", tmp_path, port=port)
    bench.engine._pause = pause  # pyright: ignore[reportPrivateUsage]

    async def test() -> None:
        assert await bench.ready() is None
        adapter = await open_engine(bench.engine.door, name=bench.engine.identity.name)
        bench.engine.on_ready = adapter.http.move
        assert (await adapter.http.ask("GET", "/health")).status == 200
        guard, engine = psutil.Process(bench.engine.pid), family(bench)[0]
        guard.suspend()  # the node can't know yet
        engine.send_signal(signal.SIGKILL)
        await gone([engine])
        async with stranger.at(ports[0]):
            with pytest.raises(EngineGone):
                await adapter.http.ask("GET", "/props")
            guard.resume()
            await paused.wait()
            with pytest.raises(EngineGone):
                await adapter.http.ask("GET", "/props")
            assert not stranger.heard
            goes_on.set()
            await bench.engine.wait_ready()
            assert (await adapter.http.ask("GET", "/health")).status == 200
        assert len(set(ports)) == 2
        assert not stranger.heard
        await adapter.close()

    run(bench, test)


@pytest.mark.parametrize(("looks", "connections"), [([False], 0), ([True, False], 1)])
def test_a_port_that_changes_hands_while_it_is_connected_to_gets_no_key(looks: list[bool], connections: int) -> None:
    stranger = Stranger()

    async def test() -> None:
        async with stranger.at(0) as port:
            door = Door(f"http://127.0.0.1:{port}", "key", is_held=iter(looks).__next__)
            adapter = await open_engine(door, name="llama-server")
            with pytest.raises(EngineGone):
                await adapter.models()
            await until(lambda: stranger.connections == connections)
            await adapter.close()
        assert not stranger.heard

    asyncio.run(test())


def test_out_of_gpu_memory_is_tried_again_with_fewer_layers_and_said(tmp_path: Path) -> None:
    bench = Bench("fits:16", tmp_path, n_layers=33)

    async def test() -> None:
        assert await bench.ready() is None
        assert bench.engine.gpu_layers == 16
        assert [note for note in bench.notes if "24 of 33" in note or "16 of 33" in note] == bench.notes[:2]
        assert not bench.exits

    run(bench, test)


@pytest.mark.parametrize(("mode", "n_layers", "kind", "shows"), [
    ("fits:-1", 33, OutOfMemory, "unable to allocate CUDA0 buffer"),  # not even with none
    ("fits:-1", 0, OutOfMemory, "cudaMalloc failed"),
    ("host-full", 33, OutOfMemory, "unable to allocate CPU buffer"),
    ("wrong", 33, EngineGone, "unknown model architecture: 'new'"),
    ("once:", 0, EngineGone, "it ended with code"),
])  # fmt: skip
def test_a_first_start_that_fails_ends_with_the_reason(tmp_path: Path, mode: str, n_layers: int, kind: type, shows: str) -> None:
    bench = Bench(mode, tmp_path, n_layers=n_layers)

    async def test() -> None:
        error = await bench.ready()
        assert type(error) is kind
        assert error is not None
        assert shows in f"{error.message} {error.hint}"
        assert "\n" not in error.message
        assert bench.engine.state is ProcessState.FAILED

    run(bench, test)
    assert len(list(tmp_path.glob("*.log"))) <= 5


def test_a_load_that_shows_nothing_is_given_up(tmp_path: Path) -> None:
    bench = Bench("silent", tmp_path, wait=settle)

    async def test() -> None:
        assert "no progress" in str(await bench.ready())
        assert PATIENCE.silent_s < sum(bench.pauses) < 2 * PATIENCE.working_s

    run(bench, test)


def test_a_load_that_talks_goes_on_up_to_the_longest(tmp_path: Path) -> None:
    async def more(bench: Bench) -> None:
        log = bench.engine.log
        assert log is not None
        before = log.n_bytes
        await until(lambda: log.n_bytes > before)

    bench = Bench("talks", tmp_path, wait=more)

    async def test() -> None:
        assert f"not ready after {PATIENCE.longest_s:.0f} s" in str(await bench.ready())
        assert sum(bench.pauses) >= PATIENCE.longest_s

    run(bench, test)


def test_after_a_crash_it_is_started_again_with_growing_pauses(tmp_path: Path) -> None:
    bench = Bench("serve", tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        for n_crashes in (1, 2, 3):
            door = bench.engine.door
            family(bench)[0].send_signal(signal.SIGKILL)
            await until(lambda: bench.engine.n_restarts == n_crashes)  # noqa: B023 - it is called here alone
            await bench.engine.wait_ready()
            assert bench.engine.door.api_key != door.api_key
        assert [each.pause_s for each in bench.exits] == [1.0, 2.0, 4.0]
        assert [each.code for each in bench.exits] == [128 + signal.SIGKILL] * 3
        bench.clock.advance(10_000)
        family(bench)[0].send_signal(signal.SIGKILL)
        await until(lambda: len(bench.exits) == 4)
        assert bench.exits[-1].pause_s == 1.0  # it ran for long

    run(bench, test)


def test_an_engine_that_crashes_again_and_again_stays_down(tmp_path: Path) -> None:
    bench = Bench("once", tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        await until(lambda: bench.engine.state is ProcessState.FAILED)
        with pytest.raises(EngineGone) as caught:
            await bench.engine.wait_ready()
        assert "the driver is gone" in caught.value.hint
        assert [each.n_crashes for each in bench.exits] == list(range(1, MOST_CRASHES + 1))
        assert bench.exits[-1].pause_s is None

    run(bench, test)


def test_an_engine_that_does_not_answer_can_be_started_again(tmp_path: Path) -> None:
    bench = Bench("serve", tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        before = family(bench)
        await bench.engine.restart("it answers nothing")
        await until(lambda: bench.engine.n_restarts == 1)
        await bench.engine.wait_ready()
        assert bench.exits[0].why == "it answers nothing"
        assert not set(family(bench)) & set(before)

    run(bench, test)


@pytest.mark.parametrize("mode", ["stubborn", "forks"])
def test_nothing_that_the_engine_started_outlives_it(tmp_path: Path, mode: str) -> None:
    bench = Bench(mode, tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        processes = family(bench)
        assert len(processes) == (3 if mode == "forks" else 1)
        await bench.engine.stop()
        await gone(processes)

    run(bench, test)


def test_forks_of_an_engine_that_crashed_are_ended_before_the_next_start(tmp_path: Path) -> None:
    bench = Bench("forks", tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        processes = family(bench)
        processes[0].send_signal(signal.SIGKILL)
        await until(lambda: bench.engine.n_restarts == 1)
        await gone(processes)

    run(bench, test)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the engine with its guard")
@pytest.mark.parametrize("mode", ["serve", "stubborn", "forks", "bare"])
@pytest.mark.parametrize("how", ["guard killed", "guard stopped"])
def test_a_guard_that_fails_leaves_no_process(tmp_path: Path, mode: str, how: str) -> None:
    bench = Bench(mode, tmp_path)

    async def test() -> None:
        assert await bench.ready() is None
        processes, folder = family(bench), bench.folder
        guard = psutil.Process(bench.engine.pid)
        if how == "guard killed":
            guard.send_signal(signal.SIGKILL)
            await until(lambda: bench.engine.n_restarts == 1)
            assert bench.exits[0].code == 128 + signal.SIGKILL
            await bench.engine.wait_ready()
        else:
            guard.suspend()
            bench.engine.kill()  # as a node does before it ends itself
            processes.append(guard)
        assert not any(map(runs, processes))
        assert not folder.exists()

    run(bench, test)


def test_only_processes_of_the_start_are_killed(tmp_path: Path) -> None:
    bench, other = Bench("serve", tmp_path), Bench("serve", tmp_path)
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

    async def test() -> None:
        assert await bench.ready() is None
        assert await other.ready() is None
        unlike = await asyncio.create_subprocess_exec(*sleeping, env={MARK: str(other.folder)})
        bare = await asyncio.create_subprocess_exec(*sleeping, env={})
        try:
            bench.engine.kill()
            assert all(map(runs, [*family(other), psutil.Process(unlike.pid), psutil.Process(bare.pid)]))
        finally:
            for process in (unlike, bare):
                process.kill()
                await process.wait()
            await other.engine.stop()

    run(bench, test)


def test_a_full_disk_holds_up_no_engine(tmp_path: Path) -> None:
    bench = Bench("floods", tmp_path)
    (tmp_path / "llama-server-000000000000000.log").mkdir()
    bench.engine._logs = tmp_path / "started"  # pyright: ignore[reportPrivateUsage]  a file, once the program runs

    async def test() -> None:
        assert await bench.ready() is None  # it wrote 3 MB before it served
        log = bench.engine.log
        assert log is not None
        await until(lambda: log.n_bytes == 3_000_000)

    (tmp_path / "started").write_text("0")
    run(bench, test)


def test_folders_of_killed_nodes_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_SOCKET_PATH", 4096)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    held, left, other = EngineFolder(), EngineFolder(), tmp_path / "paceline-notes"
    assert {held.path.parent, left.path.parent} == {tmp_path}
    assert left._lock is not None  # pyright: ignore[reportPrivateUsage]
    os.close(left._lock)  # as the system does for a process that ended
    other.mkdir(mode=0o700)
    (tmp_path / "paceline-link").symlink_to(left.path)
    readable = EngineFolder()
    readable.path.chmod(0o755)
    os.close(readable._lock or 0)  # pyright: ignore[reportPrivateUsage]
    assert not left.path.exists()
    new = EngineFolder()
    assert sorted(path for path in tmp_path.iterdir() if path.is_dir()) == sorted([held.path, other, readable.path, new.path])
    for folder in (held, new):
        folder.remove()
        folder.remove()
        assert not folder.path.exists()


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.engines.test_process import Bench
async def main():
    bench = Bench("forks", Path(sys.argv[1]))
    assert await bench.ready() is None
    print(bench.engine.pid, bench.folder, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_it_ends_however_its_node_ends(tmp_path: Path) -> None:
    command = python_command("-c", PARENT, str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as node:
        try:
            assert node.stdout is not None
            pid, folder = node.stdout.readline().split()
            guard = psutil.Process(int(pid))
            processes = [*guard.children(recursive=True), guard]
            assert len(processes) == 4
            node.send_signal(signal.SIGKILL)
            until = time.monotonic() + 20
            while any(map(runs, processes)):
                assert time.monotonic() < until, processes
                time.sleep(0.01)
            assert not Path(folder).exists()
        finally:
            node.kill()
            shutil.rmtree(folder, ignore_errors=True)
            for process in processes:
                if process.is_running():
                    process.kill()


@pytest.mark.parametrize(("signs", "every_s", "given_up_s"), [
    ([LoadSigns()] * 999, 10, 130),
    ([LoadSigns(output=n) for n in range(999)], 10, 3610),
    ([LoadSigns(memory=n << 20) for n in range(999)], 10, 3610),
    ([LoadSigns(memory=n << 10) for n in range(999)], 10, 130),  # noise
    ([LoadSigns(read=n) for n in range(999)], 10, 3610),
    ([LoadSigns(processor_s=n) for n in range(999)], 10, 610),  # kernels are compiled, or it spins
    ([*[LoadSigns(output=n) for n in range(100)], *[LoadSigns(output=99)] * 99], 10, 1120),
    ([LoadSigns(memory=-n << 20) for n in range(999)], 10, 130),  # shrinking is no progress
])  # fmt: skip
def test_a_load_is_given_up_by_its_signs(signs: list[LoadSigns], every_s: int, given_up_s: int) -> None:
    watch = LoadWatch(LoadPatience(), 0.0)
    at = next(n * every_s for n, each in enumerate(signs) if watch.look(each, n * every_s))
    assert at == given_up_s


@pytest.mark.parametrize(("layers", "n_layers", "tries"), [
    (None, 33, [24, 16, 8, 0]),
    (None, 2, [1, 0]),
    (None, 1, [0]),
    (None, 0, []),
    (20, 33, [16, 8, 0]),
    (99, 33, [24, 16, 8, 0]),
    (0, 33, []),
])  # fmt: skip
def test_fewer_layers_are_tried_in_few_steps(layers: int | None, n_layers: int, tries: list[int]) -> None:
    found: list[int] = []
    while (layers := fewer_layers(layers, n_layers)) is not None:
        found.append(layers)
    assert found == tries
