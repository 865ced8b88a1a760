"""Parts of layers in torch: experts grouped are the experts one by one, and what a GPU's own kernels give is what torch's operations give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.backends.numerics import SeededWeights
from paceline.backends.torch import cuda_kernels
from paceline.backends.torch.attention import Rope
from paceline.backends.torch.families import Experts, GroupedExperts, TensorReader
from paceline.core.model import ModelSpec, MoeSpec, RopeSpec

MIXTURE = ModelSpec(
    model_type="qwen3_moe", n_layers=1, hidden=96, n_heads=6, n_kv_heads=2, head_dim=32, ffn=160, vocab=307, max_context=512, rms_eps=1e-5,
    rope=RopeSpec(10_000.0), tied_head=True, qk_norm=True, moe=MoeSpec(n_experts=6, top_k=2, ffn=64, norm_topk=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_grouped_experts_are_the_experts(rows: int) -> None:
    assert MIXTURE.moe is not None
    reader = TensorReader(SeededWeights(MIXTURE), torch.device("cpu"), None)
    one_by_one, grouped = (kind(reader, "model.layers.0.mlp", MIXTURE.moe) for kind in (Experts, GroupedExperts))
    h_TD = torch.randn(rows, MIXTURE.hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()
    torch.testing.assert_close(grouped(h_TD), one_by_one(h_TD))


def on_gpu(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [96, 4096])
def test_the_gpus_norm(width: int) -> None:
    x, weight = on_gpu(33, width), torch.rand(width, device="cuda")
    torch.testing.assert_close(cuda_kernels.norm(x, weight, 1e-5), functional.rms_norm(x.float(), (width,), weight, 1e-5).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 80, 128])
def test_the_gpus_heads_normed_and_turned(width: int) -> None:
    qk = on_gpu(33, 12, width)[:, :10]
    weight, positions = torch.rand(width, device="cuda"), torch.randint(0, 5000, (33,), device="cuda")
    torch.testing.assert_close(
        cuda_kernels.norm(qk[:, 3:], weight, 1e-5), functional.rms_norm(qk[:, 3:].float(), (width,), weight, 1e-5).bfloat16()
    )
    rope = Rope(RopeSpec(1e4), width, 5000, torch.device("cuda"))
    assert torch.equal(cuda_kernels.rotate(qk, rope.cos_CD, rope.sin_CD, positions), rope.rotate(qk, rope.at(positions)))


@pytest.mark.gpu
def test_the_gpus_gate() -> None:
    gate_up = on_gpu(33, 2 * 300)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(cuda_kernels.gate(gate_up), functional.silu(gate).mul_(up))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_gpus_merge(heads: int, kv_heads: int, *, packed: bool) -> None:
    rows, n_parts, width, per_kv = 5, 9, 80, heads // kv_heads
    own, parts = on_gpu(rows, heads, width), on_gpu(n_parts, heads, width)
    own_logs, logs = torch.randn(rows, heads, device="cuda"), torch.randn(n_parts, heads, device="cuda")
    places = torch.tensor([[-1, -1], [0, -1], [1, 2], [8, 3], [5, 7]], dtype=torch.int32, device="cuda")
    expected = own.float()
    for row, used in enumerate(places.tolist()):
        found = [place for place in used if place >= 0]
        weights = torch.cat([logs[found], own_logs[row : row + 1]]).softmax(0)
        expected[row] = (weights[..., None] * torch.cat([parts[found], own[row : row + 1]]).float()).sum(0)

    def pack(means: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        if not packed:
            return means, sums.T.contiguous()
        by_kv = means.unflatten(1, (kv_heads, per_kv)).transpose(1, 2).reshape(-1, kv_heads, width)
        return by_kv, sums.unflatten(1, (kv_heads, per_kv)).permute(1, 0, 2).reshape(kv_heads, -1).contiguous()

    found = cuda_kernels.merge(*pack(own, own_logs), *pack(parts, logs), places, heads, kv_heads)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
