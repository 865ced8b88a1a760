"""Requests in, tokens out: the loop around scheduler, executor, sampler and text.

Laws:
- Every sequence of an added request ends exactly once, with a chunk that has a finish reason; nothing follows it.
- A lost executor costs time: live sequences are replayed from their token ids. If it stays down or is lost repeatedly, live sequences end with an error, and
  later requests may find it again. Any other failure of the executor ends the engine too.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from math import inf, isfinite
from time import sleep

from paceline.core.clock import Clock
from paceline.core.errors import DrawFailed, ExecutorLost, ExecutorUnavailable, InvalidRequest, PacelineError
from paceline.core.generation import NUMERICS_CHANGED, FinishReason, GenerationChunk, GenerationRequest, Notice
from paceline.core.ids import RequestId, SequenceId
from paceline.core.stats import EngineStats
from paceline.core.text import Vocabulary
from paceline.engine.config import EngineConfig, check_draft, check_grammar, check_request, check_room, context_of
from paceline.engine.drafting import Drafting, DraftingConfig
from paceline.engine.executor import Executor, SequenceStep, StepOutput
from paceline.engine.grammar import Grammars, restrict
from paceline.engine.kv_source import KvLoans, KvSource
from paceline.engine.prompt_progress import PromptProgress
from paceline.engine.sampling import Drawn, DrawRow, DrawState, PlainSampler, Sampler, draw_each
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import PlannedBatch, SequenceState, TextStream, carry_on, gain_of, score_rows
from paceline.engine.step_costs import StepCosts, StepTimes

SHORTER = 4
"""Least ratio of the rows of a prompt step in flight to the tokens of a new prompt for the step to be cancelled. Raising it: less is run twice, and
medium-length prompts wait longer.
"""
TOLD_EVERY = 64
"""Steps between two reports of step costs. Raising it: other nodes plan with older costs; less overhead per step."""
WAIT_S = 0.005
"""Seconds between two checks whether a live sequence can run, where none could. Raising it: an answer begins later after its blocks have arrived."""
_NOT_EXACT = "The machines that are left compute other bytes, and the request is exact"
_NO_ROOM = "The machines that are left have too little memory for this sequence"


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little")


class Engine:
    """The generations of one model. For one thread. The caller owns the executor and the clock."""

    def __init__(
        self,
        executor: Executor,
        vocabulary: Vocabulary,
        config: EngineConfig,
        clock: Clock,
        *,
        entropy: Callable[[], int] = _entropy,
        drafting: DraftingConfig | None = None,
        sampler: Sampler | None = None,
        grammars: Grammars | None = None,
        wait: Callable[[float], object] = sleep,
        kv: KvSource | None = None,
        loans: KvLoans | None = None,
    ) -> None:
        """Start idle.

        Args:
            executor: runs the batches; closed by its creator.
            entropy: returns the seed of a request that has none.
            drafting: sources of draft tokens, used as long as the executor holds identity; None: no drafts.
            sampler: draws the tokens; closed by its creator. None: the plain one, which is slow with a large vocabulary.
            grammars: compiled for this vocabulary; None: structured outputs are refused.
            kv: keeps blocks outside the pool; closed by its creator.
            loans: lets other threads read blocks of the pool.
            wait: waits for the given seconds, or less if something arrived that sequences wait for.
        """
        self._executor, self._vocabulary, self._config = executor, vocabulary, config
        self._clock, self._entropy, self._kv, self._loans = clock, entropy, kv, loans
        costs = self._costs = StepCosts()
        self._told_at, self._step_seconds, self._prefill_per_s = 0, dict[int, float](), 0.0
        """Step-cost snapshot taken at step `_told_at`."""
        self._times = StepTimes(costs, clock)
        self._prompts = PromptProgress(clock)
        self._drafting = Drafting(drafting, vocabulary.size, costs, clock)
        self._numerics_id = executor.numerics_id
        self._drafts = executor.holds_identity
        """Sequences may be drafted for. Where kernels give other bytes for other batches, a draft would change the answer."""
        self._scheduler = Scheduler(executor, config, self._drafting, costs, kv, loans, entropy)
        self._sampler = sampler or PlainSampler(vocabulary.size)
        self._grammars = grammars
        self._live: dict[RequestId, list[SequenceState]] = {}
        self._n_live = 0
        self._in_flight: deque[PlannedBatch] = deque()
        self._recallable: PlannedBatch | None = None
        """The batch in flight, if it may be cancelled."""
        self._outbox: list[GenerationChunk] = []
        """Endings that happened outside a step; the next step delivers them."""
        self._sequence_ids = count()
        self._losses = 0
        self._lost = False
        """KV was lost, and the executor has run nothing since."""
        self._wait = wait
        self._ready = False
        """The executor was ready when the last batch was wanted. An executor that is not ready bounds its own waits."""
        self._waits_since: float | None = None
        """Monotonic time since which sequences are live and none could run; None: one can."""
        self._came = 0
        """Number of awaited blocks that had arrived at the last check."""
        self._arrivals = 0
        """Number of checks that found more blocks."""
        self._failure: str | None = None
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """True if `step` has work or chunks to deliver."""
        lends = self._loans is not None and self._loans.is_waiting
        return bool(self._live or self._in_flight or self._outbox or self._is_keeping or lends)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: a field is wrong, or the id is in use.
            ContextOverflow: it can never fit.
            Overloaded: the queue is full.
            PacelineError: the engine failed.
        """
        if self._failure is not None:
            raise PacelineError(f"The engine stopped: {self._failure}", "Restart it.")
        if request.request_id in self._live:
            raise InvalidRequest(f"The request id {request.request_id} is in use", "Give each request its own.")
        check_request(request, self._config, self._executor, self._vocabulary.size)
        check_room(self._n_live, len(request.indices), self._config)
        check_draft(request, self._drafting.names)
        check_grammar(request, served=self._grammars is not None)
        seed = self._entropy() if request.sampling.seed is None else request.sampling.seed
        stop_ids = request.stop_ids if request.ignore_eos else request.stop_ids | self._vocabulary.eos_ids
        banned = [token for token in self._vocabulary.eos_ids if token < self._vocabulary.size] if request.ignore_eos else []
        sequences: list[SequenceState] = []
        for index in request.indices:
            matcher = None if request.grammar is None or self._grammars is None else self._grammars.matcher(request.grammar)
            draws = DrawState(request.sampling, seed + index, request.prompt_ids, banned, matcher)
            text = TextStream(self._vocabulary, request.stop)
            seq = SequenceState(SequenceId(next(self._sequence_ids)), request, index, draws, text, stop_ids)
            carry_on(seq, request.so_far.get(index, ()))
            sequences.append(seq)
        for seq in sequences:
            self._scheduler.add(seq)
            if self._drafts:
                self._drafting.begin(seq)
        self._prompts.begin(sequences[0])
        self._live[request.request_id] = sequences
        self._n_live += len(sequences)
        self._prompt_tokens += len(request.prompt_ids)

    def abort(self, request_id: RequestId) -> None:
        """End a request now; the next step delivers the ending. Blocks are freed at once, or with the batch in flight. Unknown ids are ignored: they have
        ended.
        """
        for seq in tuple(self._live.get(request_id, ())):
            self._outbox.append(self._end(seq, FinishReason.ABORT))

    @property
    def advanced(self) -> int:
        """A counter that grows with every step, every part of a step, and while awaited blocks arrive. Any thread may read it."""
        return self._steps + self._executor.advanced + self._arrivals

    def recall(self, gone: Collection[RequestId], shortest: int | None, *, stops: bool = False) -> None:
        """Cancel the step in flight if waiting requests are better served without it. Its rows run again if they are still wanted.

        Any thread may call this; it is only a hint.

        Args:
            gone: requests that are no longer wanted.
            shortest: tokens of the shortest prompt that arrived since; None: none arrived.
            stops: all requests are being stopped.
        """
        planned = self._recallable
        if planned is None:
            return
        room = len(self._scheduler.running) < self._config.max_running
        overtaken = shortest is not None and room and SHORTER * shortest <= planned.load.rows
        if stops or overtaken or all(seq.request.request_id in gone for seq in planned.sequences):
            self._executor.recall(planned.batch.batch_id)

    def step(self) -> list[GenerationChunk]:
        """Keep the executor full, take one batch's output, and return what each sequence gained. Raises as `collect` does."""
        self.submit()
        return self.collect()

    def submit(self) -> None:
        """Keep the executor full. Raises as `collect` does."""
        self._ready = self._is_ready()
        if not self._ready:
            return
        while len(self._in_flight) < self._executor.depth and (planned := self._scheduler.next_batch()) is not None:
            self._in_flight.append(planned)
            self._times.submitted(planned.load)
            self._recallable = planned if planned.may_recall else None
            try:
                self._executor.submit(planned.batch)
            except ExecutorLost as lost:
                self._replay(lost, self._outbox)
                return
            except Exception as error:
                self._fail(error, self._outbox)
                raise

    def collect(self) -> list[GenerationChunk]:
        """Take one batch's output, and return what each sequence gained. If no sequence can run yet, wait a moment and return nothing.

        Raises:
            Exception: any error of the executor, except a loss that can be replayed. The next call returns the endings.
        """
        chunks, self._outbox = self._outbox, []
        try:
            if self._in_flight:
                output = self._executor.collect(self._clock.monotonic() + self._config.step_timeout_s)
                self._times.collected(whole=output is not None)
                self._recallable = None
                if output is not None:
                    self._read(self._in_flight.popleft(), output, chunks)
                else:
                    self._scheduler.recalled(self._in_flight.popleft())
                self._waits_since = None
            elif self._live and self._ready and not self._lost:
                self._await_any(chunks)
            else:
                self._waits_since = None
                if not chunks and self._is_keeping:
                    self._wait(WAIT_S)
        except ExecutorLost as lost:
            self._replay(lost, chunks)
        except Exception as error:
            self._fail(error, chunks)
            raise
        chunks += self._notices()
        return chunks

    def stats(self) -> EngineStats:
        scheduler, pool, compared = self._scheduler, self._scheduler.pool, self._drafting.compared
        if self._steps >= self._told_at + TOLD_EVERY:
            self._told_at, self._step_seconds, self._prefill_per_s = self._steps, self._costs.seen_seconds(), self._costs.seen_prefill()
        prompts_read, prompts_reading = self._prompts.totals()
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            max_context=context_of(self._config, self._executor),
            numerics_id=self._numerics_id,
            blocks_total=pool.n_blocks,
            blocks_in_use=pool.used,
            blocks_cached=len(pool.cache),
            prefix_queries_tokens=scheduler.prefixes.queried_tokens,
            prefix_hits_tokens=scheduler.prefixes.hit_tokens,
            prefix_fetched_tokens=scheduler.prefixes.fetched_tokens,
            kept_blocks={} if self._kv is None else dict(self._kv.counts),
            kept_bytes=0 if self._kv is None else self._kv.kept_bytes,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            reading_tokens_read=prompts_read,
            reading_tokens=prompts_reading,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            steps_in_flight=len(self._in_flight),
            steps_expected_s=self._times.expected_s,
            drafted_tokens=dict(self._drafting.drafted),
            accepted_tokens=dict(self._drafting.accepted),
            draft_blocks=dict(self._drafting.blocks),
            compared_tokens={maker: times for maker, (times, _) in compared.items()},
            true_tokens={maker: true for maker, (_, true) in compared.items()},
            step_seconds=self._step_seconds,
            prefill_per_s=self._prefill_per_s,
            drafts_off=not self._drafts,
            finished=dict(self._finished),
        )

    def check_invariants(self) -> None:
        """Assert that nothing leaked and nothing is owned twice."""
        self._scheduler.check_invariants()
        live = [seq for sequences in self._live.values() for seq in sequences]
        assert len(live) == self._n_live, "the number of live sequences is wrong"
        assert {*live} == {*self._scheduler.waiting, *self._scheduler.running}, "scheduler and engine disagree on who is live"
        fetching = () if self._scheduler.kv is None else self._scheduler.kv.fetching
        flying = Counter([*(seq for planned in self._in_flight for seq in planned.sequences), *fetching])
        assert all(seq.flights == flying[seq] for seq in {*live, *flying}), (
            "a sequence is in more batches in flight than it knows, or fewer"
        )

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _is_ready(self) -> bool:
        """Return whether batches may be submitted. After a loss, restore the executor, which may then have other sizes."""
        if not self.has_work:
            return False
        try:
            if not self._executor.ready():
                return False
        except ExecutorUnavailable as error:
            self._outbox += self._notices()
            self._end_all(str(error), self._outbox, error.code)
            return False
        except Exception as error:
            self._fail(error, self._outbox)
            raise
        if self._executor.numerics_id != self._numerics_id and not self._lost:  # a reset executor found other machines
            self._lost = True
            self._drop()
        if self._lost and not self._in_flight:
            kept = self._restored()
            if kept is None:
                return False
            self._lost = False
            for seq in self._scheduler.resume(kept):
                self._outbox.append(self._end(seq, FinishReason.ERROR, _NO_ROOM, "shard_unavailable"))
            if self._executor.numerics_id != self._numerics_id:
                before, self._numerics_id = self._numerics_id, self._executor.numerics_id
                # Without a promise before, exact requests were admitted for the new numerics.
                exact = self._exact() if before else ()
                self._outbox += [self._end(seq, FinishReason.ERROR, _NOT_EXACT, NUMERICS_CHANGED) for seq in exact]
            if self._executor.holds_identity != self._drafts:
                self._drafts = not self._drafts
                for seq in (*self._scheduler.running, *self._scheduler.waiting):
                    (self._drafting.begin if self._drafts else self._drafting.end)(seq)
        return True

    @property
    def _is_keeping(self) -> bool:
        """True if blocks are still to be kept outside the pool."""
        return self._scheduler.kv is not None and self._scheduler.kv.is_keeping

    def _await_any(self, chunks: Sequence[GenerationChunk]) -> None:
        """Wait a moment for blocks, because no live sequence can run without them."""
        now, came = self._clock.monotonic(), 0 if self._scheduler.kv is None else self._scheduler.kv.n_coming
        if came != self._came:
            self._came, self._waits_since = came, None
            self._arrivals += 1
        since = self._waits_since = now if self._waits_since is None else self._waits_since
        if now - since >= self._config.wait_timeout_s:
            raise RuntimeError(f"{self._n_live} sequences are live and none could run for {self._config.wait_timeout_s:g} s")
        if not chunks:
            self._wait(WAIT_S)

    def _restored(self) -> Collection[SequenceId] | None:
        """Return the sequences with their KV restored after a loss. None: it is not known yet, or was lost again."""
        before = self._executor.advanced
        try:
            return self._executor.restore(self._scheduler.held())
        except ExecutorLost as lost:
            self._replay(lost, self._outbox)
            return None
        except Exception as error:
            self._fail(error, self._outbox)
            raise
        finally:
            if self._executor.advanced != before:
                self._losses = 0

    def _read(self, planned: PlannedBatch, output: StepOutput, chunks: list[GenerationChunk]) -> None:
        self._losses = 0
        self._steps += 1
        steps, logits_RV = planned.batch.steps, output.logits_RV
        n_rows = sum(len(step.logits_rows) for step in steps)
        if output.batch_id != planned.batch.batch_id or len(logits_RV) != n_rows:
            raise RuntimeError(f"batch {planned.batch.batch_id} came back as {output.batch_id}, {len(logits_RV)} rows of {n_rows}")
        row = 0
        advancing: list[tuple[SequenceState, SequenceStep, int, slice]] = []
        rows: list[DrawRow] = []
        for seq, step in zip(planned.sequences, steps, strict=True):
            # Skip rows of sequences that were aborted in flight, and rows that ran on a wrong guess.
            if step.logits_rows and seq.is_live and step.epoch == seq.epoch:
                first = len(rows)
                scored = score_rows(seq, step, row)
                rows += scored
                if not seq.ends_with_prompt:
                    rows += [seq.draw_row(row + len(scored) + ahead, ahead) for ahead in range(len(step.logits_rows) - len(scored))]
                advancing.append((seq, step, len(scored), slice(first, len(rows))))
            row += len(step.logits_rows)
        for wanted in rows:
            if wanted.mask is not None:
                restrict(logits_RV[wanted.logits_row, : self._vocabulary.size], wanted.mask)
        drawn = draw_each(self._sampler, logits_RV, rows)
        for seq, step, n_scores, own in advancing:
            if seq.givers and any(isinstance(one, DrawFailed) for one in drawn[own]):
                tops = [float(logits_RV[row.logits_row, : self._vocabulary.size].max()) for row in rows[own]]
                if not all(isfinite(top) or top == -inf for top in tops):
                    self._scheduler.found_lie(seq.givers)  # if they are not to blame, the draw fails again and ends the answer
            if seq.distrusted:
                continue
            if n_scores or seq.ends_with_prompt:
                chunks += self._scored(seq, step, drawn[own][:n_scores])
            if own.stop - own.start > n_scores and seq.is_live:
                chunks.append(self._advance(seq, drawn[own][n_scores:]))
        chunks += self._prompts.collected(zip(planned.sequences, steps, strict=True))
        self._scheduler.collected(planned)

    def _scored(self, seq: SequenceState, step: SequenceStep, drawn: Sequence[Drawn | DrawFailed]) -> list[GenerationChunk]:
        """Return the log probabilities that a step has of the prompt's tokens, and the ending if the request wants nothing else."""
        if failed := next((one for one in drawn if isinstance(one, DrawFailed)), None):
            return [self._end(seq, FinishReason.ERROR, str(failed))]
        scores = tuple(one.logprob for one in drawn if isinstance(one, Drawn) and one.logprob is not None)
        seq.n_scored += len(scores)
        chunks = [GenerationChunk(seq.request.request_id, seq.index, (), "", prompt_logprobs=scores)] if scores else []
        if seq.ends_with_prompt and step.first_position + len(step.token_ids) >= seq.n_prompt:
            chunks.append(self._end(seq, FinishReason.LENGTH))
        return chunks

    def _advance(self, seq: SequenceState, drawn: Iterable[Drawn | DrawFailed]) -> GenerationChunk:
        """Return the tokens that a sequence's rows gave, and its ending if they end it."""
        cached = (seq.cached_tokens or 0) if seq.n_generated == 0 else 0
        self._prompts.end(seq)
        gain = gain_of(seq, drawn)
        token_ids, reason = tuple(gain.token_ids), gain.finish_reason
        self._generated_tokens += len(token_ids)
        self._drafting.took(seq, len(token_ids), gain.accepted)
        if reason is not None:
            self._forget(seq, reason)
        id_ = seq.request.request_id
        error, code = (None, None) if gain.error is None else (str(gain.error), getattr(gain.error, "code", None))
        return GenerationChunk(id_, seq.index, token_ids, gain.text, tuple(gain.logprobs), reason, error, code, cached_tokens=cached)

    def _exact(self) -> list[SequenceState]:
        """Return the sequences that no other numerics may continue."""
        return [seq for live in self._live.values() for seq in live if seq.request.exact]

    def _notices(self, *more: Notice) -> list[GenerationChunk]:
        """Return the executor's notices for every live request; those of changed numerics for the sequences that have begun, with their place in each; and
        notices of distrusted KV for the sequences that replay.
        """
        new = self._executor.notices()
        notices = (*(notice for notice in new if notice.kind != NUMERICS_CHANGED), *more)
        told = [GenerationChunk(id_, live[0].index, (), "", notices=notices) for id_, live in self._live.items()] if notices else []
        for notice in new:
            for seq in (seq for live in self._live.values() for seq in live if notice.kind == NUMERICS_CHANGED and seq.n_generated):
                place = {"index": seq.index, "n_tokens": seq.n_generated}
                changed = Notice(NUMERICS_CHANGED, {**notice.detail, **place})
                told.append(GenerationChunk(seq.request.request_id, seq.index, (), "", notices=(changed,)))
        again, self._scheduler.distrusted = self._scheduler.distrusted, []
        for seq, givers in again:
            if seq.is_live:
                lied = Notice("kv_distrusted", {"nodes": ", ".join(sorted(givers)), "n_tokens": seq.n_generated})
                told.append(GenerationChunk(seq.request.request_id, seq.index, (), "", notices=(lied,)))
        return told

    def _end(self, seq: SequenceState, reason: FinishReason, error: str | None = None, code: str | None = None) -> GenerationChunk:
        self._forget(seq, reason)
        return GenerationChunk(seq.request.request_id, seq.index, (), "", finish_reason=reason, error=error, code=code)

    def _forget(self, seq: SequenceState, reason: FinishReason) -> None:
        self._scheduler.end(seq, failed=reason is FinishReason.ERROR)
        self._drafting.end(seq)
        self._prompts.end(seq)
        self._finished[reason.value] += 1
        self._n_live -= 1
        siblings = self._live[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._live[seq.request.request_id]

    def _replay(self, lost: ExecutorLost, chunks: list[GenerationChunk]) -> None:
        self._losses += 1
        self._lost = True
        if self._losses > self._config.max_losses:
            self._losses = 0
            chunks += self._notices(Notice("pipeline_aborted", {"code": "pipeline_aborted", "reason": lost.message}))
            self._end_all(str(lost), chunks, "pipeline_aborted")
        else:
            self._drop()

    def _fail(self, error: Exception, chunks: list[GenerationChunk]) -> None:
        """End all sequences. The next step delivers this step's chunks, since this one raises."""
        self._failure = f"{type(error).__name__}: {error}"
        self._end_all(self._failure, chunks)
        self._outbox = chunks

    def _end_all(self, reason: str, chunks: list[GenerationChunk], code: str | None = None) -> None:
        self._drop()
        for sequences in tuple(self._live.values()):
            chunks += [self._end(seq, FinishReason.ERROR, reason, code) for seq in tuple(sequences)]

    def _drop(self) -> None:
        """Forget the batches in flight, which are lost."""
        self._scheduler.lost(self._in_flight)
        self._times.lost()
        self._in_flight.clear()
