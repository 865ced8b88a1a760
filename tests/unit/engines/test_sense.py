"""What an engine says about itself is bounded before anything shows it or sends it on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import aiohttp
import pytest

from paceline.core.errors import EngineGone, ModelAway
from paceline.engines.addresses import are_at_home
from paceline.engines.contract import Door, EngineIdentity, EngineModel, Takes
from paceline.engines.http import Http
from paceline.engines.patience import EnginePatience
from paceline.engines.sense import MOST_LETTERS, made_sense, shown_identity, shown_models

CHATS = frozenset({Takes.MESSAGES})


@pytest.mark.parametrize(
    ("version", "shown"),
    [("b9000", "b9000"), ("b1\x1b[31m\nINFO forged", "b1?[31m?INFO forged"), ("v" * 10**6, "v" * 88), ("a\0b", "a?b")],
)
def test_an_identity_is_one_short_line(version: str, shown: str) -> None:
    assert shown_identity(EngineIdentity("llama-server", version)) == EngineIdentity("llama-server", shown)


@pytest.mark.parametrize("name", ["", "n" * (MOST_LETTERS + 1), "a\nb", "\x1b[31m", "a\0b", "\ud800"])
def test_a_model_whose_name_can_not_be_shown_is_not_offered(name: str) -> None:
    good = EngineModel("good", CHATS)
    assert shown_models("here", [EngineModel(name, CHATS), good]) == (good,)


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 53, 1 << 63, (1 << 64) - 1])
def test_figures_out_of_bounds_are_not_known(number: int) -> None:
    (model,) = shown_models("here", [EngineModel("m", CHATS, "no digest", None, "Q" * 10**6, number, number, number)])
    assert (model.digest, model.context, model.slots, len(model.quantisation)) == ("", 0, 0, 100)
    assert model.size_bytes in {0, number}
    assert model.size_bytes < 1 << 53


@pytest.mark.parametrize("error", [TypeError("x"), ValueError("x"), RecursionError(), KeyError("x"), AssertionError()])
def test_errors_of_adapters_become_ours(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(error: Exception) -> None:
        raise error

    with caplog.at_level(logging.DEBUG), pytest.raises(EngineGone):
        asyncio.run(awaited(made_sense("http://here", fails(error))))
    assert "http://here" in caplog.text
    with pytest.raises(ModelAway):
        asyncio.run(awaited(made_sense("http://here", fails(ModelAway("m")))))


async def awaited(work: Awaitable[Any]) -> Any:
    return await work


@pytest.mark.parametrize(
    ("addresses", "home"),
    [
        (["127.0.0.1"], True),
        (["10.1.2.3", "192.168.1.1"], True),
        (["fd00::1", "fe80::1%eth0", "::1"], True),
        (["169.254.7.7"], True),
        (["::ffff:10.0.0.1"], True),
        (["169.254.169.254"], False),
        (["192.0.2.1"], False),
        (["240.0.0.1"], False),
        (["0.0.0.0"], False),
        (["::ffff:8.8.8.8"], False),
        (["10.0.0.1", "93.184.216.34"], False),
        (["2606:4700::1"], False),
        ([], False),
    ],
)
def test_which_addresses_are_at_home(addresses: list[str], home: bool) -> None:
    assert are_at_home(addresses) == home


@pytest.mark.parametrize(("may_leave", "reaches"), [(False, False), (True, True)])
def test_a_name_that_means_an_address_outside_now_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch, may_leave: bool, reaches: bool
) -> None:
    called: list[str] = []

    async def resolve(self: object, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        del self, family
        called.append(host)
        return [{"hostname": host, "host": "192.0.2.1", "port": port, "family": 2, "proto": 6, "flags": 0}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)

    async def ask() -> str:
        layer = Http(Door("http://box.lan:1", may_leave=may_leave), "e", EnginePatience(connect_s=0.05))
        try:
            with pytest.raises(EngineGone) as gone:
                await layer.ask("GET", "/")
            return gone.value.message
        finally:
            await layer.close()

    assert ("outside of your network" in asyncio.run(ask())) != reaches
    assert called
