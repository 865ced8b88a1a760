"""One question to an engine that loads: does it take requests now?"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from paceline.core.errors import EngineGone
from paceline.engines.contract import Door

PROBE_S = 3.0
"""Seconds for an answer. Raising it: an engine that hangs while it loads is asked less often."""


async def answers_ok(door: Door, path: str) -> bool:
    """Return whether a GET of `path` is answered with 200.

    Raises:
        EngineGone: nothing answers, or not in time.
    """
    at = urlsplit(door.url)
    try:
        async with asyncio.timeout(PROBE_S):
            if door.socket is not None:
                reader, writer = await asyncio.open_unix_connection(door.socket)
            else:
                reader, writer = await asyncio.open_connection(at.hostname, at.port)
            try:
                key = f"Authorization: Bearer {door.api_key}\r\n" if door.api_key else ""
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {at.netloc}\r\n{key}Connection: close\r\n\r\n".encode())
                status = await reader.readline()
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineGone(f"the engine at {door.url} does not answer") from error
    return status.split()[1:2] == [b"200"]
