"""Paceline: one OpenAI endpoint out of the machines you already own."""

__version__ = "0.1.0"
