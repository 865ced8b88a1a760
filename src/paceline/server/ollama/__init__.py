"""Ollama's API over the server's own requests."""
