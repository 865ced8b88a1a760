"""A disk without space is said with what mends it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from paceline.core.errors import MembershipError
from paceline.transport.trust.folder import FleetFolder


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("a disk of its own can't be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_asks_for_space_and_not_for_another_folder(small_disk: Path) -> None:
    folder = FleetFolder(small_disk / "fleet")
    folder.write_secret(folder.peers_file, b"[]")
    with pytest.raises(MembershipError, match="No space left") as caught:
        folder.write_secret(folder.peers_file, bytes(128 << 10))
    assert "Free some space" in caught.value.hint
    assert folder.peers_file.read_bytes() == b"[]"
