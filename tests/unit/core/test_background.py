"""What goes on in the background does not end unheard."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop

from paceline.core.background import STEADY_S, Background, in_background, run_interruptibly


@in_loop
async def test_what_ends_a_task_is_logged_unless_its_owner_did(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def waits_for_what_is_cancelled() -> None:
        raise asyncio.CancelledError

    async def ends() -> None:
        pass

    tasks = [in_background(work(), work.__name__) for work in (fails, waits_for_what_is_cancelled, ends)]
    cancelled = in_background(asyncio.Event().wait(), "cancelled")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(*tasks, cancelled, return_exceptions=True)
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "fails failed",
        "waits_for_what_is_cancelled was ended by something it waited for",
    ]


class Pauses:
    """Waits no time, moves the clock, and remembers."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)


@in_loop
async def test_what_fails_is_started_again_after_longer_and_longer_and_named_meanwhile() -> None:
    pauses = Pauses()
    background = Background(pauses.clock, pauses.sleep)
    named: list[tuple[str, ...]] = []

    async def fails_nine_times() -> None:
        named.append(background.failing)
        if len(named) <= 9:
            raise OSError("the disk is full")

    await background.keep(fails_nine_times, "fleet-watch")
    assert pauses.seconds == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert named == [(), (), *[("fleet-watch",)] * 8]
    assert background.failing == ()


@in_loop
async def test_what_fails_for_days_is_started_again_all_the_same() -> None:
    pauses, rounds, times = Pauses(), 1100, 0

    async def fails() -> None:
        nonlocal times
        times += 1
        if times <= rounds:
            raise OSError("the disk is full")

    await Background(pauses.clock, pauses.sleep).keep(fails, "fleet-watch")
    assert pauses.seconds[6:] == [60] * (rounds - 6)


@in_loop
async def test_what_went_on_for_long_begins_anew() -> None:
    pauses = Pauses()
    background = Background(pauses.clock, pauses.sleep)
    runs = 0

    async def fails_now_and_then() -> None:
        nonlocal runs
        runs += 1
        if runs == 4:
            pauses.clock.advance(STEADY_S + 4)
            assert background.failing == ()
        if runs < 6:
            raise asyncio.CancelledError  # by something it waited for

    await background.keep(fails_now_and_then, "fleet-links")
    assert pauses.seconds == [1, 2, 4, 1, 2]


@in_loop
async def test_its_owner_ends_it_at_work_and_in_a_pause() -> None:
    async def fails() -> None:
        raise OSError("no")

    async def waits() -> None:
        await asyncio.Event().wait()

    background = Background(FakeClock(), lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    for work in (fails, waits):
        task = background.keep(work, "work")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert background.failing == ()


def test_an_interrupt_waits_until_a_future_is_complete(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        awaited = loop.create_future()

        def complete() -> None:
            assert not awaited.done()
            signal.raise_signal(signal.SIGINT)
            awaited.set_result(True)  # as asyncio itself does when a thread has ended

        loop.call_soon(complete)
        try:
            await awaited
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(work())
    assert (ended, caplog.records) == (["cleaned up"], [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_coroutine_may_catch_an_interrupt() -> None:
    async def work() -> str:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "closed"
        raise AssertionError

    assert run_interruptibly(work()) == "closed"


def test_what_cancels_itself_is_no_interrupt() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_interruptibly(work())
