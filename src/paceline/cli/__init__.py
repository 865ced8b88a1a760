"""The command line: parses arguments and renders. Whatever takes time to import is imported by the command that needs it."""

from paceline.cli.app import main

__all__ = ["main"]
