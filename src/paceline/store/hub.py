"""What a hub says of a repository: its files, their sizes and checksums. The Hugging Face HTTP API, one request.

huggingface_hub's own downloader checks sizes but not checksums and lets no partial file outlive a changed revision under our
control, so of it we use the settings people already have: the endpoint and the token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from paceline.core.errors import HubSilent, NotAtHub
from paceline.core.manifest import combined_digest
from paceline.store.selection import HubRef, choose_files

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Checksum:
    """What a file's bytes must hash to: `sha256` of the bytes (large files), or git's `sha1` of a blob (small ones)."""

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
    """The files of one model, as the hub lists them. Its word on a name stands above any other's."""

    ref: HubRef
    commit: str
    files: tuple[HubFile, ...]
    """Small files first."""

    @property
    def digest(self) -> str | None:
        """The model's, where the listing tells it: of GGUF files."""
        if not all(file.name.lower().endswith(".gguf") and file.checksum.kind == "sha256" for file in self.files):
            return None
        return combined_digest((file.name.rpartition("/")[2], file.checksum.hex) for file in self.files)


def list_model(client: httpx.Client, address: str, ref: HubRef) -> Listed:
    """Ask the hub what a model is made of: one request.

    Raises:
        NotAtHub, HubSilent: as `list_repo`.
        ModelNotFound: there is no model in the repository, or it is not clear which is meant.
        UnsupportedModel: as `choose_files`.
    """
    listing = list_repo(client, address, ref)
    names = choose_files(ref.repo, list(listing.files), ref.selector)
    # A configuration that can't be run is found out before gigabytes are fetched.
    return Listed(ref, listing.commit, tuple(sorted((listing.files[name] for name in names), key=lambda file: (file.size, file.name))))


def endpoint() -> str:
    """The hub's address: `HF_ENDPOINT`, else the library's default."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def token() -> str | None:
    """The person's access token, from `HF_TOKEN` or a login; None without one."""
    from huggingface_hub import get_token

    return get_token()


def list_repo(client: httpx.Client, address: str, ref: HubRef) -> HubListing:
    """Ask the hub for a repository's files.

    Raises:
        NotAtHub: there is no such repository or revision, or it may not be seen.
        HubSilent: the hub can't be reached, or answers nonsense.
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
    """One file; None where its name would leave the folder or command a terminal, or where the hub says too little to check what it sends."""
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
    """A relative path that stays in its folder, on every operating system."""
    parts = name.split("/")
    return name.isprintable() and not any(part in {"", ".", ".."} for part in parts) and not any(char in name for char in '\\:*?"<>|')
