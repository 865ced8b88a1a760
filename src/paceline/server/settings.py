"""Settings of the server, and the cost of each tunable.

Bounds exist so that no client can hold memory, a connection or a KV block for as long as it likes.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.via import new_mark

MIB = 1 << 20
OWNER_HEADER = "x-paceline-owner"
"""Header of the owner's requests: it has the key from the note in the home."""
LEAST_KEY = 16
"""Letters of a key. Lowering it: keys that can be guessed."""
LEAST_LETTERS = 6
"""Different letters of a key. Raising it: keys that were drawn at random out of few letters are refused."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server. The defaults suit a machine that serves a household or a team."""

    api_key: str | None = field(default=None, repr=False)
    """Asked of every path but / and /health when set (as `Authorization: Bearer`, or as `x-api-key`)."""
    owner_key: str | None = field(default=None, repr=False)
    """Asked of what only this machine's owner may do, in a header of its own; None: it is not served."""
    allow_hosts: tuple[str, ...] = ()
    """Names of this machine in addition to localhost, in lower case. Checked if no key is set: an evil page may have its own name looked up here."""
    allow_origins: tuple[str, ...] = ()
    """Web pages that may use the API, as `guard.check_origin` writes them."""
    served_names: tuple[str, ...] = ()
    """Names that mean this machine's model too, for clients that ask for one name only."""
    ways: tuple[str, ...] = ("alone",)
    """Names of ways of spreading work that a request may use."""
    exact: bool = False
    """Every request is exact, whether or not it says so."""
    uses_model_sampling: bool = True
    """Sampling values that a request leaves out come from the model's own files; otherwise they are OpenAI's defaults."""
    keep_client_headers: bool = False
    """Render the lines that clients change from request to request (`messages.without_headers`). Setting it: their prompts have no beginning in common."""
    mark: str = field(default_factory=new_mark)
    """This process's mark on requests that leave it; one that comes back with it is refused. See `core.via`."""
    max_body_bytes: int = 16 * MIB
    """Longest request body. Raising it lets one request hold the event loop longer (parsing is about 1 ms a megabyte)."""
    max_pending_body_bytes: int = 256 * MIB
    """Bodies being read or parsed, in all; beyond it new ones get 429. Raising it costs that much memory under attack."""
    max_requests: int = 1024
    """Requests in flight, waiting ones included; beyond it 429. The engine's own queue is usually the tighter bound."""
    max_connections: int = 4096
    """Open sockets; beyond it those of the address that has the most make way, or get 429. Raising it costs file descriptors."""
    request_timeout_s: float = 30.0
    """For a whole request (headers and body) to arrive. Raising it lets half-open connections live longer."""
    idle_timeout_s: float = 75.0
    """Between two requests of a kept-alive connection. Raising it costs idle sockets; lowering it, reconnects."""
    slow_reader_timeout_s: float = 30.0
    """For a client that stopped reading its stream. Raising it holds that client's KV blocks longer."""
    comment_s: float = 10.0
    """Longest silence in a stream: a comment ends it, so that nothing on the way takes the connection for dead. A request that waits for its first
    token for so long has its status, 200, sent then. Raising it: proxies give up sooner than answers come."""
    kept_responses: int = 1024
    """Responses kept for `previous_response_id`, of all clients. Raising it: conversations may be picked up again after more others."""
    kept_responses_bytes: int = 64 * MIB
    """The same by their length. Raising it costs that much memory."""
    kept_responses_age_s: float = 24 * 3600.0
    """Since a response was last used. Raising it: what clients said stays in memory longer."""
    stall_after_s: float = 30.0
    """Busy without a finished step, or a part of one, for so long is unhealthy, or for several times as long as steps take here."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with the chain above it, and its key."""

    certificate: Path
    key: Path
    own: bool = False
    """Made by this machine: clients are given the file, and no authority knows it."""

    def context(self) -> ssl.SSLContext:
        """TLS 1.3 with them.

        Raises:
            ConfigError: they can't be read, or don't belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        for path in (self.certificate, self.key):
            if not path.is_file():
                raise ConfigError(f"There is no file {path}", "Give a certificate and its key, both PEM.")
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.certificate} and {self.key} can't be used for TLS: {error}",
                "Give a certificate and its key, both PEM, without a password.",
            ) from error
        return context


def _no_password() -> bytes:
    """Refuse keys with a password, instead of asking for it at the terminal."""
    raise ValueError("the key has a password")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. A name other than localhost counts as reachable from elsewhere."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, api_key: str | None) -> None:
    """Refuse to open the API to a network without a key.

    Raises:
        ConfigError: `host` is not loopback and no key is given, or the key can't travel in a header or can be guessed.
    """
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip() or not api_key):
        raise ConfigError("The API key is empty or has characters a header can't carry", "Use printable ASCII without spaces around it.")
    if api_key is not None and len(api_key) < LEAST_KEY:
        raise ConfigError(f"The API key has fewer than {LEAST_KEY} letters and can be guessed", "Make one: openssl rand -hex 16")
    if api_key is not None and (len(set(api_key)) < LEAST_LETTERS or re.fullmatch(r"(.+?)\1+", api_key)):
        raise ConfigError("The API key repeats itself and can be guessed", "Make one: openssl rand -hex 16")
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"Refusing to listen on {host or 'every interface'} without an API key: anyone on that network could use this machine",
            "Give a key with --api-key-file FILE or PACELINE_API_KEY, or leave out --host, which listens on 127.0.0.1 then.",
        )
