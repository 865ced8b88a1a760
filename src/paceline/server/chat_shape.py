"""`chat.completion` and `chat.completion.chunk` as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.core.text import Vocabulary
from paceline.server.call import Call
from paceline.server.shapes import Collected, Shape, finite, token_text


class ChatShape(Shape):
    """The chat endpoint's answers."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._text_heads = [self._head + b'{"index":%d,"delta":{"content":' % index for index in range(call.n * len(call.requests))]
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._close

    def opening(self) -> bytes:
        """One event with the role for every choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + choice % index + self._close for index in range(len(self._text_heads)))

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """A delta, and the event with the finish reason after it."""
        out = b""
        if logprobs:
            listed = orjson.dumps(chat_logprobs(self._vocabulary, logprobs))
            out = self._text_heads[index] + orjson.dumps(text) + b'},"logprobs":' + listed + b',"finish_reason":null}' + self._close
        elif text:
            out = self._text_heads[index] + orjson.dumps(text) + self._tail
        if finish is not None:
            ending = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}' % (index, finish.value.encode())
            out += self._head + ending + self._close
        return out

    def choice(self, collected: Collected) -> dict[str, object]:
        return {
            "message": {"role": "assistant", "content": "".join(collected.text), "refusal": None},
            "logprobs": chat_logprobs(self._vocabulary, collected.logprobs) if self._call.logprobs else None,
        }


def chat_logprobs(vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """A choice's `logprobs`, in chat's shape."""
    return {
        "content": [
            _entry(vocabulary, one.token_id, one.logprob) | {"top_logprobs": [_entry(vocabulary, *alternative) for alternative in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, object]:
    text, raw = token_text(vocabulary, token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": raw}
