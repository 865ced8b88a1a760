"""Partners for a chat: an OpenAI endpoint, or an engine in this process, without a server. Synchronous, one answer at a time."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import httpx

from paceline.core.errors import ContextOverflow, PacelineError, UserError
from paceline.core.generation import AnswerProgress, FinishReason, GenerationChunk, GenerationRequest, progress_of, progress_of_comment
from paceline.core.ids import RequestId
from paceline.core.text import NOTHING_GIVEN, printable

if TYPE_CHECKING:
    from paceline.core.inference import ChunkStream, Inference, ServedModel

MAX_WORDS = 2000
_HINTS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "Give the endpoint's key with --api-key or PACELINE_API_KEY.",
    HTTPStatus.NOT_FOUND: "Check --url and --model.",
}


class EndpointError(UserError):
    """An endpoint that can't be reached, or that refused."""


class EndpointClient:
    """One endpoint, over one connection."""

    def __init__(self, url: str, api_key: str | None, ca: Path | None = None) -> None:
        """Prepare to talk; nothing is sent yet.

        Args:
            url: with or without `http://` before it and `/v1` at its end.
            api_key: sent as a bearer token.
            ca: PEM of the certificate or authority to trust; None: the authorities that this system knows.

        Raises:
            EndpointError: the URL is malformed, or the file can't be used.
        """
        self._has_answered = False
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not self._url.endswith("/v1"):
            self._url += "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Reading has no bound of its own: an answer that waits in a queue is not an error. The person has Ctrl-C.
        timeout = httpx.Timeout(10.0, read=None)
        try:
            verify = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise EndpointError(f"{ca} can't be used: {error}", "Give a certificate as PEM.") from error
        try:
            self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False, verify=verify)
        except (httpx.InvalidURL, ValueError) as error:
            raise EndpointError(f"{url}: {error}", "Give a URL such as http://127.0.0.1:8000/v1.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()

    def models(self, *, at_home: bool = False) -> list[str]:
        """Return the names of the models that answer chats.

        Args:
            at_home: leave out those to which prompts leave the home network.

        Raises:
            EndpointError: it can't be reached, or refused.
        """
        try:
            response = self._client.get(f"{self._url}/models")
            self._check(response)
            chats = [model for model in response.json()["data"] if "chat" in model.get("tasks", ("chat",))]
            return [printable(str(model["id"])) for model in chats if not (at_home and model.get("leaves_network"))]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self._url}/models does not answer as an OpenAI endpoint does", "Check the URL.") from error

    def say(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        *,
        temperature: float | None,
        seed: int | None,
        max_tokens: int | None = None,
        on_reading: Callable[[AnswerProgress], object] = lambda _: None,
    ) -> Generator[str, None, bool]:
        """Stream the answer's text; returns whether it was cut for want of room. Closing the generator hangs up, which ends the generation.

        Args:
            on_reading: called now and then while a model is loaded or a long prompt is read.

        Raises:
            EndpointError: it can't be reached, refused, or the answer broke off.
            ContextOverflow: the conversation has outgrown the context.
        """
        body: dict[str, Any] = {"model": model, "messages": list(messages), "stream": True}
        body |= {"temperature": temperature} if temperature is not None else {}
        body |= {"seed": seed} if seed is not None else {}
        body |= {"max_tokens": max_tokens} if max_tokens is not None else {}
        try:
            with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                return (yield from self._texts(response, on_reading))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _texts(self, response: httpx.Response, on_reading: Callable[[AnswerProgress], object]) -> Generator[str, None, bool]:
        cut = False
        for line in response.iter_lines():
            if (reading := progress_of_comment(line)) is not None:
                on_reading(reading)
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return cut
            text, ended = self._text(data)
            cut = cut or ended == "length"
            if text:
                yield text
        raise EndpointError(f"{self._url} broke off the answer before its end", "Try again.")

    def _text(self, data: str) -> tuple[str, str | None]:
        """Read an event of a stream. Returns its text, empty if it has none, and the finish reason of the answer, once it has one."""
        try:
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise EndpointError(f"{self._url} failed: {printable(event['error']['message'], MAX_WORDS)}", "Try again.")
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            return text, next((choice["finish_reason"] for choice in event["choices"] if choice.get("finish_reason")), None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self._url} does not stream as an OpenAI endpoint does: {printable(data, 80)}", "Check the URL."
            ) from error

    def _check(self, response: httpx.Response) -> None:
        self._has_answered = True
        if not response.is_error:
            return
        try:
            error: dict[str, Any] = response.json()["error"]
            message, code = printable(str(error["message"]), MAX_WORDS), error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError):
            message, code = printable(response.reason_phrase), None
        if code == "context_length_exceeded":
            raise ContextOverflow(message)
        raise EndpointError(f"{self._url} refused ({response.status_code}): {message}", _HINTS.get(response.status_code, ""))

    def _unreachable(self, error: Exception) -> EndpointError:
        if self._has_answered:
            said = "it ended the connection" if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) else str(error)
            return EndpointError(f"{self._url} went away: {said}", "Ask again once it is back; `paceline status` shows what runs here.")
        said, rest = str(error), self._url.partition("://")[2]
        hint = "Start one with `paceline up`, or correct --url."
        if "CERTIFICATE_VERIFY_FAILED" in said:
            hint = "Its certificate is not known here: --tls-ca FILE, with the file that `paceline up --tls` names there."
        elif "SSL" in said:
            hint = f"Where it speaks no TLS: --url http://{rest}"
        elif isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and self._url.startswith("http://"):
            hint = f"Where it speaks TLS: --url https://{rest} --tls-ca FILE"
        return EndpointError(f"Cannot reach {self._url}: {said}", hint)


class LocalChat:
    """Answers to conversations, streamed, on an event loop of its own that runs only while an answer does."""

    def __init__(self, inference: Inference, model: ServedModel) -> None:
        self._inference = inference
        self._model = model
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.close()

    def say(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        temperature: float | None,
        seed: int | None,
        on_reading: Callable[[AnswerProgress], object] = lambda _: None,
    ) -> Generator[str, None, bool]:
        """Stream the answer's text; returns whether it was cut for want of room. Closing the generator ends the generation.

        Args:
            on_reading: called now and then while a model is loaded or a long prompt is read.

        Raises:
            ContextOverflow: the conversation has outgrown the context.
            PacelineError: the engine failed.
        """
        from paceline.server.call import Beginning
        from paceline.server.fitting import Chat, fit_chat
        from paceline.server.messages import Message

        vocabulary, now = self._model.tokenizer, datetime.now().astimezone()
        chat = Chat([Message.model_validate(message) for message in messages], NOTHING_GIVEN, knows_tools=True)
        prompt = tuple(fit_chat(chat, lambda messages, given: vocabulary.render_chat(messages, now, given)).ids)
        beginning = Beginning(has_space=vocabulary.strips_space)
        if len(prompt) >= self._model.max_context:
            raise ContextOverflow(f"The conversation has outgrown the context of {self._model.max_context} tokens", "Shorten it.")
        from paceline.server.intake import sampling_of
        from paceline.server.requests import Sampling

        sampling = sampling_of(Sampling(temperature=temperature, seed=seed), None, vocabulary.size, vocabulary.sampling_defaults)
        request = GenerationRequest(RequestId(f"chat-{uuid4().hex}"), prompt, None, sampling)
        stream = self._inference.generate(self._model.name, request)
        cut = False
        try:
            while (chunks := self._runner.run(_next(stream))) is not None:
                for chunk in chunks:
                    for reading in filter(None, map(progress_of, chunk.notices)):
                        on_reading(reading)
                    if chunk.finish_reason is FinishReason.ERROR:
                        raise PacelineError(chunk.error or "The generation failed")
                    cut = cut or chunk.finish_reason is FinishReason.LENGTH
                    if text := beginning.cut(chunk.text):
                        yield text
        finally:
            self._runner.run(stream.aclose())
        return cut


async def _next(stream: ChunkStream) -> Sequence[GenerationChunk] | None:
    return await anext(stream, None)
