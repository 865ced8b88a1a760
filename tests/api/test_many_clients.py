"""Many clients at once: answers or 429 with Retry-After, nothing held after, and no long prompt that holds up the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference
from tests.fakes.served import BOUND_S, Served

from paceline.server.settings import ServerSettings

Serve = Callable[..., Served[ScriptedInference]]
CLIENTS = 500
BODY = b'{"model":"echo","messages":[{"role":"user","content":"hello"}],"max_tokens":5,"stream":true}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
OK, REFUSED = b"HTTP/1.1 200 ", b"HTTP/1.1 429 "


async def ask_all(served: Served[ScriptedInference], release_after_refused: int) -> tuple[list[bytes], list[bytes]]:
    """Ask from every client at once; release held answers when so many were refused. Returns the answered and the refused."""
    refused: list[bytes] = []
    answered: list[bytes] = []

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(REQUEST)
        answer = await reader.read()
        (answered if answer.startswith(OK) else refused).append(answer)
        if len(refused) == release_after_refused:
            served.loop.call_soon_threadsafe(served.inference.release)
        writer.close()
        await writer.wait_closed()

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    return answered, refused


def is_whole(answer: bytes) -> bool:
    return b"data: [DONE]" in answer and answer.count(b'"content":"') == 6


def test_all_are_answered(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_requests=CLIENTS))
    answered, refused = asyncio.run(ask_all(served, CLIENTS))
    assert (len(answered), refused) == (CLIENTS, [])
    assert all(map(is_whole, answered))
    assert served.metric("paceline_kv_blocks_used") == 0


def test_a_full_queue_refuses(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_requests=64, hold_after=2))
    answered, refused = asyncio.run(ask_all(served, CLIENTS - 64))
    assert (len(answered), len(refused)) == (64, CLIENTS - 64)
    assert all(map(is_whole, answered))
    assert all(answer.startswith(REFUSED) and b"retry-after: 3\r\n" in answer and b'"rate_limit_exceeded"' in answer for answer in refused)
    assert served.metric("paceline_kv_blocks_used") == 0
    assert served.metric('paceline_http_responses_total{path="/v1/chat/completions",status="429"}') == CLIENTS - 64


def test_the_server_itself_is_bounded(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(max_requests=CLIENTS, hold_after=2), ServerSettings(max_requests=100))
    answered, refused = asyncio.run(ask_all(served, CLIENTS - 100))
    assert (len(answered), len(refused)) == (100, CLIENTS - 100)
    assert all(answer.startswith(REFUSED) for answer in refused)
    assert served.metric("paceline_kv_blocks_used") == 0


class OneAtATime(ByteTokenizer):
    """As real ones do, and with a long text only when told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on, self._lock = threading.Event(), threading.Event(), threading.Lock()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        with self._lock:
            if len(text) > 5000:
                self.begun.set()
                assert self.go_on.wait(BOUND_S)
            return super().encode(text, add_special=add_special)


def test_a_long_prompt_that_is_tokenized_holds_up_no_stream(serve_with: Serve) -> None:
    tokenizer, inference = OneAtATime(), ScriptedInference(max_context=1 << 14)
    inference._model = replace(inference._model, tokenizer=tokenizer)
    served = serve_with(inference)

    def ask(prompt: str) -> int:
        return served.http.post("/v1/completions", json={"model": "echo", "prompt": prompt, "max_tokens": 1}).status_code

    with ThreadPoolExecutor() as clients:
        long = clients.submit(ask, "a" * 6000)
        assert tokenizer.begun.wait(BOUND_S)
        short = clients.submit(ask, "a")
        try:
            while served.metric("paceline_http_in_flight") < 3:  # the two and the scrape; bounded by the client's timeout
                pass
        finally:
            tokenizer.go_on.set()
        assert (long.result(), short.result()) == (200, 200)
