"""State that all routes of one application share: intake, threads, and how it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paceline.core.background import end_tasks
from paceline.core.clock import Clock
from paceline.core.encoding import Encoders, meant_encoder
from paceline.core.inference import Inference
from paceline.core.via import VIA_HEADER, read_via, through
from paceline.machine.models import Models
from paceline.server.answer import Answer, until_gone
from paceline.server.call import Call
from paceline.server.faults import NOT_JSON, STOPPING, Refusal
from paceline.server.guard import BodyReader, headers_of, is_json, is_undeclared, network_of
from paceline.server.intake import Intake
from paceline.server.metrics import Meter, MetricsPage
from paceline.server.responses.calls import Responses
from paceline.server.responses.conversation import KeptBounds, KeptResponses
from paceline.server.settings import ServerSettings
from paceline.store.catalog import LocalModel

Asked = TypeVar("Asked")

STALLED_TIMES = 5.0
"""By what factor a step may take longer than steps like it took, before it counts as stalled."""
INTAKE_THREADS = 4
"""Threads that parse bodies and wait for tokenizers, each of which runs one text at a time. Raising it: more models are tokenized for concurrently, and
code that holds the interpreter may delay everyone's tokens for longer."""


class ApiService:
    """State that the routes share. One per application, on one event loop."""

    def __init__(
        self, inference: Inference, settings: ServerSettings, clock: Clock, encoders: Encoders, models: Models[Any] | None
    ) -> None:
        self.inference, self.models, self.encoders = inference, models, encoders
        self.settings = settings
        self.clock = clock
        self.meter = Meter()
        self.metrics = MetricsPage(inference, self.meter)
        bounds = KeptBounds(settings.kept_responses, settings.kept_responses_bytes, settings.kept_responses_age_s)
        self.responses = Responses(KeptResponses(bounds, clock), clock)
        self._intake = Intake(
            inference,
            clock,
            settings.served_names,
            uses_model_sampling=settings.uses_model_sampling,
            keep_client_headers=settings.keep_client_headers,
            ways=settings.ways,
            exact=settings.exact,
            encoder_named=lambda name: meant_encoder(name, encoders.encoders()),
            open_model=None if models is None else models.open,
        )
        self._bodies = BodyReader(settings)
        self._tokenizing = ThreadPoolExecutor(INTAKE_THREADS, thread_name_prefix="paceline-intake")
        self._stopping: asyncio.Future[None] | None = None
        self.is_draining = False
        """Live answers go on, and no new ones begin."""

    def stop(self) -> None:
        """End every stream and refuse new calls. Called on the event loop."""
        future = self._stop_future()
        if not future.done():
            future.set_result(None)

    @property
    def is_quiet(self) -> bool:
        """True if no request is being answered."""
        return not self.meter.in_flight

    def close(self) -> None:
        """Join the threads."""
        self._tokenizing.shutdown(wait=True, cancel_futures=True)

    @property
    def is_stopping(self) -> bool:
        return self._stop_future().done()

    def _stop_future(self) -> asyncio.Future[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
        return self._stopping

    async def answer(self, request: Request, parse: Callable[[Intake, bytes], Call]) -> Response:
        """Read, check, and hand over to an `Answer`.

        Raises:
            Refusal, PacelineError: turned into an error answer by the application.
        """
        arrived_s = self.clock.monotonic()
        call = await self.read(request, parse)
        return self.answer_to(call.named(request_id_of(request)), request, arrived_s)

    async def read(self, request: Request, parse: Callable[[Intake, bytes], Asked], *, declared: bool = True) -> Asked:
        """Read a body and make of it what was asked for.

        Args:
            declared: as JSON, or it is refused; False: programs that are no browsers may leave it out.

        Raises:
            Refusal, PacelineError: see `answer`.
        """
        if self.is_stopping or self.is_draining:
            raise Refusal(STOPPING)
        if not is_json(request.headers.get("content-type", "")) and (declared or not is_undeclared(headers_of(request.scope))):
            raise Refusal(NOT_JSON)
        async with self._bodies.read(request.scope, request.receive) as body:
            # Never on the loop: templates and tokenizers are strangers' programs, and long texts take long.
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, parse, self._intake, body)

    def answer_to(self, call: Call, request: Request, arrived_s: float) -> Response:
        """Return the response that runs a call.

        Raises:
            RequestLoop: the request went through this node before, or through too many.
        """
        call = call.sent_by("" if request.client is None else network_of(request.client.host), self.via_of(request))
        return Answer(call, self.inference, self.meter, self.clock, arrived_s, self._stop_future(), self.settings.comment_s)

    def via_of(self, request: Request) -> tuple[str, ...]:
        """Return the marks of the nodes that a request went through.

        Raises:
            RequestLoop: this node is among them, or they are too many.
            InvalidRequest: the header is not one that a node wrote.
        """
        via = read_via(headers_of(request.scope).get(VIA_HEADER.encode(), b"").decode("latin-1"))
        through(via, self.settings.mark)
        return via

    async def while_wanted(self, work: Coroutine[Any, Any, Asked], request: Request) -> Asked:
        """Return the result of some work, which is cancelled if the client leaves or the server stops.

        Raises:
            ClientDisconnect, Refusal: the work was cancelled.
        """
        doing, gone = asyncio.create_task(work), asyncio.create_task(until_gone(request.receive))
        try:
            await asyncio.wait((doing, gone, self._stop_future()), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            if not gone.done():
                raise Refusal(STOPPING)
            self.meter.disconnects += 1
            raise ClientDisconnect
        finally:
            await end_tasks(doing, gone)

    async def loadable(self) -> Sequence[LocalModel]:
        """Models that a request could name beside those served."""
        found = () if self.models is None else await asyncio.to_thread(self.models.loadable)
        served = {model.name for model in self.inference.models()}
        return [model for model in found if model.name not in served]

    def health(self, *, has_key: bool) -> tuple[int, dict[str, object]]:
        """Return status and body of /health: whether work advances. What fails may name paths and addresses, so only a client with the key reads it."""
        progress = self.inference.progress()
        bound_s = max(self.settings.stall_after_s, STALLED_TIMES * progress.step_expected_s)
        stalled = progress.busy and progress.seconds_since_step > bound_s
        stopping = self.is_draining or self.is_stopping
        wrong = "failed" if progress.error is not None else "recovering" if progress.lacks is not None else "stalled" if stalled else ""
        status = wrong or ("stopping" if stopping else "ok")
        body: dict[str, object] = {
            "status": status,
            "busy": progress.busy,
            "seconds_since_step": round(progress.seconds_since_step, 3),
            "error": progress.error or progress.lacks,
            "failing": list(progress.failing),
        }
        if not has_key:
            body["error"] = body["error"] and WITH_KEY
            body["failing"] = [WITH_KEY] if progress.failing else []
        return (200 if status == "ok" else 503), body


WITH_KEY = "something fails; what it is, /health says to a request with the key"


def request_id_of(request: Request) -> str:
    """Return the request's id, which the guard set."""
    return request.scope.get("state", {}).get("request_id", "")
