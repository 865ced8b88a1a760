"""What bounds a pipeline's waits and batches. Each field says what raising it costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Bounds of one pipeline."""

    stall_s: float = 2.0
    """Without a batch coming out, beyond what its rows take. Raising it: a machine that hangs is noticed later."""
    search_s: float = 30.0
    """How long machines are looked for, or may load no further byte, before requests end with an error. Raising it: they wait longer where
    none come back."""
    prepare_s: float = 300.0
    """How long machines that have all bytes may go on: kernels are compiled. Raising it: one that hangs there is given up later."""
    alone_s: float = 30.0
    """How long this machine goes on alone, once it has to, before it looks for others again. Raising it: machines that come back are used later, and
    those that come and go hold up answers less often."""
    row_s: float = 0.01
    """What a row may take in all stages, until rows were seen. The bound on a stall grows with the rows under way."""
    look_s: float = 0.25
    """How long one look for machines may hold up the engine's thread."""
    max_rows: int = 1024
    max_context: int = 1 << 20
