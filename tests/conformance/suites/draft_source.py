"""What every `DraftSource` must do, wherever its drafts come from.

Subclass `DraftSourceSuite` in a test module that has a fixture `case` (a `DraftSourceCase`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk, DraftSource

BOUND_S = 60.0
"""Longest wait for an answer; reached only when a test fails."""


@dataclass(frozen=True)
class DraftSourceCase:
    """A source to be looked at.

    Args:
        drafts: what is drafted behind a text, so many tokens of it; None: the source has no drafter, and answers with nothing.
    """

    source: DraftSource
    drafts: Callable[[Sequence[int], int], Sequence[int]] | None


class DraftSourceSuite:
    numbers = count()
    """Of sequences: no two tests have one in common."""

    def sequence(self) -> SequenceId:
        return SequenceId(next(self.numbers))

    def answer(self, case: DraftSourceCase, ask: DraftAsk) -> DraftAnswer:
        """The one answer to an ask, which is the only one under way."""
        case.source.ask(ask)
        answers = case.source.answers(BOUND_S)
        assert len(answers) == 1
        return answers[0]

    def answers(self, case: DraftSourceCase, n: int) -> Sequence[DraftAnswer]:
        """To so many asks."""
        found: list[DraftAnswer] = []
        while len(found) < n:
            came = case.source.answers(BOUND_S)
            assert came, "an ask was not answered"
            found += came
        return found

    def check(self, case: DraftSourceCase, text: Sequence[int], ask: DraftAsk, answer: DraftAnswer) -> None:
        """An answer stands behind its ask, is no longer than that asked for, and is of the text that the source was told."""
        assert answer.sequence == ask.sequence
        assert answer.position == ask.first_position + len(ask.token_ids) == len(text)
        assert len(answer.token_ids) <= ask.length
        assert list(answer.token_ids) == (list(case.drafts(text, ask.length)) if case.drafts is not None else [])

    # -------------------------------------------------------------------------------------------------------------- laws

    def test_what_it_says_of_itself_can_be_meant(self, case: DraftSourceCase) -> None:
        assert case.source.block >= 1
        assert (case.source.expected_s is None) == (case.drafts is None)
        assert case.source.expected_s is None or case.source.expected_s >= 0

    def test_without_an_ask_there_is_no_answer_and_no_wait(self, case: DraftSourceCase) -> None:
        assert not case.source.answers()
        assert not case.source.answers(0.001)

    def test_only_what_is_new_of_a_text_need_be_said(self, case: DraftSourceCase) -> None:
        sequence, text = self.sequence(), [3, 1, 4, 1, 5]
        ask = DraftAsk(sequence, 0, text, 3)
        self.check(case, text, ask, self.answer(case, ask))
        ask = DraftAsk(sequence, 5, [9, 2], 2)
        self.check(case, [*text, 9, 2], ask, self.answer(case, ask))
        case.source.forget(sequence)

    def test_a_first_position_takes_back_what_stood_behind_it(self, case: DraftSourceCase) -> None:
        sequence = self.sequence()
        self.answer(case, DraftAsk(sequence, 0, [3, 1, 4, 1, 5], 3))
        ask = DraftAsk(sequence, 2, [7], 3)
        self.check(case, [3, 1, 7], ask, self.answer(case, ask))
        case.source.forget(sequence)

    def test_an_ask_may_be_written_over(self, case: DraftSourceCase) -> None:
        sequence, text = self.sequence(), [3, 1, 4]
        ask = DraftAsk(sequence, 0, text, 3)
        case.source.ask(ask)
        text.append(0)
        answers = case.source.answers(BOUND_S)
        self.check(case, [3, 1, 4], DraftAsk(sequence, 0, [3, 1, 4], 3), answers[0])
        case.source.forget(sequence)

    def test_sequences_are_apart_and_each_is_answered(self, case: DraftSourceCase) -> None:
        texts = {self.sequence(): [place, 1, place] for place in range(8)}
        for sequence, text in texts.items():
            case.source.ask(DraftAsk(sequence, 0, text, 4))
        answers = {one.sequence: one for one in self.answers(case, len(texts))}
        for sequence, text in texts.items():
            self.check(case, text, DraftAsk(sequence, 0, text, 4), answers[sequence])
            case.source.forget(sequence)

    def test_a_later_ask_takes_the_place_of_one_under_way(self, case: DraftSourceCase) -> None:
        sequence = self.sequence()
        case.source.ask(DraftAsk(sequence, 0, [3, 1, 4], 4))
        last = DraftAsk(sequence, 1, [8, 8, 6], 4)
        case.source.ask(last)
        answers = self.answers(case, 2)
        self.check(case, [3, 8, 8, 6], last, next(one for one in answers if one.position == 4))
        case.source.forget(sequence)

    def test_a_sequence_that_is_over_begins_anew_under_its_name(self, case: DraftSourceCase) -> None:
        sequence = self.sequence()
        self.answer(case, DraftAsk(sequence, 0, [3, 1, 4], 4))
        case.source.forget(sequence)
        case.source.forget(sequence)
        ask = DraftAsk(sequence, 0, [2, 7], 4)
        self.check(case, [2, 7], ask, self.answer(case, ask))
        case.source.forget(sequence)
