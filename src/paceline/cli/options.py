"""Options that several commands share, by the panel of `--help` that lists them, and the API options of `paceline up`: address, key, origins and TLS.

The commands are a group of Typer's that reports a wrong value in plain words, together with the value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from typer.core import TyperGroup

from paceline.backends.table import Kernels
from paceline.core.errors import ConfigError
from paceline.core.ids import NodeId
from paceline.core.model import WeightsFormat
from paceline.machine.settings import PrefillRole
from paceline.server.settings import ServerSettings, TlsFiles, check_bind, is_loopback

MAX_KEY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ApiOptions:
    host: str = "127.0.0.1"
    port: int = 0
    settings: ServerSettings = field(default_factory=ServerSettings)
    tls: bool = False
    """With a certificate that this machine makes for itself."""
    certificate: Path | None = None
    key: Path | None = None
    """Private key of the given certificate."""

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
        """Return the files to serve TLS with, checked; None without TLS.

        Raises:
            ConfigError: the certificate or the key can't be used.
        """
        if not self.is_encrypted:
            return None
        if self.certificate is not None and self.key is not None:
            files = TlsFiles(self.certificate, self.key)
        else:
            from paceline.server.serve import own_certificate
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
    """Read a key from an option or a file. All users of the machine can see a command's arguments; a file can be private.

    Raises:
        ConfigError: both were given, the file can't be read, or it is too long for a key.
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


WHY = {
    "int_parsing": "is not an integer",
    "int_from_float": "is not an integer",
    "int_parsing_size": "is too large a number",
    "float_parsing": "is not a number",
    "less_than_equal": "is more than {le:g}",
    "greater_than_equal": "is less than {ge:g}",
}
"""By the kind of pydantic's error, which reads typer's values. Of a word that is none of those that are taken it lists them."""


class Commands(TyperGroup):
    """Typer's group, with its own messages for wrong values."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command asked for.

        Raises:
            ConfigError: an option's value is not a number, or out of its range.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
            if error.param is None or not details or details[0]["type"] not in {*WHY, "value_error"}:
                raise
            listed = str(details[0]["msg"]).removeprefix("Value error, ").removeprefix(f"{details[0]['input']!r} ").rstrip(".")
            why = WHY.get(details[0]["type"], listed).format_map(details[0].get("ctx", {}))
            help_ = f"{(error.ctx or ctx).command_path} --help"
            raise ConfigError(f"{error.param.opts[0]}: {details[0]['input']!r} {why}", f"This says what it takes: {help_}") from None


def up_params(context: typer.Context, flags: Sequence[str]) -> dict[str, Any]:
    """Parse flags as `paceline up` does, for a command that passes them on. Raises the errors of `paceline up` for flags that it does not take."""
    commands = context.find_root().command
    assert isinstance(commands, TyperGroup)
    return commands.commands["up"].make_context(context.info_name, [*flags], context.parent).params


def _in_panel(name: str) -> Callable[..., Any]:
    return partial(typer.Option, rich_help_panel=name)


of_model, of_server, of_fleet, of_pipeline, of_drafts = map(_in_panel, ("Model", "Server", "Fleet", "Pipeline", "Drafts"))
PORTS: Final = {"min": 0, "max": 65535}
PIN_HELP: Final = "NODE or NODE:FIRST-LAST: who runs layers. Once for each machine."
OWN_LAYERS_HELP: Final = "How many a pipeline runs here. Default: as planned."
KV_DISK_HELP: Final = (
    "Keep KV on this disk, at most so much: 20GB, say. Prompts are then known after a restart, to whoever reads the disk too."
)
ROLE_HELP: Final = "In a fleet: compute prompts for others (prefill), have others compute this machine's (decode), or both, where it is faster. Default: both."

Model = Annotated[str, typer.Option("--model", "-m", help="A model's name, a folder, or a GGUF file.", show_default=True)]
Weights = Annotated[WeightsFormat | None, of_model("--weights", "-w", help="Format in memory. Default: as the file has it.")]
KvTokens = Annotated[int | None, of_model("--kv-tokens", min=16, help="Tokens of KV to hold. Default: by free memory.")]
KvDisk = Annotated[str | None, of_model("--kv-disk", metavar="SIZE", help=KV_DISK_HELP)]
Role = Annotated[PrefillRole | None, of_fleet("--role", help=ROLE_HELP)]
Context = Annotated[int | None, of_model("--context", min=16, help="Longest prompt and answer together. Default: the model's.")]
Device = Annotated[
    Kernels | None,
    of_model(
        "--device",
        "-d",
        metavar="<kernels>",
        help=f"{', '.join(Kernels)}. What is of processors runs layers for other machines too. Default: the fastest that apply.",
    ),
]
Tensor = Annotated[
    str,
    of_model(
        "--tensor",
        metavar="RANKS",
        help="Share each layer among so many processes of this machine; 2:1 for two, the first twice as fast; 2:1@desktop, the other on "
        "that machine of the fleet. Changes no byte.",
    ),
]
Threads = Annotated[int | None, of_model("--threads", "-t", min=1, help="Default: one a physical core.")]
MaxRunning = Annotated[int, of_model("--max-running", min=1, max=64, help="Answers generated side by side; others wait.")]
PrefillChunk = Annotated[int, of_model("--prefill-chunk", min=16, max=4096, help="Prompt tokens in one step while nothing else waits.")]
StepBudgetMs = Annotated[
    int, of_model("--step-budget-ms", min=1, max=60_000, help="What a step may take while an answer waits for its next token.")
]
Draft = Annotated[
    str,
    of_drafts(
        "--draft", metavar="auto|off|ngram|fleet|MODEL", help="Guess tokens ahead, with a model of the fleet or without. Changes no byte."
    ),
]
Exact = Annotated[
    bool | None,
    of_fleet(
        "--exact/--no-exact",
        help="Only machines that compute the same bytes share a model or continue one another's answers. Default: the fastest do.",
    ),
]
PinDraft = Annotated[str | None, of_drafts("--pin-draft", metavar="NODE", help="The machine that drafts, and no other.")]
ApiKeyFile = Annotated[Path | None, of_server("--api-key-file", help="A file with the key, in place of --api-key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
PromptTokens = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")]
AnswerTokens = Annotated[int, typer.Option("--answer", min=2, help="Tokens of each answer.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Medians are over these.")]
Streams = Annotated[str, typer.Option("--streams", help="Answers side by side, measured one after the other.")]
Pins = Annotated[list[str] | None, typer.Option("--pin", help=PIN_HELP)]
OwnLayers = Annotated[int | None, typer.Option("--own-layers", min=0, help=OWN_LAYERS_HELP)]


LEAST_DISK = 1 << 20


MOST_RANKS: Final = 16


def tensor_speeds(text: str) -> tuple[float, ...]:
    """Speeds of tensor ranks, as a person names them: how many, or each one's.

    Raises:
        ConfigError: they are none.
    """
    try:
        numbers = [float(part.partition("@")[0]) for part in text.split(":")]
        speeds = tuple(numbers) if len(numbers) > 1 else (1.0,) * int(text)
    except ValueError:
        speeds = ()
    if not 1 <= len(speeds) <= MOST_RANKS or not all(0.01 <= speed <= 100 for speed in speeds):
        raise ConfigError(f"--tensor {text!r} says no ranks", f"Write how many, 1 to {MOST_RANKS}, or their speeds, like 2:1.")
    return speeds


def tensor_nodes(text: str) -> tuple[NodeId | None, ...]:
    """Return the nodes that a person names for tensor ranks, with None for this machine; empty if all ranks are here.

    Raises:
        ConfigError: the first rank is elsewhere, or a name is missing.
    """
    named = [part.partition("@")[1:] for part in text.split(":")]
    if named[0][0] or any(at and not name for at, name in named):
        raise ConfigError(f"--tensor {text!r} names no machines for its ranks", "The first is this one's: write it like 2:1@desktop.")
    return tuple(NodeId(name) if at else None for at, name in named) if any(name for _, name in named) else ()


def disk_size(text: str | None) -> int:
    """Bytes, of a size as people write it; 0 where there is none.

    Raises:
        ConfigError: it is none, or next to nothing.
    """
    if text is None:
        return 0
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"--kv-disk {text!r} is no size", "Write it like 20GB, or 500MB.") from None
    if size < LEAST_DISK:
        raise ConfigError(f"--kv-disk {text} is too little to keep anything", "Ask for 1MB or more (20GB is usual), or leave it out.")
    return size
