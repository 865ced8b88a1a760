from __future__ import annotations

from pathlib import Path

import pytest
from tests.scenarios.gossip_script import rewritten

FILES = sorted((Path(__file__).parent / "gossip").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_happens_is_what_the_file_says(path: Path) -> None:
    assert rewritten(path) == path.read_text()
