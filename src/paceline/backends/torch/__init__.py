"""Layers in torch: CUDA, and every processor the cpu backend has no kernels for."""
