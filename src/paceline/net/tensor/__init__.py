"""Activations between machines: tensor streams over TLS sockets of their own (docs/adr/0004).

`frames` is what goes over the wire, `conversation` what may follow what, `incoming` turns bytes into events: all three pure. `pipe` is a
TLS socket with deadlines, `streams` the two ends, `listener`, `expected` and `dialling` how they meet, `batches` what stages and executors use.
"""
