"""Fakes and conformance suites for tests: fake clock, null backend."""
