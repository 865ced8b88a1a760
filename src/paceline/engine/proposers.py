"""Drafts by a model: greedily, token by token; or whole blocks, refined until they no longer change (Jacobi iteration).

Laws:
- Both draft the model's own greedy continuation, as far as they get. Jacobi's first token is right after one pass, and each further pass makes at least one
  more token right; rows that are already right are not run again.
- `SharedKv.extend` leaves a text's KV as if all its tokens had just been run. A text that needs blocks takes them from the least recently drafted text, which
  is run again when its turn comes: KV is never missing, only slow.

Shapes: T rows, R rows with logits, V vocabulary, D hidden, B blocks of a table.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt

from paceline.core.errors import InvalidRequest
from paceline.core.text import common_length
from paceline.engine.drafts import BlockProposal, DraftSession, SessionProposer, retell
from paceline.engine.executor import Path
from paceline.engine.local import Activations, LayerRunner, row_plan
from paceline.engine.prompt_lookup import NGramIndex

PROMPT_ROWS = 16
"""Least number of rows that run on the prompt path, which is faster from there on where the kernels differ."""


class DraftedText:
    """The KV of one text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Tokens with KV in the blocks."""
        self.blocks: list[int] = []
        self.passes = 0
        """Number of forward passes since the start."""
        self.peak_bytes = 0
        """Bytes of the largest activations of a pass since this was last set to 0: residual in, residual out, logits."""


class SharedKv(Generic[Activations]):
    """The KV of a runner, shared among all texts of one model.

    Args:
        runner: holds all layers; closed by its creator.
        max_rows: rows of one pass, at most.
        max_context: tokens of one text, at most.
    """

    def __init__(self, runner: LayerRunner[Activations], *, max_rows: int, max_context: int) -> None:
        self._runner, self.max_rows = runner, max_rows
        self.room = min(max_context, runner.n_blocks * runner.block_size)
        """Maximum tokens of one text."""
        self.lock = threading.Lock()
        """Held by the thread that extends a text: a runner runs one batch at a time."""
        self._free = list(range(runner.n_blocks))
        self._texts: list[DraftedText] = []
        """Texts with blocks, least recently drafted first."""
        self._row_bytes = 0

    def extend(self, text: DraftedText, tokens: Sequence[int], wanted: int) -> npt.NDArray[np.float32]:
        """Make a text's KV that of `tokens`, by running the tokens that it lacks.

        Args:
            tokens: all tokens of the text; at most `room`.
            wanted: number of last rows that need logits; at least 1.

        Returns:
            The logits of these rows, [R, V]. Valid until the next call.
        """
        kept = min(common_length(text.tokens, tokens), len(tokens) - wanted)
        del text.tokens[kept:]
        self._make_room(text, len(tokens))
        while len(tokens) - kept > self.max_rows:
            self._run(text, tokens[kept : kept + self.max_rows], 0)
            kept += self.max_rows
        if len(tokens) - kept < wanted:  # a chunk ended inside the wanted rows
            del text.tokens[len(tokens) - wanted :]
            kept = len(text.tokens)
        return self._run(text, tokens[kept:], wanted)

    def forget(self, text: DraftedText) -> None:
        """Give back a text's blocks. Idempotent."""
        self._free += text.blocks
        text.blocks, text.tokens = [], []
        if text in self._texts:
            self._texts.remove(text)

    def _make_room(self, text: DraftedText, n_tokens: int) -> None:
        if text in self._texts:
            self._texts.remove(text)
        needed = -(-n_tokens // self._runner.block_size)
        while len(self._free) + len(text.blocks) < needed:
            self.forget(self._texts[0])
        self._texts.append(text)
        while len(text.blocks) < needed:
            text.blocks.append(self._free.pop())

    def _run(self, text: DraftedText, tokens: Sequence[int], wanted: int) -> npt.NDArray[np.float32]:
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


BEST_STEPS = 2
"""Tokens of a block for each refinement, if the caller does not choose. More refinements make about one token right each, as token-by-token decoding does.
Raising it: fewer refinements, and fewer right tokens.
"""


class ModelProposer(SessionProposer, Generic[Activations]):
    """A model that drafts.

    Args:
        runner: holds all layers, and must not be shared; closed by its creator.
        vocabulary_size: token ids below this are valid. For others, kernels would read beyond the table.
        eos_ids: nothing is drafted after one of these tokens.
        max_rows: rows of one pass, at most.
        max_context: tokens of one text, at most.
    """

    def __init__(
        self,
        runner: LayerRunner[Activations],
        *,
        vocabulary_size: int,
        eos_ids: frozenset[int] = frozenset(),
        max_rows: int = 512,
        max_context: int = 1 << 30,
    ) -> None:
        super().__init__()
        self.vocabulary_size, self.eos_ids = vocabulary_size, eos_ids
        self.kv = SharedKv(runner, max_rows=max_rows, max_context=max_context)


class DraftModelProposer(ModelProposer[Activations]):
    """Drafts token by token."""

    def open(self) -> DraftSession:
        return _TokenByToken(self)


class JacobiProposer(ModelProposer[Activations]):
    """Drafts a whole block at a time. All rows see a guess of the tokens before them, and each pass replaces the guess by the model's output."""

    def open(self) -> DraftSession:
        return _WholeBlocks(self)


class _ModelSession(ABC, Generic[Activations]):
    def __init__(self, model: ModelProposer[Activations]) -> None:
        self._model, self._kv = model, model.kv
        self._text = DraftedText()
        self.told: list[int] = []

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """Draft as `DraftSession` describes; empty if the text fills the context.

        Raises:
            InvalidRequest: a token id is outside the vocabulary. Other nodes send the ids, so they are checked.
        """
        size = self._model.vocabulary_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            raise InvalidRequest(f"Tokens beyond the {size} that this model has", field="committed_token_ids")
        self._tell(first_position, token_ids)
        kv, text = self._kv, self._text
        with kv.lock:
            block_size = min(block_size, kv.room - len(self.told), kv.max_rows)
            if block_size < 1 or not self.told:
                return BlockProposal(())
            passes, text.peak_bytes = text.passes, 0
            drafted, steps = self._drafted(block_size, num_steps)
            return BlockProposal(tuple(drafted), steps, text.passes - passes, text.peak_bytes)

    def close(self) -> None:
        self._tell(0, ())
        with self._kv.lock:
            self._kv.forget(self._text)

    def _tell(self, first_position: int, token_ids: Sequence[int]) -> None:
        retell(self.told, first_position, token_ids)

    @abstractmethod
    def _drafted(self, block_size: int, num_steps: int) -> tuple[list[int], int]:
        """Return the drafted tokens, and how often the block was refined."""


class _TokenByToken(_ModelSession[Activations]):
    def _drafted(self, block_size: int, num_steps: int) -> tuple[list[int], int]:
        del num_steps  # a token is drafted once
        tokens = [*self.told]
        for _ in range(block_size):
            tokens.append(int(self._kv.extend(self._text, tokens, 1)[0].argmax()))
            if tokens[-1] in self._model.eos_ids:
                break
        return tokens[len(self.told) :], 0


class _WholeBlocks(_ModelSession[Activations]):
    def __init__(self, model: ModelProposer[Activations]) -> None:
        super().__init__(model)
        self._index = NGramIndex()
        """Index of the told tokens, for the first guess of a block."""

    def _tell(self, first_position: int, token_ids: Sequence[int]) -> None:
        super()._tell(first_position, token_ids)
        self._index.cut(first_position)
        self._index.extend(token_ids)

    def _drafted(self, block_size: int, num_steps: int) -> tuple[list[int], int]:
        told, eos_ids = self.told, self._model.eos_ids
        most = min(num_steps, block_size) if num_steps else max(2, -(-block_size // BEST_STEPS))
        tokens = [*told, *self._first_guess(block_size)]
        right, steps = len(told), 0
        while right < len(tokens) and steps < most:
            # Rows from the last right token on: the model's next token at each row replaces the guess.
            wanted = len(tokens) - right
            said: list[int] = self._kv.extend(self._text, tokens[:-1], wanted).argmax(axis=1).tolist()
            steps += 1
            agreed = next((place for place in range(wanted) if said[place] != tokens[right + place]), wanted)
            tokens[right:] = said
            right = min(right + agreed + 1, len(tokens))  # the first that changed follows only right tokens, so it is right now
            if not eos_ids.isdisjoint(tokens[len(told) : right]):
                break
        block = tokens[len(told) :]
        return next((block[: place + 1] for place, token in enumerate(block) if token in eos_ids), block), steps

    def _first_guess(self, block_size: int) -> list[int]:
        """Return the tokens of prompt lookup, filled up with the last token again."""
        looked_up = self._index.propose(block_size)
        return [*looked_up, *([self.told[-1]] * (block_size - len(looked_up)))]
