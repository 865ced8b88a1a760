"""Families of models in torch: their common building blocks, a reader of the tensors of a layer range, and the layer that is built from both.

Only tensors that a family asks for by name are read, each one once. Progress is reported in bytes of the file.
Source: transformers' `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py` and `modeling_qwen3_moe.py`.
Shapes: T rows, D hidden (or a head's width), F feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.backends.options import LoadProgress
from paceline.backends.quantize import to_float32
from paceline.backends.torch import cuda_kernels
from paceline.backends.torch.attention import Step
from paceline.backends.torch.linear import Linear, dense
from paceline.core.model import LayerRange, ModelSpec, MoeSpec
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, StoredTensor, WeightSource


class RmsNorm:
    """Root mean square norm over the last dimension, computed in float32, rounded to bf16 once."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight_D, self._eps = weight_D, eps

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return cuda_kernels.norm(x, self._weight_D, self._eps)
        return F.rms_norm(x.float(), x.shape[-1:], self._weight_D, self._eps).bfloat16()


def gated(gate_up: Tensor) -> Tensor:
    """Compute SwiGLU of a fused product: bf16 [T, F] from [T, 2 F]."""
    if gate_up.is_cuda:
        return cuda_kernels.gate(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def split_heads(qkv: Tensor, n_heads: int, n_kv: int) -> tuple[Tensor, Tensor]:
    """Split a fused product into queries and keys, [T, n_heads + n_kv, D], which are rotated together, and values, [T, n_kv, D]."""
    qk, v = qkv.unflatten(-1, (n_heads + 2 * n_kv, -1)).split((n_heads + n_kv, n_kv), 1)
    return qk, v


class TensorReader:
    """Reads the weights of families from a source, in bf16."""

    def __init__(self, source: WeightSource, device: torch.device, progress: LoadProgress | None) -> None:
        self._source, self.device, self._progress = source, device, progress
        self._done, self._total = 0, 0

    @property
    def spec(self) -> ModelSpec:
        return self._source.spec

    def expect(self, layers: LayerRange, *, edges: bool) -> None:
        """Compute the bytes that will be read, which progress reports as the total."""
        prefixes = tuple(f"model.layers.{i}." for i in range(layers.start, layers.stop))
        edge_names = {EMBEDDING, FINAL_NORM} | (set[str]() if self.spec.tied_head else {HEAD})
        self._total = sum(self._source.nbytes(n) for n in self._source.names() if n.startswith(prefixes) or (edges and n in edge_names))

    def linear(self, prefix: str, *names: str, bias: bool = False) -> Linear:
        """Read the matrices `names` under `prefix`, fused along their outputs."""
        weight_NK, bias_N = (
            dense([self._read(f"{prefix}.{name}.{kind}") for name in names], self.device) if kind == "weight" or bias else None
            for kind in ("weight", "bias")
        )
        assert weight_NK is not None
        return Linear(weight_NK, bias_N)

    def stacked(self, prefixes: Sequence[str], *names: str) -> Tensor:
        """Read, for each prefix, the matrices `names` fused along their outputs: bf16 [prefixes, N, K]."""
        parts = (dense([self._read(f"{prefix}.{name}.weight") for name in names], self.device) for prefix in prefixes)
        first = next(parts)
        stack = first.new_empty(len(prefixes), *first.shape)
        for place, part in enumerate(chain((first,), parts)):
            stack[place] = part
        return stack

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._vector(name), self.spec.rms_eps)

    def table(self, name: str) -> Linear:
        return Linear(dense([self._read(name)], self.device))

    def _vector(self, name: str) -> Tensor:
        return torch.from_numpy(to_float32(self._read(name))).to(self.device)

    def _read(self, name: str) -> StoredTensor:
        tensor = self._source.read(name)
        self._done += self._source.nbytes(name)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor


class Attention:
    """Norm, attention and its output product of one layer.

    Args:
        slot: the layer's number, counted from the first layer of the range.
        window: number of keys that a row sees; 0: all up to its own.
    """

    def __init__(self, reader: TensorReader, at: str, slot: int, *, window: int) -> None:
        spec = reader.spec
        self._window = window
        self._slot, self._n_heads, self._n_kv = slot, spec.n_heads, spec.n_kv_heads
        self._norm = reader.norm(f"{at}.input_layernorm.weight")
        self._qkv = reader.linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj", bias=spec.qkv_bias)
        self._qk_norms = [reader.norm(f"{at}.self_attn.{name}.weight") for name in ("q_norm", "k_norm")] if spec.qk_norm else None
        self._out = reader.linear(f"{at}.self_attn", "o_proj")

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        n_heads = self._n_heads
        qk, v = split_heads(self._qkv(self._norm(x_TD)), n_heads, self._n_kv)
        if self._qk_norms is not None:
            q_norm, k_norm = self._qk_norms
            qk = torch.cat([q_norm(qk[:, :n_heads]), k_norm(qk[:, n_heads:])], 1)
        qk = step.rotate(qk)
        return self._out(step.attend(self._slot, qk[:, :n_heads], qk[:, n_heads:], v, self._window))


class FeedForward:
    """The gated feed-forward of one layer, or of one expert."""

    def __init__(self, reader: TensorReader, at: str) -> None:
        self._gate_up = reader.linear(at, "gate_proj", "up_proj")
        self._down = reader.linear(at, "down_proj")

    def __call__(self, h_TD: Tensor) -> Tensor:
        return self._down(gated(self._gate_up(h_TD)))


class ExpertRouter:
    """Chooses each row's experts, in the order of their numbers, and their shares: [T, K] and float32 [T, K]."""

    def __init__(self, reader: TensorReader, at: str, moe: MoeSpec) -> None:
        self._linear, self._moe = reader.linear(at, "gate"), moe

    def __call__(self, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        share_TK, expert_TK = self._linear(h_TD).float().softmax(-1).topk(self._moe.top_k, -1)
        if self._moe.norm_topk:
            share_TK = share_TK / share_TK.sum(-1, keepdim=True)
        expert_TK, order_TK = expert_TK.sort(-1)
        return expert_TK, share_TK.gather(-1, order_TK)


class Experts:
    """Router and experts of one layer. A row's experts are added in the order of their numbers, in float32, so other rows change nothing.

    Shapes: E experts, K of them for each row, R rows of one expert.
    """

    def __init__(self, reader: TensorReader, at: str, moe: MoeSpec) -> None:
        self._route = ExpertRouter(reader, at, moe)
        self._experts = [FeedForward(reader, f"{at}.experts.{e}") for e in range(moe.n_experts)]

    def __call__(self, h_TD: Tensor) -> Tensor:
        expert_TK, share_TK = self._route(h_TD)
        total_TD = torch.zeros(h_TD.shape, dtype=torch.float32, device=h_TD.device)
        for expert in expert_TK.unique().tolist():
            rows_R, place_R = torch.where(expert_TK == expert)
            y_RD = self._experts[expert](h_TD[rows_R])
            total_TD.index_add_(0, rows_R, y_RD.float() * share_TK[rows_R, place_R, None])
        return total_TD.bfloat16()


def groups_products(device: torch.device) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` is one launch on a device (Hopper and Blackwell). Elsewhere the host loops over small products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in {9, 10}


class GroupedExperts:
    """A mixture of experts in two launches of grouped products: each group of rows has its own matrix, and the host need not know the groups.

    Shapes: E experts, K of them for each row, P = T * K contiguous rows, sorted by expert.
    """

    def __init__(self, reader: TensorReader, at: str, moe: MoeSpec) -> None:
        self._route = ExpertRouter(reader, at, moe)
        experts = [f"{at}.experts.{e}" for e in range(moe.n_experts)]
        self._gate_up_EFD = reader.stacked(experts, "gate_proj", "up_proj")
        self._down_EDF = reader.stacked(experts, "down_proj")
        self._numbers_E = torch.arange(moe.n_experts, device=reader.device)

    def __call__(self, h_TD: Tensor) -> Tensor:
        expert_TK, share_TK = self._route(h_TD)
        expert_P = expert_TK.flatten()
        order_P = expert_P.argsort(stable=True)
        ends_E = (expert_P[:, None] == self._numbers_E).sum(0).cumsum(0).int()
        x_PD = h_TD[order_P // expert_TK.shape[1]]
        y_PD = F.grouped_mm(
            gated(F.grouped_mm(x_PD, self._gate_up_EFD.transpose(1, 2), offs=ends_E)), self._down_EDF.transpose(1, 2), offs=ends_E
        )
        y_TKD = torch.empty_like(y_PD).index_copy_(0, order_P, y_PD).unflatten(0, expert_TK.shape).float().mul_(share_TK[..., None])
        total_TD = y_TKD[:, 0]
        for place in range(1, expert_TK.shape[1]):
            total_TD = total_TD + y_TKD[:, place]
        return total_TD.bfloat16()


class Layer:
    """One layer of any family, with experts in place of the feed-forward if the model is a mixture.

    Args:
        index: the layer's number, counted from the model's first layer.
        slot: the layer's number, counted from the first layer of the range.
    """

    def __init__(self, reader: TensorReader, index: int, slot: int) -> None:
        at, moe = f"model.layers.{index}", reader.spec.moe
        window = reader.spec.window_of(index)
        self._attention = Attention(reader, at, slot, window=window)
        self._ffn_norm = reader.norm(f"{at}.post_attention_layernorm.weight")
        if moe is None:
            self._feed_forward = FeedForward(reader, f"{at}.mlp")
        else:
            self._feed_forward = (GroupedExperts if groups_products(reader.device) else Experts)(reader, f"{at}.mlp", moe)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        x_TD = x_TD + self._attention(x_TD, step)
        return x_TD + self._feed_forward(self._ffn_norm(x_TD))
