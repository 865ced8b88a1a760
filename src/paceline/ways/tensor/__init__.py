"""Tensor ranks: every layer's heads, inner activations and outputs shared among processes, with the bytes of one."""
