"""Weights, tokenizers and models on disk; pulling them from a hub."""
