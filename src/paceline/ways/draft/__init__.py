"""Tokens that another machine, or a smaller model, guesses: speculative decoding."""
