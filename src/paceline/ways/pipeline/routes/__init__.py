"""Pipelines that this node orchestrates: which machines, the sessions with them, and the engine on top."""
