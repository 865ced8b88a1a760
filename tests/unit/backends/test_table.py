from __future__ import annotations

from dataclasses import replace

import pytest
from tests.conformance.test_layer_runners import LLAMA

from paceline.backends import cpu, instructions, table
from paceline.backends.table import Kernels, choose, fastest_on_processors
from paceline.core.errors import ConfigError, UnsupportedModel
from paceline.core.model import ModelSpec, MoeSpec, WeightsFormat

ODD = {
    "heads of 320": replace(LLAMA, head_dim=320),
    "heads of which 80 dimensions turn": replace(LLAMA, head_dim=80, qk_norm=True),
    "hidden is not a multiple of 32, and the norms of its heads": replace(LLAMA, hidden=LLAMA.hidden + 16, qk_norm=True),
    "layers of 1024 experts": replace(LLAMA, moe=MoeSpec(1024, 2, 64, norm_topk=True)),
}


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no compiled kernels")
@pytest.mark.parametrize("weights", list(WeightsFormat))
@pytest.mark.parametrize(("reason", "spec"), list(ODD.items()))
def test_what_compiled_kernels_do_not_run_is_refused_and_runs_in_torch_only_where_that_is_asked_for(
    reason: str, spec: ModelSpec, weights: WeightsFormat
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        choose(spec, weights)
    assert "--device torch-cpu" in refused.value.hint
    if weights in {WeightsFormat.INT4, WeightsFormat.INT8}:
        with pytest.raises(ConfigError, match="holds bf16"):
            choose(spec, weights, asked=Kernels.TORCH)
    else:
        assert choose(spec, weights, asked=Kernels.TORCH) is Kernels.TORCH
    assert choose(LLAMA, weights) is fastest_on_processors() is not Kernels.TORCH


def test_a_processor_without_compiled_kernels_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "runs_here", lambda: False)
    assert choose(LLAMA, WeightsFormat.STORED) is Kernels.TORCH


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no compiled kernels")
def test_torch_that_is_missing_is_said_of_what_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedModel, match=r"^--device torch-cpu was asked for, and torch is not installed") as refused:
        choose(LLAMA, WeightsFormat.BF16, asked=Kernels.TORCH)
    assert "paceline[torch]" in refused.value.hint
    monkeypatch.setattr(instructions, "runs_here", lambda: False)
    with pytest.raises(UnsupportedModel, match=r"^This model needs torch here \(this processor has no \w"):
        choose(LLAMA, WeightsFormat.BF16)
