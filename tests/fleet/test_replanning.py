"""A node moves a model that it serves to a pipeline, and back to itself, as its fleet changes: what is lasting, between answers, with the same bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.machines import Machine, free_port, machines, until
from tests.fleet.test_forwarding import MODEL, client_of
from tests.fleet.test_pipeline import found_fleet

from paceline.fleet.choices import HELD_S
from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

SCRIPT = str(Path(__file__).parent / "paced_node.py")
ASK: dict[str, Any] = {
    "model": MODEL,
    "prompt": "The history of bicycle racing begins",
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "draft": "off"},
}


def set_speed(machine: Machine, tokens_per_s: float) -> None:
    write(machine.home / "speed", tokens_per_s)


def set_plan_clock(machine: Machine, seconds: float) -> None:
    """Of how long a plan has been better, where nothing else tells time."""
    write(machine.home / "plan_clock", seconds)


def write(path: Path, figure: float) -> None:
    """Whole at any moment: others read it."""
    path.with_suffix(".new").write_text(f"{figure}")
    path.with_suffix(".new").rename(path)


def runs(machine: Machine) -> str:
    """How its model runs, and what it would rather be."""
    ((_, words),) = machine.sight().plans
    return words


def pieces(machine: Machine, tokens: int) -> Iterator[str]:
    with client_of(machine).completions.create(**ASK, max_tokens=tokens, stream=True) as chunks:
        for chunk in chunks:
            yield chunk.choices[0].text


def test_a_model_moves_to_a_pipeline_and_back_between_answers(tmp_path: Path) -> None:
    with machines(tmp_path, Home.from_environment().kernels, "o", "h", prefix=(sys.executable, SCRIPT)) as (o, h):
        found_fleet(o, h)
        (o.home / "config.toml").write_text("[pipeline]\nsearch_seconds = 1\n")
        port = free_port()
        for machine, speed in ((o, 2.0), (h, 2.0)):
            set_speed(machine, speed)
            set_plan_clock(machine, 0.0)
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", str(port))
        # Where the link is measured to be quick enough, ranks would be better yet.
        o.up(
            "--ways",
            "alone,pipeline",
            "--draft",
            "off",
            "--context",
            "2048",
            "--kv-tokens",
            "8192",
            "--threads",
            "1",
            "--fleet-port",
            "0",
            "--peer",
            f"127.0.0.1:{port}",
        )
        assert runs(o).startswith("o alone: ")
        alone = "".join(pieces(o, 150))

        # A quick machine is there, and not for long yet.
        set_speed(h, 1e5)
        until(lambda: "; would rather be o [embedding and head] -> h [0..29]" in runs(o))
        assert "".join(pieces(o, 150)) == alone
        assert runs(o).startswith("o alone: ")

        # It is there for long; an answer is under way.
        answer, text = pieces(o, 1900), ""
        for piece in answer:
            text += piece
            set_plan_clock(o, HELD_S)
            if (o.home / "put_off").exists():
                break
        assert runs(o).startswith("o alone: ")
        assert text[: len(alone)] == alone[: len(text)]
        answer.close()  # pyright: ignore[reportAttributeAccessIssue]
        until(lambda: runs(o).startswith("o [embedding and head] -> h [0..29]: "))
        assert "".join(pieces(o, 150)) == alone

        # It is lost in the middle of an answer.
        answer = pieces(o, 150)
        text = "".join(next(answer) for _ in range(5))
        h.node.kill()
        assert text + "".join(answer) == alone
        until(lambda: "; now over o [0..29]; would rather be o alone" in runs(o))
        set_plan_clock(o, 2 * HELD_S)
        until(lambda: runs(o).startswith("o alone: "))
        assert "".join(pieces(o, 150)) == alone
        o.node.stop()
