"""Promise 1 on processors that have less: where torch's kernels say that a row's bytes don't depend on its neighbours, they don't."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

BOUNDS = {
    "all": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
pytestmark = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="these bounds are x86's")


def told(bound: str) -> dict[str, Any]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, str(Path(__file__).parent / "on_torch.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **BOUNDS[bound]}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_identity_is_declared_where_it_holds_and_ids_tell_instruction_sets_apart() -> None:
    with ThreadPoolExecutor(2) as together:
        found = dict(zip(BOUNDS, together.map(told, BOUNDS), strict=True))
    assert all(one["agree"] for one in found.values() if one["holds"]), found
    assert found["avx2"]["holds"], found
    assert len({one["id"] for one in found.values()}) == len({one["isa"] for one in found.values()})
