"""A process that compiles kernels into the kernel cache: `python -m ... LOWERING FOLDER`.

It prints an empty line once it is ready. Then it takes names on its input, and repeats each once the function is compiled.
"""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path

from paceline.backends import cpu
from paceline.backends.cpu.kernels import compile_kernel


def main() -> None:
    lowering, folder = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks: its end closes the input
    gc.disable()  # types and code live as long as the process: looking for garbage among them takes a tenth of the time
    cpu.prepare(cpu.Lowering(lowering), Path(folder))
    _answer("\n")
    for line in sys.stdin:
        compile_kernel(line.strip())
        _answer(line)


def _answer(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
