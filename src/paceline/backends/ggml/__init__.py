"""GGML's quantised blocks, dequantised by compiled code that any processor runs."""
