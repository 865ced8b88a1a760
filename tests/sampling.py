"""Choose which cases of heavy tests a run has: a sample drawn by a seed, or all of them.

`make test` runs the sample, `make test-all` (PACELINE_TEST_ALL=1) runs every case. The seed is PACELINE_TEST_SEED, otherwise the week; the report's
header prints it, so that a failing sample can be run again.

Of the cases that the marks keep, each file runs about `FILE_S` seconds. `tests/seconds.json` says how long files take; `make times` measures them.
A file that is named on the command line (`file.py`, `file.py::test[case]`) runs without that bound, and a test that is named always runs.

Marks:
    sampled(n)                         keep n of a test's cases
    sampled(n, by=A)                   keep the cases with n values of argument A, the same values for all tests of the file
    sampled(n, by="file", among=NAME)  keep n of the files that are marked with that name
    sampled(n, by="test")              keep n tests of the file
    whole(reason)                      run with every case only
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import pytest

ALL = os.environ.get("PACELINE_TEST_ALL", "") not in {"", "0"}
"""Whether this run has every case."""


# A week has one sample: a test that fails after a change fails for the change, and not for the draw.
SEED = os.environ.setdefault("PACELINE_TEST_SEED", "") or datetime.now(UTC).strftime("%G-W%V")
os.environ["PACELINE_TEST_SEED"] = SEED  # the other processes of this run draw the same sample


FILE_S = float(os.environ.get("PACELINE_TEST_FILE_S", "10"))
"""Seconds by the clock, of each file; 0: no bound. Raising it: a run has more cases of the heaviest files, and takes longer."""
SECONDS = Path(__file__).parent / "seconds.json"


def examples(whole: int) -> int:
    """Return how many examples a property of so many has in this run."""
    return whole if ALL else max(10, whole // 4)


def draws(name: str) -> random.Random:
    """Return this run's random numbers for one purpose, for a test that draws its own cases."""
    return random.Random(f"{SEED} {name}")


def pytest_report_header() -> str:
    return (
        "every case"
        if ALL
        else f"cases of heavy tests are sampled; PACELINE_TEST_SEED={SEED} draws these again, PACELINE_TEST_ALL=1 runs all"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "sampled(n, by=None, among=None): keep n cases of this test, values of an argument, or files of a group: tests/sampling.py",
    )
    config.addinivalue_line("markers", "whole(reason): runs with PACELINE_TEST_ALL=1 only: tests/sampling.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ALL or any("::" in argument for argument in config.args):
        return
    draw = _Draw()
    for item in items:
        draw.add(item)
    kept = {item for item in items if draw.keeps(item)}
    if FILE_S:
        kept -= beyond_the_bound(
            [item for item in items if item in kept], {argument for argument in config.args if argument.endswith(".py")}
        )
    if out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item in kept]


def beyond_the_bound(items: list[pytest.Item], named: Collection[str]) -> set[pytest.Item]:
    """Return the items that files which take longer than `FILE_S` do without. A file of one long test runs in some weeks only."""
    seconds, files = json.loads(SECONDS.read_text()), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    out = set[pytest.Item]()
    for file, cases in files.items():
        share = FILE_S / seconds.get(file, FILE_S)
        if share < 1 and file not in named:
            draw = draws(f"{file} seconds")
            out.update(draw.sample(cases, len(cases) - int(share * len(cases) + draw.random())))
    return out


class _Draw:
    """Draws among the cases of each group."""

    def __init__(self) -> None:
        self._cases: dict[tuple[str, int], set[int | str]] = {}
        self._drawn: dict[tuple[str, int], set[int | str]] = {}

    def add(self, item: pytest.Item) -> None:
        if item.get_closest_marker("whole") is None:
            for group, case in _groups(item):
                self._cases.setdefault(group, set()).add(case)

    def keeps(self, item: pytest.Item) -> bool:
        return item.get_closest_marker("whole") is None and all(case in self._draw(group) for group, case in _groups(item))

    def _draw(self, group: tuple[str, int]) -> set[int | str]:
        if group not in self._drawn:
            cases = sorted(self._cases[group], key=str)
            self._drawn[group] = set(draws(group[0]).sample(cases, min(group[1], len(cases))))
        return self._drawn[group]


def _groups(item: pytest.Item) -> list[tuple[tuple[str, int], int | str]]:
    """Return the groups that an item is drawn in, each a name and how many cases are kept, with the item's case in it."""
    found: list[tuple[tuple[str, int], int | str]] = []
    file, indices = item.nodeid.partition("::")[0], getattr(getattr(item, "callspec", None), "indices", {})
    for mark in item.iter_markers("sampled"):
        (most,), by = mark.args, mark.kwargs.get("by")
        if by == "file":
            found.append(((mark.kwargs["among"], most), file))
        elif by == "test":
            found.append(((f"{file} {by}", most), item.nodeid.partition("[")[0]))
        elif by is None:
            found.append(((item.nodeid.partition("[")[0], most), item.nodeid))
        else:
            found.append(((f"{file} {by}", most), indices[by]))
    return found
