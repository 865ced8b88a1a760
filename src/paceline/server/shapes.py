"""Answers as bytes: what both endpoints' share, `chat.completion` and its chunks, and `text_completion` with the older endpoint's own shape of
logprobs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import orjson

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.server.call import Call
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from paceline.server.shape import DONE, Collected, Shape, Usage, new_call_id


class OpenAIShape(Shape):
    """Common part of the answers of the chat and the completion endpoint. The repeated part of a stream is built once; a token costs one escape."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head = b"data: " + orjson.dumps(self._base(self.event_object))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    @abstractmethod
    def choice(self, index: int, collected: Collected) -> dict[str, object]:
        """A choice of a whole answer, but for its index and finish reason."""

    def ending(self, usage: Usage) -> bytes:
        """`[DONE]`, with `include_usage` behind an event with `choices: []`."""
        if not self._call.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n" + DONE

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        listed = [
            {"index": index, **self.choice(index, collected), "finish_reason": finish_reason(collected.finish, collected.has_called)}
            for index, collected in enumerate(choices)
        ]
        transfer = next(({"kv_transfer_params": one.transfer} for one in choices if one.transfer is not None), {})
        return orjson.dumps({**self._base(self.whole_object), "choices": listed, "usage": usage.as_json(), **transfer})

    def _token_texts(self, index: int) -> TokenTexts:
        """Return what spells the tokens of choice `index`, at its beginning."""
        return TokenTexts(self._call.model.tokenizer, has_space=self._call.has_space(index // self._call.n))

    def _base(self, kind: str) -> dict[str, object]:
        call = self._call
        return {
            "id": call.id,
            "object": kind,
            "created": call.created,
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
        }


def finish_reason(finish: FinishReason | None, has_called: bool) -> str | None:
    """OpenAI's word for how a choice ended."""
    return "tool_calls" if has_called and finish is FinishReason.STOP else finish


class ChatShape(OpenAIShape):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        count = call.n * len(call.requests)
        self._delta_heads = [self._head + b'{"index":%d,"delta":' % index for index in range(count)]
        self._text_heads = [head + b'{"content":' for head in self._delta_heads]
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._close
        self._texts = [self._token_texts(index) for index in range(count)]
        self._open_calls = [set[int]() for _ in range(count)]
        """Calls of each choice that were not read to their end."""
        self._has_called = [False] * count

    def first_events(self) -> bytes:
        """Return one event with the role for every choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + choice % index + self._close for index in range(len(self._text_heads)))

    def event(self, index: int, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """Return a delta for each part, and the event with the finish reason after it. Logprobs come with the first delta."""
        out = b""
        if logprobs:
            listed = orjson.dumps(chat_logprobs(self._texts[index], logprobs))
            first = self._delta(index, parts[0]) if parts else {"content": ""}
            out = self._delta_heads[index] + orjson.dumps(first) + b',"logprobs":' + listed + b',"finish_reason":null}' + self._close
            parts = parts[1:]
        for part in parts:
            if isinstance(part, Content):
                out += self._text_heads[index] + orjson.dumps(part.text) + self._tail
            else:
                out += self._delta_heads[index] + orjson.dumps(self._delta(index, part))[:-1] + self._tail
        if finish is not None:
            reason = finish_reason(finish, self._has_called[index] and not self._open_calls[index]) or ""
            ending = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}' % (index, reason.encode())
            out += self._head + ending + self._close
        return out

    def _delta(self, index: int, part: Part) -> dict[str, object]:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegun(call, name, is_open):
                self._has_called[index] = True
                self._note(index, call, is_open=is_open)
                begun = {"index": call, "id": new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}
                return {"tool_calls": [begun]}
            case CallArguments(call, text, is_open):
                self._note(index, call, is_open=is_open)
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}

    def _note(self, index: int, call: int, *, is_open: bool) -> None:
        (self._open_calls[index].add if is_open else self._open_calls[index].discard)(call)

    def choice(self, index: int, collected: Collected) -> dict[str, object]:
        content = "".join(collected.content)
        message: dict[str, object] = {"role": "assistant", "content": content if content or not collected.calls else None, "refusal": None}
        if collected.reasoning:
            message["reasoning_content"] = "".join(collected.reasoning)
        if collected.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
                for call in collected.calls
            ]
        return {
            "message": message,
            "logprobs": chat_logprobs(self._token_texts(index), collected.logprobs) if self._call.logprobs else None,
        }


class CompletionShape(OpenAIShape):
    id_prefix = "cmpl-"
    whole_object = event_object = "text_completion"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        count = call.n * len(call.requests)
        self._text_heads = [self._head + b'{"index":%d,"text":' % index for index in range(count)]
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._close
        self._texts = [self._token_texts(index) for index in range(count)]
        self._offsets = [0] * count
        self._unscored: dict[int, int] = {}
        """First tokens of prompts that are repeated with logprobs, by choice: they have none, and are still to be named."""
        if call.echoed and call.logprobs:
            self._unscored = {index: call.requests[index // call.n].prompt_ids[0] for index in range(count)}

    def first_events(self) -> bytes:
        """Return the prompts, if the answer repeats them."""
        return b"".join(
            head + orjson.dumps(self._call.echoed[index // self._call.n]) + self._tail
            for index, head in enumerate(self._text_heads if self._call.echoed else ())
        )

    def event(self, index: int, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """Return one event: the text, with the finish reason if the choice ended."""
        text = "".join([part.text for part in parts if isinstance(part, Content)])
        if finish is None and not logprobs:
            return self._text_heads[index] + orjson.dumps(text) + self._tail if text else b""
        listed = b"null"
        first = self._unscored.pop(index, None)
        if logprobs or first is not None:
            shown, self._offsets[index] = completion_logprobs(self._texts[index], logprobs, self._offsets[index], first)
            listed = orjson.dumps(shown)
        ending = orjson.dumps(finish)
        return self._text_heads[index] + orjson.dumps(text) + b',"logprobs":' + listed + b',"finish_reason":' + ending + b"}" + self._close

    def choice(self, index: int, collected: Collected) -> dict[str, object]:
        call = self._call
        texts, first = self._token_texts(index), self._unscored.get(index)
        shown = completion_logprobs(texts, collected.logprobs, 0, first)[0] if call.logprobs else None
        return {"text": "".join([*call.echoed[index // call.n : index // call.n + 1], *collected.content]), "logprobs": shown}
