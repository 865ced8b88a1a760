"""Options that several commands have.

The commands as a group: a value that an option can't take is said in a person's words, with what was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.backends.table import Kernels
from paceline.core.errors import ConfigError
from paceline.core.model import WeightsFormat
from paceline.machine.settings import PrefillRole

WHY = {
    "int_parsing": "is no whole number",
    "int_from_float": "is no whole number",
    "int_parsing_size": "is too large a number",
    "float_parsing": "is no number",
    "less_than_equal": "is more than {le:g}",
    "greater_than_equal": "is less than {ge:g}",
}
"""By the kind of pydantic's error, which reads typer's values. Of other kinds typer says it in words of its own."""


class Commands(TyperGroup):
    """Typer's, but for what it says of wrong numbers."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command asked for.

        Raises:
            ConfigError: an option's value is no number, or out of its range.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
            if error.param is None or not details or details[0]["type"] not in WHY:
                raise
            why = WHY[details[0]["type"]].format_map(details[0].get("ctx", {}))
            help_ = f"{(error.ctx or ctx).command_path} --help"
            raise ConfigError(f"{error.param.opts[0]}: {details[0]['input']!r} {why}", f"This says what it takes: {help_}") from None


Model = Annotated[str, typer.Option("--model", "-m", help="A model's name, a folder, or a GGUF file.", show_default=True)]
Weights = Annotated[
    WeightsFormat | None, typer.Option("--weights", "-w", help="Format in memory. Default: as the file has it.", rich_help_panel="Model")
]
KvTokens = Annotated[
    int | None, typer.Option("--kv-tokens", min=16, help="Tokens of KV to hold. Default: by free memory.", rich_help_panel="Model")
]
KvDisk = Annotated[
    str | None,
    typer.Option(
        "--kv-disk",
        metavar="SIZE",
        help="Keep KV on this disk, at most so much: 20GB, say. Prompts are then known after a restart, to whoever reads the disk too.",
        rich_help_panel="Model",
    ),
]
Role = Annotated[
    PrefillRole | None,
    typer.Option(
        "--role",
        help="In a fleet: compute prompts for others (prefill), have others compute this machine's (decode), or both, where it is faster. Default: both.",
        rich_help_panel="Fleet",
    ),
]
Context = Annotated[
    int | None, typer.Option("--context", min=16, help="Longest prompt and answer together. Default: the model's.", rich_help_panel="Model")
]
Device = Annotated[
    Kernels | None,
    typer.Option(
        "--device", "-d", metavar="<kernels>", help=f"{', '.join(Kernels)}. Default: the fastest that apply.", rich_help_panel="Model"
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Default: one a physical core.", rich_help_panel="Model")]
MaxRunning = Annotated[
    int, typer.Option("--max-running", min=1, max=64, help="Answers generated side by side; others wait.", rich_help_panel="Model")
]
PrefillChunk = Annotated[
    int,
    typer.Option("--prefill-chunk", min=16, max=4096, help="Prompt tokens in one step while nothing else waits.", rich_help_panel="Model"),
]
StepBudgetMs = Annotated[
    int,
    typer.Option(
        "--step-budget-ms",
        min=1,
        max=60_000,
        help="What a step may take while an answer waits for its next token.",
        rich_help_panel="Model",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="auto|off|ngram|fleet|MODEL",
        help="Guess tokens ahead, with a model of the fleet or without. Changes no byte.",
        rich_help_panel="Drafts",
    ),
]
AllowUnlike = Annotated[
    bool | None,
    typer.Option(
        "--allow-unlike/--no-allow-unlike",
        help="Machines that compute other bytes than one another may share a model.",
        rich_help_panel="Pipeline",
    ),
]
PinDraft = Annotated[
    str | None, typer.Option("--pin-draft", metavar="NODE", help="The machine that drafts, and no other.", rich_help_panel="Drafts")
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="A file with the key, in place of --api-key.", rich_help_panel="Server")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
PromptTokens = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")]
AnswerTokens = Annotated[int, typer.Option("--answer", min=2, help="Tokens of each answer.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Medians are over these.")]
Pins = Annotated[list[str] | None, typer.Option("--pin", help="NODE or NODE:FIRST-LAST: who runs layers. Once for each machine.")]
OwnLayers = Annotated[int | None, typer.Option("--own-layers", min=0, help="How many a pipeline runs here. Default: as planned.")]


LEAST_DISK = 1 << 20


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
        raise ConfigError(f"--kv-disk {text} is too little to keep anything", "Ask for 1 GB or more, or leave it out.")
    return size
