"""Run the tests in two groups side by side, each a pytest of its own: those that keep a core busy with kernels, and the rest.

    python tools/run_tests.py [pytest's options and paths]

With options there is one group: what they say. What the second group prints is shown as it comes, what the first one does at its end. Each ends
with what its test files took.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = ["tests/api", "tests/conformance", "tests/golden", "tests/identity"]
PYTEST = [sys.executable, "-m", "pytest", "-p", "tools.file_times"]


def main(options: list[str]) -> int:
    if options:
        return subprocess.call([*PYTEST, *options])
    others = [option for path in KERNELS for option in ("--ignore", path)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "kernels.log")
        with log.open("wb") as out, subprocess.Popen([*PYTEST, *KERNELS, "-p", "no:cacheprovider"], stdout=out, stderr=out) as kernels:
            try:
                codes = [subprocess.call([*PYTEST, *others]), kernels.wait()]
            except BaseException:
                kernels.kill()
                raise
        sys.stdout.write(log.read_text(errors="replace"))
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
