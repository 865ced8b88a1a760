"""Which form each matrix takes, and that loading gives the same records however many threads pack them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from tests.fakes.blocks import to_blocks

from paceline.backends import cpu
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.padding import Padded, padded
from paceline.backends.ggml.dequantise import TYPES
from paceline.backends.holding import NEAREST, formats_of_products, forms_by, held_bytes, mlx_formats, part_bytes
from paceline.backends.numerics import SeededWeights, small
from paceline.backends.options import LoadOptions
from paceline.backends.quantize import to_float32
from paceline.core.errors import OutOfMemory
from paceline.core.model import BLOCK_TOKENS, LayerRange, ModelSpec, RopeSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, HEAD, BlockTensor

SPEC = ModelSpec("llama", 2, 512, 8, 2, 64, 768, 1000, 256, 1e-5, RopeSpec(10000.0), tied_head=False)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_what_has_a_form_is_held_as_it_lies(name: str) -> None:
    assert forms_by(WeightsFormat.STORED, lambda _: name)("model.layers.0.mlp.down_proj.weight").name == name


def test_every_type_has_a_form() -> None:
    assert NEAREST.keys() == {*TYPES, "F32", "F16", "BF16"}


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_other_types_lose_little_beside_what_their_file_lost(name: str) -> None:
    """Of the types that gguf-py can make; the others are measured in bench/RESULTS.md."""
    weights = np.random.default_rng(3).standard_normal((16, 2048), np.float32)
    blocks = BlockTensor(name, weights.shape, quantize(weights, gguf.GGMLQuantizationType[name]))
    kept = to_float32(to_blocks(blocks, NEAREST[name].name))  # type: ignore[arg-type]
    own = np.linalg.norm(dequantize(blocks.rows_NB, gguf.GGMLQuantizationType[name]) - weights)
    assert np.linalg.norm(kept - weights) <= 1.05 * own


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Q4_K", "int4"), ("Q4_0", "int4"), ("Q3_K", "int4"), ("Q5_0", "int8"), ("Q5_K", "int8"), ("Q6_K", "int8"), ("IQ4_XS", "int8"),
     ("Q8_0", "int8"), ("F16", "bf16"), ("BF16", "bf16")],
)  # fmt: skip
def test_mlx_holds_each_matrix_in_the_nearest_format_and_five_bits_never_become_four(name: str, expected: str) -> None:
    formats = mlx_formats(SPEC, WeightsFormat.STORED, lambda tensor: "Q6_K" if "v_proj" in tensor or "embed" in tensor else name)
    mixed = "int8" if expected == "bf16" else expected  # a model is in bf16 as a whole or not at all
    assert (formats["model.layers.1.mlp.down_proj.weight"], formats["model.layers.1.self_attn.v_proj.weight"]) == (mixed, "int8")
    assert (formats[EMBEDDING], formats[HEAD], formats_of_products(formats)) == ("int8", "int8", sorted({mixed, "int8"}))
    whole = mlx_formats(SPEC, WeightsFormat.STORED, lambda _: name)
    assert formats_of_products(whole) == [expected]
    assert whole[EMBEDDING] == ("bf16" if expected == "bf16" else "int8")


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
@pytest.mark.parametrize("form", [Form.Q4_1, Form.Q6_K, Form.BF16])
def test_records_are_the_same_on_any_number_of_threads_and_take_what_was_planned(form: Form) -> None:
    from paceline.backends.cpu.probe import SeededBlocks
    from paceline.backends.cpu.weights import pack_model

    source = SeededBlocks(replace(SPEC, vocab=5000), {form})
    seen: list[tuple[int, int]] = []
    one = pack_model(source, LayerRange(1, 2), lambda _: form, edges=True)
    many = pack_model(source, LayerRange(1, 2), lambda _: form, edges=True, threads=3, progress=lambda *told: seen.append(told))
    np.testing.assert_array_equal(one.arrays[0], many.arrays[0])
    held = part_bytes(held_bytes(source.spec, lambda _: form), LayerRange(1, 2), edges=True)
    assert held <= sum(array.nbytes for array in one.arrays) <= held + 64 * 10
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 3


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
def test_a_pool_must_fit_with_the_whole_groups_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SeededWeights(SPEC)
    weights = part_bytes(held_bytes(SPEC, forms_by(WeightsFormat.BF16, source.type_of)), SPEC.all_layers, edges=True)
    monkeypatch.setattr(cpu, "available_bytes", lambda: weights + 8 * BLOCK_TOKENS * SPEC.kv_bytes_per_token(SPEC.all_layers))
    with pytest.raises(OutOfMemory, match="KV pool of 256 tokens"):
        cpu.load(source, LoadOptions(SPEC.all_layers, WeightsFormat.BF16, 2, BLOCK_TOKENS, 1))


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
def test_a_load_that_is_given_up_ends() -> None:
    from paceline.backends.cpu.weights import pack_model

    class GivenUp(Exception):
        pass

    def give_up(_: int, __: int) -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        pack_model(SeededWeights(small(SPEC)), LayerRange(0, 1), lambda _: Form.Q8_0, edges=True, threads=2, progress=give_up)


def test_padded_heads_weigh_what_they_did() -> None:
    from paceline.backends.cpu.probe import SeededBlocks

    spec = replace(SPEC, head_dim=80, n_layers=1, hidden=512)
    source = SeededBlocks(spec, {Form.Q4_0})
    widened = Padded(source)
    name = "model.layers.0.self_attn."
    assert widened.spec.head_dim == 96
    whole = to_float32(source.read(f"{name}k_proj.weight")).reshape(2, 2, 40, 512)
    read = widened.read(f"{name}k_proj.weight")
    assert isinstance(read, BlockTensor)
    values = dequantize(read.rows_NB, gguf.GGMLQuantizationType.Q4_0).reshape(2, 2, 48, 512)
    np.testing.assert_array_equal(values[:, :, :40], whole)
    assert not values[:, :, 40:].any()
    part = widened.read(f"{name}k_proj.weight", slice(32, 160))
    assert isinstance(part, BlockTensor)
    np.testing.assert_array_equal(part.rows_NB, read.rows_NB[32:160])
    out = to_float32(widened.read(f"{name}o_proj.weight", slice(16, 48))).reshape(32, 8, 2, 48)
    np.testing.assert_array_equal(out[..., :40], to_float32(source.read(f"{name}o_proj.weight", slice(16, 48))).reshape(32, 8, 2, 40))
    assert not out[..., 40:].any()


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"rope": RopeSpec(1e4, dims=40)}, {"head_dim": 64}])
def test_what_can_not_be_padded_is_as_it_was(changes: Any) -> None:
    spec = replace(SPEC, head_dim=80)
    assert padded(spec) is not spec
    other = replace(spec, **changes)
    assert padded(other) is other
    assert (cpu.refuses(other) is None) == (other.head_dim == 64)


@pytest.mark.parametrize("form", [Form.Q4_0, Form.BF16])
def test_a_padded_feed_forward_weighs_what_it_did(form: Form) -> None:
    from paceline.backends.cpu.probe import SeededBlocks

    spec = replace(SPEC, ffn=200, n_layers=1)
    source = SeededBlocks(spec, {form})
    gate, down = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
    source.forms[down] = Form.BF16  # rows of no whole groups are in no file that quantises
    widened = Padded(source)
    assert cpu.refuses(spec) is None
    assert widened.spec.ffn == 224
    whole = to_float32(source.read(gate))
    for rows in (slice(None), slice(0, 64), slice(192, 224), slice(208, 224)):
        start, stop, _ = rows.indices(224)
        values = to_float32(widened.read(gate, rows))
        np.testing.assert_array_equal(values[: max(0, 200 - start)], whole[rows])
        assert values.shape == (stop - start, 512)
        assert not values[max(0, 200 - start) :].any()
    out = to_float32(widened.read(down, slice(16, 48)))
    np.testing.assert_array_equal(out[:, :200], to_float32(source.read(down, slice(16, 48))))
    assert not out[:, 200:].any()


@pytest.mark.parametrize("changes", [{"hidden": 100}, {"ffn": 200}, {"head_dim": 80}, {"hidden": 100, "ffn": 200, "head_dim": 80}])
def test_progress_of_a_padded_model_ends_with_all_of_it(changes: Any) -> None:
    from paceline.backends.cpu.weights import pack_model

    source = Padded(SeededWeights(replace(small(SPEC), **changes)))
    told = list[tuple[int, int]]()
    pack_model(
        source, LayerRange(0, 1), lambda _: Form.BF16, edges=True, threads=1, progress=lambda done, total: told.append((done, total))
    )
    assert all(done <= total for done, total in told)
    assert told[-1][0] == told[-1][1]


def test_a_padded_hidden_size_reads_what_it_did() -> None:
    spec = replace(SPEC, hidden=100, n_layers=1)
    source = SeededWeights(spec)
    widened = Padded(source)
    assert (cpu.refuses(spec), widened.spec.hidden, padded(widened.spec)) == (None, 128, widened.spec)
    query, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(to_float32(widened.read(query))[:, :100], to_float32(source.read(query)))
    assert not to_float32(widened.read(query))[:, 100:].any()
    rows = to_float32(widened.read(down, slice(96, 128)))
    np.testing.assert_array_equal(rows[:4], to_float32(source.read(down, slice(96, 100))))
    assert not rows[4:].any()
