"""Ends answers at an engine that hangs while its pages still answer.

Law: silence counts only before the first token, and only if each request that waits there is allowed a known time: then it ends once the engine has written
nothing, to any request, for all these times together. It works on them one after the other at worst. `Rates.silence_s` says what a prompt is allowed.
An engine may be busy for a program that Paceline does not know, so requests that were ended together make the next ones `MORE` times as patient, and each
that is answered undoes one such step. It may also have
unloaded the model a moment ago, so it is asked before a request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from math import inf
from typing import Final

from paceline.core.background import end_tasks
from paceline.core.errors import EngineGone
from paceline.engines.contract import AnswerPiece

MORE: Final = 4.0
"""Factor on the silence that is allowed, for each request that was ended. Raising it: a busy engine loses fewer requests, and one that hangs again keeps more."""
MOST_LOOK_S: Final = 1.0
"""Seconds between two looks at a silence. Raising it: one that became too long because other requests ended is noticed later."""


async def always() -> bool:
    """Return True: an engine that never unloads its model."""
    return True


class Silence:
    """The silence of one engine. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[object, float | None] = {}
        """Seconds that each request without a token is allowed; None: not known."""
        self._sign_s = -inf
        self._patience = 1.0
        self._raised_s = -inf

    async def watched(
        self, pieces: AsyncGenerator[AnswerPiece, None], allowed_s: float | None, is_loaded: Callable[[], Awaitable[bool]] = always
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of an answer, and close it at the end.

        Args:
            allowed_s: seconds of silence before its first token; None: not known.
            is_loaded: asks the engine whether it has the model loaded still.

        Raises:
            EngineGone: the engine was silent for too long.
        """
        loop, waits = asyncio.get_running_loop(), object()
        self._waiting[waits] = None if allowed_s is None else allowed_s * self._patience
        try:
            async with aclosing(pieces):
                while allowed_s is not None and waits in self._waiting:
                    if (piece := await self._next(pieces, waits, is_loaded)) is None:
                        return
                    if piece.tokens_read is None:
                        del self._waiting[waits]
                        self._patience = max(1.0, self._patience / MORE)
                    self._sign_s = loop.time()
                    yield piece
                async for piece in pieces:
                    if piece.tokens_read is None:
                        self._waiting.pop(waits, None)
                    self._sign_s = loop.time()
                    yield piece
        finally:
            self._waiting.pop(waits, None)

    async def _next(
        self, pieces: AsyncGenerator[AnswerPiece, None], waits: object, is_loaded: Callable[[], Awaitable[bool]]
    ) -> AnswerPiece | None:
        """Return the next piece; None at the end."""
        loop = asyncio.get_running_loop()
        began_s, coming = loop.time(), asyncio.ensure_future(anext(pieces, None))
        try:
            while not coming.done():
                allowed_s = sum(inf if each is None else each for each in self._waiting.values())
                left_s = allowed_s - (loop.time() - max(began_s, self._sign_s))
                if left_s <= 0 and not await is_loaded():
                    self._waiting[waits] = None
                elif left_s <= 0 and not coming.done():
                    if began_s > self._raised_s:  # once for all that waited together
                        self._patience, self._raised_s = self._patience * MORE, loop.time()
                    raise EngineGone(f"The engine wrote nothing for {allowed_s:.3g} s", "Restart it if it hangs.")
                await asyncio.wait((coming,), timeout=max(0.0, min(left_s, MOST_LOOK_S)))
            return coming.result()
        finally:
            await end_tasks(coming)
