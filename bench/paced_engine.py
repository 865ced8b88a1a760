"""A server that speaks llama-server's protocol and writes a token of each answer at a fixed pace, so that a bench can tell a node's time from its engine's.

    python bench/paced_engine.py --model FILE --port PORT [--slots 32] [--context 4096] [--pace-ms 20] [--read-per-s 0] [--throttle-after 0]

Each answer repeats the same words. A slot keeps the tokens of its last request, and reports as cached those that a request repeats from the beginning, as
llama-server does. Requests that find no free slot wait for one. The process ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from paceline.store.catalog import open_model

WORDS = "The riders kept to the line and the wind kept to the riders, for the road was long and the light was low."
PATIENCE_S = 0.001
"""A token that is due within so many seconds is written at once."""


@dataclass(eq=False)
class Slot:
    """Room for one request, with the tokens that it holds."""

    index: int
    ids: list[int] = field(default_factory=list[int])
    at_work: bool = False
    used: int = 0
    """Number of the last request."""

    def cached(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt need not be computed. The last one always is."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt, strict=False)))
        return min(same, len(prompt) - 1)


class Engine:
    """Slots and pages. Connections ask it."""

    def __init__(self, options: argparse.Namespace) -> None:
        tokenizer = open_model(str(options.model)).tokenizer
        self.words = [(token, tokenizer.text_of([token])) for token in tokenizer.encode(WORDS)]
        self.pace_s, self.read_per_s, self._throttle_after = options.pace_ms / 1000, options.read_per_s, options.throttle_after
        self.slots = [Slot(index) for index in range(options.slots)]
        self.waiting: deque[Answer] = deque()
        self.requests = 0
        name, size = str(options.model), options.model.stat().st_size
        meta = {"n_vocab": 49152, "n_params": 134515008, "size": size, "ftype": "Q4_1", "n_embd": 576}
        self.pages: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": name, "aliases": [name], "object": "model", "meta": meta}]},
            "/props": {
                "default_generation_settings": {"n_ctx": options.context},
                "total_slots": options.slots,
                "model_path": name,
                "model_ftype": "Q4_1",
                "modalities": {"vision": False},
                "chat_template_caps": {"supports_tools": False},
                "bos_token": "<|im_start|>",
                "build_info": "paced",
                "is_sleeping": False,
            },
        }

    def page(self, path: str) -> tuple[int, Any]:
        if path == "/slots":
            return 200, [{"id": slot.index, "is_processing": slot.at_work} for slot in self.slots]
        if path in self.pages:
            return 200, self.pages[path]
        return 501, {"error": {"code": 501, "message": f"This server does not support {path}", "type": "not_supported_error"}}

    def begin(self, answer: Answer) -> None:
        """Give an answer a slot: the free one that holds most of its prompt, else the one that was used longest ago."""
        free = [slot for slot in self.slots if not slot.at_work]
        if not free:
            self.waiting.append(answer)
            return
        slot = max(free, key=lambda one: (one.cached(answer.prompt), -one.used))
        self.requests += 1
        if self.requests == self._throttle_after:
            self.pace_s, self.read_per_s = 2 * self.pace_s, self.read_per_s / 2
        slot.at_work, slot.used = True, self.requests
        answer.start(slot, slot.cached(answer.prompt))

    def ended(self, slot: Slot) -> None:
        slot.at_work = False
        if self.waiting:
            self.begin(self.waiting.popleft())


class Answer:
    """One request for a completion, on its connection."""

    def __init__(self, engine: Engine, transport: asyncio.Transport, body: dict[str, Any]) -> None:
        self._engine, self._transport = engine, transport
        self.prompt: list[int] = body["prompt"]
        self._most = body["n_predict"] if body["n_predict"] >= 0 else 128
        self._loop = asyncio.get_running_loop()
        self._slot: Slot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cached = self._written = 0
        self._due_s = 0.0
        self._over = False

    def start(self, slot: Slot, cached: int) -> None:
        self._slot, self._cached = slot, cached
        slot.ids = [*self.prompt]
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        total = len(self.prompt)
        progress = {"total": total, "cache": cached, "processed": cached, "time_ms": 0}
        self._send(json.dumps({"index": 0, "content": "", "tokens": [0], "stop": False, "prompt_progress": progress}).encode())
        reading_s = (total - cached) / self._engine.read_per_s if self._engine.read_per_s else 0.0
        self._due_s = self._loop.time() + reading_s + self._engine.pace_s
        self._timer = self._loop.call_at(self._due_s, self._write)

    def _write(self) -> None:
        assert self._slot is not None
        words, total = self._engine.words, len(self.prompt)
        while self._written < self._most and self._due_s <= self._loop.time() + PATIENCE_S:
            token, text = words[self._written % len(words)]
            self._written += 1
            self._slot.ids.append(token)
            self._send(
                b'{"index":0,"content":"%b","tokens":[%d],"stop":false,"id_slot":%d,"tokens_predicted":%d,"tokens_evaluated":%d}'
                % (text.encode(), token, self._slot.index, self._written, total)
            )
            self._due_s += self._engine.pace_s
        if self._written < self._most:
            self._timer = self._loop.call_at(self._due_s, self._write)
            return
        end = {"stop": True, "stop_type": "limit", "tokens": [], "content": "", "tokens_evaluated": total}
        self._send(json.dumps({**end, "timings": {"cache_n": self._cached, "prompt_n": total - self._cached}}).encode())
        self._transport.write(b"0\r\n\r\n")
        self._transport.close()
        self.close()

    def _send(self, data: bytes) -> None:
        self._transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def close(self) -> None:
        """Free the slot. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self in self._engine.waiting:
            self._engine.waiting.remove(self)
        if self._slot is not None and not self._over:
            self._over = True
            self._engine.ended(self._slot)


class Connection(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._data = b""
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's has the methods, not the base

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = head.lower().rpartition(b"content-length:")[2].split(b"\r\n")[0].strip()
        if not found or self._answer is not None or len(body) < (int(length) if length.isdigit() else 0):
            return
        method, path, _ = head.split(b" ", 2)
        if (method, path) == (b"POST", b"/completion"):
            self._answer = Answer(self._engine, self._transport, json.loads(body))
            self._engine.begin(self._answer)
            return
        status, page = self._engine.page(path.decode().partition("?")[0])
        text = json.dumps(page).encode()
        lines = f"HTTP/1.1 {status} X\r\nServer: llama.cpp\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
        self._transport.write(lines.encode() + text)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._answer is not None:
            self._answer.close()


async def serve(options: argparse.Namespace) -> None:
    engine = Engine(options)
    await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", options.port)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096, help="tokens of one slot")
    parser.add_argument("--pace-ms", type=float, default=20.0, help="from one token of an answer to the next")
    parser.add_argument("--read-per-s", type=float, default=0.0, help="tokens of a prompt that are read in a second; 0: any number")
    parser.add_argument("--throttle-after", type=int, default=0, help="half the speed from this request on; 0: never")
    options = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(options))
    else:
        uvloop.run(serve(options))


if __name__ == "__main__":
    main()
