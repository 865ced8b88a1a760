"""Client of a hub: list the files of a repository with their sizes and checksums (one request), and download a file, resumed and checked.

It speaks the Hugging Face HTTP API. huggingface_hub's own downloader checks sizes but not checksums, and gives us no control over partial files when a
revision changes. So only the settings that people already have come from it: the endpoint and the token.

Bytes go to `<name>.<checksum>.part`, so only the same content ever continues a part, and the part stays if anything fails.
A cut connection is retried from where it broke as long as attempts bring bytes. A file with a wrong checksum is fetched once
more from the start, because the bad bytes may come from an earlier part; after a second failure it is removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

from paceline.core.errors import DownloadError, HubSilent, NotAtHub
from paceline.core.manifest import combined_digest
from paceline.store.faults import can_not_write, go_on
from paceline.store.selection import HubRef, choose_files

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Checksum:
    """The hash that a file's bytes must have: `sha256` of the bytes (large files), or git's `sha1` of a blob (small ones)."""

    kind: str
    hex: str


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at one commit."""

    name: str
    size: int
    checksum: Checksum
    url: str


@dataclass(frozen=True, slots=True)
class HubListing:
    """A repository at one commit."""

    commit: str
    files: dict[str, HubFile]


@dataclass(frozen=True, slots=True)
class Listed:
    """The files of one model, as the hub lists them. For the content behind a name, the hub is the authority."""

    ref: HubRef
    commit: str
    files: tuple[HubFile, ...]
    """Small files first."""

    @property
    def digest(self) -> str | None:
        """Digest of the model; None unless all files are GGUF files with a SHA-256 in the listing."""
        if not all(file.name.lower().endswith(".gguf") and file.checksum.kind == "sha256" for file in self.files):
            return None
        return combined_digest((file.name.rpartition("/")[2], file.checksum.hex) for file in self.files)


def list_model(client: httpx.Client, address: str, ref: HubRef) -> Listed:
    """Ask the hub for the files of a model: one request.

    Raises:
        NotAtHub, HubSilent: as `list_repo`.
        ModelNotFound: the repository has no model, or several that `ref` may mean.
        UnsupportedModel: as `choose_files`.
    """
    listing = list_repo(client, address, ref)
    names = choose_files(ref.repo, list(listing.files), ref.selector)
    # Small files first: a configuration that can't run is then refused before gigabytes are fetched.
    return Listed(ref, listing.commit, tuple(sorted((listing.files[name] for name in names), key=lambda file: (file.size, file.name))))


def endpoint() -> str:
    """Return the hub's address: `HF_ENDPOINT`, or the library's default."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def token() -> str | None:
    """Return the user's access token, from `HF_TOKEN` or a login; None without one."""
    from huggingface_hub import get_token

    return get_token()


def list_repo(client: httpx.Client, address: str, ref: HubRef) -> HubListing:
    """Ask the hub for a repository's files.

    Raises:
        NotAtHub: the hub has no such repository or revision, or does not show it to this user.
        HubSilent: the hub can't be reached, fails, or its answer can't be read.
    """
    import httpx

    url = f"{address}/api/models/{ref.repo}/revision/{quote(ref.revision or 'main', safe='')}"
    try:
        answer = client.get(url, params={"blobs": "true"})
        if answer.status_code in {401, 403}:
            raise NotAtHub(
                f"the hub does not show {ref.repo} (HTTP {answer.status_code}): it is private, gated, or not there",
                "Check the name; for a gated model accept its terms on its page and set HF_TOKEN",
            )
        if answer.status_code == 404:
            raise NotAtHub(f"the hub has no {ref.repo} at revision {ref.revision or 'main'}", "Check the name, as in org/name")
        if not answer.is_success:
            raise HubSilent(f"the hub at {address} did not list {ref.repo}: HTTP {answer.status_code}", "Try again later")
        body: Any = answer.json()
    except httpx.HTTPError as error:
        raise HubSilent(f"the hub at {address} can't be reached: {error}", "Check the connection and try again") from error
    except ValueError as error:
        raise HubSilent(f"the hub at {address} answered something that is not JSON", "Check HF_ENDPOINT") from error
    return _listing(address, ref, body)


def _listing(address: str, ref: HubRef, body: Any) -> HubListing:
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    commit, siblings = fields.get("sha"), fields.get("siblings")
    if not isinstance(commit, str) or not commit.isalnum() or not isinstance(siblings, list):
        raise HubSilent(f"the hub at {address} lists no files for {ref.repo}", "Check HF_ENDPOINT")
    files: dict[str, HubFile] = {}
    for entry in cast("list[Any]", siblings):
        file = _file(address, ref, commit, cast("dict[str, Any]", entry) if isinstance(entry, dict) else {})
        if file is not None:
            files[file.name] = file
    return HubListing(commit, files)


def _file(address: str, ref: HubRef, commit: str, entry: dict[str, Any]) -> HubFile | None:
    """Return one file of a listing; None if its name would leave the folder or control a terminal, or if it has no size or checksum to check."""
    name, large = entry.get("rfilename"), entry.get("lfs")
    lfs = cast("dict[str, Any]", large) if isinstance(large, dict) else {}
    size, digest, blob = lfs.get("size", entry.get("size")), lfs.get("sha256", lfs.get("oid")), entry.get("blobId")
    if not isinstance(name, str) or not is_safe(name) or not isinstance(size, int) or size < 0:
        return None
    if isinstance(digest, str):
        checksum = Checksum("sha256", digest.removeprefix("sha256:").lower())
    elif isinstance(blob, str):
        checksum = Checksum("sha1", blob.lower())
    else:
        return None
    if not checksum.hex.isascii() or not checksum.hex.isalnum():
        return None  # a part of it becomes a file's name
    return HubFile(name, size, checksum, f"{address}/{ref.repo}/resolve/{commit}/{quote(name)}")


def is_safe(name: str) -> bool:
    """Return whether a name is a relative path that stays in its folder on every operating system."""
    parts = name.split("/")
    return name.isprintable() and not any(part in {"", ".", ".."} for part in parts) and not any(char in name for char in '\\:*?"<>|')


CHUNK: Final = 1 << 20
IDLE_ATTEMPTS: Final = 5
"""Attempts in a row without a new byte after which a download fails. Raising it: the wait on a dead link is longer."""
_WAIT_S: Final = (0.5, 1.0, 2.0, 4.0)
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP status codes after which another attempt may succeed."""

Advance = Callable[[int], None]
"""Callback with the bytes of the file that are on disk now. The number falls if a file starts over."""


class _WrongBytes(Exception):
    """The file is complete, but its size or checksum is not the one in the listing."""


class _Interrupted(Exception):
    """The transfer stopped early; another attempt may continue it."""


def part_of(file: HubFile, target: Path) -> Path:
    """Return the path of a file's bytes until they are complete and the caller moves them to `target`."""
    return target.with_name(f"{target.name}.{file.checksum.hex[:16]}.part")


def fetch(client: httpx.Client, file: HubFile, target: Path, advance: Advance, sleep: Callable[[float], None]) -> Path:
    """Download `file` next to `target`, complete and checked. The caller renames it once every file of the model is there.

    Returns:
        The path of the complete file, as `part_of` gives it.

    Raises:
        DownloadError: the download could not be finished, the disk is full, or the hub sent other bytes than it listed.
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


def verify(path: Path, file: HubFile) -> bool:
    """Return whether the file on disk has the size and checksum that the hub lists.

    Raises:
        OSError: it can't be read.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return _digest_of(path, file) == file.checksum.hex


def _complete(client: httpx.Client, file: HubFile, part: Path, advance: Advance, sleep: Callable[[float], None]) -> None:
    """Fill `part` up to the file's size, over as many connections as necessary, and check it. Raises _WrongBytes after it removed a wrong file."""
    idle, most = 0, _size(part)
    while _size(part) < file.size or not part.exists():
        try:
            _transfer(client, file, part, advance)
        except _Interrupted as error:
            # Progress is measured against the most bytes there ever were: a server that ignores ranges starts over each time.
            idle = 0 if _size(part) > most else idle + 1
            most = max(most, _size(part))
            if idle >= IDLE_ATTEMPTS:
                raise DownloadError(
                    f"{file.name} stopped at {_size(part)} of {file.size} bytes: {error}", go_on("Check the connection")
                ) from error
            sleep(_WAIT_S[min(idle, len(_WAIT_S) - 1)])
    advance(file.size)
    if _size(part) != file.size or _digest_of(part, file) != file.checksum.hex:
        part.unlink()
        advance(0)
        raise _WrongBytes


def _transfer(client: httpx.Client, file: HubFile, part: Path, advance: Advance) -> None:
    """Open one connection, and append its bytes to `part`. Raises _Interrupted if the file is not complete afterwards."""
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
            # A server that sends too much must not fill the disk. One extra byte is written, so that the check of the size fails.
            out.write(chunk[: size + 1 - have])
            have = min(have + len(chunk), size + 1)
            advance(min(have, size))
            if have > size:
                break
        out.flush()
        os.fsync(out.fileno())


def _continues(answer: httpx.Response, have: int) -> bool:
    """Return whether the answer starts at byte `have`. Servers may ignore ranges and send the whole file."""
    return answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _refusal_hint(status: int) -> str:
    return "Accept the model's terms on its page and set HF_TOKEN" if status in {401, 403} else "Check the name, or try again later"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest_of(path: Path, file: HubFile) -> str:
    """Return a file's hash in hex, of the kind that the hub's checksum has."""
    # Git hashes a blob with its length in front.
    running = hashlib.sha256() if file.checksum.kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb", buffering=0) as opened:
        while data := opened.read(CHUNK):
            running.update(data)
    return running.hexdigest()
