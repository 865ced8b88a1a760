"""Which device runs a model here: a function of the model, of what was asked, and of what a GPU says of itself, which stands in a table here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.options import DeviceKind
from paceline.backends.table import Kernels, fastest_on_processors
from paceline.core.errors import ConfigError
from paceline.core.ids import NodeId
from paceline.core.model import LongContext, RopeSpec, WeightsFormat
from paceline.machine import devices, setup
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.store.catalog import open_model

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
    made = set_up(NodeSettings(weights=weights), spread=spread)
    assert made.kernels is kernels
    assert [note for note in made.notes if note.startswith("the GPU")] == ([] if not said else [made.notes[0]])
    assert not said or made.notes[0].startswith(said)


@pytest.mark.parametrize(("spread", "tensor_on"), [(True, ()), (False, (None, NodeId("other")))])
def test_a_context_beyond_the_first_rope_is_one_machines(
    monkeypatch: pytest.MonkeyPatch, tensor_on: tuple[NodeId | None, ...], *, spread: bool
) -> None:
    """Others open the model for themselves, by its first rope."""
    model = open_model("smollm2-135m")
    further = LongContext(2 * model.spec.max_context, RopeSpec(1e6))
    monkeypatch.setattr(setup, "open_model", lambda _: replace(model, spec=replace(model.spec, long=further)))
    settings = NodeSettings(context=further.tokens, tensor=(1.0, 1.0), tensor_on=tensor_on)
    with pytest.raises(ConfigError, match="beyond 8192 tokens smollm2-135m has another rope"):
        set_up(settings, spread=spread)
    assert set_up(replace(settings, tensor_on=())).opened.spec.max_context == further.tokens
    assert set_up(replace(settings, context=8192), spread=spread).opened.spec.long is further


def test_ranks_of_a_machine_with_a_gpu_run_on_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "fastest_device", lambda: DeviceKind.CUDA)
    monkeypatch.setattr(devices, "free_device_bytes", lambda: LARGE)
    made = set_up(NodeSettings(tensor=(1.0, 1.0)))
    assert (made.kernels, made.notes[0]) == (PROCESSORS, "the GPU is not used: tensor ranks run in compiled kernels")


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"is_available": False}, "torch sees no CUDA device"),
        ({"get_device_capability": (7, 5)}, "RTX 2080 has compute capability 7.5, and attention takes 8.0"),
        ({}, None),
    ],
    ids=str,
)
def test_a_gpu_that_can_not_be_used_is_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: dict[str, Any], said: str | None
) -> None:
    monkeypatch.setattr(devices, "_DRIVERS", (tmp_path,))
    answers = {"is_available": True, "get_device_capability": (8, 0), "get_device_name": "RTX 2080", **seen}
    cuda = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
    monkeypatch.setattr(devices, "import_cuda", lambda: cuda)
    monkeypatch.setattr(devices, "free_device_bytes", lambda: LARGE)
    assert devices.fastest_device() is (DeviceKind.CPU if said else DeviceKind.CUDA)
    notes = [note for note in set_up(NodeSettings()).notes if note.startswith("the GPU")]
    assert notes == ([f"the GPU is not used: {said}"] if said else [])


def test_a_gpu_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_NVIDIA", (tmp_path,))
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    made = set_up(NodeSettings())
    assert (made.kernels, made.notes[0]) == (PROCESSORS, "the GPU is not used: torch is not installed (pip install 'paceline[torch]')")
