"""From rows of logits to an answer's next tokens: drawn one after the other, turned to text, until a guess was wrong or the answer ends.

Law: a token is what its own (seed, position) draws. A guess decides only whether the row behind it counts.

Log probabilities of a prompt's own tokens.

Law: a token of the prompt is scored as a draw that can only fall on it: the sampler that draws answers says its log probability, and the bytes are those of
a drawn token's. The row before it is the one that tells, so the first token has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import DrawFailed, InvalidRequest
from paceline.core.generation import FinishReason, SamplingParams, TokenLogprob
from paceline.engine.executor import SequenceStep
from paceline.engine.sampling import Drawn, DrawRow, DrawState
from paceline.engine.sequence import SequenceState

CERTAIN: Final = 1e30
"""A bias that no logit stands against, and that is finite."""


def score_rows(seq: SequenceState, step: SequenceStep, first: int) -> list[DrawRow]:
    """The draws that score what a step ran of a prompt.

    Args:
        first: the step's first row in the batch's logits.
    """
    if seq.is_scored:
        return []
    positions = [step.first_position + row for row in step.logits_rows if step.first_position + row + 1 < seq.n_prompt]
    return [_forced(seq, first + place, position + 1) for place, position in enumerate(positions)]


def _forced(seq: SequenceState, logits_row: int, position: int) -> DrawRow:
    params = SamplingParams(temperature=0, logprobs=seq.request.sampling.logprobs or 0, logit_bias={seq.tokens[position]: CERTAIN})
    return DrawState(params, 0, ()).row(logits_row, position)


@dataclass(slots=True)
class Gain:
    """What a sequence gained in one batch."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    accepted: int = 0
    """Tokens that were guessed."""
    finish_reason: FinishReason | None = None
    error: str | None = None


def gain_of(seq: SequenceState, drawn: Iterable[Drawn | DrawFailed]) -> Gain:
    """A sequence's next tokens, from row to row as long as the guess was right."""
    gain = Gain()
    for one in drawn:
        if isinstance(one, DrawFailed):
            gain.finish_reason, gain.error = FinishReason.ERROR, str(one)
            break
        token = one.token
        gain.token_ids.append(token)
        if one.logprob is not None and token not in seq.stop_ids:  # a token that only ends the answer is no part of it
            gain.logprobs.append(one.logprob)
        guessed = seq.take(token)
        gain.accepted += guessed
        seq.draws.count(token)
        text, gain.finish_reason = _say(seq, token)
        gain.text += text
        if gain.finish_reason is not None or not guessed:
            break
    return gain


def carry_on(seq: SequenceState, token_ids: Iterable[int]) -> None:
    """Have a new sequence stand behind tokens that another node drew and said.

    Raises:
        InvalidRequest: the answer ended with one of them.
    """
    for token in token_ids:
        seq.tokens.append(token)
        seq.draws.count(token)
        seq.text.push(token)
        if token in seq.stop_ids or seq.text.stopped:
            raise InvalidRequest("The answer to go on with has ended already", "Ask for it from its beginning.", field="so_far")


def _say(seq: SequenceState, token: int) -> tuple[str, FinishReason | None]:
    """The text that a token adds, and whether the answer ends with it."""
    if token in seq.stop_ids:
        return seq.text.flush(), FinishReason.STOP
    text = seq.text.push(token)
    if seq.text.stopped:
        return text, FinishReason.STOP
    if len(seq.tokens) >= seq.most_tokens:
        text += seq.text.flush()
        return text, FinishReason.STOP if seq.text.stopped else FinishReason.LENGTH
    return text, None
