"""Which tokens top-k and top-p leave, and log probabilities: what depends on the weights of all tokens (docs/arithmetic.md, Sampling).

Shapes as in `draw_scan`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from paceline.backends.cpu import draw_lanes as lanes
from paceline.backends.cpu.draw_lanes import BLOCK, ROUNDER, ROUNDER_BITS
from paceline.backends.cpu.draw_noise import log_of
from paceline.backends.cpu.draw_scan import NOWHERE, gather, largest, select, value_of
from paceline.engine.arithmetic import EXP2, LOG2E, WEIGHT_BITS, WEIGHTLESS

_LOG2E = np.float32(LOG2E)
_ONE = np.float32(1)
_CUT, _CUTS = 2.0, 9
"""How far below the largest, in logits over temperature, a nucleus is looked for; how many times as far at most, before it is looked for everywhere."""
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in EXP2)


@njit(nogil=True)
def weight_of(z):
    t = max(z * _LOG2E, np.float32(WEIGHTLESS))
    whole = np.float32(math.floor(t))
    rest = t - whole
    p = ((((_C0 * rest + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest + _C5
    power = lanes.bits_double((np.int64(whole) + 1023) << 52)
    return lanes.double_bits(np.float64(p) * power + ROUNDER) - ROUNDER_BITS


@njit(nogil=True)
def total_weight(x, n, tail, maxima, top, inverse):
    """Of all tokens."""
    total = np.int64(0)
    for block in range(len(maxima)):
        if (maxima[block] - top) * inverse * _LOG2E > np.float32(WEIGHTLESS):
            total += lanes.block_weight(x + 4 * BLOCK * block if (block + 1) * BLOCK <= n else tail.ctypes.data, top, inverse)
    return total


@njit(nogil=True)
def _share_of(top_p, total):
    """The whole number that a nucleus must reach."""
    return min(total, max(np.int64(1), np.int64(math.ceil(top_p * np.float64(total)))))


@njit(nogil=True)
def _nucleus(ids, orders, top, inverse, total, top_p):
    """(found, order, id) of the last token of a nucleus, if what was gathered holds it. `total` 0: of what was gathered."""
    worths = np.empty(len(ids), np.int64)
    here = np.int64(0)
    for i in range(len(ids)):
        worths[i] = weight_of((value_of(orders[i]) - top) * inverse)
        here += worths[i]
    need = _share_of(top_p, total or here)
    if here < need:
        return False, np.int64(0), np.int64(0)
    order, last = select(ids, orders, worths, need)
    return True, order, last


@njit(nogil=True)
def last_left(x, n, tail, maxima, top, inverse, top_k, top_p):
    """(logit, id) of the last token that top-k and top-p leave; others are left if larger, or equal with an id no higher."""
    if 0 < top_k < n:
        ids, orders = largest(x, n, tail, maxima, top_k)
        if top_p < 1.0:
            _, order, last = _nucleus(ids, orders, top, inverse, np.int64(0), top_p)
            return value_of(order), last
        order, last = orders[0], ids[0]
        for i in range(len(ids)):
            if orders[i] <= order:
                order, last = orders[i], ids[i]
        return value_of(order), last
    if top_p < 1.0:
        total = total_weight(x, n, tail, maxima, top, inverse)
        for turn in range(_CUTS + 1):
            least = top - np.float32(_CUT * (turn + 1)) / inverse if turn < _CUTS else NOWHERE
            ids, orders = gather(x, n, tail, maxima, least)
            found, order, last = _nucleus(ids, orders, top, inverse, total, top_p)
            if found:
                return value_of(order), last
    return NOWHERE, np.int64(n)


@njit(nogil=True)
def write_logprobs(x, n, tail, maxima, top, n_top, out_ids, out_logprobs):
    """Write the largest logits' ids and log probabilities, largest first. Returns the logarithm of the sum of all weights."""
    log_total = log_of(np.float64(total_weight(x, n, tail, maxima, top, _ONE)) * 2.0**-WEIGHT_BITS)
    if n_top > 0:
        ids, orders = largest(x, n, tail, maxima, min(n_top, n))
        for i in range(len(ids)):
            at = i
            while at > 0 and orders[at - 1] < orders[at]:
                orders[at - 1], orders[at] = orders[at], orders[at - 1]
                ids[at - 1], ids[at] = ids[at], ids[at - 1]
                at -= 1
        for i in range(len(ids)):
            out_ids[i] = ids[i]
            out_logprobs[i] = np.float64(value_of(orders[i])) - np.float64(top) - log_total
    return log_total
