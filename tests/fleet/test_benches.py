"""Benches of pipelines over local nodes: real processes, and one of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.whole("a bench is a tool")
def test_each_row_is_split_into_computing_and_waiting(shallow_gguf: Path) -> None:
    small = ("--model", str(shallow_gguf), "--prompt", "16", "--answer", "8", "--streams", "1,3", "--rounds", "1", "--threads", "1")
    report = report_of(bench("pipeline", "--local-nodes", "2", *small, "--json"))
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["pipeline_per_s"] > 0
        assert row["alone_per_s"] > 0
        assert row["estimate_per_s"] > 0
        split = row["split"]
        assert [share["node_id"] for share in split["stages"]] == ["this machine", "local-2"]
        assert split["stages"][0]["last_layer"] + 1 == split["stages"][1]["first_layer"]
        for share in split["stages"]:
            assert share["computing_s"] > 0
            assert share["computing_s"] + share["waiting_s"] == pytest.approx(split["wall_s"])
        assert 0 < split["transfer_ms"] < split["away_ms"]


@pytest.mark.whole("a bench is a tool")
def test_a_killed_machine_costs_time_and_no_bytes(shallow_gguf: Path) -> None:
    small = ("--model", str(shallow_gguf), "--prompt", "24", "--answer", "24", "--streams", "1,4", "--at", "8", "--threads", "1")
    done = bench("fault", "--kill", "stage:1", *small, "--json")
    rows = report_of(done)["rows"]
    assert [row["streams"] for row in rows] == [1, 4]
    for row in rows:
        assert row["killed"] == "local-2"
        assert row["same_bytes"]
        # All prompts, and the tokens of the answer that was watched: others may be a few behind it.
        assert row["replayed_tokens"] >= row["streams"] * 24 + 7
        assert row["gap_s"] > 0
        assert row["before"] != row["after"]
        assert "local-2" not in row["after"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("fault", "--at", "200"), "token 200"),
        (("fault", "--streams", "1,some"), "1,some"),
        (("fault", "--local-nodes", "2"), "no machine to spare"),
        (("pipeline", "--streams", "0"), "Nothing can be measured"),
        (("pipeline",), "in no fleet"),
    ],
)
def test_what_can_not_be_measured_is_said(arguments: tuple[str, ...], complaint: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
