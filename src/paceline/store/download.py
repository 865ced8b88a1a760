"""One file from a hub to disk: resumed and checked.

Bytes go to `<name>.<checksum>.part`, so a part is only ever continued by the same content, and stays when anything fails.
A cut connection is retried from where it broke as long as attempts bring bytes; a file whose checksum is wrong is fetched once
more from the start, since the bad bytes may come from an earlier part, and then given up and removed.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.core.errors import DownloadError
from paceline.store.hub import HubFile

if TYPE_CHECKING:
    import httpx

CHUNK: Final = 1 << 20
IDLE_ATTEMPTS: Final = 5
"""Attempts in a row that brought no byte before a download is given up. Raising it waits longer on a dead link."""
_WAIT_S: Final = (0.5, 1.0, 2.0, 4.0)
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP answers that may be better the next time."""

Advance = Callable[[int], None]
"""Told the bytes of the file that are on disk now; may go back when a file starts over."""


class _WrongBytes(Exception):
    """The file is complete and not what the hub promised."""


class _Interrupted(Exception):
    """The transfer stopped early; a further attempt may go on."""


def part_of(file: HubFile, target: Path) -> Path:
    """Where the bytes lie until they are whole and the caller moves them to `target`."""
    return target.with_name(f"{target.name}.{file.checksum.hex[:16]}.part")


def fetch(client: httpx.Client, file: HubFile, target: Path, advance: Advance, sleep: Callable[[float], None]) -> Path:
    """Bring `file` next to `target`, whole and checked; the caller renames it, once every file of the model is there.

    Raises:
        DownloadError: it could not be finished, the disk is full, or the hub sends other bytes than it promised.
    """
    part = part_of(file, target)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            _complete(client, file, part, advance, sleep)
        except _WrongBytes:
            _complete(client, file, part, advance, sleep)
    except _WrongBytes as error:
        raise DownloadError(
            f"{file.name} arrived with the wrong checksum, twice", "The hub or something on the way changes the file; try again later"
        ) from error
    except OSError as error:
        raise can_not_write(file.name, part.parent, error) from error
    return part


def can_not_write(what: str, folder: Path, error: OSError) -> DownloadError:
    """The disk does not take what was fetched."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    why, first = ("the disk is full", "Free some space") if full else (error.strerror or str(error), "Check PACELINE_HOME")
    return DownloadError(f"{what} can't be written to {folder}: {why}", _go_on(first))


def verify(path: Path, file: HubFile) -> bool:
    """Whether the file on disk has the size and checksum the hub promises.

    Raises:
        OSError: it can't be read.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return _digest_of(path, file) == file.checksum.hex


def _go_on(first: str) -> str:
    return f"{first} and run the same command again: it goes on from there"


def _complete(client: httpx.Client, file: HubFile, part: Path, advance: Advance, sleep: Callable[[float], None]) -> None:
    """Fill `part` up to the file's size, over as many connections as it takes, and check it."""
    idle, most = 0, _size(part)
    while _size(part) < file.size or not part.exists():
        try:
            _transfer(client, file, part, advance)
        except _Interrupted as error:
            # Measured against the most there ever was: a server that ignores ranges starts over each time.
            idle = 0 if _size(part) > most else idle + 1
            most = max(most, _size(part))
            if idle >= IDLE_ATTEMPTS:
                raise DownloadError(
                    f"{file.name} stopped at {_size(part)} of {file.size} bytes: {error}", _go_on("Check the connection")
                ) from error
            sleep(_WAIT_S[min(idle, len(_WAIT_S) - 1)])
    advance(file.size)
    if _size(part) != file.size or _digest_of(part, file) != file.checksum.hex:
        part.unlink()
        advance(0)
        raise _WrongBytes


def _transfer(client: httpx.Client, file: HubFile, part: Path, advance: Advance) -> None:
    """One connection's worth of bytes, appended to `part`."""
    import httpx

    have = _size(part)
    # Compressed bytes can't be resumed by offset.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with client.stream("GET", file.url, headers=headers) as answer:
            if answer.status_code in _PASSING:
                raise _Interrupted(f"HTTP {answer.status_code}")
            if answer.status_code not in {200, 206}:
                raise DownloadError(f"the hub refused {file.name}: HTTP {answer.status_code}", _refusal_hint(answer.status_code))
            if have and not _continues(answer, have):
                have = 0
            _append(answer, part, have, file.size, advance)
    except httpx.TransportError as error:
        raise _Interrupted(str(error) or type(error).__name__) from error
    if _size(part) < file.size:
        raise _Interrupted("the connection was closed early")


def _append(answer: httpx.Response, part: Path, have: int, size: int, advance: Advance) -> None:
    with part.open("r+b" if have else "wb") as out:
        out.seek(have)
        advance(have)
        for chunk in answer.iter_bytes():
            # A server that sends too much must not fill the disk; the checksum finds it out.
            out.write(chunk[: size + 1 - have])
            have = min(have + len(chunk), size + 1)
            advance(min(have, size))
            if have > size:
                break
        out.flush()
        os.fsync(out.fileno())


def _continues(answer: httpx.Response, have: int) -> bool:
    """Whether the answer starts where we asked. Servers may ignore ranges and send all of it."""
    return answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _refusal_hint(status: int) -> str:
    return "Accept the model's terms on its page and set HF_TOKEN" if status in {401, 403} else "Check the name, or try again later"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest_of(path: Path, file: HubFile) -> str:
    """A file's hash, in hex, under the kind of checksum the hub gave."""
    # Git hashes a blob with its length in front.
    running = hashlib.sha256() if file.checksum.kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb", buffering=0) as opened:
        while data := opened.read(CHUNK):
            running.update(data)
    return running.hexdigest()
