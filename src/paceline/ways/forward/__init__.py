"""Answers that another node computes."""
