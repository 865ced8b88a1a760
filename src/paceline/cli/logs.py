"""The log of `paceline up`: a message is a line, whatever a client or another node wrote into it."""

from __future__ import annotations

import logging

from paceline.core.text import escaped


class OneLine(logging.Formatter):
    """Escapes each message, and indents the lines of tracebacks, so that no text from outside begins a line or commands a terminal.

    gRPC logs a traceback where a caller hangs up in the middle of a message; of its records the error alone is written.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = [escaped(record.getMessage())]
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name.startswith("grpc."):
            lines[0] += f" ({escaped(repr(error))})"
        elif record.exc_info:
            lines += map(escaped, self.formatException(record.exc_info).split("\n"))
        if record.stack_info:
            lines += map(escaped, record.stack_info.split("\n"))
        return "\n  ".join(lines)


def write_log(level: str) -> None:
    """Write the log of this process to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=level, handlers=[handler])
