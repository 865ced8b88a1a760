"""What protoc made of proto/, by tools/generate_stubs.py. Nothing here is written by hand."""
