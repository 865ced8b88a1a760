"""Where `make install` takes torch, and where it takes none."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.backends import cpu

SCRIPT = Path(__file__).parents[2] / "tools" / "install_torch.py"


def commands_run(monkeypatch: pytest.MonkeyPatch, *options: str, gpu: bool, kernels: bool) -> list[list[str]]:
    """What the script has pip install."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    monkeypatch.setattr(cpu, "runs_here", lambda: kernels)
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    names = runpy.run_path(str(SCRIPT))
    main = names["main"]
    main.__globals__.update(has_nvidia_gpu=lambda: gpu, installed=lambda: None)
    assert main() == 0
    return ran


@pytest.mark.skipif(not SCRIPT.exists(), reason="a part of the source tree")
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_serving_takes_torch_for_a_gpu_and_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, gpu: bool, kernels: bool) -> None:
    monkeypatch.delenv("TORCH_SPEC", raising=False)
    assert bool(commands_run(monkeypatch, "--if-needed", gpu=gpu, kernels=kernels)) is (gpu or not kernels)
    assert commands_run(monkeypatch, gpu=gpu, kernels=kernels)  # tests take it everywhere
    monkeypatch.setenv("TORCH_SPEC", "torch==2.13.0")
    assert commands_run(monkeypatch, "--if-needed", gpu=gpu, kernels=kernels)[-1][-1] == "torch==2.13.0"
