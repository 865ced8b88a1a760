"""The OpenAI API, SSE and metrics. Sees an inference protocol it owns, never the engine."""
