"""The numerics id of these kernels on this machine, and a refusal to run where they do not hold the rules (`backends.numerics`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.backends import numerics
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.weights import pack_model, uniform_forms
from paceline.core.errors import PacelineError
from paceline.core.model import ModelSpec, WeightsFormat
from paceline.core.weights import WeightSource


def numerics_id(spec: ModelSpec, weights: WeightsFormat, threads: int) -> str:
    """Hex id of what the kernels compute for a family and a weights format, on one thread and on as many as are in use.

    Raises:
        PacelineError: batching or threads changed a byte: these kernels can't be trusted here.
    """

    def make(source: WeightSource, count: int) -> CpuRunner:
        model = pack_model(source, source.spec.all_layers, uniform_forms(weights), edges=True)
        return CpuRunner(model, n_blocks=4, threads=count, numerics_id="", max_rows=64)

    def to_bytes(x_TD: npt.NDArray[np.uint16]) -> bytes:
        return x_TD.tobytes()

    measured = numerics.measure(make, spec, {1, threads}, to_bytes, f"cpu-avx512bf16-{weights}")
    if not measured.holds_identity:
        raise PacelineError(
            f"The compiled kernels gave other bytes for other cuts of one prompt, on 1 or {threads} threads",
            "This breaks the promise that batching changes nothing; run with --device torch-cpu and report the processor.",
        )
    return measured.id
