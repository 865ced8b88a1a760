"""An engine that this node starts and owns: loading, out of memory, crashes, and its end.

Laws:
- Only the processes that were started here are ever signalled, with their descendants. They end with the node's process, however that ends (`guard`), and
  before the next start.
- A load may take as long as it shows signs of progress, up to `LoadPatience.longest_s`. Signs are output, growing memory and bytes read.
- Out of memory on a device: the load is retried with fewer layers there, at most `len(loading.SHARES)` times, and each time is announced.
- A first start that fails ends the matter with its reason. After a crash of an engine that was ready, it is started again after growing pauses.
- Each start has a new door: another program may have taken the port, and knows what it was sent. Nothing is sent to the door of an engine that is down.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from paceline.core.backoff import Backoff
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError, EngineGone, OutOfMemory, PacelineError
from paceline.core.piped import start_python
from paceline.engines import guard
from paceline.engines.contract import Door, EngineIdentity
from paceline.engines.engine_log import EngineLog, Memory
from paceline.engines.family import MARK, PortHolder, kill_family
from paceline.engines.folders import EngineFolder
from paceline.engines.http import EnginePatience as HttpPatience
from paceline.engines.http import Http
from paceline.engines.loading import LoadPatience, LoadWatch, fewer_layers, signs_of

logger = logging.getLogger(__name__)

MOST_CRASHES: Final = 8
"""Crashes in a row after which an engine stays down. The pauses between them take two minutes. Raising it: more time for a cause to pass; a
model that crashes its engine costs its load time more often."""
READY_S: Final = 3.0
"""Seconds for an engine to say whether it takes requests. Raising it: an engine that hangs while it loads is asked less often."""

OUTPUT_SLICE: Final = 1 << 14
"""Bytes of output that are taken at once. Raising it: output that makes the patterns of `engine_log` slow holds up requests for longer."""
EXIT_LOOK_S: Final = 0.25
"""Seconds between two looks whether a guard ended while other processes still hold its output. Raising it: they are found later."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one engine is started."""

    identity: EngineIdentity
    open_door: Callable[[Path], Door]
    """Returns the door of one start, with a key of its own, from a folder for the socket that this start alone has."""
    command: Callable[[Door, int | None], Sequence[str]]
    """Returns the command, from the door and the number of layers on the GPU; None: the engine decides."""
    environment: Callable[[Door, Path], Mapping[str, str]]
    """Returns all of its variables, from the door and the folder."""
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


OnReady = Callable[[Door], Awaitable[object]]
"""Takes the door of a start that is ready."""
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
        self.on_ready: OnReady | None = None
        """Called on the event loop at each start once the engine takes requests, before it counts as ready."""
        self.n_restarts = 0
        """Starts after crashes."""
        self._logs, self._clock, self._pause = logs, clock, pause
        self._patience, self._on_exit = patience or LoadPatience(), on_exit
        self._backoff = Backoff(1.0, 60.0, steady_s=300.0)
        self._changed = asyncio.Event()
        self._listeners: list[Note] = [logger.info]
        self._process: Process | None = None
        self._folder: EngineFolder | None = None
        """Folder of the last start, while its processes may still run."""
        self._task: asyncio.Task[None] | None = None
        self._asked_why = ""
        """Why `restart` was called."""

    error: PacelineError | None
    """Why it stays down."""

    door: Door
    """Door of the last start."""

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
        if self.error is None:
            self._become(ProcessState.STOPPED)

    def kill(self) -> None:
        """Kill the engine and its guard, for a node that ends its own process next. Blocks for some milliseconds, and 2 s at most. From any thread."""
        process, folder = self._process, self._folder
        if process is not None and folder is not None:
            kill_family(str(folder.path), process.pid)
            folder.remove()

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
                    if self.on_ready is not None:
                        await self.on_ready(self.door)
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

    async def _spawn(self) -> None:
        launch = self.launch
        try:
            self._folder = EngineFolder()
            folder = self._folder.path
            door = launch.open_door(folder)
            arguments = ("-m", guard.__name__, str(self._patience.grace_s), str(folder), *launch.command(door, self.gpu_layers))
            environment = {**launch.environment(door, folder), MARK: str(folder)}
            process = await start_python(*arguments, environment=environment)
        except BaseException as error:
            self._remove_folder()
            if isinstance(error, OSError):
                raise ConfigError(f"{launch.identity} can't be started: {error.strerror or error}") from error
            raise
        self._process = process
        self.door = door if door.socket is not None else _guarded(door, process)
        self.log = EngineLog(self._logs, launch.identity.name, self._clock.wall(), door.api_key)
        self._reader = asyncio.create_task(_copy(process, self.log))

    _reader: asyncio.Task[None]

    async def _load(self) -> str | None:
        """Wait until the engine is ready. Returns why it will not be; None: it is."""
        process, log = self._process, self.log
        assert process is not None
        assert log is not None
        watch = LoadWatch(self._patience, self._clock.monotonic())
        while process.returncode is None:
            with suppress(EngineGone):
                if await _takes_requests(self.launch, self.door):
                    return None
            why = watch.look(signs_of(process.pid, log.n_bytes), self._clock.monotonic())
            if why is not None:
                return why
            await self._pause(self._patience.look_s)
        return await self._crash()

    async def _crash(self) -> str:
        """Wait until the process ends. Returns how it ended, in words."""
        process = self._process
        assert process is not None
        code = await _ended(process)
        if code < 0:  # the guard was killed, and ended nothing
            await self._kill_rest(process, self._folder)
        await asyncio.wait([self._reader], timeout=5)  # the last lines say why
        if self._asked_why:
            self._asked_why, why = "", self._asked_why
            return why
        how = f"it was ended by signal {code - 128}" if code > 128 else f"it ended with code {code}"
        if code < 0:
            how = f"the process that guards it was ended by signal {-code}"
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
        code = 0 if self._process is None else self._process.returncode or 0
        return code if code >= 0 else 128 - code

    def _tell_exit(self, exit_: EngineExit) -> None:
        if self._on_exit is not None:
            self._on_exit(exit_)

    async def _end(self) -> None:
        """End the process, if it runs, with all that it left, and close its log. Idempotent."""
        process, folder, reader, log = self._process, self._folder, self._reader, self.log  # a later start may change them meanwhile
        if process is None:
            return
        assert process.stdin is not None
        assert log is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(self._patience.grace_s + 10):
                await _ended(process)
        except TimeoutError:  # the guard hangs
            await self._kill_rest(process, folder)
            await _ended(process)
        await self._kill_rest(process, folder)
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader
        log.close()

    async def _kill_rest(self, process: Process, folder: EngineFolder | None) -> None:
        """Kill what is left of a start, and remove its folder. Idempotent."""
        if folder is not None:
            await asyncio.to_thread(kill_family, str(folder.path), process.pid)
            if process.returncode is not None:
                folder.remove()
                self._folder = None if self._folder is folder else self._folder

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


def _guarded(door: Door, process: Process) -> Door:
    """Return the door at a port for as long as the engine itself listens there."""
    holder = PortHolder(process.pid, door)
    return replace(door, is_held=lambda: process.returncode is None and holder.is_there())


async def _ended(process: Process) -> int:
    """Wait until a process ends, and return its exit code.

    `Process.wait` alone waits until its output is closed as well (https://github.com/python/cpython/issues/119710), which what it left may hold open.
    """
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=EXIT_LOOK_S)
    finally:
        waiting.cancel()
    return process.returncode


async def _copy(process: Process, log: EngineLog) -> None:
    """Copy the output of a process to its log."""
    assert process.stdout is not None
    while data := await process.stdout.read(OUTPUT_SLICE):
        log.write(data)
        await asyncio.sleep(0)  # reading what is there already lets nothing else run


async def _takes_requests(launch: Launch, door: Door) -> bool:
    """Return whether the engine says that it takes requests. Raises EngineGone if it says nothing."""
    http = Http(door, launch.identity.name, HttpPatience(answer_s=READY_S))
    try:
        return (await http.ask("GET", launch.ready_path)).status == 200
    finally:
        await http.close()
