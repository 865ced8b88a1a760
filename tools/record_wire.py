"""Record the bytes of every message anew, in tests/data/wire. From the repository: python -m tools.record_wire.

Only for a change of the wire that is meant: nodes of an older version must refuse it by name, or read it as before.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.wire_examples import examples

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "wire" / "messages.json"

if __name__ == "__main__":
    recorded = {example.name: example.write().hex() for example in examples()}
    before: dict[str, str] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    RECORDED.write_text(json.dumps(recorded, indent=0) + "\n")
    changed = [name for name in recorded if name in before and before[name] != recorded[name]]
    added, gone = recorded.keys() - before.keys(), before.keys() - recorded.keys()
    print(f"{len(recorded)} messages recorded, {len(added)} of them new; changed: {changed or 'none'}; gone: {sorted(gone) or 'none'}")
