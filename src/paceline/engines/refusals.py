"""Refusals of engines as Paceline's errors.

Engines write `{"error": {"message", "type", "code"}}`, `{"error": "words"}` or `{"detail": ...}`, and differ in statuses. Their words are quoted, in short,
unless they repeat a part of the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from paceline.core.errors import (
    ContextOverflow,
    EngineGone,
    InvalidRequest,
    ModelAway,
    NotServed,
    Overloaded,
    PacelineError,
    RequestLoop,
    UnknownModel,
)
from paceline.core.text import printable
from paceline.engines.contract import Door

Error = TypeVar("Error", bound=PacelineError)

MAX_WORDS: Final = 300
"""Maximum characters of an engine's own words in a message. Raising it: messages fill the screen with a prompt that an engine repeats."""
MAX_READ: Final = 2000
"""Maximum characters of a refusal that are looked at. Raising it: words that make a pattern slow hold up all requests for longer."""
KEY_PART: Final = 6
"""Length of a part of a key that no message may hold. Raising it: an engine that repeats half of a short key is quoted."""
RETRY_S: Final = 2
"""Seconds after which a client comes back if the engine does not say. Raising it: a free engine idles; lowering it: more requests are refused."""
MAX_RETRY_S: Final = 3600
MAX_DIGITS: Final = 9
"""Digits of a time that are read. Python refuses to read thousands."""

_CONTEXT = re.compile(r"context (length|size|window)|exceed_context|context_length_exceeded|maximum context|max_model_len", re.IGNORECASE)
_NO_MODEL = re.compile(r"model\b.*\b(not (found|exist|loaded|available)|unknown|does not exist|no such)|(unknown|invalid|no such) model|model_not_found", re.IGNORECASE | re.DOTALL)  # fmt: skip
_CANNOT = re.compile(r"(does not|doesn't|not) support|makes no ", re.IGNORECASE)
_LOADING = re.compile(r"\bloading\b", re.IGNORECASE)
_BUSY = re.compile(r"\bbusy\b|overload|queue|too many|pending requests|capacity|rate limit|try again", re.IGNORECASE)


def refusal_of(
    engine: str, key: str, status: int, body: Any, retry_after: str = "", own: Callable[[int, str], PacelineError | None] | None = None
) -> PacelineError:
    """Return the error for an answer other than 200.

    Args:
        engine: name and address, for messages.
        key: the engine's key, which the message must not hold.
        body: the answer's JSON; None if it had none.
        retry_after: the header.
        own: an adapter's reading of status and message, asked first.
    """
    kind, message = (text[:MAX_READ] for text in _read(body))
    words = quoted(message, key)
    if own is not None and (error := own(status, words)) is not None:
        return error
    said = f"{engine}: {words}" if words else f"{engine} answers with status {status}"
    about = f"{kind} {message}"
    if status == 508:
        return RequestLoop(said, "These endpoints share each other: stop sharing one of them.")
    if status in {401, 403}:
        return EngineGone(f"{engine} refuses the key", "Share it again with the key that it was started with.")
    if status == 429 or (status == 503 and (retry_after or _BUSY.search(message)) and not _LOADING.search(message)):
        return Overloaded(said, "Retry later.", retry_after_s=_seconds(retry_after))
    if status == 503 and _LOADING.search(message):
        return ModelAway(f"{engine} is loading its model", "Retry in a few seconds.")
    if status in {400, 404, 413, 422} and body is not None:
        if _CONTEXT.search(about):
            return ContextOverflow(said, "Send a shorter prompt, or fewer max_tokens.", field="messages")
        if _NO_MODEL.search(about):
            return UnknownModel(said, "Ask for its list of models.")
    if status in {404, 405, 501} or (status in {400, 422} and _CANNOT.search(message)):
        return NotServed(said, "It can't do that, or not as it was started.")
    if 400 <= status < 500 and body is not None:
        return InvalidRequest(said, "Change the request.")
    return EngineGone(said, "See its own log for the cause.")


def parts_of(key: str) -> tuple[str, ...]:
    """Return all parts of a key with `KEY_PART` letters, or the whole of a shorter key. A text without them holds no longer part either."""
    return tuple(key[at : at + KEY_PART] for at in range(max(1, len(key) - KEY_PART + 1))) if key else ()


def quoted(message: str, key: str) -> str:
    """Return an engine's words for a message: one line, cut, and none if they hold a part of the key."""
    if any(part in message for part in parts_of(key)):
        return ""
    words = printable(" ".join(message.split()))
    return words if len(words) <= MAX_WORDS else words[:MAX_WORDS] + "..."


def without_address(error: Error, door: Door, called: str) -> Error:
    """Return a copy of an engine's error for clients, who must not learn where it listens: they may be guests, or on other machines.

    Args:
        called: the engine's name and version, which stand in place of its address.
    """
    address = _address_of(door)
    told = type(error).__new__(type(error))
    told.__dict__.update(error.__dict__)
    told.message, told.hint = (address.sub(lambda _: called, text) for text in (error.message, error.hint))
    told.args = (told.message,)
    return told


def _address_of(door: Door) -> re.Pattern[str]:
    """Return what finds a door's address in a message, with the name that adapters write before it, under each name of the machine."""
    parts = urlsplit(door.url)
    host, port = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
    found = [rf"[\w.%\[\]:-]*:{port}\b"]
    if "." in host or ":" in host:  # a name of one word may be any word
        found.append(rf"\[?{re.escape(host)}\]?(?![\w.]*\w)")
    elif host:
        found.append(rf"(?<=://){re.escape(host)}\b")
    where = rf"(?:https?://)?(?:{'|'.join(found)})"
    if door.socket is not None:
        where = rf"{re.escape(str(door.socket))}|{where}"
    return re.compile(rf"(?:[\w.-]+ at )?(?:{where})", re.IGNORECASE)


def _read(body: Any) -> tuple[str, str]:
    """Return a refusal's kind and message."""
    if not isinstance(body, dict):
        return "", ""
    error = body.get("error", body.get("detail", body))
    if isinstance(error, str):
        return "", error
    if not isinstance(error, dict):
        return "", ""
    kind = " ".join(str(error[name]) for name in ("type", "code") if error.get(name) is not None)
    message = error.get("message", "")
    return kind, message if isinstance(message, str) else ""


def _seconds(retry_after: str) -> int:
    return max(1, min(int(retry_after[:MAX_DIGITS]), MAX_RETRY_S)) if retry_after.isdecimal() else RETRY_S
