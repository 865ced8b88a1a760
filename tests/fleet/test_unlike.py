"""Two real nodes whose kernels compute other bytes than one another share a model: where that is allowed, and it is said in plan and answer."""

from __future__ import annotations

import json
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


def test_machines_that_compute_other_bytes_share_a_model_only_where_that_is_allowed(tmp_path: Path) -> None:
    path, port = write_gguf(tmp_path / "seeded.gguf", SPEC, "Q8_0"), free_port()
    with machines(tmp_path, Home.from_environment().kernels, "o", "h") as (o, h):
        found_fleet(o, h)
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", str(port), "--beside", str(path))
        ask = ("--model", str(path), "--device", "torch-cpu", "--pipeline", "--own-layers", "2", *SMALL)
        ask += ("--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        o.up(*ask, "--allow-unlike")
        body = {"model": "seeded", "prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_events": True}}
        lines = httpx.post(f"{o.node.url}/v1/completions", json=body, timeout=BOUND_S).text.splitlines()
        said = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert said[0]["event"] == "shard_status"
        assert said[0]["detail"] == {"status": "other numerics", "route": "seeded:2-5 on h"}
        assert all("_unlike-" in chunk["system_fingerprint"] for chunk in said[1:])
        until(lambda: runs(o).startswith("o [0..1] -> h [2..5], unlike machines: "))
        o.node.stop()
        (o.home / "config.toml").write_text("[pipeline]\nsearch_seconds = 1\n")
        # Where it has found h but no link to it was measured in that second, that is what it says.
        until(lambda: "--allow-unlike allows that" in o.run("up", "--port", "0", *o.options, *ask, code=2))
