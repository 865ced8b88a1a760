"""Suites that every implementation of a protocol passes: subclass one in a test module and give it a fixture."""
