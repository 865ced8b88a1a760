"""This machine: its devices, memory and speed, and a model set up, stepped and hosted on it alone."""
