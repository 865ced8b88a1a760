"""`paceline pull`: bring a model here, with a bar. Interrupted, it says that the next pull goes on from there."""

from __future__ import annotations

from rich.console import Console

from paceline.backends.memory import human
from paceline.cli.progress import byte_bar
from paceline.store.home import Home
from paceline.store.pull import PullProgress, pull


def run_pull(ref: str) -> None:
    """Pull `ref` and say what came.

    Raises:
        UserError: it can't be found, finished, or run.
    """
    console = Console(highlight=False)
    try:
        with byte_bar(console, f"Pulling {ref}") as show:

            def progress(news: PullProgress) -> None:
                show(news.done_bytes, news.total_bytes)

            model = pull(ref, Home.from_environment(), progress)
    except KeyboardInterrupt:
        console.print("Interrupted. What was fetched is kept: pull again to go on from there.")
        raise
    console.print(f"{model.name}: {human(model.nbytes)}, {model.format}, {model.family}, context {model.context}", markup=False)
    console.print(f"Try: paceline up --model {model.name}", markup=False)
