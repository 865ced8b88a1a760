"""Layers of models that this machine runs for others: loading, sharing out, running, and ending."""
