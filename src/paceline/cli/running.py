"""Endpoints that run on this machine for this home: each `paceline up` leaves a note of itself while it serves.

A note whose process is gone, or no longer answers as what it says, is no endpoint.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from paceline.core.files import write_file
from paceline.store.home import Home, read_json_object

logger = logging.getLogger(__name__)

ANSWERS_S = 2.0
"""What an endpoint on this machine has to say that it is there."""


@dataclass(frozen=True, slots=True)
class Running:
    """An endpoint of this machine."""

    url: str
    process: int
    has_key: bool
    certificate: str = ""
    """File (PEM) that it is known by, where it speaks TLS."""

    @property
    def authority(self) -> Path | None:
        """The certificate, where there is one."""
        return Path(self.certificate) if self.certificate else None

    def client(self, api_key: str | None = None) -> httpx.Client:
        """For short questions to it.

        Raises:
            OSError: its certificate can't be read any more.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key and self.has_key else {}
        verify = ssl.create_default_context(cafile=self.certificate) if self.certificate else True
        return httpx.Client(base_url=self.url, timeout=ANSWERS_S, trust_env=False, headers=headers, verify=verify)


@contextmanager
def announced(url: str, *, has_key: bool, certificate: Path | None) -> Generator[None]:
    """Leave a note of this process's endpoint while the block runs."""
    place = Home.from_environment().running / f"{os.getpid()}.json"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(
            place,
            json.dumps(asdict(Running(url, os.getpid(), has_key, "" if certificate is None else str(certificate.absolute())))).encode(),
        )
    except OSError as error:
        logger.warning("%s can't be written (%s): chat and status will not find this endpoint by themselves", place, error.strerror)
    try:
        yield
    finally:
        with suppress(OSError):
            place.unlink()


def running(home: Home) -> list[Running]:
    """Endpoints that answer, the one that started last first. Notes of processes that are gone are removed."""
    found: list[tuple[float, Running]] = []
    for place in home.running.glob("*.json"):
        endpoint = _read(place)
        if endpoint is None or not _lives(endpoint.process):
            with suppress(OSError):
                place.unlink()
        elif _answers(endpoint):
            with suppress(OSError):
                found.append((place.stat().st_mtime, endpoint))
    return [endpoint for _, endpoint in sorted(found, key=lambda each: each[0], reverse=True)]


def _read(place: Path) -> Running | None:
    fields = read_json_object(place) or {}
    match fields:
        case {"url": str(url), "process": int(process), "has_key": bool(has_key), "certificate": str(certificate)} if process > 0:
            return Running(url, process, has_key, certificate)
        case _:
            return None


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _answers(endpoint: Running) -> bool:
    try:
        with endpoint.client() as client:
            answer = client.get("/health")
    except (httpx.HTTPError, OSError):
        return False
    return isinstance(answer.headers.get("content-type"), str) and "status" in answer.text
