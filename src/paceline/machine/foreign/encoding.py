"""Work of foreign engines on texts: vectors and relevance, as arrays that were checked."""

from __future__ import annotations

import numpy as np

from paceline.core.encoding import Encoded
from paceline.core.errors import EngineGone
from paceline.engines.contract import ForeignEngine
from paceline.machine.foreign.model import ForeignModel


async def encode_texts(
    engine: ForeignEngine, model: ForeignModel, texts: tuple[str, ...], query: str | None, via: tuple[str, ...] = ()
) -> Encoded:
    """Have a model of an engine make vectors of texts, or rank them.

    Args:
        query: the text to rank by; None: vectors are wanted.

    Raises:
        EngineGone: the result is empty, or has numbers beyond the range of a float.
        PacelineError: as `ForeignEngine.embed`.
    """
    if query is None:
        made = await engine.embed(model.told.name, texts, via)
        with np.errstate(over="ignore"):
            encoded = Encoded(np.array(made.vectors, np.float32), made.tokens)
    else:
        ranked = await engine.rerank(model.told.name, query, texts, via)
        encoded = Encoded(np.array(ranked.scores, np.float64), ranked.tokens)
    if not encoded.values.size or not np.isfinite(encoded.values).all():
        raise EngineGone(f"{model.identity} returned numbers for {model.name} that mean nothing", "See its own log for the cause.")
    return encoded
