"""Activations between machines: tensor streams over TLS sockets of their own (docs/internals/adr/0004).

`frames` is what goes over the wire and what may follow what, `incoming` turns bytes into events: both pure. `pipe` is a
TLS socket with deadlines, `ends` the two ends, `listener` and `dialling` how they meet. What travels on them a way says (`ways.pipeline.host.ends`).
"""
