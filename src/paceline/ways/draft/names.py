"""Names of drafts in options, in a module of their own: the code that drafts takes time to import."""

from __future__ import annotations

from typing import Final

JACOBI: Final = "jacobi:"
"""Before a model's name: it drafts by itself, a block at once."""
FLEET: Final = "fleet"
"""A `draft` for whatever model of the fleet drafts best."""
