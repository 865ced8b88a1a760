"""Layers in compiled Numba kernels, for processors with AVX512-BF16."""
