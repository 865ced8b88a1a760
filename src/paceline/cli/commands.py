"""The commands as a group: a value that an option can't take is said in a person's words, with what was given."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from paceline.core.errors import ConfigError

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
