"""Progress of bytes and of kernels: a bar on a terminal; elsewhere nothing, or lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from paceline.backends.options import CompileProgress, Compiling, showing_compiling
from paceline.cli.terminal import print_lines

if TYPE_CHECKING:
    from paceline.ways.pipeline.executor.route import Opening

STEP_PERCENT = 10
"""Between two lines about a load where no bar can be drawn."""
KERNEL_STEP = 0.25
"""Share of the work between two lines about kernels, likewise."""


class _WhileCounting(ProgressColumn):
    """A column that is empty unless bytes are counted: before their number is known, and for kernels."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return "" if task.total is None or _END_S in task.fields else self._column(task)


_END_S = "end_s"
"""Field of the task that counts kernels: when it will end (`time.monotonic`), or None."""


class _EstimateLeft(ProgressColumn):
    """Seconds until kernels are compiled."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        end_s: float | None = task.fields.get(_END_S)
        return Text("" if end_s is None else _about(end_s - time.monotonic()), style="progress.remaining")


def _about(left_s: float) -> str:
    return f"about {max(1, round(left_s))} s left"


class _Speed(ProgressColumn):
    """In the binary units of the sizes beside it."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text()
        unit, suffix = pick_unit_and_suffix(int(task.speed), ["bytes", "KiB", "MiB", "GiB"], 1024)
        return Text(f"{task.speed / unit:.1f} {suffix}/s", style="progress.data.speed")


@contextmanager
def byte_bar(console: Console, label: str, after: str) -> Generator[Callable[[int, int], None]]:
    """Show a bar while the block runs.

    Args:
        after: what is being done once all bytes are there; a full bar that stands still would look stuck.

    Yields:
        A function of (bytes done, bytes in all), to be called as often as one likes, from any thread.
    """
    with _bars(console) as progress:
        counted = progress.add_task(label, total=None)
        uncounted = progress.add_task(after, total=None, visible=False)

        def show(done: int, total: int) -> None:
            full = 0 < total <= done
            progress.update(counted, completed=done, total=total or None, visible=not full)
            progress.update(uncounted, visible=full)

        with showing_compiling(_kernel_bar(progress, console)):
            yield show


def _kernel_bar(progress: Progress, console: Console) -> CompileProgress:
    """Show a bar for the kernels, or a line at each step if output is not a terminal."""
    bar = progress.add_task("", total=1.0, visible=False, end_s=None)
    told_share = 0.0

    def show(compiling: Compiling) -> None:
        nonlocal told_share
        label = f"Compiling kernels for this processor, once: {compiling.done} of {compiling.total}"
        end_s = None if compiling.left_s is None else time.monotonic() + compiling.left_s
        is_visible = compiling.done < compiling.total
        progress.update(bar, description=label, completed=compiling.done_share, visible=is_visible, end_s=end_s)
        is_step = compiling.done == 0 or compiling.done_share >= told_share + KERNEL_STEP
        if is_visible and is_step and not console.is_terminal:
            told_share = compiling.done_share
            print_lines(console, label if compiling.left_s is None else f"{label}, {_about(compiling.left_s)}")

    return show


@contextmanager
def opening_bar(
    console: Console, model: str
) -> Generator[tuple[Callable[[int, int], None], Callable[[str], Callable[[int, int], None]], Callable[[Opening], None]]]:
    """Show how far the machines of a pipeline have loaded their layers while the block runs: bars, or lines if output is not a terminal.

    Yields:
        Three callbacks, to call from any thread: one for reading the model to compute its digest; one that returns a callback for loading the named part
        of it on this machine; and one for loading on other machines. The first two get bytes done and bytes in all.
    """
    with _bars(console) as progress:
        reads = progress.add_task(f"Reading {model} for its digest, once", total=None, visible=False)
        here = progress.add_task("", total=None, visible=False)
        there = progress.add_task("", total=None, visible=False)
        said = ""

        def say(label: str, percent: int, more: str = "") -> None:
            """Print a line for each step if output is not a terminal."""
            nonlocal said
            line = f"{label}, {percent // STEP_PERCENT * STEP_PERCENT} %"
            if line != said and not console.is_terminal:
                print_lines(console, f"{label}, {more or f'{percent} %'}")
            said = line

        def reading(done: int, total: int) -> None:
            progress.update(reads, completed=done, total=total or None, visible=done < total)
            if done < total:
                say(f"Reading {model} for its digest, once", 100 * done // total)

        def own(part: str) -> Callable[[int, int], None]:
            label = f"Loading {part} here"

            def loading(done: int, total: int) -> None:
                progress.update(here, description=label, completed=done, total=total or None, visible=done < total)
                if total:
                    say(label, 100 * done // total)

            return loading

        def others(opening: Opening) -> None:
            progress.update(here, visible=False)
            label = f"{' and '.join(opening.nodes)} {'loads its' if len(opening.nodes) == 1 else 'load their'} layers of {model}"
            total, loading = opening.bytes_total or None, bool(opening.nodes)
            progress.update(there, description=label, completed=opening.bytes_done, total=total, visible=loading)
            if loading:
                say(label, opening.percent, str(opening))

        with showing_compiling(_kernel_bar(progress, console)):
            yield reading, own, others


def _bars(console: Console) -> Progress:
    counting = (DownloadColumn(binary_units=True), _Speed(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *map(_WhileCounting, counting), _EstimateLeft())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
