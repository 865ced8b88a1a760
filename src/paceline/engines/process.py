"""An engine that this node starts and owns: loading, out of memory, crashes, and its end.

Laws:
- The process started here is the only one that is ever signalled, with its descendants. It ends with the node's process, however that ends (`guard`).
- A load may take as long as it shows signs of progress, up to `LoadPatience.longest_s`. Signs are output, growing memory and bytes read.
- Out of memory on a device: the load is retried with fewer layers there, at most `len(loading.SHARES)` times, and each time is announced.
- A first start that fails ends the matter with its reason. After a crash of an engine that was ready, it is started again after growing pauses.
- The door stays the same over restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError, EngineGone, OutOfMemory, PacelineError
from paceline.core.piped import start_python
from paceline.engines import guard
from paceline.engines.contract import Door, EngineIdentity
from paceline.engines.engine_log import EngineLog, Memory
from paceline.engines.http import EnginePatience as HttpPatience
from paceline.engines.http import Http
from paceline.engines.loading import LoadPatience, LoadWatch, fewer_layers, signs_of

logger = logging.getLogger(__name__)

MOST_CRASHES: Final = 8
"""Crashes in a row after which an engine stays down. The pauses between them take two minutes. Raising it: more time for a cause to pass; a
model that crashes its engine costs its load time more often."""
READY_S: Final = 3.0
"""Seconds for an engine to say whether it takes requests. Raising it: an engine that hangs while it loads is asked less often."""
MAX_SOCKET_PATH: Final = 100
"""Longest path of a Unix socket, in bytes. macOS allows 103, Linux 107."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one engine is started."""

    identity: EngineIdentity
    command: Callable[[int | None], Sequence[str]]
    """Returns the command, from the number of layers on the GPU; None: the engine decides."""
    door: Door
    environment: Mapping[str, str] = field(repr=False)
    """All of its variables."""
    folder: Path
    """Folder of this start alone, for the socket. It is removed when the engine ends."""
    ready_path: str = "/health"
    """Answered with 200 once the engine takes requests."""
    n_layers: int = 0
    """Layers that the engine could hold on a GPU; 0: no GPU is used, or the engine can't split a model."""
    gpu_layers: int | None = None
    """Layers on the GPU at the first try; None: the engine decides."""


class ProcessState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    PAUSED = "paused"
    """Between a crash and the next start."""
    FAILED = "failed"
    """It stays down; `EngineProcess.error` says why."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineExit:
    """The end of an engine's process that was not asked for."""

    why: str
    """In words, on one line."""
    code: int
    """Its exit code; 128 + number for a signal."""
    n_crashes: int
    """Crashes in a row, this one included."""
    pause_s: float | None
    """Seconds until it is started again; None: it stays down."""


Pause = Callable[[float], Awaitable[None]]
"""Waits for a number of seconds."""
Note = Callable[[str], None]
"""Takes a sentence about the engine, for people."""


class EngineProcess:
    """An engine, started and watched. For one event loop.

    Args:
        launch: how it is started.
        logs: folder for its output.
        on_exit: called on the event loop for each end of the process that was not asked for, before the pause.
        pause: waits; tests give a pause that moves their clock.
    """

    def __init__(
        self,
        launch: Launch,
        logs: Path,
        clock: Clock,
        *,
        patience: LoadPatience | None = None,
        on_exit: Callable[[EngineExit], None] | None = None,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self.launch, self.gpu_layers = launch, launch.gpu_layers
        self.state, self.error = ProcessState.LOADING, None
        self.log: EngineLog | None = None
        self.n_restarts = 0
        """Starts after crashes."""
        self._logs, self._clock, self._pause = logs, clock, pause
        self._patience, self._on_exit = patience or LoadPatience(), on_exit
        self._backoff = Backoff(1.0, 60.0, steady_s=300.0)
        self._changed = asyncio.Event()
        self._listeners: list[Note] = [logger.info]
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked_why = ""
        """Why `restart` was called."""

    error: PacelineError | None
    """Why it stays down."""

    @property
    def door(self) -> Door:
        return self.launch.door

    @property
    def identity(self) -> EngineIdentity:
        return self.launch.identity

    @property
    def pid(self) -> int | None:
        """Process id of the engine's guard, the parent of the engine; None while nothing runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process. Returns before it is ready.

        Raises:
            ConfigError: the system starts no process.
        """
        await self._spawn()
        self._task = asyncio.create_task(self._supervise(), name=f"engine {self.identity.name}")

    async def wait_ready(self, progress: Note | None = None) -> None:
        """Wait until the engine takes requests.

        Args:
            progress: called with a sentence for each thing that happens meanwhile, such as a second try with fewer layers on the GPU.

        Raises:
            OutOfMemory: the model does not fit, whatever is tried.
            EngineGone: the engine can't be started, or was stopped.
        """
        if progress is not None:
            self._listeners.append(progress)
        try:
            while self.state in {ProcessState.LOADING, ProcessState.PAUSED}:
                self._changed.clear()
                await self._changed.wait()
        finally:
            if progress is not None:
                self._listeners.remove(progress)
        if self.error is not None:
            raise self.error
        if self.state is ProcessState.STOPPED:
            raise EngineGone(f"{self.identity} was stopped")

    async def restart(self, why: str) -> None:
        """End the process and start it again, as after a crash: for an engine that runs but does not answer."""
        if self.state is ProcessState.READY:
            self._asked_why = why
            await self._end()

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._end()
        shutil.rmtree(self.launch.folder, ignore_errors=True)
        if self.error is None:
            self._become(ProcessState.STOPPED)

    # ------------------------------------------------------------------------------------------------------------ inside

    def _become(self, state: ProcessState) -> None:
        self.state = state
        self._changed.set()

    def _say(self, text: str) -> None:
        for listener in tuple(self._listeners):
            listener(text)

    async def _supervise(self) -> None:
        was_ready, is_first = False, True
        try:
            while True:
                if not is_first:
                    await self._spawn()
                is_first = False
                self._become(ProcessState.LOADING)
                why = await self._load()
                if why is None:
                    was_ready = True
                    self._become(ProcessState.READY)
                    self._say(f"{self.identity} is ready")
                    why = await self._crash()
                await self._end()
                if self._retries_with_fewer_layers():
                    if was_ready:
                        self._tell_exit(EngineExit(why, self._code, self._backoff.failures, 0.0))
                    continue
                if not was_ready:
                    self._fail(why)
                    return
                if (pause_s := self._note_crash(why)) is None:
                    return
                await self._pause(pause_s)
                self.n_restarts += 1
        except PacelineError as error:  # the system starts no process
            self.error = error
            self._become(ProcessState.FAILED)
        finally:
            await self._end()
            shutil.rmtree(self.launch.folder, ignore_errors=True)

    async def _spawn(self) -> None:
        launch = self.launch
        launch.folder.mkdir(mode=0o700, exist_ok=True)
        if launch.door.socket is not None:
            launch.door.socket.unlink(missing_ok=True)
        arguments = ("-m", guard.__name__, str(self._patience.grace_s), str(launch.folder), *launch.command(self.gpu_layers))
        try:
            self.log = EngineLog(self._logs, launch.identity.name, self._clock.wall(), launch.door.api_key)
            self._process = await start_python(*arguments, environment=launch.environment)
        except OSError as error:
            raise ConfigError(f"{launch.identity} can't be started: {error.strerror or error}") from error
        self._reader = asyncio.create_task(_copy(self._process, self.log))

    _reader: asyncio.Task[None]

    async def _load(self) -> str | None:
        """Wait until the engine is ready. Returns why it will not be; None: it is."""
        process, log = self._process, self.log
        assert process is not None
        assert log is not None
        watch = LoadWatch(self._patience, self._clock.monotonic())
        while process.returncode is None:
            with suppress(EngineGone):
                if _listens(process.pid, self.door) and await _takes_requests(self.launch):
                    return None
            why = watch.look(signs_of(process.pid, log.n_bytes), self._clock.monotonic())
            if why is not None:
                return why
            await self._pause(self._patience.look_s)
        return await self._crash()

    async def _crash(self) -> str:
        """Wait until the process ends. Returns how it ended, in words."""
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait([self._reader], timeout=5)  # the last lines say why
        if self._asked_why:
            self._asked_why, why = "", self._asked_why
            return why
        how = f"it was ended by signal {code - 128}" if code > 128 else f"it ended with code {code}"
        if code == 137:
            how += ", which the system does when memory runs out"
        assert self.log is not None
        return f"{self.log.cause} ({how})" if self.log.cause else how

    def _retries_with_fewer_layers(self) -> bool:
        assert self.log is not None
        if self.log.lacked is not Memory.DEVICE:
            return False
        fewer = fewer_layers(self.gpu_layers, self.launch.n_layers)
        if fewer is None:
            return False
        self._say(f"{self.identity} ran out of GPU memory; it is started again with {fewer} of {self.launch.n_layers} layers on the GPU")
        self.gpu_layers = fewer
        self._become(ProcessState.LOADING)
        return True

    def _fail(self, why: str) -> None:
        assert self.log is not None
        if self.log.lacked is not None:
            advice = "Ask for a smaller context (--context) or fewer requests at once, take a smaller quantisation, or stop programs that hold memory"
            self.error = OutOfMemory(f"{self.identity} has too little memory for the model: {why}", self._hint(advice))
        else:
            advice = "A newer version of it may know the model" if "unknown" in self.log.cause else ""
            self.error = EngineGone(f"{self.identity} can't run the model: {why}", self._hint(advice))
        self._become(ProcessState.FAILED)

    def _hint(self, advice: str) -> str:
        assert self.log is not None
        last = self.log.last_lines()
        lines = f"Its last lines, of {self.log.path}:\n{last}" if last else "It printed nothing"
        return f"{advice}. {lines}" if advice else lines

    def _note_crash(self, why: str) -> float | None:
        """Count a crash. Returns the seconds until the next start; None: it stays down."""
        pause_s: float | None = self._backoff.fail(self._clock.monotonic())
        n_crashes = self._backoff.failures
        if n_crashes >= MOST_CRASHES:
            pause_s = None
            self.error = EngineGone(f"{self.identity} crashed {n_crashes} times in a row and stays down: {why}", self._hint(""))
            self._become(ProcessState.FAILED)
        else:
            self._become(ProcessState.PAUSED)
            self._say(f"{self.identity} crashed (time {n_crashes} in a row) and is started again in {pause_s:.0f} s: {why}")
        self._tell_exit(EngineExit(why, self._code, n_crashes, pause_s))
        return pause_s

    @property
    def _code(self) -> int:
        return 0 if self._process is None else self._process.returncode or 0

    def _tell_exit(self, exit_: EngineExit) -> None:
        if self._on_exit is not None:
            self._on_exit(exit_)

    async def _end(self) -> None:
        """End the process, if it runs, and close its log. Idempotent."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert self.log is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(self._patience.grace_s + 10):
                await process.wait()
        except TimeoutError:  # the guard hangs: on Linux the engine ends with it
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        self.log.close()


async def _copy(process: Process, log: EngineLog) -> None:
    """Copy the output of a process to its log."""
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        log.write(data)


async def _takes_requests(launch: Launch) -> bool:
    """Return whether the engine says that it takes requests. Raises EngineGone if it says nothing."""
    http = Http(launch.door, launch.identity.name, HttpPatience(answer_s=READY_S))
    try:
        return (await http.ask("GET", launch.ready_path)).status == 200
    finally:
        await http.close()


def _listens(pid: int, door: Door) -> bool:
    """Return whether it is a descendant of the guard `pid` that listens at the door. Another program that took the port would get the key."""
    if door.socket is not None:
        return door.socket.exists()  # only this user can search its folder
    port = urlsplit(door.url).port
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections("tcp")):
                    return True
    return False


def new_folder() -> Path:
    """Make a folder for the socket of one engine, which only this user can search. Its path is short enough for a socket, if any is."""
    places = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")  # noqa: S108 - mkdtemp makes a new folder of mode 0700
    for place in places:
        if place and len(os.fsencode(place)) < MAX_SOCKET_PATH - 40:
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="paceline-", dir=place))
    return Path(tempfile.mkdtemp(prefix="paceline-"))
