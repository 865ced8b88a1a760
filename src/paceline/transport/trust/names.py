"""What a node may be called."""

from __future__ import annotations

import re

NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def is_node_id(text: str) -> bool:
    """Whether `text` may name a node: a host's name in lower case, at most 63 characters, so that it is safe in a log, a file and a certificate."""
    return NODE_ID.fullmatch(text) is not None
