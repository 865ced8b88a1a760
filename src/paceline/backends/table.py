"""Choice of the kernels that run a model here: a fixed table by processor and model, never by timing (byte identity, rule 7).

first that applies        for
torch-cuda                a CUDA device, bf16 weights; families that torch has
mlx                       a Mac's GPU, bf16 weights; families that mlx-lm has; if a person asks for it, any format, and processors too
cpu-avx512bf16            all families on processors with AVX512-BF16
cpu-avx512vnni            ... with AVX512-VNNI
cpu-avxvnni               ... with AVX-VNNI
cpu-avx2                  ... with AVX2, FMA and F16C
cpu-neon-i8mm             ... on 64-bit ARM with the dot product and products of matrices of bytes
cpu-neon                  ... on 64-bit ARM with the dot product
torch-cpu                 on other processors, in bf16; if a person asks for it, on any

All `cpu` entries compute the same bytes (docs/internals/arithmetic.md). A processor with the instructions of one also has those of some later ones.
"""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from typing import Final

from paceline.backends import instructions
from paceline.backends.cpu.support import refuses
from paceline.backends.instructions import Lowering
from paceline.backends.options import DeviceKind
from paceline.core.errors import ConfigError, UnsupportedModel, how_to_install
from paceline.core.model import PLAIN, Activation, ModelSpec, Norms, RopeSpec, WeightsFormat, yarn_gain


class Kernels(StrEnum):
    """An entry of the table, by its name in `--device` and in a node's card."""

    CUDA = "torch-cuda"
    AVX512_BF16 = "cpu-avx512bf16"
    AVX512_VNNI = "cpu-avx512vnni"
    AVX_VNNI = "cpu-avxvnni"
    AVX2 = "cpu-avx2"
    NEON_I8MM = "cpu-neon-i8mm"
    NEON = "cpu-neon"
    MLX = "mlx"
    TORCH = "torch-cpu"

    @property
    def device(self) -> DeviceKind:
        return {Kernels.CUDA: DeviceKind.CUDA, Kernels.MLX: DeviceKind.MLX}.get(self, DeviceKind.CPU)

    @property
    def lowering(self) -> Lowering | None:
        """Instruction set of the compiled kernels; None: torch or MLX runs."""
        return Lowering(self.removeprefix("cpu-")) if self.startswith("cpu-") else None

    @property
    def compiled(self) -> bool:
        return self.lowering is not None


def fastest_on_processors() -> Kernels:
    """Return the kernels that run models on this machine's processors: compiled ones if any run here, otherwise torch."""
    lowering = instructions.lowering_in_use()
    return Kernels.TORCH if lowering is None else Kernels(f"cpu-{lowering}")


def use_on_processors(asked: Kernels) -> None:
    """Make this process use the compiled kernels that a person asked for, also for other machines' layers. Does nothing for torch or MLX.

    Raises:
        ConfigError: this processor lacks their instructions, or other compiled kernels are already in use.
    """
    if asked.lowering is not None:
        if asked.lowering not in instructions.lowerings_here():
            here = ", ".join(f"cpu-{lowering}" for lowering in instructions.lowerings_here()) or Kernels.TORCH
            raise ConfigError(
                f"--device {asked} can't be used here: this processor has no {asked.lowering}", f"It runs {here}. Leave --device out."
            )
        instructions.use_lowering(asked.lowering)


def torch_refuses(spec: ModelSpec) -> str | None:
    """Return why torch can't run a model; None if it can."""
    if spec.low is not None:
        return "queries, keys and values that are products of products have no code"
    if spec.norms is not Norms.BEFORE:
        return "norms behind attention and feed-forward have no code"
    if spec.qk_norm_whole:
        return "a norm over all heads together has no code"
    if spec.activation is not Activation.SILU:
        return f"the activation {spec.activation} has no code"
    if spec.sinks or spec.out_bias or (spec.moe is not None and spec.moe.biased):
        return "sinks of attention, or biases behind it or of experts, have no code"
    if any(spec.unturned):
        return "layers without rope have no code"
    if spec.scales != PLAIN:
        return "scales of the embedding, the residual or the logits have no code"
    if spec.rope.dims is not None or (spec.window is not None and spec.window.rope is not None):
        return "rope over a part of a head, or of two kinds, has no code"
    return None


MAX_HEAD_DIM: Final = 256
"""Largest head that FlashAttention takes."""


def cuda_refuses(spec: ModelSpec) -> str | None:
    """Return why torch can't run a model on an NVIDIA GPU; None if it can."""
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"attention takes heads of at most {MAX_HEAD_DIM}, in eights; this model's have {spec.head_dim}"
    return torch_refuses(spec)


MLX_MODULES: Final = {name: name for name in ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")} | {"mistral": "llama"}
"""Families that MLX runs, with the module of mlx-lm for each."""


def mlx_refuses(spec: ModelSpec) -> str | None:
    """Return why MLX can't run a model here; None if it can."""
    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        return "mlx and mlx-lm are not both installed"
    return mlx_lacks(spec)


def mlx_lacks(spec: ModelSpec) -> str | None:
    """Return why MLX can't run a model on any machine; None if it can."""
    if spec.model_type not in MLX_MODULES:
        return f"of mlx-lm's families, {spec.model_type} was not brought here"
    yarn = spec.rope.yarn
    if spec.rope.divisors or spec.rope.gain != (1.0 if yarn is None else yarn_gain(yarn.factor)) or (yarn is not None and not yarn.whole):
        return "rope with divisors or a gain of its own has no code"
    if MLX_MODULES[spec.model_type] == "mixtral" and spec.rope != RopeSpec(spec.rope.theta):
        return "mlx-lm's mixtral knows no rope scaling"
    return torch_refuses(spec)


def gpu_refuses(device: DeviceKind, spec: ModelSpec) -> str | None:
    """Return why a GPU of this kind can't run a model; None if it can."""
    return mlx_refuses(spec) if device is DeviceKind.MLX else cuda_refuses(spec)


def check_torch_holds(weights: WeightsFormat) -> None:
    """Raise ConfigError for int4 and int8, because torch holds weights only in bf16."""
    if weights in {WeightsFormat.INT4, WeightsFormat.INT8}:
        raise ConfigError(f"--weights {weights} was asked for on torch, which holds bf16", "Leave --weights out.")


def choose(spec: ModelSpec, weights: WeightsFormat, *, asked: Kernels | None = None, device: DeviceKind = DeviceKind.CPU) -> Kernels:
    """Return the table's entry for a model.

    Args:
        asked: the entry that a person asked for, used instead of the table's; None: the table decides.
        device: the fastest kind of device that this machine has and may use.

    Raises:
        ConfigError: the requested entry can't run the model here.
        UnsupportedModel: no entry can run the model here.
    """
    if asked is Kernels.CUDA or (asked is None and device is DeviceKind.CUDA and weights is device.format_unasked):
        if device is not DeviceKind.CUDA:
            raise ConfigError(
                "--device torch-cuda was asked for, and torch sees no CUDA device that it can use",
                "Check the driver, or leave --device out.",
            )
        if weights is not WeightsFormat.BF16:
            raise ConfigError(f"--weights {weights} was asked for on CUDA, which holds bf16", "Ask for --weights bf16.")
        if (missing := cuda_refuses(spec)) is None:
            return Kernels.CUDA
        if asked is not None:
            raise ConfigError(f"--device torch-cuda can't run this model: {missing}", "Leave --device out.")
    if asked is Kernels.MLX or (asked is None and device is DeviceKind.MLX and weights is device.format_unasked):
        if (missing := mlx_refuses(spec)) is None:
            return Kernels.MLX
        if asked is not None:
            raise ConfigError(f"--device mlx can't run this model here: {missing}", "Leave --device out.")
    reason = refuses(spec) if instructions.runs_here() else f"this processor has no {'dot product' if instructions.is_arm() else 'AVX2'}"
    if asked is not None and asked.lowering is not None and reason is None and asked.lowering not in instructions.lowerings_here():
        reason = f"this processor has no {asked.lowering}"
    if (asked is not None and asked.compiled) or (asked is None and reason is None):
        if reason is not None:
            raise ConfigError(f"--device {asked} can't run this model here: {reason}", "Leave --device out.")
        return asked or fastest_on_processors()
    if asked is None and instructions.runs_here():
        raise UnsupportedModel(
            f"No compiled kernels run this model: {reason}",
            f"Serve it on a GPU, or, many times slower, with --device torch-cpu, which takes: {how_to_install('paceline[torch]')}",
        )
    check_torch_holds(weights)
    if (missing := torch_refuses(spec)) is not None and asked is not None:
        raise ConfigError(f"--device {asked} can't run this model: {missing}", "Leave --device out.")
    if missing is not None:
        raise UnsupportedModel(
            f"Nothing here runs this model: {reason}; and on torch {missing}",
            "Serve it on a processor with compiled kernels: x86 since AVX2, ARM with the dot product.",
        )
    if find_spec("torch") is None:
        needed = f"This model needs torch here ({reason})" if asked is None else f"--device {asked} was asked for"
        raise UnsupportedModel(
            f"{needed}, and torch is not installed",
            f"Install it with: {how_to_install('paceline[torch]')}",
        )
    return Kernels.TORCH
