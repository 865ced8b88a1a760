"""Clients of the API as people have them. Each is closed at the end of its file, whatever became of its streams: none is left to the garbage collector."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import openai


class _Closable(Protocol):
    def close(self) -> None: ...


Client = TypeVar("Client", bound=_Closable)
_OPEN: list[_Closable] = []


def kept(client: Client) -> Client:
    """Close a client with the others."""
    _OPEN.append(client)
    return client


def openai_client(url: str, key: str | None = None, **options: Any) -> openai.OpenAI:
    """Args: url: of the server; key: None where it asks for none; options: of the official client, which asks once and not again."""
    return kept(openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", **{"max_retries": 0, **options}))


def close_clients() -> None:
    while _OPEN:
        _OPEN.pop().close()
