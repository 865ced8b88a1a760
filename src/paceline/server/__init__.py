"""The APIs, SSE, metrics and pages over `core.inference`. Never sees the engine."""
