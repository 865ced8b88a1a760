"""Benchmarks that `paceline bench` runs."""
