"""A tokenizer that runs in a child process with limits on time and memory, because templates and tokenizers are untrusted code of the model's maker.

Law: the ids are those that `ModelTokenizer` gives. A text that takes too long, or more memory than a chat needs, is an error of its request; the
next request starts the process again. Only the bytes that a token spells are looked up in this process: that runs no code of the model.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from paceline.core.errors import InvalidRequest, ModelFileError, PacelineError, TemplateRefused, UnsupportedModel
from paceline.core.processes import python_command
from paceline.core.text import NOTHING_GIVEN, Given
from paceline.store.tokenizer import ModelTokenizer, pack_tokenizer
from paceline.store.tokenizer_child import BUILD_BYTES, BUILD_S, FAULT, HEAD, PER_BYTE, RENDER_BYTES, STATM, limit_of, write_time

logger = logging.getLogger(__name__)

PATIENCE: Final = 10.0
"""Limit of wall-clock time, as a multiple of the limit of CPU time that the child sets for itself: a busy machine runs it more slowly. Raising it:
a child that hangs holds up its requests for longer; lowering it: chats fail on a busy machine."""
LIMITS_MEMORY: bool = STATM.exists()
"""The child limits its own memory where this is true. Elsewhere this process measures the child's memory while it waits."""
LOOK_S: Final = 0.1
"""Seconds between two looks at the child's memory. Raising it: the child takes more memory before it is ended."""
_MOST_ANSWER: Final = 256 << 20
_PART: Final = 1 << 16
_MODULE: Final = "paceline.store.tokenizer_child"


class BoundedTokenizer:
    """A `core.text.Tokenizer` that encodes in a child process. Its methods block: call them from threads, never on an event loop. One text at a time.

    Args:
        tokenizer: the same tokenizer in this process. It answers everything but encoding and rendering.
        idle_s: seconds without a text after which the process ends; the next text waits for a new one. None: it stays.
    """

    def __init__(self, tokenizer: ModelTokenizer, idle_s: int | None = None) -> None:
        self.model: Final = tokenizer
        self._idle_s: Final = idle_s
        self._lock: Final = threading.Lock()
        self._process: TokenizerProcess | None = None

    @property
    def size(self) -> int:
        return self.model.size

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.model.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.model.token_bytes(token_id)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encode a text in the child process, as `ModelTokenizer.encode` does.

        Raises:
            InvalidRequest: the text can't be encoded within its limits of time and memory.
        """
        return self._ask({"text": text, "add_special": add_special})

    def encode_inside(self, text: str) -> list[int]:
        """Encode a part of a text in the child process, as `ModelTokenizer.encode_inside` does.

        Raises:
            InvalidRequest: as `encode`.
        """
        return self._ask({"inside": text})

    def text_of(self, ids: Sequence[int]) -> str:
        return self.model.text_of(ids)

    @property
    def strips_space(self) -> bool:
        return self.model.strips_space

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self.model.special_tokens

    @property
    def chat_template(self) -> str | None:
        return self.model.chat_template

    @property
    def tool_template(self) -> str | None:
        return self.model.tool_template

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        return self.model.sampling_defaults

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        return self.model.infill_tokens

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        return self.model.response_template

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        """Render a chat and encode it in the child process, as `ModelTokenizer.render_chat` does.

        Raises:
            InvalidRequest: the template refuses the messages, or does not end within its limits of time and memory.
        """
        if self.model.template is None:
            return self.model.render_chat(messages, now, given)  # raises the error for a model without a template
        now = datetime.now().astimezone() if now is None else now
        told = {
            "tools": list(given.tools),
            "switches": dict(given.switches),
            "salt": given.salt,
            "continues": given.continues,
            "begins_turn": given.begins_turn,
        }
        return self._ask({"messages": list(messages), "now": write_time(now), "given": told})

    def begin(self) -> None:
        """Start the process in the background, and warn if the chat template does not compile. Otherwise the first request waits for the start."""
        threading.Thread(target=self._begin, name="paceline-tokenizer", daemon=True).start()

    def _begin(self) -> None:
        with suppress(PacelineError, OSError):  # the first request reports it; at exit files may be closed
            try:
                self._ask({"compile": True})
            except InvalidRequest as error:
                logger.warning("%s: %s. %s.", self.model.template and self.model.template.path, error.message, error.hint)

    def close(self) -> None:
        """End the process; the next request starts another. Idempotent."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _started(self) -> TokenizerProcess:
        if self._process is None or self._process.has_ended:
            self._process = TokenizerProcess(pack_tokenizer(self.model), self._idle_s)
        return self._process

    def _ask(self, what: dict[str, Any]) -> list[int]:
        data = json.dumps(what).encode()
        with self._lock:
            process = self._started()
            try:
                return process.ask(data, limit_of(len(data)))
            except ProcessLost as error:
                process.end()
                self._process = None
                raise InvalidRequest(
                    f"the model's chat template or tokenizer was ended: {error}",
                    "Send less text; if short texts fail too, the model's files are not to be trusted.",
                ) from error


class ProcessLost(Exception):
    """The tokenizer process took too long, took too much memory, or has ended."""


class TokenizerProcess:
    """One child process with one tokenizer. It serves one thread at a time."""

    def __init__(self, packed: bytes, idle_s: int | None = None) -> None:
        """Start the process, and wait until it has built the tokenizer.

        Args:
            packed: the tokenizer, as `pack_tokenizer` writes it.
            idle_s: seconds without a text after which the process ends; None: it stays.

        Raises:
            ModelFileError, UnsupportedModel: it can't build the tokenizer within its limits of time and memory.
        """
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        self._process = subprocess.Popen(  # noqa: S603 - this program itself
            python_command("-m", _MODULE, str(idle_s or 0), str(int(LIMITS_MEMORY))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._until_s, self._most_bytes = 0.0, 0
        """Limits of the text in work: the `time.monotonic` at which the process is ended, and the bytes of memory it may hold."""
        self.end: Final = weakref.finalize(self, _end, self._process)
        try:
            self.ask(packed, BUILD_S)
        except ProcessLost as error:
            self.end()
            raise ModelFileError(f"The model's tokenizer can't be read: {error}", "Get the model's files again.") from error
        except BaseException:
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, data: bytes, limit_s: float) -> list[int]:
        """Send a frame, and wait for the token ids of the answer.

        Args:
            limit_s: seconds of CPU time that the child may take. By the clock it has `PATIENCE` times as long.

        Raises:
            ProcessLost: the answer did not come in time, or makes no sense.
            PacelineError: the child answered with an error; raised in the type that it names.
        """
        self._until_s = time.monotonic() + PATIENCE * limit_s
        self._most_bytes = BUILD_BYTES + RENDER_BYTES + PER_BYTE * len(data)
        self._send(HEAD.pack(len(data)) + data)
        size = HEAD.unpack(self._receive(HEAD.size))[0]
        if not 1 <= size <= _MOST_ANSWER:
            raise ProcessLost("its answer makes no sense")
        answer = self._receive(size)
        if answer[:1] == FAULT:
            raise _error_of(answer[1:])
        return array("I", answer[1:]).tolist()

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._to, select.POLLOUT)
            try:
                view = view[os.write(self._to, view[:_PART]) :]
            except BrokenPipeError as error:
                raise ProcessLost(_NEEDS_MORE) from error

    def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._wait(self._from, select.POLLIN)
            part = os.read(self._from, size - len(parts))
            if not part:
                raise ProcessLost(_NEEDS_MORE)
            parts += part
        return bytes(parts)

    def _wait(self, file: int, event: int) -> None:
        poll = select.poll()
        poll.register(file, event)
        while (left_s := self._until_s - time.monotonic()) > 0:
            if poll.poll(1000 * min(left_s, LOOK_S)):
                return
            if not LIMITS_MEMORY and _resident_bytes(self._process.pid) > self._most_bytes:
                raise ProcessLost("it takes more memory than any chat does")
        raise ProcessLost("it did not end in time")


def _resident_bytes(pid: int) -> int:
    told = subprocess.run(["/bin/ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False).stdout  # noqa: S603
    return 1024 * int(told or 0)


_NEEDS_MORE: Final = "it needs more memory or time than any chat does"


def _error_of(told: bytes) -> PacelineError:
    """Return the error that the child reported. Its fields are checked, because the child runs untrusted programs."""
    try:
        said: Any = json.loads(told)
        kind, message, hint, field = (said[name] for name in ("kind", "message", "hint", "field"))
        if not all(isinstance(text, str) for text in (message, hint)) or not (field is None or isinstance(field, str)):
            raise TypeError(field)
    except (ValueError, KeyError, TypeError):
        return InvalidRequest("the model's chat template or tokenizer failed", "Get the model's files again.")
    match kind:
        case "damaged":
            return ModelFileError(message, hint)
        case "unsupported":
            return UnsupportedModel(message, hint)
        case "refused":
            return TemplateRefused(message, hint, field=field)
        case _:
            return InvalidRequest(message, hint, field=field)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()
