"""Drafts on a node: made for others, had from others, and counted."""
