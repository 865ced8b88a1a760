"""Drafts by a model: greedily, token by token; or whole blocks, refined until they no longer change (Jacobi iteration).

Law: both draft what the model itself would say greedily, as far as they get: Jacobi's first token is right after one pass, and each further pass
makes at least one more so; rows that are right already are not run again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic

from paceline.core.errors import InvalidRequest
from paceline.engine import prompt_lookup
from paceline.engine.drafts import BlockProposal
from paceline.engine.local import Activations, LayerRunner
from paceline.engine.proposers.kv import SharedKv, Text
from paceline.engine.proposers.session import DraftSession, SessionProposer, retell

BEST_STEPS = 2
"""Refinements of a block are worth it up to one for so many tokens of it, where the caller does not say: beyond, each makes about one token right,
which is what decoding takes."""


class ModelProposer(SessionProposer, Generic[Activations]):
    """A model that drafts.

    Args:
        runner: holds all layers, and runs for nobody else; closed by whoever made it.
        vocabulary_size: token ids below this are tokens. Kernels look up the others' too, wherever that is in memory.
        eos_ids: nothing is drafted behind one.
        max_rows: that the runner takes at a time.
        max_context: of the model.
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
        self._vocabulary_size = vocabulary_size
        self._kv = SharedKv(runner, max_rows=max_rows, max_context=max_context)
        self._eos_ids = eos_ids

    def open(self) -> DraftSession:
        return _ModelSession(self)

    def draft(self, text: Text, told: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """A block, counted; empty where the text fills the context."""
        kv = self._kv
        with kv.lock:
            block_size = min(block_size, kv.room - len(told), kv.max_rows)
            if block_size < 1 or not told:
                return BlockProposal(())
            passes, text.peak_bytes = text.passes, 0
            token_ids, steps = self._drafted(text, told, block_size, num_steps)
            block = BlockProposal(tuple(token_ids), steps, text.passes - passes, text.peak_bytes)
            self.stats.count(block)
            return block

    def check(self, token_ids: Sequence[int]) -> None:
        """Whether a text can be run: others say it.

        Raises:
            InvalidRequest: there is no such token.
        """
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocabulary_size:
            raise InvalidRequest(f"Tokens beyond the {self._vocabulary_size} that this model has", field="committed_token_ids")

    def forget(self, text: Text) -> None:
        """A session is over."""
        with self._kv.lock:
            self._kv.forget(text)

    @abstractmethod
    def _drafted(self, text: Text, told: Sequence[int], block_size: int, num_steps: int) -> tuple[list[int], int]:
        """The tokens, and how often the block was refined."""

    def _ended(self, token_ids: list[int]) -> list[int]:
        """Up to the first end of sequence."""
        return next((token_ids[: place + 1] for place, token in enumerate(token_ids) if token in self._eos_ids), token_ids)


class _ModelSession(Generic[Activations]):
    def __init__(self, proposer: ModelProposer[Activations]) -> None:
        self._proposer = proposer
        self._text = Text()
        self.told: list[int] = []

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        self._proposer.check(token_ids)
        retell(self.told, first_position, token_ids)
        return self._proposer.draft(self._text, self.told, block_size, num_steps)

    def close(self) -> None:
        self.told.clear()
        self._proposer.forget(self._text)


class DraftModelProposer(ModelProposer[Activations]):
    """Token by token."""

    def _drafted(self, text: Text, told: Sequence[int], block_size: int, num_steps: int) -> tuple[list[int], int]:
        del num_steps  # a token is drafted once
        tokens = list(told)
        for _ in range(block_size):
            tokens.append(int(self._kv.extend(text, tokens, 1)[0].argmax()))
            if tokens[-1] in self._eos_ids:
                break
        return tokens[len(told) :], 0


class JacobiProposer(ModelProposer[Activations]):
    """The whole block at once: all rows see a guess of the tokens before them, and each pass puts what the model says in the guess's place."""

    def _drafted(self, text: Text, told: Sequence[int], block_size: int, num_steps: int) -> tuple[list[int], int]:
        most = min(num_steps, block_size) if num_steps else max(2, -(-block_size // BEST_STEPS))
        tokens = [*told, *self._first_guess(told, block_size)]
        right, steps = len(told), 0
        while right < len(tokens) and steps < most:
            # Rows from the last right token on: what each says next takes the place of what was guessed there.
            wanted = len(tokens) - right
            said: list[int] = self._kv.extend(text, tokens[:-1], wanted).argmax(axis=1).tolist()
            steps += 1
            agreed = next((place for place in range(wanted) if said[place] != tokens[right + place]), wanted)
            tokens[right:] = said
            right = min(right + agreed + 1, len(tokens))  # the first that changed was said after right ones only, so it is right now
            if not self._eos_ids.isdisjoint(tokens[len(told) : right]):
                break
        return self._ended(tokens[len(told) :]), steps

    @staticmethod
    def _first_guess(told: Sequence[int], block_size: int) -> list[int]:
        """What prompt lookup says, and the last token again where it says nothing."""
        looked_up = prompt_lookup.propose(told, block_size)
        return [*looked_up, *([told[-1]] * (block_size - len(looked_up)))]
