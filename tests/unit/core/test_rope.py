"""Frequencies against transformers, which took Llama 3.1's scaling from Meta's release."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.model import RopeSpec
from paceline.core.weights import inverse_frequencies


def test_llama3_scaling_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, head_dim=128, rope_parameters=scaling, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(500000.0, llama3=(8.0, 1.0, 4.0, 8192)), 128), expected.numpy(), rtol=1e-5)


def test_linear_scaling_divides() -> None:
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(1e4, linear_factor=4.0), 64) * 4, inverse_frequencies(RopeSpec(1e4), 64))
