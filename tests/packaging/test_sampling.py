"""The sample of heavy tests: a file has its seconds, and every case is drawn in some week."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import sampling


def left_out(seed: str, files: dict[str, int], monkeypatch: pytest.MonkeyPatch, named: frozenset[str] = frozenset()) -> set[str]:
    """Return the cases that a week's draw leaves out, of files with so many cases."""
    monkeypatch.setattr(sampling, "SEED", seed)
    items: list[Any] = [Item(f"{file}::test[{n}]") for file, cases in files.items() for n in range(cases)]
    return set(map(str, sampling.beyond_the_bound(items, named)))


class Item(str):
    """Stands for a test of pytest."""

    __slots__ = ()

    @property
    def nodeid(self) -> str:
        return str(self)


def test_a_file_runs_as_many_cases_as_fit_and_each_in_some_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = tmp_path / "seconds.json"
    seconds.write_text(json.dumps({"slow.py": 4 * sampling.FILE_S, "lone.py": 2 * sampling.FILE_S, "quick.py": 0.5}))
    monkeypatch.setattr(sampling, "SECONDS", seconds)
    files = {"slow.py": 20, "lone.py": 1, "quick.py": 3, "new.py": 2}
    weeks = [left_out(f"2026-W{week}", files, monkeypatch) for week in range(60)]
    for out in weeks:
        assert {len([name for name in out if name.startswith("slow.py")])} <= {14, 15, 16}
        assert not any(name.startswith(("quick.py", "new.py")) for name in out)
    assert set.intersection(*weeks) == set()
    assert 10 < sum("lone.py::test[0]" in out for out in weeks) < 50
    assert left_out("2026-W1", files, monkeypatch) == left_out("2026-W1", files, monkeypatch)
    assert not any(name.startswith("slow.py") for name in left_out("2026-W1", files, monkeypatch, frozenset({"slow.py"})))
