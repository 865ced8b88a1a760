"""Argument parsing and rendering."""
