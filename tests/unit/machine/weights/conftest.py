"""Models to give away, and a fleet to give them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.machine.weights.nodes import Fleet
from tests.unit.store.conftest import VOCAB, write_folder

from paceline.core.model import ModelSpec, RopeSpec
from paceline.core.weights import tensor_shapes
from paceline.store.catalog import open_model
from paceline.store.home import Home
from paceline.store.pull import pull
from paceline.store.selection import INDEX

SHARDED = ModelSpec(
    model_type="llama", n_layers=6, hidden=256, n_heads=4, n_kv_heads=2, head_dim=64, ffn=512, vocab=VOCAB, max_context=128,
    rms_eps=1e-5, rope=RopeSpec(10000.0), tied_head=False,
)  # fmt: skip
"""14 MiB, 2.2 a layer."""


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def new_home(tmp_path: Path) -> Callable[[str], Home]:
    return lambda name: Home(tmp_path / name)


@pytest.fixture
def sharded(tmp_path: Path, new_home: Callable[[str], Home]) -> tuple[Home, str]:
    """A home with a model of three safetensors shards, called `sharded`, and the model's digest."""
    folder = tmp_path / "made" / "sharded"
    write_folder(
        folder, {}, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    (folder / "model.safetensors").unlink()
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, np.float32) / 16 for name, shape in tensor_shapes(SHARDED).items()}
    names = sorted(tensors)
    index = {name: f"model-0000{1 + 3 * at // len(names)}-of-00003.safetensors" for at, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    home = new_home("giver")
    pull(str(folder), home, lambda done, total: None)
    return home, open_model("sharded", home).weights.digest


@pytest.fixture
def bundled(bundled_gguf: Path, new_home: Callable[[str], Home]) -> tuple[Home, str]:
    """A home with the bundled model under its own name, and the model's digest."""
    home = new_home("giver")
    return home, open_model("smollm2-135m", home).weights.digest
