"""How far a member of a fleet is trusted: said once, by the person who invites it, and written into its certificate."""

from __future__ import annotations

from enum import StrEnum


class Trust(StrEnum):
    """From the least to the most."""

    GUEST = "guest"
    MEMBER = "member"
    """The default, and what certificates without a level mean."""
    TRUSTED = "trusted"

    def reaches(self, least: Trust) -> bool:
        """Whether it is as much as `least`, or more."""
        order = list(Trust)
        return order.index(self) >= order.index(least)
