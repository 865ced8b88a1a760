"""Every lowering that this processor has the instructions of computes the same bytes, and they are those that other processors compute."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.backends import cpu
from paceline.backends.cpu import Lowering
from paceline.backends.options import LoadOptions
from paceline.backends.table import Kernels, choose, fastest_on_processors
from paceline.core.errors import ConfigError
from paceline.core.model import Activation, LowRank, ModelSpec, MoeSpec, Multipliers, Norms, RopeSpec, WeightsFormat, WindowSpec

SPEC = ModelSpec("llama", 1, 256, 8, 2, 32, 512, 1000, 256, 1e-5, RopeSpec(10000.0), tied_head=True)
IDENTITY = "001c16de12e6c649"
"""The numerics id of all forms."""
EVERY_PART = replace(
    SPEC, head_dim=64, rope=RopeSpec(10000.0, dims=32, gain=1.25), qk_norm=True, qk_norm_whole=True, norms=Norms.AROUND,
    activation=Activation.GELU_TANH, scales=Multipliers(12.0, 0.12, 0.22, 0.125), window=WindowSpec(64, (True,), RopeSpec(1000.0, dims=32)),
    out_bias=True, sinks=True,
)  # fmt: skip
MIXTURE = replace(
    SPEC, moe=MoeSpec(8, 3, 512, norm_topk=True, biased=True), qkv_bias=True, out_bias=True, sinks=True, activation=Activation.CLAMPED
)
"""What no model has together: each part that some family has."""
LOW_RANK = replace(
    SPEC, n_kv_heads=8, head_dim=96, rope=RopeSpec(10000.0, dims=32), low=LowRank(768, 256, 64), scales=Multipliers(12.0, None, 0.5, 0.1)
)
IDENTITIES = {
    "plain": (SPEC, IDENTITY),
    "every part": (EVERY_PART, "53b06c9d2010964f"),
    "mixture": (MIXTURE, "6557ad5320a68788"),
    "low rank": (LOW_RANK, "1448f7c676bc1f3c"),
}
MEASURE = """
import sys
from paceline.backends import cpu
cpu.use_lowering(cpu.Lowering(sys.argv[1]))
from paceline.backends import kernel_cache
from paceline.store.home import Home
kernel_cache.use(Home.from_environment().kernels)
from tests.unit.backends.cpu.test_lowerings import IDENTITIES
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.probe import numerics_id
print(numerics_id(IDENTITIES[sys.argv[2]][0], set(Form), 2))
"""

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", IDENTITIES)
@pytest.mark.parametrize("lowering", cpu.lowerings_here())
def test_all_forms_have_one_numerics_id_everywhere(lowering: Lowering, model: str) -> None:
    process = subprocess.run([sys.executable, "-c", MEASURE, lowering, model], capture_output=True, text=True, check=False)
    assert process.stdout.strip() == IDENTITIES[model][1], process.stderr


def test_the_table_takes_the_fastest_and_what_is_asked_for() -> None:
    fastest, *_ = here = [Kernels(f"cpu-{lowering}") for lowering in cpu.lowerings_here()]
    assert fastest is fastest_on_processors() is choose(SPEC, WeightsFormat.STORED)
    for kernels in here:
        assert choose(SPEC, WeightsFormat.STORED, asked=kernels) is kernels
    for lowering in set(Lowering) - set(cpu.lowerings_here()):
        with pytest.raises(ConfigError, match=f"--device cpu-{lowering} can't run this model here: this processor has no {lowering}"):
            choose(SPEC, WeightsFormat.STORED, asked=Kernels(f"cpu-{lowering}"))


def test_one_process_runs_one_lowering() -> None:
    from paceline.backends.cpu import lowering as imported  # noqa: F401 - what fixes the choice

    other = next(each for each in Lowering if each is not cpu.lowering_in_use())
    with pytest.raises(ConfigError, match="this process runs kernels of"):
        cpu.load(None, LoadOptions(SPEC.all_layers, WeightsFormat.BF16, 2, 16, 1), lowering=other)  # type: ignore[arg-type]
