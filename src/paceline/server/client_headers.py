"""Lines that clients put before their system message and change from request to request, for their vendor's accounts alone.

They stand at the very beginning of a prompt, so that no two prompts would have anything in common: they are dropped before a prompt is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.server.messages import Message

_HEADERS = re.compile(r"(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")
"""Claude Code's: versions of itself and a checksum of the conversation."""


def without_headers(messages: Sequence[Message]) -> list[Message]:
    """The messages, the first of them without such lines, if it is a system message; without it, if it had nothing else."""
    first = messages[0]
    found = _HEADERS.match(first.text) if first.role in {"system", "developer"} else None
    if found is None:
        return list(messages)
    rest = first.text[found.end() :]
    if rest:
        return [first.model_copy(update={"content": rest}), *messages[1:]]
    return list(messages[1:] or messages)
