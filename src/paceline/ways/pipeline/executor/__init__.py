"""Executors made of executors: one model over several machines. Knows the engine's protocols, not their transports."""
