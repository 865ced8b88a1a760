"""Clients of the API as people have them. Each is closed at the end of its file, whatever became of its streams: none is left to the garbage collector."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import openai

OPEN_CLIENTS = ExitStack()
"""What tests made of clients; closing it leaves it empty, for the next file."""


def openai_client(url: str, key: str | None = None, **options: Any) -> openai.OpenAI:
    """The official client.

    Args:
        url: of the server.
        key: None where it asks for none.
        options: of the client, which asks once and not again unless they say so.
    """
    return OPEN_CLIENTS.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", **{"max_retries": 0, **options}))
