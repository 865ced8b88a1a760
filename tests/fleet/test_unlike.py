"""Real nodes whose kernels compute other bytes than one another share a model and continue one another's answers, unless a person asks for exact bytes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.fakes.seeded_models import write_gguf
from tests.fleet.machines import BOUND_S, free_port, machines, until
from tests.fleet.test_paths import SMALL, SPEC
from tests.fleet.test_pipeline import found_fleet
from tests.fleet.test_replanning import runs

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")


def test_machines_that_compute_other_bytes_share_a_model_unless_that_must_be_exact(tmp_path: Path) -> None:
    path, port = write_gguf(tmp_path / "seeded.gguf", SPEC, "Q8_0"), free_port()
    with machines(tmp_path, Home.from_environment().kernels, "o", "h") as (o, h):
        found_fleet(o, h)
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", str(port), "--beside", str(path))
        ask = ("--model", str(path), "--device", "torch-cpu", "--pipeline", "--own-layers", "2", *SMALL)
        ask += ("--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        o.up(*ask)
        body = {"model": "seeded", "prompt": "abc", "max_tokens": 4}
        answer = httpx.post(f"{o.node.url}/v1/completions", json=body, timeout=BOUND_S).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["system_fingerprint"].endswith("_none")
        refused = httpx.post(f"{o.node.url}/v1/completions", json={**body, "exact": True}, timeout=BOUND_S)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "exact")
        until(lambda: runs(o).startswith("o [0..1] -> h [2..5]") and ("unlike machines" in runs(o) or "other bytes" in runs(o)))
        o.node.stop()
        (o.home / "config.toml").write_text("[plan]\nexact = true\n[pipeline]\nsearch_seconds = 1\n")
        # Where it has found h but no link to it was measured in that second, that is what it says.
        until(lambda: "leave out --exact" in o.run("up", "--port", "0", *o.options, *ask, code=2))
