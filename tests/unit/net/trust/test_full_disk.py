"""A disk without space is said with what mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import MembershipError
from paceline.net.trust.folder import FleetFolder


def test_a_full_disk_asks_for_space_and_not_for_another_folder(small_disk: Path) -> None:
    folder = FleetFolder(small_disk / "fleet")
    folder.write_secret(folder.peers_file, b"[]")
    with pytest.raises(MembershipError, match="No space left") as caught:
        folder.write_secret(folder.peers_file, bytes(128 << 10))
    assert "Free some space" in caught.value.hint
    assert folder.peers_file.read_bytes() == b"[]"
