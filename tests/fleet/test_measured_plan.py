"""What a node sees as it serves changes what it does: a drafter that is always wrong loses its place in the plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fleet.machines import BOUND_S, EMPTY, free_port, machines, token_in, until

from paceline.machine.settings import DEFAULT_MODEL
from paceline.store.home import Home

pytestmark = pytest.mark.sampled(1, by="file", among="models over machines")

SCRIPT = str(Path(__file__).parent / "wrong_drafter.py")


def test_a_drafter_that_is_always_wrong_loses_its_place(tmp_path: Path) -> None:
    with machines(tmp_path, Home.from_environment().kernels, "a", "b") as (a, b):
        a.prefix, b.prefix = (sys.executable, SCRIPT, "right"), (sys.executable, SCRIPT, "wrong")
        a.init("--join-port", str(free_port()), "--address", "127.0.0.1")
        up = a.up("--model", DEFAULT_MODEL, "--draft", DEFAULT_MODEL, "--threads", "1", "--fleet-port", "0")
        b.run("join", token_in(a.run("token", "--address", "127.0.0.1")), "--name", "b")
        b.up(*EMPTY, "--propose", DEFAULT_MODEL)

        def planned() -> tuple[str, dict[str, Any] | None]:
            """The way that a would serve its model now, and what it expects of b's drafts, whether or not they pay at the link's figures."""
            made = json.loads(a.run("plan", DEFAULT_MODEL, "--pin", "a", "--ways", "alone,draft", "--json"))
            drafts = (choice["draft"] for choice in (made["chosen"], *made["runners_up"]))
            return made["chosen"]["way"], next((draft for draft in drafts if draft and draft["node_id"] == "b"), None)

        def drafter() -> str:
            return next(use["node_id"] for use in a.status()["drafts"] if use["by"] == DEFAULT_MODEL)

        def shares() -> dict[str, float]:
            """What a says of the drafts that it had."""
            card = a.card_of("a")
            assert card is not None
            return {draft.node_id: draft.acceptance for offer in card.models for draft in offer.drafts}

        until(lambda: drafter() == "b")
        until(lambda: planned()[1] is not None)
        _, before = planned()
        assert before is not None
        assert (before["acceptance"], before["measured"]) == (0.6, False)
        body = {
            "model": DEFAULT_MODEL,
            "messages": [{"role": "user", "content": "Tell me a long story."}],
            "max_tokens": 120,
            "temperature": 0,
        }

        def answered() -> bool:
            httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=BOUND_S).raise_for_status()
            return "b" in shares()

        until(answered)
        assert shares()["b"] < 0.05
        way, after = planned()
        assert way == "alone"
        assert after is not None
        assert after["measured"]
