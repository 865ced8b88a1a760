"""The items of one answer, as they are written, and the events that tell of them.

Law: at most one item is open, the last; what its events said, joined, is the item. So an answer that is streamed and one that is not are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.logprobs import TokenTexts, chat_logprobs
from paceline.server.responses.conversation import new_id, seal_reasoning
from paceline.server.shape import new_call_id

Event = Mapping[str, object]
TEXT_PART: Mapping[str, object] = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}


class Output:
    def __init__(
        self, texts: TokenTexts, *, logprobs: bool, summarised: bool, carried: bool, namespaced: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Begin an answer without items.

        Args:
            texts: what spells the tokens of log probabilities, at the answer's beginning.
            logprobs: the text comes with them.
            summarised: reasoning comes as a summary, not as content.
            carried: reasoning comes as `encrypted_content`, too.
            namespaced: the `name` and `namespace` of functions that have one, by the name that the model sees.
        """
        self._spelling, self._logprobs = texts, logprobs
        self._summarised, self._carried, self._namespaced = summarised, carried, namespaced
        self.items: list[dict[str, Any]] = []
        self.finish: FinishReason | None = None
        self._open = False
        self._is_cut = False
        """The call that was begun last was not read to its end."""
        self._texts: list[str] = []
        """Texts of the open item."""
        self._entries: list[object] = []
        """Log probabilities of the open item's tokens."""
        self._waiting: list[object] = []
        """Log probabilities of tokens that have no text yet."""

    def add(self, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> list[Event]:
        events: list[Event] = []
        if self._logprobs:
            self._waiting += cast("list[object]", chat_logprobs(self._spelling, logprobs)["content"])
        for part in parts:
            match part:
                case Content(text):
                    if not self._is("message"):
                        events += [*self._close("completed"), *self._begin_message()]
                    events.append(self._text(text))
                case Reasoning(text):
                    if not self._is("reasoning"):
                        events += [*self._close("completed"), *self._begin_reasoning()]
                    self._texts.append(text)
                    name, index = ("reasoning_summary_text", "summary_index") if self._summarised else ("reasoning_text", "content_index")
                    events.append(self._event(f"{name}.delta", {index: 0, "delta": text}))
                case CallBegun(_, name, is_open):
                    events += [*self._close("completed"), *self._begin_call(name)]
                    self._is_cut = is_open
                case CallArguments(_, text, is_open):
                    self._texts.append(text)
                    self._is_cut = is_open
                    events.append(self._event("function_call_arguments.delta", {"delta": text}))
        if parts and not isinstance(parts[-1], Content):
            self._waiting.clear()  # they are of tokens that are no part of the text
        if finish is not None:
            self.finish = finish
            events += self._end("incomplete" if finish is FinishReason.LENGTH else "completed")
        return events

    def _end(self, status: str) -> list[Event]:
        events = self._close(status)
        if status == "completed" and all(item["type"] == "reasoning" for item in self.items):
            events += [*self._begin_message(), *self._close(status)]  # clients want a message, and it was to say nothing
        return events

    def _is(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    def _event(self, name: str, told: Mapping[str, object]) -> Event:
        """Return an event about the open item."""
        return {"type": f"response.{name}", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **told}

    def _begin(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._open = True
        # A copy: what is in the lists comes later.
        shown = {key: list(cast("list[object]", value)) if isinstance(value, list) else value for key, value in item.items()}
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _begin_message(self) -> list[Event]:
        begun = {"id": new_id("message"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        added = self._begin(begun)
        return [added, self._event("content_part.added", {"content_index": 0, "part": TEXT_PART})]

    def _begin_reasoning(self) -> list[Event]:
        begun = {"id": new_id("reasoning"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        added = self._begin(begun)
        if self._summarised:
            return [added, self._event("reasoning_summary_part.added", {"summary_index": 0, "part": {"type": "summary_text", "text": ""}})]
        return [added, self._event("content_part.added", {"content_index": 0, "part": {"type": "reasoning_text", "text": ""}})]

    def _begin_call(self, name: str) -> list[Event]:
        begun = {"id": new_id("function_call"), "type": "function_call", "status": "in_progress"}
        named = self._namespaced.get(name, {"name": name})
        return [self._begin({**begun, "call_id": new_call_id(), **named, "arguments": ""})]

    def _text(self, text: str) -> Event:
        self._texts.append(text)
        entries = self._spelled()
        return self._event("output_text.delta", {"content_index": 0, "delta": text, "logprobs": entries})

    def _spelled(self) -> list[object]:
        """Return the log probabilities that waited for their text."""
        entries, self._waiting = self._waiting, []
        self._entries += entries
        return entries

    def _close(self, status: str) -> list[Event]:
        """End the open item, where there is one."""
        if not self._open:
            return []
        item, text = self.items[-1], "".join(self._texts)
        is_cut = item["type"] == "function_call" and self._is_cut
        item["status"] = "incomplete" if is_cut else status
        if self._carried and item["type"] == "reasoning":
            item["encrypted_content"] = seal_reasoning(text)
        events: list[Event] = []
        match item["type"]:
            case "message":
                self._spelled()
                part = {**TEXT_PART, "text": text, "logprobs": self._entries}
                item["content"] = [part]
                events.append(self._event("output_text.done", {"content_index": 0, "text": text, "logprobs": self._entries}))
                events.append(self._event("content_part.done", {"content_index": 0, "part": part}))
            case "reasoning" if self._summarised:
                part = {"type": "summary_text", "text": text}
                item["summary"] = [part]
                events.append(self._event("reasoning_summary_text.done", {"summary_index": 0, "text": text}))
                events.append(self._event("reasoning_summary_part.done", {"summary_index": 0, "part": part}))
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                events.append(self._event("reasoning_text.done", {"content_index": 0, "text": text}))
                events.append(self._event("content_part.done", {"content_index": 0, "part": part}))
            case _:
                item["arguments"] = text
                events.append(self._event("function_call_arguments.done", {"name": item["name"], "arguments": text}))
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item})
        self._open, self._texts, self._entries = False, [], []
        return events
