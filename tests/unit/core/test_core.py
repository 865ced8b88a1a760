"""The error tree says what to do, and clocks do what clocks do."""

from __future__ import annotations

import shlex
import subprocess
import venv
from pathlib import Path

import pytest
from tests.fakes.clock import FakeClock

from paceline.core import errors
from paceline.core.clock import SystemClock
from paceline.core.errors import ExecutorLost, FleetError, InvalidRequest, Overloaded, PacelineError, RequestError, UserError
from paceline.core.generation import FinishReason
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan


def test_an_error_reads_as_what_happened_and_what_to_do() -> None:
    assert str(PacelineError("The file is short", "Download it again.")) == "The file is short. Download it again."
    assert str(PacelineError("The file is short")) == "The file is short"


def test_errors_carry_what_answers_need() -> None:
    assert InvalidRequest("bad", field="top_p").field == "top_p"
    assert Overloaded("full", retry_after_s=3).retry_after_s == 3
    assert ExecutorLost("gone", (LayerSpan(NodeId("b"), LayerRange(0, 4)),)).spans[0].node_id == "b"


def test_the_tree_is_the_one_in_its_docstring() -> None:
    named = {word for line in (errors.__doc__ or "").splitlines() if "--" in line or "PacelineError" in line for word in line.split()[:5]}
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, PacelineError)}
    assert classes.keys() <= named
    for name, kind in classes.items():
        if name not in {"PacelineError", "DrawFailed", "FormFailed", "ExecutorLost", "ExecutorUnavailable", "EngineGone"}:
            assert sum(issubclass(kind, branch) for branch in (UserError, RequestError, FleetError)) == 1


def test_layer_ranges_are_half_open() -> None:
    layers = LayerRange(2, 5)
    assert len(layers) == 3
    assert [i in layers for i in (1, 2, 4, 5)] == [False, True, True, False]


def test_finish_reasons_are_what_clients_read() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_clocks_never_go_back() -> None:
    system, fake = SystemClock(), FakeClock()
    assert system.monotonic() <= system.monotonic()
    before = fake.monotonic(), fake.wall()
    fake.advance(2.5)
    assert (fake.monotonic() - before[0], fake.wall() - before[1]) == (2.5, 2.5)
    with pytest.raises(ValueError, match="-1"):
        fake.advance(-1)


@pytest.mark.parametrize("has_pip", [True, False])
def test_how_to_install_is_a_command_for_the_python_that_runs(has_pip: bool, tmp_path: Path) -> None:
    """`pip install` alone is another Python's, where pipx or uv made this one's environment."""
    venv.create(tmp_path / "its own", with_pip=False)
    python = tmp_path / "its own/bin/python"
    if has_pip:
        (tmp_path / "pip.py").touch()
    code = "from paceline.core.errors import how_to_install; print(how_to_install('paceline[torch]'))"
    path = f"{Path(errors.__file__).parents[2]}:{tmp_path}"
    said = subprocess.run([python, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True).stdout
    asked = [str(python), "-P", "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", str(python)]
    assert shlex.split(said) == [*asked, "paceline[torch]"]
