"""`chat.completion` and `chat.completion.chunk` as bytes. What a stream repeats is built once; a token costs one escape."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.core.text import Vocabulary
from paceline.server.call import Call, Usage
from paceline.server.shapes import Collected, finite, token_text


class ChatShape:
    """The chat endpoint's `Shape`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._vocabulary = call.model.tokenizer
        base = {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
        }
        head = b"data: " + orjson.dumps(base)[:-1] + b',"choices":['
        self._head = head
        self._text_heads = [head + b'{"index":%d,"delta":{"content":' % index for index in range(call.n * len(call.requests))]
        self._close = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"
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

    def usage_event(self, usage: Usage) -> bytes:
        """The last event of a stream with `include_usage`."""
        return self._head + b'],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """A `chat.completion`."""
        call = self._call
        return orjson.dumps(
            {
                "id": call.id,
                "object": "chat.completion",
                "created": call.created,
                "model": call.model.name,
                "system_fingerprint": call.model.fingerprint,
                "choices": [
                    {
                        "index": index,
                        "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                        "logprobs": chat_logprobs(self._vocabulary, choice.logprobs) if call.logprobs else None,
                        "finish_reason": choice.finish,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": usage.as_json(),
            }
        )


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
