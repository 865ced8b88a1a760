"""A step that runs, as other threads see it: how far it is, and that it may be given up.

The words lie at a fixed address, for compiled code that reads and writes them between two tasks, where nobody holds the interpreter.
"""

from __future__ import annotations

import numpy as np

_GIVE_UP, _LAYERS = 0, 1
"""Places of the words (int64). Compiled code knows them too: `backends.cpu.conduct`."""


class StepWatch:
    """Of one batch on one machine."""

    __slots__ = ("_words", "address")

    def __init__(self) -> None:
        self._words = np.zeros(2, np.int64)
        self.address = int(self._words.ctypes.data)

    def give_up(self) -> None:
        """Have what runs end as soon as it can. Its result and the KV of its rows are void."""
        self._words[_GIVE_UP] = 1

    @property
    def gives_up(self) -> bool:
        return bool(self._words[_GIVE_UP])

    def layer_done(self) -> None:
        """Another layer was run."""
        self._words[_LAYERS] += 1

    @property
    def layers_done(self) -> int:
        return int(self._words[_LAYERS])
