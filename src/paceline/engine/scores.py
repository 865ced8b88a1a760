"""Log probabilities of a prompt's own tokens.

Law: a token of the prompt is scored as a draw that can only fall on it: the sampler that draws answers says its log probability, and the bytes are those of
a drawn token's. The row before it is the one that tells, so the first token has none.
"""

from __future__ import annotations

from typing import Final

from paceline.core.generation import SamplingParams
from paceline.engine.draw_state import DrawRow, DrawState
from paceline.engine.executor import SequenceStep
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
