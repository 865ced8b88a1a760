"""Which device runs a model here: a function of the model, of what was asked, and of what a GPU says of itself, which stands in a table here."""

from __future__ import annotations

import pytest

from paceline.backends.options import DeviceKind
from paceline.backends.table import Kernels, fastest_on_processors
from paceline.core.model import WeightsFormat
from paceline.machine import devices
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up

PROCESSORS = fastest_on_processors()
SMALL, LARGE = 200 << 20, 8 << 30
"""The bundled model takes 257 MiB in bf16."""


@pytest.mark.parametrize(
    ("gpu_bytes", "weights", "spread", "kernels", "said"),
    [
        (LARGE, None, False, Kernels.CUDA, ""),
        (SMALL, None, False, PROCESSORS, "the GPU is not used: in bf16 the weights need"),
        (SMALL, WeightsFormat.BF16, False, PROCESSORS, "the GPU is not used: in bf16 the weights need"),
        (LARGE, None, True, PROCESSORS, ""),
        # Of several machines, each takes as many layers as the plan says: the whole need not fit.
        (SMALL, WeightsFormat.BF16, True, Kernels.CUDA, ""),
    ],
)
def test_the_gpu_is_used_where_what_it_is_to_hold_fits(
    monkeypatch: pytest.MonkeyPatch, gpu_bytes: int, weights: WeightsFormat | None, spread: bool, kernels: Kernels, said: str
) -> None:
    monkeypatch.setattr(devices, "fastest_device", lambda: DeviceKind.CUDA)
    monkeypatch.setattr(devices, "free_device_bytes", lambda: gpu_bytes)
    setup = set_up(NodeSettings(weights=weights), spread=spread)
    assert setup.kernels is kernels
    assert [note for note in setup.notes if note.startswith("the GPU")] == ([] if not said else [setup.notes[0]])
    assert not said or setup.notes[0].startswith(said)
