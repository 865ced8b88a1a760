"""Drafts by a model: greedily, token by token; or whole blocks, refined until they no longer change (Jacobi iteration).

Law: both draft what the model itself would say greedily, as far as they get: Jacobi's first token is right after one pass, and each further pass
makes at least one more so; rows that are right already are not run again.

A runner's KV, shared out to the texts that a model drafts for.

Law: `extend` leaves a text's KV as if all its tokens had just been run. A text that needs blocks takes them from the one drafted for longest
ago, which is then run anew when its turn comes: KV is never missing, only slow.

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
"""So many rows or more run as a prompt's: where kernels differ, those for prompts are faster then."""


class DraftedText:
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
    """

    def __init__(self, runner: LayerRunner[Activations], *, max_rows: int, max_context: int) -> None:
        self._runner, self.max_rows = runner, max_rows
        self.room = min(max_context, runner.n_blocks * runner.block_size)
        """Tokens that one text may have."""
        self.lock = threading.Lock()
        """Held while a text is extended, by the thread that does: a runner runs one batch at a time."""
        self._free = list(range(runner.n_blocks))
        self._texts: list[DraftedText] = []
        """Those with blocks, the one drafted for last at the end."""
        self._row_bytes = 0

    def extend(self, text: DraftedText, tokens: Sequence[int], wanted: int) -> npt.NDArray[np.float32]:
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

    def forget(self, text: DraftedText) -> None:
        """Give its blocks back. Idempotent."""
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
"""Refinements of a block are worth it up to one for so many tokens of it, where the caller does not say: beyond, each makes about one token right,
which is what decoding takes."""


class ModelProposer(SessionProposer, Generic[Activations]):
    """A model that drafts.

    Args:
        runner: holds all layers, and runs for no other; closed by its maker.
        vocabulary_size: token ids below this are tokens. For others, kernels would read beyond the table.
        eos_ids: nothing is drafted behind one.
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
    """Token by token."""

    def open(self) -> DraftSession:
        return _TokenByToken(self)


class JacobiProposer(ModelProposer[Activations]):
    """The whole block at once: all rows see a guess of the tokens before them, and each pass puts what the model says in the guess's place."""

    def open(self) -> DraftSession:
        return _WholeBlocks(self)


class _ModelSession(ABC, Generic[Activations]):
    def __init__(self, model: ModelProposer[Activations]) -> None:
        self._model, self._kv = model, model.kv
        self._text = DraftedText()
        self.told: list[int] = []

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """As `DraftSession`; empty where the text fills the context.

        Raises:
            InvalidRequest: there is no such token. Others say them.
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
        """The tokens, and how often the block was refined."""


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
        """Of what was told, for the first guess of a block."""

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
            # Rows from the last right token on: what each says next takes the place of what was guessed there.
            wanted = len(tokens) - right
            said: list[int] = self._kv.extend(self._text, tokens[:-1], wanted).argmax(axis=1).tolist()
            steps += 1
            agreed = next((place for place in range(wanted) if said[place] != tokens[right + place]), wanted)
            tokens[right:] = said
            right = min(right + agreed + 1, len(tokens))  # the first that changed was said after right ones only, so it is right now
            if not eos_ids.isdisjoint(tokens[len(told) : right]):
                break
        block = tokens[len(told) :]
        return next((block[: place + 1] for place, token in enumerate(block) if token in eos_ids), block), steps

    def _first_guess(self, block_size: int) -> list[int]:
        """What prompt lookup says, and the last token again where it says nothing."""
        looked_up = self._index.propose(block_size)
        return [*looked_up, *([self.told[-1]] * (block_size - len(looked_up)))]
