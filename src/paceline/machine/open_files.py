"""How many files and connections this process may have open: some systems begin with 256, fewer than strangers can take of a node's port."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

WANTED = 8192
"""Connections of members and of clients, of those who are being turned away, and files."""


def allow_open_files(wanted: int = WANTED) -> int:
    """Raise this process's own limit as far as the system lets it; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:
        logger.warning("this process may open %d files only: %s", soft, error)
        return soft
    return most
