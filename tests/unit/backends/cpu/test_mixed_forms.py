"""Layers whose matrices are held in different forms, as files mix them: each product meets its own weights and activations, and no cut or thread changes a byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.backends.numerics import answer
from paceline.backends.quantize import round_to_bf16
from paceline.core.model import ModelSpec, RopeSpec
from paceline.core.weights import EMBEDDING, HEAD, BlockTensor, DenseTensor, StoredTensor, columns_of, tensor_shapes

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from tests.unit.backends.cpu import arithmetic

from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.weights import pack_model

pytestmark = pytest.mark.timeout(300)
ROWS = 37
CUTS = ((ROWS,), (1, 2, 34), (16, 16, 5), (1,) * ROWS)
SPEC = ModelSpec(
    model_type="llama", n_layers=2, hidden=256, n_heads=4, n_kv_heads=2, head_dim=64, ffn=512, vocab=300, max_context=64,
    rms_eps=1e-5, rope=RopeSpec(10_000.0), tied_head=False,
)  # fmt: skip
Q4_K_M = {"v_proj": Form.Q6_K, "down_proj": Form.Q6_K, HEAD: Form.Q6_K}
"""By the end of a tensor's name; the rest is Q4_K."""
EVERY = {
    "q_proj": Form.Q4_0, "k_proj": Form.Q8_0, "v_proj": Form.BF16, "o_proj": Form.Q5_0, "gate_proj": Form.BF16, "up_proj": Form.Q5_K,
    "down_proj": Form.Q8_0, EMBEDDING: Form.Q5_1, HEAD: Form.BF16,
}  # fmt: skip
MIXES: Mapping[str, tuple[ModelSpec, Mapping[str, Form]]] = {
    "Q4_K_M": (SPEC, Q4_K_M),
    "Q4_K_M, its head tied": (replace(SPEC, tied_head=True), {**Q4_K_M, EMBEDDING: Form.Q6_K}),
    "every kind of activation": (SPEC, EVERY),
    "three KV heads of three queries, with norms": (
        replace(SPEC, model_type="qwen3", n_heads=9, n_kv_heads=3, head_dim=32, qk_norm=True, ffn=544),
        {"o_proj": Form.Q4_1, "down_proj": Form.Q5_1},
    ),
    "one KV head": (replace(SPEC, n_heads=5, n_kv_heads=1, head_dim=96), {"o_proj": Form.Q8_0, "q_proj": Form.Q5_K}),
}


class Mixed:
    """A source of random matrices, each in a form of its own; `plain`: the same values as bf16."""

    digest = "mixed"

    def __init__(self, spec: ModelSpec, forms: Mapping[str, Form], *, plain: bool = False) -> None:
        self.spec, self._forms, self._plain = spec, forms, plain
        self._shapes = tensor_shapes(spec)

    def form_of(self, name: str) -> Form:
        if self._plain:
            return Form.BF16
        stem = name.removesuffix(".weight").rpartition(".")[2]
        return self._forms.get(name, self._forms.get(stem, Form.Q4_K))

    def names(self) -> Iterable[str]:
        return self._shapes

    def nbytes(self, name: str) -> int:
        return int(np.prod(self._shapes[name]))

    def type_of(self, name: str) -> str:
        return self.form_of(name).name if len(self._shapes[name]) == 2 else "F32"

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return DenseTensor(np.linspace(0.5, 1.5, shape[0], dtype=np.float32), "f32")
        form = Mixed(self.spec, self._forms).form_of(name)
        stored = arithmetic.random_rows(form, *shape, np.random.default_rng(len(name)))[rows or slice(None)]
        if form is Form.BF16:
            bits = round_to_bf16(arithmetic.widen(stored.view(np.uint16)) * np.float32(0.05))
            return columns_of(DenseTensor(bits, "bf16"), columns)
        if self._plain:
            return columns_of(DenseTensor(arithmetic.matrix(form, stored).values(), "f32"), columns)
        return columns_of(BlockTensor(form.name, (len(stored), shape[1]), stored), columns)


def answers(source: Mixed, threads: int, cuts: Iterable[tuple[int, ...]]) -> list[bytes]:
    runner = CpuRunner(
        pack_model(source, source.spec.all_layers, source.form_of, edges=True), n_blocks=4, threads=threads, numerics_id="", max_rows=64
    )
    try:
        x = runner.embed(np.arange(ROWS, dtype=np.int32) * 7 % source.spec.vocab)
        return [answer(runner, x, lambda x_TD: x_TD.tobytes(), cut, logits=True) for cut in cuts]
    finally:
        runner.close()


def logits(given: bytes, spec: ModelSpec) -> npt.NDArray[np.float32]:
    return np.frombuffer(given[2 * ROWS * spec.hidden :], np.float32).reshape(ROWS, spec.vocab)


@pytest.mark.parametrize("mix", MIXES)
def test_mixed_forms(mix: str) -> None:
    source = Mixed(*MIXES[mix])
    found = {given for threads in (1, 2) for given in answers(source, threads, CUTS)}
    assert len(found) == 1, "cuts or threads changed a byte"
    (plain,) = answers(Mixed(*MIXES[mix], plain=True), 1, CUTS[:1])
    ours, theirs = logits(found.pop(), source.spec), logits(plain, source.spec)
    assert np.isfinite(ours).all()
    # What quantised activations lose over two layers is little for most rows; another matrix or form in one place would leave nothing alike.
    alike = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert np.median(alike) > 0.995
