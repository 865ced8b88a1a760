"""The composition root: the one place that names concrete classes and puts them together."""
