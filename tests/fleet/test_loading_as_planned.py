"""What is loaded while a node runs is served as its plan says, and a pipeline is unloaded as any model is: between answers, and nothing stays behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fleet.machines import Machine, free_port, machines, until
from tests.fleet.test_forwarding import MODEL, client_of
from tests.fleet.test_pipeline import SMALL, found_fleet

from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

ASK: dict[str, Any] = {
    "model": MODEL,
    "prompt": "The history of bicycle racing begins",
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "draft": "off"},
}


def text(machine: Machine, tokens: int = 64) -> str:
    return client_of(machine).completions.create(**ASK, max_tokens=tokens).choices[0].text


def health(machine: Machine) -> tuple[int, Any]:
    said = httpx.get(f"{machine.node.url}/health", timeout=60)
    return said.status_code, said.json()["error"]


def plans(machine: Machine) -> list[str]:
    return [words for _, words in machine.sight().plans]


def streams(seen_by: Machine) -> list[int]:
    """Sessions of the layers that h has loaded for others, as its card says."""
    card = seen_by.card_of("h")
    return [] if card is None else [offer.shard.streams for offer in card.models if offer.shard is not None]


def test_a_pipeline_is_unloaded_between_answers_and_loaded_again_as_one(tmp_path: Path) -> None:
    with machines(tmp_path, Home.from_environment().kernels, "o", "h") as (o, h):
        found_fleet(o, h)
        (o.home / "config.toml").write_text("[pipeline]\nkeep_spares = false\nfallback_to_local = false\n")
        port = free_port()
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", str(port))
        o.up("--ways", "pipeline", "--on-demand", "--draft", "off", "--fleet-port", "0", "--peer", f"127.0.0.1:{port}", *SMALL)
        (first,) = plans(o)
        assert "-> h [" in first
        # One name in status, on the page of metrics, and in the log.
        (called,) = re.findall(r"; pipeline ([0-9a-f]{8})$", first)
        page = httpx.get(f"{o.node.url}/metrics", timeout=60).text
        assert f'paceline_pipeline_machines{{model="{MODEL}",pipeline="{called}"}} 1.0' in page
        assert any(f"pipeline {called}" in line for line in o.node.said)
        whole = text(o)

        # In the middle of an answer it stays.
        chunks = iter(client_of(o).completions.create(**ASK, max_tokens=400, stream=True))
        begun = next(chunks).choices[0].text
        assert "in the middle of 1" in o.run("unload", MODEL, "--wait-s", "0", code=2)
        assert (begun + "".join(chunk.choices[0].text for chunk in chunks)).startswith(whole)

        assert f"{MODEL} is unloaded" in o.run("unload", MODEL)
        assert "No model is loaded" in o.run("ps")
        until(lambda: not any(streams(o)))
        until(lambda: plans(o) == [])
        assert "paceline_pipeline_machines{" not in httpx.get(f"{o.node.url}/metrics", timeout=60).text

        # A request that names it has it planned, and so has its owner.
        assert text(o) == whole
        assert "-> h [" in plans(o)[0]
        assert called not in plans(o)[0]
        o.run("unload", MODEL)
        assert f"{MODEL} is loaded" in o.run("load", MODEL)
        assert "-> h [" in plans(o)[0]
        assert text(o) == whole
        assert any(streams(o))

        # Who asks for its health learns of a lost machine before a request does, and of one that is back without any.
        assert health(o) == (200, None)
        h.node.kill()
        until(lambda: health(o)[0] == 503)
        assert "No machines are left for layers" in health(o)[1]
        h.up("--no-model", "--serve-shards", "--threads", "1", "--fleet-port", str(port))
        until(lambda: health(o) == (200, None))
        assert text(o) == whole
        o.node.stop()
