"""Engines that this node offers: each is called by itself, so that one with odd answers, or with none, keeps no other from clients."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_http import Asked, Hang, Said, Script, said, served
from tests.unit.net.member.nodes import in_loop, until

from paceline.core.background import end_tasks, in_background
from paceline.machine.foreign.engines import ForeignEngines
from paceline.node import engines as node_engines
from paceline.node.engines import SharedEngines
from paceline.store.home import Home

PROPS: Mapping[str, Any] = {
    "build_info": "b1",
    "default_generation_settings": {"n_ctx": 64},
    "total_slots": 1,
    "model_path": "/nowhere/m.gguf",
}


def llama(name: str, over: Mapping[str, Said] | None = None, **props: Any) -> Script:
    """Answer as llama-server does.

    Args:
        over: other answers, by path.
    """

    def script(asked: Asked) -> Said:
        match asked.path.partition("?")[0]:
            case path if path in (over or {}):
                return (over or {})[path]
            case "/props":
                return said({**PROPS, **props})
            case "/health":
                return said({"status": "ok"})
            case "/v1/models":
                return said({"data": [{"id": name}]})
            case _:
                return said({"error": {"message": "not found", "code": 404}}, 404)

    return script


ODD: Mapping[str, Script] = {
    "aliases that are no list": llama("bad", {"/v1/models": said({"data": [{"id": "bad", "aliases": True}]})}),
    "settings that are no object": llama("bad", default_generation_settings=[]),
    "a path with NUL": llama("bad", model_path="/tmp/a\0b"),
    "a time of 5,000 digits": llama("bad", {"/v1/models": said({"error": {"message": "x"}}, 503, **{"Retry-After": "9" * 5000})}),
    "nothing at all": lambda _: Said((Hang(),)),
    "a list of numbers": llama("bad", {"/v1/models": said({"data": [1, 2]})}),
    "names that are numbers": llama("bad", {"/v1/models": said({"data": [{"id": {"a": 1}}]})}),
}


@pytest.fixture
def engines() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("odd", [*ODD, "a pipe"])
@in_loop
async def test_an_odd_engine_keeps_no_other_from_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: ExitStack, odd: str
) -> None:
    monkeypatch.setattr(node_engines, "LOOK_S", 0.05)
    pipe = tmp_path / "m.gguf"
    os.mkfifo(pipe)
    bad = engines.enter_context(served(ODD.get(odd) or llama("bad", model_path=str(pipe)), "llama.cpp"))
    good, later = (engines.enter_context(served(llama(name), "llama.cpp")) for name in ("good", "later"))
    home = Home(tmp_path / "home")
    home.root.mkdir()
    offered = ForeignEngines(home, FakeClock())
    share(home, bad.url, good.url)
    following = in_background(SharedEngines(offered, home, FakeClock()).run(), "what is shared")
    try:
        await until(lambda: "good" in names(offered))
        share(home, bad.url, later.url)
        await until(lambda: "later" in names(offered) and "good" not in names(offered))
        share(home, later.url)
        await until(lambda: names(offered) == {"later"} and [state.url for state in offered.states()] == [later.url])
        assert not following.done()
    finally:
        await end_tasks(following)
        await offered.close()


def share(home: Home, *urls: str) -> None:
    written = home.engines.with_suffix(".new")
    written.write_text(json.dumps([{"url": url} for url in urls]))
    written.chmod(0o600)
    written.rename(home.engines)


def names(engines: ForeignEngines) -> set[str]:
    return {one.model.told.name for one in engines.offered}
