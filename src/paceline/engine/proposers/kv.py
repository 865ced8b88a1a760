"""A runner's KV, shared out to the texts that a model drafts for.

Law: `extend` leaves a text's KV as if all its tokens had just been run. A text that needs blocks takes them from the one drafted for longest
ago, which is then run anew when its turn comes: KV is never missing, only slow.

Shapes: T rows, R rows with logits, V vocabulary, D hidden, B blocks of a table.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt

from paceline.engine.executor import Path
from paceline.engine.local import Activations, LayerRunner, row_plan
from paceline.engine.proposers.session import common_length

PROMPT_ROWS = 16
"""So many rows or more run as a prompt's: where kernels differ, those for prompts are faster then."""


class Text:
    """One text's place in the KV."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Those whose KV is there."""
        self.blocks: list[int] = []
        self.passes = 0
        """Forward passes, in all."""
        self.peak_bytes = 0
        """The largest activations of a pass since this was last set to 0: residual in, residual out, logits."""


class SharedKv(Generic[Activations]):
    """All texts of one model.

    Args:
        runner: holds all layers; closed by its maker.
        max_rows: that it takes at a time.
    """

    def __init__(self, runner: LayerRunner[Activations], *, max_rows: int, max_context: int) -> None:
        self._runner, self.max_rows = runner, max_rows
        self.room = min(max_context, runner.n_blocks * runner.block_size)
        """Tokens that one text may have."""
        self.lock = threading.Lock()
        """Held while a text is extended, by the thread that does: a runner runs one batch at a time."""
        self._free = list(range(runner.n_blocks))
        self._texts: list[Text] = []
        """Those with blocks, the one drafted for last at the end."""
        self._row_bytes = 0

    def extend(self, text: Text, tokens: Sequence[int], wanted: int) -> npt.NDArray[np.float32]:
        """Make a text's KV that of `tokens`; run what of them is not there.

        Args:
            tokens: all of it; at most `room`.
            wanted: rows whose logits are asked for, the last ones; at least 1.

        Returns:
            Their logits, [R, V]. Valid until the next call.
        """
        kept = min(common_length(text.tokens, tokens), len(tokens) - wanted)
        del text.tokens[kept:]
        self._make_room(text, len(tokens))
        while len(tokens) - kept > self.max_rows:
            self._run(text, tokens[kept : kept + self.max_rows], 0)
            kept += self.max_rows
        if len(tokens) - kept < wanted:  # a chunk ended among the rows wanted
            del text.tokens[len(tokens) - wanted :]
            kept = len(text.tokens)
        return self._run(text, tokens[kept:], wanted)

    def forget(self, text: Text) -> None:
        """Give its blocks back. Idempotent."""
        self._free += text.blocks
        text.blocks, text.tokens = [], []
        if text in self._texts:
            self._texts.remove(text)

    def _make_room(self, text: Text, n_tokens: int) -> None:
        if text in self._texts:
            self._texts.remove(text)
        needed = -(-n_tokens // self._runner.block_size)
        while len(self._free) + len(text.blocks) < needed:
            self.forget(self._texts[0])
        self._texts.append(text)
        while len(text.blocks) < needed:
            text.blocks.append(self._free.pop())

    def _run(self, text: Text, tokens: Sequence[int], wanted: int) -> npt.NDArray[np.float32]:
        runner, rows = self._runner, len(tokens)
        path = Path.PROMPT if rows >= PROMPT_ROWS else Path.GENERATED
        plan = row_plan([rows], [len(text.tokens)], [path], np.array([text.blocks], np.int32))
        x_TD = runner.run_layers(runner.embed(np.array(tokens, np.int32)), plan)
        if not self._row_bytes:
            self._row_bytes = 2 * runner.to_wire(x_TD).nbytes // rows
        logits_RV = runner.logits(x_TD, np.arange(rows - wanted, rows, dtype=np.int32))
        text.tokens += tokens
        text.passes += 1
        text.peak_bytes = max(text.peak_bytes, rows * self._row_bytes + logits_RV.nbytes)
        return logits_RV
