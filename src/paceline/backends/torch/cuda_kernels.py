"""Kernels for the operations between a layer's products on an NVIDIA GPU, with one launch each: torch's own operations need up to eight.

NVRTC, which torch installs, compiles them for the present GPU when the first one is needed, in some tens of milliseconds. The machine needs no compiler.
A block of the GPU computes one row alone and adds in a fixed order, so other rows change nothing.

Shapes: T rows, D width of a row or a head, H heads, N KV heads, G = H / N, F feed-forward, S segments of keys, P rows of parts.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError

_SOURCE = r"""
typedef unsigned short bf16;
typedef long long wide_int;

__device__ float widen(bf16 x) { return __uint_as_float((unsigned)x << 16); }

__device__ bf16 round_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

extern "C" __global__ void rms_norm(
    const bf16* x, const float* weight, bf16* y, int n_inner, wide_int outer, wide_int inner, int width, float eps
) {
    __shared__ float sums[THREADS];
    x += blockIdx.x / n_inner * outer + blockIdx.x % n_inner * inner;
    y += (wide_int)blockIdx.x * width;
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += widen(x[i]) * widen(x[i]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int left = THREADS / 2; left; left /= 2) {
        if (threadIdx.x < left) sums[threadIdx.x] += sums[threadIdx.x + left];
        __syncthreads();
    }
    float scale = rsqrtf(sums[0] / width + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) y[i] = round_to_bf16(widen(x[i]) * scale * weight[i]);
}

// cosines, sines [positions, D]; the first half of the sines is negative. No product is fused with the sum.
extern "C" __global__ void rotate_heads(
    const bf16* x, const float* cosines, const float* sines, const wide_int* positions, bf16* y, int heads, wide_int outer, int width
) {
    int row = blockIdx.x / heads, half = width / 2;
    x += row * outer + blockIdx.x % heads * (wide_int)width;
    y += (wide_int)blockIdx.x * width;
    cosines += positions[row] * width;
    sines += positions[row] * width;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float low = widen(x[i]), high = widen(x[i + half]);
        y[i] = round_to_bf16(__fadd_rn(__fmul_rn(low, cosines[i]), __fmul_rn(high, sines[i])));
        y[i + half] = round_to_bf16(__fadd_rn(__fmul_rn(high, cosines[i + half]), __fmul_rn(low, sines[i + half])));
    }
}

extern "C" __global__ void gate_columns(const bf16* x, bf16* y, int width, wide_int n) {
    wide_int i = blockIdx.x * (wide_int)blockDim.x + threadIdx.x;
    if (i >= n) return;
    x += i / width * 2 * width + i % width;
    float gate = widen(x[0]);
    y[i] = round_to_bf16(widen(round_to_bf16(gate / (1.0f + expf(-gate)))) * widen(x[width]));
}

// Means over keys become the mean over all of them, by the logarithms of their sums: of the parts that `places` names, -1: none, then of the row's own.
extern "C" __global__ void merge_parts(
    const bf16* own, const float* own_logs, const bf16* parts, const float* parts_logs, const int* places, bf16* y,
    int n_own, int n_parts, int n_places, int kv_heads, int per_kv, int packed, int width
) {
    int row = blockIdx.x, head = blockIdx.y, heads = kv_heads * per_kv;
    // Packed: the queries of one KV head are rows; they lie [row, G, N], otherwise [row, H].
    int lane = packed ? head % per_kv * kv_heads + head / per_kv : head;
    int log_row = packed ? head / per_kv : head, stride = packed ? per_kv : 1, shift = packed ? head % per_kv : 0;
    const float* logs = parts_logs + (wide_int)log_row * n_parts * stride + shift;
    float own_log = own_logs[((wide_int)log_row * n_own + row) * stride + shift], most = own_log;
    places += (wide_int)row * n_places;
    for (int s = 0; s < n_places; s++) if (places[s] >= 0) most = fmaxf(most, logs[(wide_int)places[s] * stride]);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0, weights = 0;
        for (int s = 0; s < n_places; s++) if (places[s] >= 0) {
            float weight = expf(logs[(wide_int)places[s] * stride] - most);
            sum += weight * widen(parts[((wide_int)places[s] * heads + lane) * width + i]);
            weights += weight;
        }
        float weight = expf(own_log - most);
        sum += weight * widen(own[((wide_int)row * heads + lane) * width + i]);
        y[((wide_int)row * heads + head) * width + i] = round_to_bf16(sum / (weights + weight));
    }
}
"""
_THREADS = 256
"""Threads of a block. Any change alters the order in which a norm's squares are added."""
_TYPES = {"p": c_void_p, "i": c_int, "l": c_longlong, "f": c_float}


def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute the root mean square norm over the last dimension of bf16 [T, D] or [T, n, D], in float32 and rounded once. Returns contiguous bf16."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_inner, inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    _launch("rms_norm", "pppillif", (len(x) * n_inner, 1), _THREADS, x, weight_D, y, n_inner, x.stride(0), inner, x.shape[-1], eps)
    return y


def rotate(x_THD: Tensor, cos_CD: Tensor, sin_CD: Tensor, positions_T: Tensor) -> Tensor:
    """Apply the rotary embedding. Returns contiguous bf16 [T, H, D]. The heads of a row of `x_THD` must be contiguous; `positions_T` is int64."""
    rows, heads, width = x_THD.shape
    y = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    _launch("rotate_heads", "pppppili", (rows * heads, 1), 64, x_THD, cos_CD, sin_CD, positions_T, y, heads, x_THD.stride(0), width)
    return y


def gate(gate_up: Tensor) -> Tensor:
    """Compute SwiGLU of a fused product: bf16 [T, F] from [T, 2 F], rounded after the activation and after the product."""
    y = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _launch("gate_columns", "ppil", (-(-y.numel() // _THREADS), 1), _THREADS, gate_up, y, y.shape[1], y.numel())
    return y


def merge(own: Tensor, own_logs: Tensor, parts: Tensor, parts_logs: Tensor, places_TS: Tensor, n_heads: int, n_kv: int) -> Tensor:
    """Merge the results of segments of keys into attention over all keys, bf16 [T, H, D].

    Args:
        own: means over each row's last segment, [T, H, D]; or packed, with the queries of a KV head as neighbouring rows, [T * G, N, D].
        own_logs: logarithms of their sums, float32 [H, T] or [N, T * G].
        parts, parts_logs: the same for other segments, with P rows.
        places_TS: int32, the rows of `parts` that belong to each row, in the order of the keys; -1: none.
    """
    rows, packed = len(places_TS), own.shape[1] != n_heads
    per_kv = n_heads // n_kv
    n_parts = len(parts) // (per_kv if packed else 1)
    y = own.new_empty(rows, n_heads, own.shape[2])
    sizes = rows, n_parts, places_TS.shape[1], n_kv, per_kv, int(packed), own.shape[2]
    _launch("merge_parts", "pppppp" + "i" * 7, (rows, n_heads), 128, own, own_logs, parts, parts_logs, places_TS, y, *sizes)
    return y


def _launch(name: str, types: str, grid: tuple[int, int], threads: int, *arguments: Tensor | float) -> None:
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    values = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
    stream, function = torch.cuda.current_stream().cuda_stream, _function(name, torch.cuda.current_device())
    (result,) = driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, 0, stream, (values, tuple(_TYPES[kind] for kind in types)), 0)
    if result:
        raise RuntimeError(f"the GPU refuses {name}, for this or an earlier kernel: {result.name}")


@cache
def _function(name: str, device: int) -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    return _check(*driver.cuModuleGetFunction(_module(device), name.encode()))


@cache
def _module(device: int) -> Any:
    """Return the compiled kernels, loaded on a device.

    Raises:
        ConfigError: NVRTC or the driver reports an error.
    """
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    major, minor = torch.cuda.get_device_capability(device)
    return _check(*driver.cuModuleLoadData(compile_kernels(f"sm_{major}{minor}")))


def compile_kernels(architecture: str) -> bytes:
    """Return the kernels' machine code for an architecture, such as `sm_90`.

    Raises:
        ConfigError: NVRTC can't compile for it.
    """
    from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]

    program = _check(*nvrtc.nvrtcCreateProgram(_SOURCE.encode(), b"paceline.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), f"-DTHREADS={_THREADS}".encode()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result:
        log = bytes(_check(*nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"NVRTC can't compile for {architecture}: {log.decode()}", "Run on the CPU.")
    code = bytes(_check(*nvrtc.nvrtcGetCUBINSize(program)))
    _check(*nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _check(result: Any, *given: Any) -> Any:
    """Return the value that a call of NVRTC or the driver returned after its status.

    Raises:
        ConfigError: the status is an error.
    """
    if result:
        raise ConfigError(f"the GPU's kernels can't be made: {result.name}", "Check the driver with nvidia-smi, or run on the CPU.")
    return given[0] if given else None
