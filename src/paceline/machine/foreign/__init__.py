"""Engines of other makers as this machine's models: looked at, offered, and answered from."""
