"""With an empty kernel cache, on one core that others want too, a load compiles all that its answers take: what begins once it is loaded counts no compiling."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends import cpu

ROOT = Path(__file__).parents[3]
WORK = """
import asyncio, os
from pathlib import Path
import numpy as np
from tests.fakes.seeded_models import TINY, write_gguf
from tests.unit.machine.test_host import drain
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import LayerRange
from paceline.engine.local import row_plan
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.node.build import build_node

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.nice(10)
home = Path(os.environ["PACELINE_HOME"])

def compiled():
    return {path.name for path in (home / "cache" / "kernels").rglob("*.nb?")}

def settled(what, before):
    assert before and compiled() == before, (what, sorted(compiled() - before))

settings = NodeSettings(str(write_gguf(home / "tiny.gguf", TINY, "Q8_0")), kv_tokens=512, context=256, threads=1, draft="ngram")
node = build_node(settings)
before = compiled()

async def answers():
    for number, sampling in enumerate((SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=5, top_p=0.9, logprobs=2, seed=1))):
        asked = GenerationRequest(RequestId(str(number)), tuple(range(3, 67)), 24, sampling, ignore_eos=True)
        await drain(node.host.generate("tiny", asked))

asyncio.run(answers())
settled("a model", before)
node.close()
stage = set_up(settings).load(LayerRange(0, 1), 16, 64, edges=False)
before = compiled()
nothing = row_plan([1], [0], [0], np.zeros((1, 1), np.int32))
stage.rehearse_layers(np.zeros((1, TINY.hidden), np.uint16), nothing, stage.layers)
settled("a stage", before)
print("settled")
"""


@pytest.mark.whole("it compiles every kernel: a minute and more")
@pytest.mark.skipif(not cpu.runs_here() or not hasattr(os, "sched_setaffinity"), reason="compiled kernels, and Linux")
@pytest.mark.timeout(1200)
def test_once_loaded_nothing_is_compiled(tmp_path: Path) -> None:
    env = {**os.environ, "PACELINE_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    env.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", WORK], env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1100)
    assert done.stdout.endswith("settled\n"), done.stderr
