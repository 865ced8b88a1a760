"""Engines of other makers that a person shares: the file `engines.json` in the home, and which addresses may be shared.

Law: the file may hold keys, so only its owner can read it. Its content reaches no card, log or message but for URLs and names.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from paceline.core.errors import ConfigError
from paceline.core.files import WRITABLE_HINT, write_file
from paceline.core.text import printable
from paceline.engines.addresses import is_at_home, is_loopback
from paceline.engines.contract import Door
from paceline.machine.foreign.watched import Offering
from paceline.store.home import Home

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineShare:
    """An engine that a person shares."""

    url: str
    """The result of `check_url`."""
    name: str = ""
    """Name of its only model for clients; empty: the engine's own."""
    models: tuple[str, ...] = ()
    """Models to offer, as the engine names them; empty: all."""
    api_key: str = field(default="", repr=False)
    plain_http: bool = False
    """The person allowed prompts to cross the network unencrypted."""
    leaves_network: bool = False
    """The address is outside of the home network."""

    @property
    def door(self) -> Door:
        return Door(self.url, self.api_key, may_leave=self.leaves_network)

    @property
    def is_here(self) -> bool:
        return is_loopback(urlsplit(self.url).hostname or "")

    @property
    def sharing(self) -> Offering:
        plain = self.url.startswith("http:") and not self.is_here
        return Offering(self.name, self.models, self.is_here, plain, self.leaves_network)


_SHARES: Final = TypeAdapter(tuple[EngineShare, ...])
MAX_BYTES: Final = 1 << 20
"""Maximum size of the file. Raising it: a file that is not Paceline's takes longer to refuse."""


def check_url(text: str, *, plain_http: bool) -> tuple[str, bool]:
    """Check the address of an engine.

    Args:
        plain_http: the person allows http to another machine.

    Returns:
        The address as it is kept, and whether it is outside of the home network.

    Raises:
        ConfigError: it is not an engine's address, or http leads to another machine without being allowed.
    """
    text = text if "://" in text or text.isdigit() else f"http://{text}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
        raise ConfigError(
            f"{printable(re.split('[?#]', text)[0])} is not the address of an engine",
            "Such as http://127.0.0.1:8080 or https://box.lan:8443",
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError("The address of an engine holds a password", "Leave it out: a key is given by --api-key-file.")
    if parts.scheme == "http" and not is_loopback(host) and not plain_http:
        raise ConfigError(
            f"Prompts and answers would cross the network to {host} unencrypted",
            "Use https, or run a node on that machine and share its engine there; or allow it: --plain-http",
        )
    path = re.sub(r"/v1$", "", parts.path.rstrip("/"), flags=re.IGNORECASE)
    if not text.isprintable():
        raise ConfigError(f"{printable(text)} has letters that no address has", "Such as http://127.0.0.1:8080")
    shown_host = f"[{host}]" if ":" in host else host
    url = f"{parts.scheme}://{shown_host}{'' if port is None else f':{port}'}{path}"
    return url, not is_loopback(host) and not is_at_home(host)


def read_shares(home: Home) -> tuple[EngineShare, ...]:
    """Return what is shared. Entries that can't be understood are an error, so that none is lost when the file is written again.

    Raises:
        ConfigError: the file can't be read or understood.
    """
    try:
        shares = _SHARES.validate_json(_content(home))
        for share in shares:
            urlsplit(share.url)  # an address that can't be read is found here
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:  # pydantic's errors are ValueErrors, and quote what they were given
        error = error if isinstance(error, OSError) else ValueError("its content is not what Paceline writes")
        raise ConfigError(f"{home.engines} can't be read: {printable(str(error))}", "Remove it, and share the engines again.") from error
    return shares


def _content(home: Home) -> bytes:
    """Return the file's content. Raises OSError if it is not a file of at most `MAX_BYTES`."""
    handle = os.open(home.engines, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no file")
        if status.st_mode & 0o077:
            logger.warning("%s may hold keys, and others can read it: chmod 600 %s", home.engines, home.engines)
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"it is longer than {MAX_BYTES >> 20} MiB")
    return content


def change_shares(home: Home, change: Callable[[tuple[EngineShare, ...]], Sequence[EngineShare]]) -> None:
    """Write what is shared from now on, for its owner's eyes alone. Of several processes, each changes what the one before wrote.

    Raises:
        ConfigError: the file can't be read, understood or written.
    """
    try:
        home.root.mkdir(parents=True, exist_ok=True)
        folder = os.open(home.root, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            write_file(home.engines, _SHARES.dump_json(tuple(change(read_shares(home))), indent=1))
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{home.engines} can't be written: {error.strerror}", WRITABLE_HINT) from error


def add_share(home: Home, share: EngineShare) -> None:
    """Share an engine from now on. It takes the place of the one at the same URL. Raises as `change_shares`."""
    change_shares(home, lambda shares: [*(one for one in shares if one.url != share.url), share])
