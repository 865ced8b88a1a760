"""Stubs that tools/generate_stubs.py makes from proto/ with protoc. Do not edit them by hand."""
