"""Conformance suites for other implementations of the seams."""
