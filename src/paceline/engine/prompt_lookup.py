"""Prompt lookup: the next tokens are those that followed the longest earlier repetition of the last ones. No weights, no randomness.

On text that repeats (quotes, code, tool calls, edits) many of its proposals come true; elsewhere it proposes nothing, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NGRAM = 8
"""Longest repetition looked for. Longer ones are found too, by their ends; raising it only breaks ties between places better."""
MAX_LOOKBACK = 8192
"""Tokens searched, the latest first. Raising it costs time in proportion (about 1 ms each 8192 tokens)."""


def propose(committed: Sequence[int], length: int) -> tuple[int, ...]:
    """Tokens that may come next; none where nothing repeats.

    Args:
        committed: prompt and answer so far.
        length: tokens wanted at most.
    """
    ids = committed[-MAX_LOOKBACK:]
    if length < 1 or len(ids) < 2:
        return ()
    last, best, place = ids[-1], 0, 0
    # The latest of the longest: what was said last is likelier to be said again.
    for end in range(len(ids) - 2, -1, -1):
        if ids[end] != last:
            continue
        matched = 1
        while matched < MAX_NGRAM and matched <= end and ids[end - matched] == ids[-1 - matched]:
            matched += 1
        if matched > best:
            best, place = matched, end + 1
            if best == MAX_NGRAM:
                break
    if not best:
        return ()
    # A repetition that runs into the end goes on with itself: its period, again and again.
    period = len(ids) - place
    return tuple(ids[place + step % period] for step in range(length))
