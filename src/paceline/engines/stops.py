"""Stop texts, looked for on this side: engines differ in where they cut, and some lose text that they held back for one."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from paceline.core.generation import FinishReason
from paceline.engine.sequence import overlap
from paceline.engines.contract import AnswerPiece


async def until_stop(pieces: AsyncGenerator[AnswerPiece], stops: tuple[str, ...]) -> AsyncGenerator[AnswerPiece]:
    """Yield pieces up to the first of the stop texts. Text that may begin one is held back, with its tokens.

    The answer is closed at a stop text, so that the engine ends it. Figures that engines send at the end are then missing.
    """
    held = deque[AnswerPiece]()
    text = ""
    firsts = {stop[0] for stop in stops}
    async with aclosing(pieces):
        async for piece in pieces:
            if not piece.text and piece.finish is None:
                if piece.n_tokens and held:
                    held.append(piece)
                else:
                    yield piece
                continue
            if not held and piece.finish is None and firsts.isdisjoint(piece.text):
                yield piece
                continue
            text += piece.text
            if piece.text:
                held.append(piece)
            place = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
            held_back = max(overlap(text, stop) for stop in stops)
            safe = place if place >= 0 else len(text) if piece.finish is not None else len(text) - held_back
            while held and len(held[0].text) <= safe:
                text, safe, given = text[len(held[0].text) :], safe - len(held[0].text), held.popleft()
                yield given
            if place >= 0:
                if safe:
                    yield replace(held[0], text=held[0].text[:safe])
                yield AnswerPiece(finish=FinishReason.STOP, stopped_by_text=True)
                return
            if piece.finish is not None:
                yield replace(piece, text="") if piece.text else piece
