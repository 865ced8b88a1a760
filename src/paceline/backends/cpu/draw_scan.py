"""Where the largest logits of a row are: the largest of each block of 64 tell where to look.

Shapes: V vocabulary. A block is 64 logits; the last one of a row is padded with minus infinity, in a copy called its tail.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.backends.cpu import draw_lanes as lanes
from paceline.backends.cpu.draw_lanes import BLOCK

NO_TOKEN = -1
NOWHERE = np.float32(-np.inf)


@njit(nogil=True)
def order_of(x):
    """A float32 as 32 bits that compare as it does, both zeros alike: int64."""
    bits = lanes.float_bits(x + np.float32(0))
    return bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000


@njit(nogil=True)
def value_of(order):
    """The float32 of such bits."""
    return lanes.bits_float(order & 0x7FFFFFFF if order >> 31 else order ^ 0xFFFFFFFF)


@njit(nogil=True)
def survey(x, n, tail, maxima):
    """Copy the last block of a row to `tail`, padded; write the largest of each block. Returns the largest of all; NaN where one is."""
    full = n // BLOCK
    at = tail.ctypes.data
    for j in range(BLOCK):
        tail[j] = lanes.load_float(x + 4 * (full * BLOCK + j)) if full * BLOCK + j < n else NOWHERE
    out = maxima.ctypes.data
    top, of_tail = lanes.block_maxima(x, full, out), lanes.block_maxima(at, 1, out + 4 * full)
    return of_tail if of_tail > top or of_tail != of_tail else top  # noqa: PLR0124  NaN alone differs from itself


@njit(nogil=True)
def first_of(x, n, maxima, top):
    """The lowest id of the largest logit."""
    for block in range(len(maxima)):
        if maxima[block] == top:
            for token in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                if lanes.load_float(x + 4 * token) == top:
                    return token
    return NO_TOKEN


@njit(nogil=True)
def _kth_largest(values, k):
    """The k-th largest, by a heap of the k largest so far; minus infinity where there are no k."""
    if k > len(values):
        return NOWHERE
    heap = np.empty(k, np.float32)
    size = 0
    for value in values:
        if size < k:
            at = size
            size += 1
            while at > 0 and heap[(at - 1) // 2] > value:
                heap[at] = heap[(at - 1) // 2]
                at = (at - 1) // 2
            heap[at] = value
        elif value > heap[0]:
            at = 0
            while True:
                child = 2 * at + 1
                if child >= k:
                    break
                if child + 1 < k and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= value:
                    break
                heap[at] = heap[child]
                at = child
            heap[at] = value
    return heap[0]


@njit(nogil=True)
def gather(x, n, tail, maxima, least):
    """(ids, orders) of the tokens whose logit is at least `least`, in order of their ids."""
    room = 0
    for block in range(len(maxima)):
        if maxima[block] >= least:
            room += BLOCK
    ids, orders = np.empty(room, np.int64), np.empty(room, np.int64)
    found = 0
    for block in range(len(maxima)):
        if maxima[block] >= least:
            at = x + 4 * BLOCK * block if (block + 1) * BLOCK <= n else tail.ctypes.data
            hits = lanes.at_least(at, least)
            while hits:
                lane = lanes.trailing_zeros(hits)
                hits &= hits - 1
                if block * BLOCK + lane < n:
                    ids[found] = block * BLOCK + lane
                    orders[found] = order_of(lanes.load_float(at + 4 * lane))
                    found += 1
    return ids[:found], orders[:found]


@njit(nogil=True)
def select(ids, orders, worths, need):
    """(order, id) of the last of the fewest tokens, largest logit first, of equal ones the lower id first, whose worths sum to `need`.

    `need` is above 0, and at most the sum of all.
    """
    prefix, above = np.int64(0), np.int64(0)
    bins = np.empty(256, np.int64)
    for shift in (24, 16, 8, 0):
        bins[:] = 0
        for i in range(len(orders)):
            if orders[i] >> (shift + 8) == prefix:
                bins[(orders[i] >> shift) & 255] += worths[i]
        digit = 255
        while above + bins[digit] < need:
            above += bins[digit]
            digit -= 1
        prefix = prefix << 8 | digit
    for i in range(len(orders)):
        if orders[i] == prefix:
            above += worths[i]
            if above >= need:
                return prefix, ids[i]
    return prefix, np.int64(NO_TOKEN)


@njit(nogil=True)
def largest(x, n, tail, maxima, k):
    """(ids, orders) of the k largest, in order of their ids."""
    ids, orders = gather(x, n, tail, maxima, _kth_largest(maxima, k))
    order, last = select(ids, orders, np.ones(len(ids), np.int64), np.int64(k))
    kept = 0
    for i in range(len(ids)):
        if orders[i] > order or (orders[i] == order and ids[i] <= last):
            ids[kept], orders[kept] = ids[i], orders[i]
            kept += 1
    return ids[:kept], orders[:kept]
