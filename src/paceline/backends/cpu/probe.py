"""The numerics id of these kernels on this machine (byte identity, rule 7), and a check that they hold the rules.

One seeded layer and head run a prompt whole and cut into chunks of 1, 2, 3, 16 and 17 rows, on one thread and on as many as are in
use. All must agree to the byte; the hash of what they agree on is the id. Shapes: T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.weights import PackedModel, pack_model
from paceline.core.errors import PacelineError
from paceline.core.model import ModelSpec, RopeSpec, WeightsFormat
from paceline.core.weights import DenseTensor, StoredTensor
from paceline.engine.local import RowPlan

ROWS = (33, 1, 2, 3, 16, 17)
_SEED = 20_26
_SPEC = ModelSpec(
    model_type="qwen3", n_layers=1, hidden=128, n_heads=6, n_kv_heads=2, head_dim=32, ffn=160, vocab=251, max_context=64, rms_eps=1e-6,
    rope=RopeSpec(10_000.0), tied_head=True, qkv_bias=True, qk_norm=True,
)  # fmt: skip


class _SeededWeights:
    """A `WeightSource` of random tensors: every machine draws the same."""

    spec = _SPEC
    digest = "seeded"

    def __init__(self) -> None:
        s = _SPEC
        heads, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
        layer = {
            "input_layernorm.weight": (s.hidden,), "post_attention_layernorm.weight": (s.hidden,),
            "self_attn.q_proj.weight": (heads, s.hidden), "self_attn.k_proj.weight": (kv, s.hidden), "self_attn.v_proj.weight": (kv, s.hidden),
            "self_attn.q_proj.bias": (heads,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,),
            "self_attn.q_norm.weight": (s.head_dim,), "self_attn.k_norm.weight": (s.head_dim,), "self_attn.o_proj.weight": (s.hidden, heads),
            "mlp.gate_proj.weight": (s.ffn, s.hidden), "mlp.up_proj.weight": (s.ffn, s.hidden), "mlp.down_proj.weight": (s.hidden, s.ffn),
        }  # fmt: skip
        self._shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
        self._shapes |= {"model.embed_tokens.weight": (s.vocab, s.hidden), "model.norm.weight": (s.hidden,)}
        rng = np.random.Generator(np.random.PCG64(_SEED))
        self._tensors = {name: rng.standard_normal(shape, np.float32) * np.float32(0.2) for name, shape in self._shapes.items()}

    def names(self) -> Iterable[str]:
        return self._tensors

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read(self, name: str) -> StoredTensor:
        return DenseTensor(self._tensors[name], "f32")


def numerics_id(weights: WeightsFormat, threads: int) -> str:
    """Hex id of what the kernels compute for a weights format.

    Raises:
        PacelineError: batching or threads changed a byte: these kernels can't be trusted here.
    """
    model = pack_model(_SeededWeights(), _SPEC.all_layers, weights, edges=True)
    answers = {(count, rows): _answer(model, count, rows) for count in {1, threads} for rows in ROWS}
    reference = answers[1, ROWS[0]]
    for (count, rows), answer in answers.items():
        if answer != reference:
            raise PacelineError(
                f"The compiled kernels gave other bytes for chunks of {rows} rows on {count} threads than for the whole prompt on one",
                "This breaks the promise that batching changes nothing; run with --device torch and report the processor.",
            )
    return hashlib.sha256(b"cpu-avx512bf16" + weights.encode() + reference).hexdigest()[:16]


def _answer(model: PackedModel, threads: int, rows: int) -> bytes:
    """Residual and logits of a prompt of 33 tokens, run `rows` at a time."""
    runner = CpuRunner(model, n_blocks=4, threads=threads, numerics_id="", max_rows=64)
    try:
        ids = np.arange(ROWS[0], dtype=np.int32) * 7 % _SPEC.vocab
        table = np.array([[2, 0, 3]], np.int32)
        answer: list[bytes] = []
        for first in range(0, len(ids), rows):
            chunk = ids[first : first + rows]
            one = np.array([0], np.int32)
            plan = RowPlan(one, np.array([len(chunk)], np.int32), np.array([first], np.int32), one, table)
            x_TD = runner.run_layers(runner.embed(chunk), plan)
            logits_TV = runner.logits(x_TD, np.arange(len(chunk), dtype=np.int32))
            answer += [x.tobytes() + row.tobytes() for x, row in zip(x_TD, logits_TV, strict=True)]
        return b"".join(answer)
    finally:
        runner.close()
