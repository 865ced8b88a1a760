"""A model that a person names by its path, and that no machine ever pulled, runs over several."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.seeded_models import write_gguf
from tests.fleet.machines import free_port, machines
from tests.fleet.open_files import open_files
from tests.fleet.test_forwarding import client_of
from tests.fleet.test_pipeline import found_fleet

from paceline.core.model import ModelSpec, RopeSpec
from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

SPEC = ModelSpec(
    model_type="llama", n_layers=6, hidden=64, n_heads=2, n_kv_heads=1, head_dim=32, ffn=96, vocab=512, max_context=1024, rms_eps=1e-5,
    rope=RopeSpec(10_000.0), tied_head=True,
)  # fmt: skip
SMALL = ("--context", "128", "--kv-tokens", "1024", "--threads", "1")


def test_a_model_named_by_its_path_runs_over_a_machine_that_has_never_seen_it(tmp_path: Path) -> None:
    path, port = write_gguf(tmp_path / "seeded.gguf", SPEC, "Q8_0"), free_port()
    with machines(tmp_path, Home.from_environment().kernels, "o", "h") as (o, h):
        found_fleet(o, h)
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        o.up("--model", str(path), "--pipeline", "--own-layers", "2", "--fleet-port", str(port), *SMALL)
        asked = client_of(o).completions.create(model="seeded", prompt="abc", max_tokens=4, temperature=0)
        assert asked.usage is not None
        assert asked.usage.completion_tokens > 0
        assert "2 to 5 on h" in "".join(o.node.said)
        fetched = list((h.home / "partial").glob("*/seeded.gguf"))
        assert fetched, "h has fetched its layers"
        assert path.stat().st_size > 0


def test_nodes_of_one_machine_run_a_model_named_by_its_path(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "seeded.gguf", SPEC, "Q8_0")
    with machines(tmp_path, Home.from_environment().kernels, "o") as (o,):
        o.options = ()
        o.up("--model", str(path), "--local-nodes", "3", *SMALL)
        asked = client_of(o).completions.create(model="seeded", prompt="abc", max_tokens=4, temperature=0)
        assert asked.usage is not None
        assert " on local-2" in "".join(o.node.said)
        assert " on local-3" in "".join(o.node.said)
        assert [row.split()[0] for row in o.run("ps").splitlines() if row] == ["name", "seeded"], "it is found as any other endpoint"
        assert f"{o.node.url}/v1: ok, serves seeded" in o.run("status")
        assert f"seeded is loaded at {o.node.url}/v1" in o.run("load", str(path))
        planned = o.run("plan", "seeded", "--prompt", "32", "--answer", "16")
        assert "it runs now, as planned then: local-1 [" in planned
        assert "this machine is alone" not in planned

        ask: dict[str, Any] = {"model": "seeded", "prompt": "abc", "max_tokens": 100, "temperature": 0}
        whole = client_of(o).completions.create(**ask).choices[0].text
        chunks = iter(client_of(o).completions.create(**ask, stream=True))
        begun = next(chunks).choices[0].text
        for pid in re.findall(r"local-[23] \(process (\d+)\)", "".join(o.node.said)):
            os.kill(int(pid), signal.SIGKILL)
        assert begun + "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole, "this machine goes on"


def test_activations_cross_at_the_ports_that_were_given(tmp_path: Path) -> None:
    """Of one machine on its command line, of the other in its file."""
    path, port = write_gguf(tmp_path / "seeded.gguf", SPEC, "Q8_0"), free_port()
    with machines(tmp_path, Home.from_environment().kernels, "o", "h") as (o, h):
        found_fleet(o, h)
        given = {o.name: free_port(), h.name: free_port()}
        (h.home / "config.toml").write_text(f"[pipeline]\ntensor_port = {given['h']}\n")
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", "0", "--peer", f"127.0.0.1:{port}")
        options = ("--pipeline", "--own-layers", "2", "--fleet-port", str(port), "--tensor-port", str(given["o"]), *SMALL)
        o.up("--model", str(path), *options)
        asked = client_of(o).completions.create(model="seeded", prompt="abc", max_tokens=4, temperature=0)
        assert asked.usage is not None
        assert asked.usage.completion_tokens > 0
        for machine in (o, h):
            opened = open_files(machine.node.process.pid)
            assert given[machine.name] in opened.listening
            assert opened.connected_to(given[machine.name])
