"""Two threads, one on each side of a pair of tensor streams, that have a rank on another machine meet its group: what each leaves in its own memory, they
carry to the other's.

At each exchange a side sends what its ranks left and takes what the other's did. Up to `AT_ONCE_BYTES` fit into the socket's buffer. Larger sums are sent
by a second thread, so that neither side waits for the other to read, and both directions of a link are full. A group of several machines meets at the
first: it passes on what it got.
No other barrier is needed: a plane is written again two exchanges later at the earliest, when its bytes have long been sent.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.exchange import Exchange
from paceline.backends.cpu.shares import LANES
from paceline.core.errors import ExecutorLost, StreamClosed, StreamCorrupt, StreamIdle, TensorStreamError
from paceline.core.model import LayerRange
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.incoming import Array, TensorMessage
from paceline.ways.tensor import frames
from paceline.ways.tensor.frames import ASK, BLOCK, DONE, GIVE_UP, NOTHING, SUMS
from paceline.ways.tensor.memory import Command, GroupMemory
from paceline.ways.tensor.process import RankProcess
from paceline.ways.tensor.rank import HEADER, LOOKS_S

AT_ONCE_BYTES: Final = 48 << 10
LOOK_S: Final = 0.004
"""How long a side looks at its stream before it sleeps. Raising it: halves of a layer that take longer are met sooner, and more of a core is taken."""
SENT_S: Final = 10.0
"""For bytes to move, once some have; who computes nothing is found before (`ranks.STALL_S`)."""
ASKED_S: Final = 10.0
"""For a process to give out or take in a block."""
JOIN_S: Final = 5.0


class CalledOff(Exception):
    """The group gives up the command that its ranks run."""


class Pump(ABC):
    """What both sides have in common.

    Args:
        memory: this side's.
        rank: the one that is on another machine than the first.
        leads: it is the group's side.
        on_end: told once, in the pump's thread, why it ended.
    """

    def __init__(
        self,
        memory: GroupMemory,
        rank: int,
        sender: TensorSender,
        receiver: TensorReceiver,
        *,
        leads: bool,
        on_end: Callable[[str], object],
    ) -> None:
        self.memory, self.rank, self._sender, self._receiver = memory, rank, sender, receiver
        self._leads, self._on_end = leads, on_end
        self._beside = ThreadPoolExecutor(1, f"paceline-rank-{rank}-sends")
        sizes = memory.sizes
        self._exchange_at = Exchange(sizes.spec, sizes.shares, rank, memory.exchange, sizes.max_rows)
        self._others = [other for other in range(1, len(sizes.shares)) if other != rank]
        self._closed = False
        self._rows, self._seen = 0, dict[tuple[bool | None, int], npt.NDArray[np.float32]]()
        """What `_views` has made for batches of so many rows."""
        receiver.look(LOOK_S)
        self._thread = threading.Thread(target=self._run, name=f"paceline-rank-{rank}-streams", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End both streams and the thread. Idempotent, from any thread but its own."""
        self._closed = True
        self._sender.close()
        self._receiver.close()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    @abstractmethod
    def _serve(self) -> None:
        """Until it is closed. Raises TensorStreamError, or ExecutorLost where the rank's process is gone."""

    def _run(self) -> None:
        why = "was ended"
        try:
            self._serve()
        except (TensorStreamError, ExecutorLost) as error:
            why = f"is lost: {error.message}"
        finally:
            self._closed = True
            self._sender.close()
            self._receiver.close()
            self._beside.shutdown()
            self._on_end(why)

    def _send(self, header: bytes, array: Array = NOTHING) -> None:
        self._sender.send(header, array, time.perf_counter() + SENT_S)

    def _receive(self) -> TensorMessage:
        """The next message, however long it takes: who waits is watched by others, and may have slept."""
        while True:
            try:
                return self._receiver.receive(time.perf_counter() + SENT_S)
            except StreamIdle:
                if self._closed:
                    raise

    def _take(self, letter: bytes) -> TensorMessage:
        """The next message, which is of that letter.

        Raises:
            CalledOff: the group gives up what its ranks are at.
        """
        message = self._receive()
        if message.header[:1] == letter:
            return message
        if message.header[:1] == GIVE_UP and not self._leads:
            raise CalledOff
        raise self._receiver.refuse(StreamCorrupt(f"{message.header[:1]!r} where {letter!r} was to come"))

    def _views(self, half: bool | None, rows: int, rank: int) -> npt.NDArray[np.float32]:
        """What a rank leaves at an exchange, in this side's memory. None as a half: the logits, which the first rank alone reads."""
        if rows != self._rows:
            self._rows = rows
            self._seen.clear()
        view = self._seen.get((half, rank))
        if view is None:
            if half is not None:
                view = self._exchange_at.sums_of(rank, half)[:, :rows]
            else:
                vocab = self.memory.sizes.shares[rank].vocab if rank == self.rank else range(0)
                view = self._exchange_at.logits[None, :rows, LANES * vocab.start : LANES * vocab.stop]
            self._seen[half, rank] = view
        return view

    def _give_sums(self, number: int, half: bool | None, rows: int, rank: int) -> None:
        self._send(frames.numbered(SUMS, number), self._views(half, rows, rank))

    def _take_sums(self, number: int, half: bool | None, rows: int, rank: int) -> None:
        into, message = self._views(half, rows, rank), self._take(SUMS)
        array = message.array
        if message.header != frames.numbered(SUMS, number) or array.dtype != np.float32 or array.shape != into.shape:
            raise self._receiver.refuse(StreamCorrupt(f"{array.dtype} of shape {array.shape} as sums of {into.shape}"))
        into[:] = array
        self.memory.say_arrived(rank, number)

    @abstractmethod
    def _meet_all(self, number: int, half: bool | None, rows: int) -> None:
        """Run one exchange. Raises CalledOff."""

    def _exchange(self, behind: int, halves: Sequence[bool | None], rows: int) -> None:
        """Run all exchanges of a command. `behind` is the number of the exchange before the first. Raises CalledOff."""
        for number, half in enumerate(halves, behind + 1):
            self._meet_all(number, half, rows)

    def _meet(self, number: int, half: bool | None, rows: int, first: int, second: int) -> None:
        """The first rank's sums and those of the one away cross: `first` is this side's."""
        self._await(first, number)
        if self._views(half, rows, first).nbytes <= AT_ONCE_BYTES:
            self._give_sums(number, half, rows, first)
            self._take_sums(number, half, rows, second)
            return
        self._views(half, rows, second)  # both threads read what is known of them
        sent = self._beside.submit(self._give_sums, number, half, rows, first)
        try:
            self._take_sums(number, half, rows, second)
        except TensorStreamError:
            self._sender.close()  # nobody reads any more
            raise
        finally:
            wait([sent])
        sent.result()

    def _await(self, rank: int, number: int) -> None:
        """Wait for a rank of this side to leave its sums. Raises CalledOff."""
        while not self.memory.await_arrival(rank, number):
            self._check()

    def _check(self) -> None:
        """Raises where nothing is to be waited for any more."""
        if self._closed:
            raise StreamClosed("The tensor streams of a rank were closed here")


def exchanges(command: Command, layers: LayerRange) -> list[bool | None]:
    """Which halves ranks meet at the end of, in their order: of attention False, of feed-forward True, of the head None."""
    return [None] if command is Command.HEAD else [False, True] * len(layers)


class GroupPump(Pump):
    """The group's side: follows the commands of the group's memory, and hands on what asks for blocks.

    Args:
        on_end: as `Pump` has it.
    """

    def __init__(
        self, memory: GroupMemory, rank: int, sender: TensorSender, receiver: TensorReceiver, on_end: Callable[[str], object]
    ) -> None:
        super().__init__(memory, rank, sender, receiver, leads=True, on_end=on_end)
        self._woken = threading.Semaphore(0)
        self._asks: queue.SimpleQueue[tuple[bytes, Future[bytes]]] = queue.SimpleQueue()

    def wake(self) -> None:
        self._woken.release()

    def ask(self, message: bytes, within_s: float) -> bytes:
        """Have the rank give out or take in a block, between two commands; as `process.Rank` has it. A command takes as long as it takes.

        Raises:
            ExecutorLost: it is gone.
            TimeoutError: it was handed on, and nothing came within so long.
        """
        answer = Future[bytes]()
        self._asks.put((message, answer))
        self.wake()
        if self._closed:
            self._refuse_asks()
        until = None
        while until is None or time.monotonic() < until:
            with suppress(TimeoutError):
                return answer.result(LOOKS_S)
            if until is None and answer.running():
                until = time.monotonic() + within_s
        raise TimeoutError

    def _serve(self) -> None:
        memory, rank, seen = self.memory, self.rank, self.memory.done(self.rank)
        while not self._closed:
            if (asked := self._next_ask()) is not None:
                self._hand_on(*asked)
            elif memory.number == seen and not memory.await_word(memory.number_address, seen):
                memory.say_sleeps(rank, True)
                if memory.number == seen and self._asks.empty():
                    self._woken.acquire(timeout=LOOKS_S)
                memory.say_sleeps(rank, False)
            elif memory.number != seen:
                seen = memory.number
                self._follow()
                memory.say_done(rank, seen)

    def _run(self) -> None:
        super()._run()
        self._refuse_asks()

    def _refuse_asks(self) -> None:
        while (asked := self._next_ask()) is not None:
            asked[1].set_exception(ExecutorLost(f"rank {self.rank} of the tensor group is gone", ()))

    def _next_ask(self) -> tuple[bytes, Future[bytes]] | None:
        """Two threads take them once the streams end."""
        try:
            return self._asks.get_nowait()
        except queue.Empty:
            return None

    def _follow(self) -> None:
        """One command."""
        memory = self.memory
        command, layers, rows, exchange = memory.command, memory.layers, len(memory.x_TD), memory.exchange_number
        if command not in {Command.LAYERS, Command.HEAD}:
            return
        self._send(*frames.write_command(memory))
        try:
            self._exchange(exchange, exchanges(command, layers), rows)
        except CalledOff:
            self._send(GIVE_UP)
            while (message := self._receive()).header[:1] != DONE:
                pass  # sums that were on their way
            arrived = frames.read_number(message.header)
            if arrived > exchange + len(exchanges(command, layers)):
                raise self._receiver.refuse(StreamCorrupt(f"Exchange {arrived} of a command that begins behind {exchange}")) from None
            memory.say_arrived(self.rank, arrived)

    def _check(self) -> None:
        super()._check()
        if self.memory.is_given_up:
            raise CalledOff

    def _meet_all(self, number: int, half: bool | None, rows: int) -> None:
        self._meet(number, half, rows, 0, self.rank)
        for other in self._others:
            self._await(other, number)
            self._give_sums(number, half, rows, other)

    def _hand_on(self, message: bytes, answer: Future[bytes]) -> None:
        head, data = message[:HEADER], message[HEADER:]
        answer.set_running_or_notify_cancel()
        try:
            self._send(ASK + head, np.frombuffer(data, np.uint16))
            answer.set_result(self._take(BLOCK).array.tobytes())
        except TensorStreamError:
            answer.set_exception(ExecutorLost(f"rank {self.rank} of the tensor group is gone", ()))
            raise


class RankPump(Pump):
    """The rank's side: puts commands where the rank's process finds them.

    Args:
        process: the rank's, loaded.
        layers, n_blocks: that it has.
    """

    def __init__(
        self,
        process: RankProcess,
        memory: GroupMemory,
        layers: LayerRange,
        n_blocks: int,
        sender: TensorSender,
        receiver: TensorReceiver,
        on_end: Callable[[str], object],
    ) -> None:
        super().__init__(memory, process.order.rank, sender, receiver, leads=False, on_end=on_end)
        self._process, self._layers, self._n_blocks = process, layers, n_blocks

    def _serve(self) -> None:
        while not self._closed:
            try:
                message = self._receiver.receive(time.perf_counter() + LOOKS_S)
            except StreamIdle:
                continue
            match message.header[:1]:
                case frames.COMMAND:
                    self._follow(message)
                case frames.ASK:
                    data = self._process.ask(frames.block_message(message, self._layers, self._n_blocks), ASKED_S)
                    self._send(BLOCK, np.frombuffer(data, np.uint16))
                case frames.GIVE_UP:  # it came behind the last exchange
                    self._say_done()
                case _:
                    raise self._receiver.refuse(StreamCorrupt(f"{message.header[:1]!r} where a command was to come"))

    def _follow(self, message: TensorMessage) -> None:
        memory = self.memory
        try:
            given = frames.read_command(message, memory, self._layers, self._n_blocks)
        except StreamCorrupt as error:
            raise self._receiver.refuse(error) from error
        if given.plan is not None:
            memory.give_layers(given.x_TD, given.plan, given.layers, given.exchange)
        else:
            memory.give_head(given.x_TD, given.exchange)
        if memory.sleeps(self.rank):
            self._process.wake()
        try:
            self._exchange(given.exchange, exchanges(given.command, given.layers), len(given.x_TD))
        except CalledOff:
            memory.give_up()
            self._say_done()
            memory.withdraw()

    def _meet_all(self, number: int, half: bool | None, rows: int) -> None:
        self._meet(number, half, rows, self.rank, 0)
        for other in self._others:
            self._take_sums(number, half, rows, other)

    def _say_done(self) -> None:
        """Once the rank is at rest."""
        while not self._is_at_rest:
            self._check()
        self._send(frames.numbered(DONE, self.memory.arrived[self.rank]))

    @property
    def _is_at_rest(self) -> bool:
        done = self.memory.done(self.rank)
        return done == self.memory.number or (
            self.memory.await_word(self.memory.done_address(self.rank), done) and self.memory.done(self.rank) == self.memory.number
        )

    def _check(self) -> None:
        super()._check()
        if (gone := self._process.gone) is not None:
            raise ExecutorLost(f"its process {gone}", ())
