"""Print the numerics id of all forms, computed with a lowering: python -m tests.neon.identity neon-i8mm."""

from __future__ import annotations

import sys

from paceline.backends import cpu

if __name__ == "__main__":
    cpu.use_lowering(cpu.Lowering(sys.argv[1]))
    from tests.neon import kernels  # noqa: F401 - chooses where they are kept
    from tests.unit.backends.cpu.test_lowerings import SPEC

    from paceline.backends.cpu.forms import Form
    from paceline.backends.cpu.probe import numerics_id

    sys.stdout.write(f"{cpu.lowering_in_use()} {numerics_id(SPEC, set(Form), 2)}\n")
