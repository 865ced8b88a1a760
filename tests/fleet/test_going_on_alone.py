"""A pipeline of two real nodes, one of them killed: the other goes on alone where it may, until that one is back, with the same bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from tests.fakes.shallow_model import MODEL
from tests.fleet.machines import BOUND_S, until

from paceline.bench.fault import answer, requests
from paceline.bench.fleet import BenchNode, LocalFleet
from paceline.cli.sharing import fleet_settings
from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError
from paceline.core.ids import NodeId
from paceline.fleet.plan import Pin
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.store.home import Home
from paceline.ways.pipeline.executor import search
from paceline.ways.pipeline.executor.search import PipelineLimits
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes import build

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

OWN = 1
"""Layer, of three."""
PROMPTS = [tuple(range(10 + 7 * n, 60 + 9 * n)) for n in range(3)]


@pytest.mark.parametrize("allowed", [True, False])
def test_the_last_machine_that_is_left_goes_on_alone(monkeypatch: pytest.MonkeyPatch, shallow_gguf: Path, *, allowed: bool) -> None:
    fleet, clock = LocalFleet(2, 1, shallow_gguf), SystemClock()
    monkeypatch.setenv("PACELINE_HOME", str(fleet.homes["local-1"]))
    monkeypatch.setattr(build, "PipelineLimits", partial(PipelineLimits, alone_s=0.0))
    monkeypatch.setattr(search, "LOOK_AGAIN_S", 0.5)
    settings, node = NodeSettings(str(shallow_gguf), context=512, kv_tokens=4096, threads=1), None
    digest = set_up(settings).digest
    try:
        node = BenchNode(fleet_settings(fleet.port, fleet.host, (), fleet.preset, mdns=False, needed=True), Home.from_environment(), clock)
        node.wait_for(["local-2"])
        assert node.wait_for_links([NodeId("local-2")])
        until(lambda: any(offer.digest == digest for card in node.cards for offer in card.models))  # plans name it so
        pipelines = PipelineSettings(enabled=True, search_seconds=6)
        if allowed:
            pipelines = PipelineSettings(enabled=True, fallback_to_local=True, search_seconds=1)
        order = PipelineOrder(pipelines, (Pin(NodeId("local-1")), Pin(NodeId("local-2"))), OWN)
        built = node.build(settings, order)
        try:
            asked = requests(PROMPTS, 48)
            right = answer(built.engine, asked, clock).tokens
            if not allowed:
                with pytest.raises(PacelineError):
                    answer(built.engine, asked, clock, 8, lambda: fleet.kill("local-2"))
                return
            seen = answer(built.engine, asked, clock, 8, lambda: fleet.kill("local-2"))
            assert seen.replayed
            assert seen.tokens == right
            assert [(stage.node_id, stage.layers.start) for stage in built.executor.stages] == [("local-1", OWN)]
            fleet.start("local-2")
            until(lambda: answer(built.engine, asked, clock).tokens == right and built.executor.stages[0].node_id == "local-2")
            built.engine.check_invariants()
        finally:
            built.executor.close()
    finally:
        if node is not None:
            node.close()
        fleet.close()


def test_a_client_that_asked_is_told_and_the_metrics_count_it(tmp_path: Path, shallow_gguf: Path) -> None:
    home = Home.from_environment().root
    for shared in ("models", "cache"):
        (home / shared).mkdir(parents=True, exist_ok=True)
        (tmp_path / shared).symlink_to(home / shared, target_is_directory=True)
    (tmp_path / "config.toml").write_text("[pipeline]\nfallback_to_local = true\nfallback_to_local_after_failures = 1\n")
    command = [
        sys.executable,
        "-m",
        "paceline",
        "up",
        "--model",
        str(shallow_gguf),
        "--local-nodes",
        "2",
        "--port",
        "0",
        "--own-layers",
        str(OWN),
        "--tied",
    ]
    process = subprocess.Popen(
        [*command, "--context", "512", "--kv-tokens", "4096", "--threads", "1"],
        env={**os.environ, "PACELINE_HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url = next((found[1] for line in process.stdout if (found := re.search(r"Ready at (http://\S+)/v1", line))), None)
        assert url is not None
        with httpx.Client(base_url=url, timeout=120) as http:
            body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "draft": "off"}
            right = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            text, told = "", list[str]()
            body |= {"stream": True, "stream_options": {"include_events": True}}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        told.append(line.removeprefix("event: "))
                    elif line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                        if not text:
                            os.kill(_other_node(process.pid), signal.SIGKILL)
                        text += choices[0]["text"]
            assert text == right
            assert told == ["shard_status", "local_fallback"]
            page = http.get("/metrics").text.splitlines()
            short = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
            refused = http.post("/v1/completions", json=short | {"ways": ["pipeline"]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ways")
            assert "is served alone now" in refused.json()["error"]["message"]
            assert http.post("/v1/completions", json=short | {"ways": ["alone", "pipeline"]}).status_code == 200
        assert "paceline_fallback_to_local_total 1.0" in page
        assert "paceline_failovers_total 0.0" in page
        assert 'paceline_pipeline_construct_ms_count{opening="first"} 1.0' in page
        assert "paceline_first_token_ms_count 2.0" in page
    finally:
        process.stdin.close()
        process.stdout.read()
        process.stdout.close()
        process.wait(BOUND_S)


def _other_node(parent: int) -> int:
    """The process of the node that was started by another."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{parent}\n" in status.read_text() and b"--serve-shards" in (status.parent / "cmdline").read_bytes():
                return int(status.parent.name)
    pytest.fail("there is no other node")
