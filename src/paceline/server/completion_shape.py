"""`text_completion` as bytes, streamed or whole, with the older endpoint's own shape of logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.core.text import Vocabulary
from paceline.server.call import Call
from paceline.server.shapes import Collected, Shape, finite, token_text


class CompletionShape(Shape):
    """The plain completion endpoint's answers."""

    whole_object = event_object = "text_completion"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        count = call.n * len(call.requests)
        self._text_heads = [self._head + b'{"index":%d,"text":' % index for index in range(count)]
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._close
        self._offsets = [0] * count

    def opening(self) -> bytes:
        """Nothing: there are no roles here."""
        return b""

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """One event: the text, with the finish reason where it ended."""
        if finish is None and not logprobs:
            return self._text_heads[index] + orjson.dumps(text) + self._tail if text else b""
        listed = b"null"
        if logprobs:
            shown, self._offsets[index] = completion_logprobs(self._vocabulary, logprobs, self._offsets[index])
            listed = orjson.dumps(shown)
        ending = orjson.dumps(finish)
        return self._text_heads[index] + orjson.dumps(text) + b',"logprobs":' + listed + b',"finish_reason":' + ending + b"}" + self._close

    def choice(self, collected: Collected) -> dict[str, object]:
        return {
            "text": "".join(collected.text),
            "logprobs": completion_logprobs(self._vocabulary, collected.logprobs, 0)[0] if self._call.logprobs else None,
        }


def completion_logprobs(vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, object], int]:
    """A choice's `logprobs` in this endpoint's shape, and the text offset (in characters) after them."""
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for one in logprobs:
        text, _ = token_text(vocabulary, one.token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # Two ids may read the same; the likelier comes first and stays.
        alternatives: dict[str, float] = {}
        for token_id, logprob in one.top:
            alternatives.setdefault(token_text(vocabulary, token_id)[0], finite(logprob))
        top.append(alternatives)
    shown: dict[str, object] = {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return shown, offset
