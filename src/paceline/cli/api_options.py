"""What `paceline up` was told about its API: where it listens, its key, who else may ask, and TLS."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from paceline.core.errors import ConfigError
from paceline.server.settings import ServerSettings, TlsFiles, check_bind, is_loopback

MAX_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Of one endpoint."""

    host: str = "127.0.0.1"
    port: int = 0
    settings: ServerSettings = field(default_factory=ServerSettings)
    tls: bool = False
    """With a certificate that this machine makes for itself."""
    certificate: Path | None = None
    key: Path | None = None
    """Of a certificate that was given, in place of that."""

    @property
    def is_encrypted(self) -> bool:
        return self.tls or self.certificate is not None

    def check(self) -> None:
        """Refuse what can't be served, before anything is loaded.

        Raises:
            ConfigError: see `server.settings.check_bind`; or half of a certificate was given.
        """
        check_bind(self.host, self.settings.api_key)
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key go together, and one of them is missing", "Give both, or --tls alone.")

    def tls_files(self) -> TlsFiles | None:
        """What to serve TLS with, checked; None: there is none.

        Raises:
            ConfigError: it can't be used.
        """
        if not self.is_encrypted:
            return None
        if self.certificate is not None and self.key is not None:
            files = TlsFiles(self.certificate, self.key)
        else:
            from paceline.node.api_certificate import own_certificate
            from paceline.store.home import Home

            files = own_certificate(Home.from_environment(), self.settings.allow_hosts, time.time())
        files.context()
        return files

    def say_what_is_open(self, console: Console) -> None:
        """Warn of what others on the network can read."""
        if not self.is_encrypted and not is_loopback(self.host):
            console.print(
                "[yellow]warning:[/] the API is plain HTTP: on this network its key, prompts and answers can be read. --tls encrypts them.",
                soft_wrap=True,
            )


def server_settings(
    api_key: str | None,
    api_key_file: Path | None,
    allow_hosts: Sequence[str] | None,
    allow_origins: Sequence[str] | None,
    served_names: Sequence[str] | None,
    sampling_defaults: Literal["model", "openai"],
    *,
    keep_client_headers: bool = False,
) -> ServerSettings:
    """Settings as options say them.

    Raises:
        ConfigError: one can't be used.
    """
    from paceline.server.guard import check_host, check_origin

    return ServerSettings(
        api_key=read_key(api_key, api_key_file),
        allow_hosts=tuple(map(check_host, allow_hosts or ())),
        allow_origins=tuple(map(check_origin, allow_origins or ())),
        served_names=tuple(served_names or ()),
        uses_model_sampling=sampling_defaults == "model",
        keep_client_headers=keep_client_headers,
    )


def read_key(api_key: str | None, file: Path | None) -> str | None:
    """A key that was given, or that a file holds: a command's arguments can be seen by all users of the machine, a file need not be.

    Raises:
        ConfigError: both were given, or the file can't be read, or is no key's.
    """
    if file is None:
        return api_key
    if api_key is not None:
        raise ConfigError("There are two API keys: --api-key (or PACELINE_API_KEY) and --api-key-file", "Give one of them.")
    try:
        with file.expanduser().open("rb") as opened:
            key = opened.read(MAX_KEY_BYTES + 1)  # all of one file, whatever its name leads to meanwhile
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}", "Write the key into it, on one line.") from error
    if len(key) > MAX_KEY_BYTES:
        raise ConfigError(f"{file} has more than {MAX_KEY_BYTES} bytes, and no key is as long", "Write the key into it, on one line.")
    return key.decode("utf-8", "replace").strip()
