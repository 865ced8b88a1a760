"""Continuous batching: decides which rows run next, and which blocks they use.

Laws:
- Every running sequence with one row to run gets it in each step, and prompts get the rows that `step_costs.rows_of_prompts` adds: neither starves.
- First come, first admitted, this node's own clients before other nodes'. A sequence that finds no blocks, or would only hold blocks behind prompts which fill
  a step anyway, is passed by at most `PASSED` others. The latest to come is preempted first, so the earliest always advances. A preempted sequence is
  recomputed, on the paths its positions had: prompt path below the prompt's length, generated path from there on.
- A sequence is in more than one batch in flight only with draft rows, or with chunks of its prompt. Its blocks stay its own until its last batch is collected,
  and enter the prefix cache only when their rows are known to be right.
- With a pipeline (depth > 1), running sequences are spread over `depth` batches, and so is a chunk of prompts: each stage has a part of it, and what follows
  waits for one part at most. Any room left there is filled with drafts that continue drafts in flight.
- A loss takes the batches in flight, and of the rest what the executor can't restore: that is run again. After a loss during this, the oldest sequence runs
  first and alone; after a loss during a restore, half as many sequences are restored, the oldest first. So answers advance however often KV is lost.
- A draft takes no block from another sequence: it is cut short if none is free.
- A sequence with blocks being fetched runs nothing; for the pool it is in flight.
- Blocks from peers are checked before a row runs behind them. If one is wrong, nothing that depends on blocks of these peers stays in the cache or goes on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from operator import attrgetter

from paceline.core.ids import BatchId, NodeId, SequenceId
from paceline.engine.config import EngineConfig, context_of
from paceline.engine.drafting import Drafting
from paceline.engine.executor import Executor, HeldSequence, Path, SequenceStep, StepBatch
from paceline.engine.kv_source import PROMPTS_END, KvLoans, KvSource, KvTraffic
from paceline.engine.local import blocks_for
from paceline.engine.prefix_cache import BlockPool, Prefixes
from paceline.engine.sequence import Phase, PlannedBatch, SequenceState, oldest
from paceline.engine.step_costs import PromptLeft, StepCosts, StepLoad, rows_of_prompts

LEAST_ROWS = 32
"""Prompt rows in the step after a recalled one; the next has twice as many. Raising it: more is lost where requests keep coming."""
PASSED = 16
"""Maximum number of sequences admitted before one that came earlier. Raising it: short requests wait less behind long ones, and long ones wait longer."""


class Scheduler:
    """Waiting and running sequences that share one pool."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        drafting: Drafting,
        costs: StepCosts,
        kv: KvSource | None = None,
        loans: KvLoans | None = None,
        draw: Callable[[], int] = lambda: 0,
    ) -> None:
        self._executor, self._drafting, self._costs = executor, drafting, costs
        self.pool = BlockPool(executor.n_blocks)
        self.prefixes = Prefixes(executor, config)
        self.kv = None if kv is None else KvTraffic(kv, self.prefixes, config.kv_check_every, draw)
        self._loans = loans or KvLoans()
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.distrusted: list[tuple[SequenceState, frozenset[NodeId]]] = []
        """Sequences that had to run again since this was last emptied, each with the peers that sent wrong KV."""
        self.preemptions = 0
        self._depth, self._block_size = executor.depth, executor.block_size
        self._config = config
        self._max_running = config.max_running
        self._chunk, self._budget_s = config.prefill_chunk, config.step_budget_s
        self._most = self._chunk
        """Prompt rows in a step, at most. It drops after a recalled step and doubles with each step until it is full again, so repeated recalls cost little."""
        self._may_recall = True
        self._batch_ids = count()
        self._most_blocks = 0
        """Maximum number of blocks that any live sequence can need."""
        self._released: list[SequenceId] = []
        self._replaying: set[SequenceState] = set()
        """Sequences that ran when KV was lost and have not reached the same point again."""
        self._piling = False
        """KV was lost while sequences were still replaying."""
        self._interrupted = 0
        """Consecutive losses, the first included, without a step between them."""
        self._draining: list[SequenceState] = []
        """Sequences that ended or are to be preempted, and hold blocks until their batch is collected."""

    # ---------------------------------------------------------------------------------------------------- sequences come and go

    def add(self, seq: SequenceState) -> None:
        self.prefixes.name(seq)
        seq.most_tokens = self._most_tokens(seq)
        insort(self.waiting, seq, key=attrgetter("turn"))
        self._most_blocks = max(self._most_blocks, self._blocks_of(seq))

    def end(self, seq: SequenceState, *, failed: bool = False) -> None:
        """Remove a sequence that ended. Its blocks are given back now or after its batch. With `failed`, unpublished blocks are never shared."""
        if failed:
            seq.n_publishable = 0
        if seq.phase is Phase.WAITING:
            self.waiting.remove(seq)
        elif seq.phase is Phase.RUNNING:
            self.running.remove(seq)
            if not seq.in_flight:
                self._release(seq)
            elif not seq.preempt_when_collected:
                self._draining.append(seq)
        seq.phase = Phase.ENDED
        self._most_blocks = max(map(self._blocks_of, (*self.running, *self.waiting)), default=0)

    # ------------------------------------------------------------------------------------------------------------------ batches

    def next_batch(self) -> PlannedBatch | None:
        """Return the next batch. None: every sequence is in flight, or waits for one that is, or for its blocks."""
        self._loans.settle(self.pool)
        while self._loans.liars:
            self._distrust(self._loans.liars.popleft())
        if self.kv is not None:
            self.kv.lend(self.pool)
            for seq, fetch in self.kv.fetched():
                if self._comes_back(seq):
                    self._released += [] if seq.check is None else [seq.id]  # its table changes
                    if (liars := self.kv.came(seq, fetch, self.pool, len(self.running))) is not None:
                        self.found_lie(liars)
        if self.waiting:
            self._admit()
        steps: list[SequenceStep] = []
        sequences: list[SequenceState] = []
        load = StepLoad(0)
        for seq, rows, guess in self._rows():
            load = load.more(rows, seq.computed) if rows > 1 else replace(load, rows=load.rows + rows + len(guess))
            steps.append(self._step(seq, rows, guess))
            sequences.append(seq)
        if not steps:
            return None
        released, self._released = tuple(self._released), []
        batch = StepBatch(BatchId(next(self._batch_ids)), tuple(steps), released, self._most_blocks)
        return PlannedBatch(batch, sequences, load, may_recall=self._may_recall and load.prompt_rows == load.rows and self._depth == 1)

    def collected(self, planned: PlannedBatch) -> None:
        """Publish a batch's full blocks, now that its KV is written and its draws are taken. Then do what was deferred for it: trim, preempt or release."""
        self._may_recall = True
        if planned.load.prompt_rows:
            self._most = min(2 * self._most, self._chunk)
        for seq, step in zip(planned.sequences, planned.batch.steps, strict=True):
            seq.flights -= 1
            seq.void = max(0, seq.void - 1)
            seq.is_settled = True
            if seq.n_published < seq.n_publishable and not seq.distrusted:
                end = step.first_position + len(step.token_ids)
                before = self.prefixes.publish(seq, min(end, len(seq.tokens) - 1) if step.logits_rows else end, self.pool.cache)
                if self.kv is not None:
                    self.kv.offer(seq, before)
            if not seq.flights:
                if seq.is_live and not seq.preempt_when_collected:
                    if self.kv is not None and seq.check is not None and seq.computed == seq.check.stop:
                        self.kv.compare(seq, seq.check)
                    self._trim(seq)
                else:
                    self._draining.remove(seq)
                    (self._preempt if seq.is_live else self._release)(seq)
        self._loans.settle(self.pool)

    def recalled(self, planned: PlannedBatch) -> None:
        """Put back a batch of prompts that was cancelled. Its rows run again, with fewer rows per step for a while."""
        for seq, step in zip(planned.sequences, planned.batch.steps, strict=True):
            if self._comes_back(seq):
                seq.computed = step.first_position
                self._most = LEAST_ROWS
        self._may_recall = False

    def lost(self, in_flight: Iterable[PlannedBatch]) -> None:
        """Undo all batches in flight after the executor lost KV. Sequences return to their state before these batches, until the remaining KV is known."""
        released: list[SequenceId] = []
        flown: dict[SequenceState, int] = {}
        for planned in in_flight:
            released += planned.batch.released
            for seq, step in zip(planned.sequences, planned.batch.steps, strict=True):
                # Rows that ran on a wrong guess begin behind the known tokens.
                flown[seq] = min(flown.get(seq, seq.computed), step.first_position)
        if self.kv is not None:
            flown |= {seq: seq.computed for seq in self.kv.reset(self.pool)}
        self._loans.void(self.pool)
        # Some parts of the executor have run these batches, others have not.
        self._released[:0] = released
        for seq, computed in flown.items():
            seq.flights = 0
            if seq.phase is Phase.ENDED:
                self._release(seq)
                continue
            seq.forget_guess()
            seq.computed, seq.void = computed, 0
            (self._preempt if seq.preempt_when_collected else self._trim)(seq)
        self._draining.clear()
        for seq in [one for one in self.running if one.check is not None]:  # the blocks after the checked one would not be restored
            self._preempt(seq)
        self._interrupted += 1

    def held(self) -> list[HeldSequence]:
        """Return the computed parts of sequences that the executor should restore after a loss."""
        found = [seq for seq in self.running if seq.computed]
        return [
            HeldSequence(seq.id, seq.tokens[: seq.computed], seq.n_prompt, seq.blocks[: blocks_for(seq.computed, self._block_size)])
            for seq in found[: -(-len(found) >> self._interrupted - 1)]
        ]

    def resume(self, kept: Collection[SequenceId]) -> list[SequenceState]:
        """Resume after a loss, with the sizes that the executor has now.

        Args:
            kept: sequences with restored KV. If there are any, the sizes are those of before.

        Returns:
            Sequences that can't gain a token with these sizes; the caller must end them.
        """
        executor = self._executor
        self._interrupted = 0
        self._piling = self._is_replaying()
        for seq in reversed(tuple(self.running)):
            if not kept or (seq.computed and seq.id not in kept):
                self._replaying.add(seq)
                self._requeue(seq)
        if kept:
            # Blocks known only to the cache are not restored everywhere.
            self.pool.forget_idle()
            for seq in self.running:
                self._send_anew(seq)
        else:
            self.pool = BlockPool(executor.n_blocks)
        self._depth, self._block_size = executor.depth, executor.block_size
        self.prefixes.follow(executor, self.waiting)
        for seq in self.waiting:
            seq.most_tokens = self._most_tokens(seq)
        self._most_blocks = max(map(self._blocks_of, (*self.running, *self.waiting)), default=0)
        return [seq for seq in self.waiting if len(seq.tokens) >= seq.most_tokens]

    def _most_tokens(self, seq: SequenceState) -> int:
        context, asked = context_of(self._config, self._executor), seq.request.max_tokens
        return (
            context if asked is None else min(context, seq.n_prompt + max(asked, 1))
        )  # a sequence that draws no token also runs its prompt's last row

    def _blocks_of(self, seq: SequenceState) -> int:
        """Return the maximum number of blocks that a sequence can need."""
        return blocks_for(seq.most_tokens - 1, self._block_size)

    # --------------------------------------------------------------------------------------------------------------- inside: rows

    def _rows(self) -> Iterator[tuple[SequenceState, int, Sequence[int]]]:
        """Yield the sequences to run, each with its number of rows and its draft tokens. Each must be planned before the next is taken."""
        share = -(-len(self.running) // self._depth)
        prefilling, decoding = False, list[SequenceState]()
        # A copy, because sequences are preempted during the loop, always later ones than the current one.
        for seq in tuple(self.running):
            if seq.left > 1:
                prefilling = True
            elif share and not (seq.is_awaited or seq.distrusted) and seq.phase is Phase.RUNNING and self._has_room(seq):
                share -= 1
                decoding.append(seq)
        # A prompt's last row has another path than the draft tokens after it.
        rooms = [self._room(seq, seq.computed + 1) if seq.computed >= seq.n_prompt else 0 for seq in decoding]
        left, answers, unguessed = self._chunk, 0, self._config.max_guesses
        # Drafts leave half of it to prompts.
        guesses = min(self._config.max_guesses, left // 2 if prefilling else left)
        for seq, draft in zip(decoding, self._drafting.plan(decoding, rooms, guesses), strict=True):
            guess = self._cut(seq, seq.computed + 1, draft)
            left -= len(guess)
            unguessed -= len(guess)
            answers += 1 + len(guess)
            yield seq, 1, guess
        idle = not decoding
        for seq, rows in self._prompts(left, answers, unguessed) if prefilling else ():
            idle = False
            yield seq, rows, ()
        if idle and self._depth > 1:
            yield from self._ahead()

    def _prompts(self, most: int, answers: int, logits: int) -> Iterator[tuple[SequenceState, int]]:
        """Yield the prompts and recomputed sequences to run, each with its number of rows: at most `most`, next to `answers` rows of answers.

        Args:
            logits: rows that may need logits in addition to one for each sequence.
        """
        fetching = () if self.kv is None else self.kv.fetching
        prompts = [seq for seq in self.running if seq.left > 1 and seq.flights < self._depth and seq not in fetching]
        prompts = [seq for seq in prompts if seq.left_of_path and not seq.preempt_when_collected]
        most = min(most, -(-self._chunk // self._depth))
        if self._piling and self._is_replaying():
            prompts = oldest(prompts, most)
        if all(seq.left > most for seq in prompts):  # otherwise the sequences that end bound the step
            most = min(most, self._most)
        # Without an answer that waits for its next token, a step may take longer.
        budget_s = self._budget_s if any(seq.left <= 1 for seq in self.running) else inf
        scored = 1 + logits // max(1, sum(not seq.is_scored for seq in prompts))
        lefts = [
            PromptLeft(seq.computed, seq.left_of_path if seq.is_scored else min(seq.left_of_path, scored), seq.left) for seq in prompts
        ]
        shares = rows_of_prompts(lefts, most, answers, self._costs, budget_s)
        for seq, rows in zip(prompts, shares, strict=True):
            if rows:
                yield seq, rows

    def _is_replaying(self) -> bool:
        """Return whether sequences are still replaying after a loss."""
        self._replaying = {seq for seq in self._replaying if seq.is_live and (seq.phase is Phase.WAITING or seq.left > 1)}
        return bool(self._replaying)

    def _ahead(self) -> Iterator[tuple[SequenceState, int, Sequence[int]]]:
        """Yield draft rows that continue drafts in flight, for a pipeline that has nothing else to do."""
        left = self._config.max_guesses
        for seq in self.running:
            if seq.is_awaited and seq.computed >= len(seq.tokens) and not seq.preempt_when_collected:
                guess = self._cut(seq, seq.computed, self._drafting.plan_ahead(seq, min(left, self._room(seq, seq.computed))))
                if guess:
                    left -= len(guess)
                    yield seq, 0, guess

    def _room(self, seq: SequenceState, start: int) -> int:
        """Return how many draft tokens fit from position `start` on, in blocks that no other sequence wants."""
        spare = max(0, self.pool.available - len(self.running))
        return min(seq.guesses_left, (len(seq.blocks) + spare) * self._block_size - start)

    def _cut(self, seq: SequenceState, start: int, draft: Sequence[int]) -> Sequence[int]:
        """Cut a draft to the blocks that are left after earlier drafts, taking blocks for it."""
        n = len(draft)
        while n > 0 and blocks_for(start + n, self._block_size) > len(seq.blocks):
            if self.pool.available > len(self.running):
                seq.blocks.append(self.pool.take())
            else:
                n = len(seq.blocks) * self._block_size - start
        return draft[:n] if n > 0 else ()

    def _step(self, seq: SequenceState, rows: int, guess: Sequence[int]) -> SequenceStep:
        start, known = seq.computed, len(seq.tokens)
        token_ids = [*seq.tokens[start : start + rows], *guess]
        stop = start + len(token_ids)
        kept, needed = min(seq.n_sent, blocks_for(start, self._block_size)), blocks_for(stop, self._block_size)
        new_blocks = seq.blocks[kept:needed] if kept < needed else ()
        seq.n_sent = needed
        seq.computed = stop
        if guess:
            seq.guess += guess
            self._drafting.sent(seq, len(guess))
        seq.flights += 1
        path = Path.PROMPT if start < seq.n_prompt else Path.GENERATED
        if seq.is_scored or start >= seq.n_prompt:
            logits_rows = range(max(0, known - 1 - start), len(token_ids)) if stop >= known else ()
        else:  # a row's logits score the token after it
            logits_rows = range(
                max(0, seq.n_scored - 1 - start), len(token_ids) if stop >= known else min(len(token_ids), seq.n_prompt - 1 - start)
            )
        return SequenceStep(seq.id, seq.epoch, token_ids, start, path, new_blocks, logits_rows)

    # ------------------------------------------------------------------------------------------------------------- inside: blocks

    def _admit(self) -> None:
        """Admit sequences that will get a row soon, if there are blocks for all their tokens now."""
        lefts = [seq.left for seq in self.running if seq.left > 1]
        backlog, least = sum(lefts), min(lefts, default=0)
        passed: list[SequenceState] = []
        blocked = 0
        for seq in tuple(self.waiting):
            if len(self.running) >= self._max_running:
                return
            may_pass = seq.passed < PASSED
            if may_pass and backlog >= self._chunk and seq.left >= least:
                passed.append(seq)  # it would hold blocks and get no row
                continue
            hits = self.prefixes.find(seq, self.pool.cache)
            if hits is None:
                continue
            revived = sum(self.pool.cache.is_idle(block) for block in hits)
            needed = blocks_for(len(seq.tokens), self._block_size) - len(hits)
            # Keep one block spare for each running sequence. Otherwise their next tokens would preempt the new one.
            if needed + revived + len(self.running) > self.pool.available:
                blocked += 1
                if not may_pass or blocked == PASSED:
                    return
                passed.append(seq)
                continue
            for other in passed:
                other.passed += 1
            for block in hits:
                self.pool.share(block)
            seq.blocks = [*hits, *(self.pool.take() for _ in range(needed))]
            seq.computed = len(hits) * self._block_size
            self.prefixes.begun(seq, len(hits), self.pool.cache)
            self.waiting.remove(seq)
            seq.phase = Phase.RUNNING
            insort(self.running, seq, key=attrgetter("id"))
            if self.kv is not None:
                writing = sum(other.left == 1 for other in self.running if other is not seq)
                self.kv.fetch(seq, self.prefixes.missing(seq, len(hits)), seq.blocks[len(hits) :], writing)
            if seq.left > 1:
                backlog += seq.left
                least = min(least or seq.left, seq.left)

    def found_lie(self, givers: frozenset[NodeId]) -> None:
        """Report a check of blocks from peers. If any peers sent wrong ones, forget all blocks that depend on them, and replay the sequences that use those."""
        self._loans.on_checked(givers)
        if givers:
            self._distrust(givers)

    def _distrust(self, givers: frozenset[NodeId]) -> None:
        self._loans.void(self.pool)
        for seq in () if self.kv is None else self.kv.distrust(givers, {*self.running, *self._draining}, self.pool):
            self.distrusted.append((seq, givers))
            if seq.in_flight:
                seq.preempt_when_collected = True
                self._draining.append(seq)
            else:
                self._requeue(seq)

    def _comes_back(self, seq: SequenceState) -> bool:
        """Take a sequence out of flight after a fetch or a recall. Returns whether it goes on; otherwise it ended or is preempted, and releases its blocks."""
        seq.flights -= 1
        if seq.is_live and not seq.preempt_when_collected:
            return True
        self._draining.remove(seq)
        (self._preempt if seq.is_live else self._release)(seq)
        return False

    def _has_room(self, seq: SequenceState) -> bool:
        """Ensure that there is a block for the next row. Preempts later sequences if necessary."""
        if seq.computed < len(seq.blocks) * self._block_size:
            return True
        while not self.pool.available:
            if self._draining:
                return False  # blocks become free as soon as a batch is collected
            latest = self.running[-1]
            if latest.in_flight:
                latest.preempt_when_collected = True
                self._draining.append(latest)
                return False
            self._preempt(latest)
            if latest is seq:
                return False
        seq.blocks.append(self.pool.take())
        return True

    def _preempt(self, seq: SequenceState) -> None:
        self.preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: SequenceState) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.forget_guess()
        seq.computed = 0
        seq.preempt_when_collected = False
        seq.phase = Phase.WAITING
        insort(self.waiting, seq, key=attrgetter("turn"))

    def _send_anew(self, seq: SequenceState) -> None:
        """Mark the part of a sequence's table to be sent again after a loss, because some parts of the executor may lack it."""
        if seq.is_settled:
            seq.n_sent = min(seq.n_sent, blocks_for(seq.computed, self._block_size))
        else:
            # Parts that ran a batch in flight have a table for it, as have parts that restored its beginning.
            self._released.append(seq.id)
            seq.n_sent = 0

    def _trim(self, seq: SequenceState) -> None:
        """Give back the blocks that held only rejected draft tokens."""
        needed = blocks_for(len(seq.tokens), self._block_size)
        if needed < len(seq.blocks):
            self.pool.give_back(reversed(seq.blocks[needed:]))
            del seq.blocks[needed:]
            seq.n_sent = min(seq.n_sent, needed)

    def _release(self, seq: SequenceState) -> None:
        self.prefixes.stopped(seq)
        self.pool.give_back(seq.put_back())
        if self.prefixes.are_shared and not (seq.request.keeps_apart or seq.distrusted):
            self._loans.used(seq.keys[: seq.n_published], (seq.n_prompt - PROMPTS_END) // self._block_size, seq.request.caller)
        self.pool.give_back(reversed(seq.blocks))
        seq.blocks = []
        # Also if no batch named it, because its beginning may have been restored.
        self._released.append(seq.id)
        seq.n_sent, seq.is_settled = 0, False

    # ----------------------------------------------------------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """Assert that blocks, queues and phases agree. Cheap enough to run after each test and at each rest."""
        lent = [() if self.kv is None else tuple(self.kv.lent), *(tuple(loan.blocks.values()) for loan in self._loans.out)]
        holders = {*self.running, *self._draining}
        self.pool.check_invariants([*(seq.blocks for seq in holders), *((seq.check.aside,) for seq in holders if seq.check), *lent])
        assert all(seq.phase is Phase.WAITING and not seq.blocks and not seq.in_flight for seq in self.waiting), (
            "a waiting sequence holds something"
        )
        assert all(seq.phase is Phase.RUNNING for seq in self.running), "a sequence that does not run stands among those that do"
        assert all(seq.in_flight for seq in self._draining), "a sequence drains that is not in flight"
        assert all(seq.flights or not seq.guess for seq in self.running), "guesses outlived the batch they were in"
        assert all(a.turn < b.turn for a, b in pairwise(self.waiting)), "those that wait are out of their turn"
        assert all(a.id < b.id for a, b in pairwise(self.running)), "those that run are out of the order of arrival"
        self.prefixes.check_invariants({*self.running, *self._draining})
        if not self.running and not self._draining:
            assert self.pool.used == len({block for blocks in lent for block in blocks}), "blocks are held with nothing running"
