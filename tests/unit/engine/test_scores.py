"""A prompt's own log probabilities are those its tokens had when they were drawn, however the prompt is cut, cached, preempted, lost or batched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.engines import EngineBench

from paceline.core.errors import InvalidRequest
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from paceline.core.ids import RequestId
from paceline.engine.executor import StepBatch

ID, SHORT = RequestId("r"), RequestId("short")
SAMPLING = SamplingParams(temperature=0.9, seed=5, logprobs=3)
START = tuple(1 + (i * i) % 31 for i in range(6))


def drawn() -> tuple[tuple[int, ...], list[TokenLogprob]]:
    """A text that was drawn behind `START`, and how likely each of its tokens was."""
    answer = EngineBench(one_path=True, prefix_cache=False).run(request(START, 40, scores_prompt=False))[ID, 0]
    return START + tuple(answer.token_ids), answer.logprobs


def request(prompt: tuple[int, ...], max_tokens: int | None, *, scores_prompt: bool = True) -> GenerationRequest:
    return GenerationRequest(ID, prompt, max_tokens, SAMPLING, ignore_eos=True, scores_prompt=scores_prompt)


class ScoreBench(EngineBench):
    """Also keeps what is said of prompts, and how many rows of logits a batch wants at most."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(one_path=True, **bounds)
        self.scores: dict[tuple[RequestId, int], list[TokenLogprob]] = {}
        self.most_logits = 0
        submit = self.executor.submit

        def counted(batch: StepBatch) -> None:
            self.most_logits = max(self.most_logits, sum(len(step.logits_rows) for step in batch.steps))
            submit(batch)

        self.executor.submit = counted  # type: ignore[method-assign]

    def read(self, chunks: Any) -> None:
        chunks = list(chunks)
        for chunk in chunks:
            if chunk.prompt_logprobs:
                assert not (answer := self.answers.get((chunk.request_id, chunk.index))) or not answer.token_ids
                self.scores.setdefault((chunk.request_id, chunk.index), []).extend(chunk.prompt_logprobs)
        super().read(chunks)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"prefill_chunk": 3, "max_guesses": 0},
        {"prefill_chunk": 1000, "max_guesses": 5},
        {"depth": 3, "prefill_chunk": 9, "max_guesses": 4},
        {"n_blocks": 13, "prefill_chunk": 5},
        {"lose": (3, 6)},
        {"lose": (4,), "restores": True, "depth": 2},
    ],
)
def test_scores_are_the_log_probabilities_of_the_draws(bounds: dict[str, Any]) -> None:
    prompt, logprobs = drawn()
    bench = ScoreBench(**bounds)
    bench.run(replace(request(prompt[:40], 3), scores_prompt=False))  # its blocks are cached from here on
    bench.answers.clear()
    others = [
        replace(request(prompt[:20], 30), request_id=RequestId("other"), sampling=SamplingParams(temperature=0), scores_prompt=False),
        replace(request(prompt[:9], 0), request_id=SHORT, n=2),
    ]
    bench.run(request(prompt, 4), *others)
    scores = bench.scores[ID, 0]
    assert [one.token_id for one in scores] == list(prompt[1:])
    assert scores[len(START) - 1 :] == logprobs
    assert bench.scores[SHORT, 0] == bench.scores[SHORT, 1] == scores[:8]
    short, answer = bench.answers[SHORT, 1], bench.answers[ID, 0]
    assert (short.finish, short.token_ids) == (FinishReason.LENGTH, [])
    assert answer.token_ids == ScoreBench().run(replace(request(prompt, 4), scores_prompt=False))[ID, 0].token_ids
    assert bench.most_logits <= bench.config.max_logits_rows
    assert ("other", 0) not in bench.scores


def test_a_prompt_of_one_token_has_no_scores_and_ends() -> None:
    bench = ScoreBench()
    answer = bench.run(request((3,), 0))[ID, 0]
    assert (answer.finish, answer.token_ids, bench.scores) == (FinishReason.LENGTH, [], {})


def test_no_tokens_may_be_asked_for_only_with_scores() -> None:
    with pytest.raises(InvalidRequest):
        EngineBench().run(request(START, 0, scores_prompt=False))
