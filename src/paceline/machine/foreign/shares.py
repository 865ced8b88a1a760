"""Engines of other makers that a person shares: the file `engines.json` in the home, and which addresses may be shared.

Law: the file may hold keys, so only its owner can read it. Its content reaches no card, log or message but for URLs and names.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from paceline.core.errors import ConfigError
from paceline.core.files import WRITABLE_HINT, write_file
from paceline.core.text import printable
from paceline.engines.contract import Door
from paceline.machine.foreign.engines import Offering
from paceline.store.home import Home


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
        return Door(self.url, self.api_key)

    @property
    def is_here(self) -> bool:
        return is_loopback(urlsplit(self.url).hostname or "")

    @property
    def sharing(self) -> Offering:
        plain = self.url.startswith("http:") and not self.is_here
        return Offering(self.name, self.models, self.is_here, plain, self.leaves_network)


_SHARES: Final = TypeAdapter(tuple[EngineShare, ...])


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
    path = parts.path.rstrip("/").removesuffix("/v1")
    shown_host = f"[{host}]" if ":" in host else host
    url = f"{parts.scheme}://{shown_host}{'' if port is None else f':{port}'}{path}"
    return url, not is_loopback(host) and not _is_at_home(host)


def read_shares(home: Home) -> tuple[EngineShare, ...]:
    """Return what is shared. Entries that can't be understood are an error, so that none is lost when the file is written again.

    Raises:
        ConfigError: the file can't be read or understood.
    """
    try:
        return _SHARES.validate_json(home.engines.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:  # pydantic's errors are ValueErrors, and quote what they were given
        error = error if isinstance(error, OSError) else ValueError("its content is not what Paceline writes")
        raise ConfigError(f"{home.engines} can't be read: {printable(str(error))}", "Remove it, and share the engines again.") from error


def write_shares(home: Home, shares: Sequence[EngineShare]) -> None:
    """Write what is shared from now on, for its owner's eyes alone.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        write_file(home.engines, _SHARES.dump_json(tuple(shares), indent=1))
    except OSError as error:
        raise ConfigError(f"{home.engines} can't be written: {error.strerror}", WRITABLE_HINT) from error


def add_share(home: Home, share: EngineShare) -> None:
    """Share an engine from now on. It takes the place of the one at the same URL.

    Raises:
        ConfigError: the file can't be read, understood or written.
    """
    write_shares(home, [*(one for one in read_shares(home) if one.url != share.url), share])


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address means this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_at_home(host: str) -> bool:
    """Return whether all addresses of a host are private ones. A name that means nothing now may mean anything later, so it is not."""
    try:
        found = {ip_address(str(each[4][0]).partition("%")[0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):
        return False
    return bool(found) and all(_is_private(each) for each in found)


def _is_private(address: IPv4Address | IPv6Address) -> bool:
    return address.is_private or address.is_link_local
