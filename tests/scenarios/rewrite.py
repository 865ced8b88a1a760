"""Write into every scenario file what its commands do now. Read the diff before keeping it: `python tests/scenarios/rewrite.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scenarios.gossip_script import rewritten

for path in sorted((Path(__file__).parent / "gossip").glob("*.txt")):
    path.write_text(rewritten(path))
