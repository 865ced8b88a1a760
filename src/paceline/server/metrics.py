"""Measurements of the server, and the Prometheus page made of them and of the engine's counters at each scrape.

Everything runs on the event loop, so counting needs no lock: a token costs one bisection.

The log has a line for each request that was refused or failed, with the message that the client got; at INFO, a line for each other request too. Each
line ends with the request's X-Request-Id.

Lines are limited per period, so that a client in a loop fills no terminal.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Awaitable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.clock import Clock
from paceline.core.inference import Inference
from paceline.core.stats import EngineStats, Histogram, Metrics, Row, counter, gauge, histogram
from paceline.core.text import printable

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Meter:
    """The server's own counts."""

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self.answers: Counter[tuple[str, int]] = Counter()
        """HTTP answers begun, by path and status."""
        self.embedded_tokens = 0
        """Tokens of all texts that an encoder ran."""
        self.disconnects = 0
        """Calls whose client went away before their end."""
        self.in_flight = 0
        """HTTP requests being answered."""


# fmt: off
METER_ROWS: tuple[Row[Meter], ...] = (
    histogram("paceline_ttft_seconds", "From a call's arrival to its first token.", lambda meter: meter.ttft),
    histogram("paceline_inter_token_seconds", "Between two tokens of one sequence.", lambda meter: meter.inter_token),
    counter("paceline_embedded_tokens", "Tokens of texts turned to vectors.", lambda meter: meter.embedded_tokens),
    counter("paceline_http_responses", "HTTP answers begun.", lambda meter: meter.answers, "path", "status"),
    counter("paceline_client_disconnects", "Calls whose client went away.", lambda meter: meter.disconnects),
    gauge("paceline_http_in_flight", "HTTP requests being answered.", lambda meter: meter.in_flight),
)
ENGINE_ROWS: tuple[Row[EngineStats], ...] = (
    gauge("paceline_requests_waiting", "Sequences waiting for their turn.", lambda stats: stats.waiting),
    gauge("paceline_requests_running", "Sequences being run.", lambda stats: stats.running),
    gauge("paceline_reading_tokens", "Tokens of the prompts being read.", lambda stats: stats.reading_tokens),
    gauge("paceline_reading_tokens_read", "Those of them that were read.", lambda stats: stats.reading_tokens_read),
    gauge("paceline_kv_blocks_total", "KV blocks of the pool.", lambda stats: stats.blocks_total),
    gauge("paceline_kv_blocks_used", "KV blocks held by live sequences.", lambda stats: stats.blocks_in_use),
    gauge("paceline_kv_blocks_cached", "KV blocks the prefix cache keeps.", lambda stats: stats.blocks_cached),
    counter("paceline_prefix_cache_queries", "Prompt tokens looked up.", lambda stats: stats.prefix_queries_tokens),
    counter("paceline_prefix_cache_hits", "Prompt tokens found.", lambda stats: stats.prefix_hits_tokens),
    counter("paceline_prefix_disk_hits", "Prompt tokens whose KV was read from the disk.", lambda stats: stats.prefix_fetched_tokens),
    counter("paceline_kv_disk_blocks", "KV blocks on the disk, by what became of them.", lambda stats: stats.kept_blocks, "what"),
    gauge("paceline_kv_disk_bytes", "KV on the disk, of all models.", lambda stats: stats.kept_bytes),
    counter("paceline_prompt_tokens", "Prompt tokens of all calls.", lambda stats: stats.prompt_tokens),
    counter("paceline_generated_tokens", "Tokens generated.", lambda stats: stats.generated_tokens),
    counter("paceline_preemptions", "Sequences preempted for memory.", lambda stats: stats.preemptions),
    counter("paceline_steps", "Engine steps.", lambda stats: stats.steps),
    counter("paceline_drafted_tokens", "Guessed tokens that were verified, by what guessed them.", lambda stats: stats.drafted_tokens, "by"),
    counter("paceline_accepted_draft_tokens", "Those that were right: each is a step saved.", lambda stats: stats.accepted_tokens, "by"),
    counter("paceline_draft_blocks", "Drafts that were verified: accepted tokens a draft are its accepted length.",
            lambda stats: stats.draft_blocks, "by"),
    counter("paceline_sequences_finished", "Sequences ended.", lambda stats: stats.finished, "reason"),
)
# fmt: on


class MetricsPage:
    """Writes the meter, the engine's stats and what was added in Prometheus' text format."""

    def __init__(self, inference: Inference, meter: Meter) -> None:
        self._registry = CollectorRegistry()
        self.add(Metrics(METER_ROWS, lambda: meter), Metrics(ENGINE_ROWS, inference.stats))
        ProcessCollector(registry=self._registry)  # memory and processor time, where the system tells

    def add(self, *collectors: Collector) -> None:
        for collector in collectors:
            self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)


logger = logging.getLogger("paceline.requests")

REQUEST_ID = b"x-request-id"
"""The header that names a request."""

MOST_LINES, IN_S = 20, 10.0
"""Lines about refusals in a time; of the rest, a number."""
_QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Asked again and again by programs: no line at INFO."""
_FAILED = b'{"error"'
_LINE = re.compile(rb'^(?:data: )?({"error".*)', re.MULTILINE)
"""How the error of a stream begins: behind `data: ` in server-sent events, alone in Ollama's lines."""


class RequestLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app, self._clock = app, clock
        self._since_s, self._lines, self._unsaid = clock.monotonic(), 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = self._clock.monotonic()
        what = f"{scope['method']} {printable(scope['path'], 80)}"
        status, told, named = 0, "", ""

        def seen(message: Message) -> Awaitable[None]:
            nonlocal status, told, named
            if message["type"] == "http.response.start":
                status = message["status"]
                named = next((f" [{value.decode('latin-1')}]" for name, value in message.get("headers", ()) if name == REQUEST_ID), "")
            elif not told and (body := message.get("body", b"")) and (status >= 400 or _FAILED in body):
                told = _words(body)
            return send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            if status >= 400 or told:
                self._refused(f"{what}: {status} {told.removeprefix(f'{what}: ')}".rstrip() + named)
            elif status and scope["path"] not in _QUIET_PATHS:
                logger.info("%s: %d in %.2f s%s", what, status, self._clock.monotonic() - began_s, named)

    def _refused(self, line: str) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._since_s >= IN_S:
            if self._unsaid:
                logger.warning("%d more requests were refused in the %.0f s before", self._unsaid, now_s - self._since_s)
            self._since_s, self._lines, self._unsaid = now_s, 0, 0
        if self._lines < MOST_LINES:
            self._lines += 1
            logger.warning("%s", line)
        else:
            self._unsaid += 1


def _words(body: bytes) -> str:
    """Return the message of an error's JSON, alone or as an event of a stream."""
    line = _LINE.search(body)
    try:
        error = json.loads(body if line is None else line[1])["error"]
        return printable(error if isinstance(error, str) else str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return ""
