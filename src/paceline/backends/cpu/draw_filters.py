"""Parts of a draw: finding the largest logits of a row; the tokens that top-k and top-p leave; log probabilities; and the token that wins by its noise
(docs/internals/arithmetic.md, Sampling).

Skipped blocks can't change a draw. The largest logit of each block of 64 shows which blocks may matter. Noise has a least value, so the largest logit of
a block also bounds the noise with which one of its tokens can win.

Shapes: V vocabulary. The last block of a row is padded with minus infinity, in a copy called its tail.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.compiling import inner
from paceline.backends.cpu import draw_lanes as lanes
from paceline.backends.cpu.draw_lanes import BLOCK, HASH, ROUNDER, ROUNDER_BITS
from paceline.backends.cpu.lowering import read_float
from paceline.engine.arithmetic import EXP2, LN2, LOG2E, LOG_SERIES, ROOT_HALF, WEIGHT_BITS, WEIGHTLESS

NO_TOKEN = -1
NOWHERE = np.float32(-np.inf)


@inner
def order_of(x):
    """Return 32 bits (int64) for a float32 that compare in the same order; both zeros give the same bits."""
    bits = lanes.float_bits(x + np.float32(0))
    return bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000


@inner
def value_of(order):
    """Return the float32 for bits of `order_of`."""
    return lanes.bits_float(order & 0x7FFFFFFF if order >> 31 else order ^ 0xFFFFFFFF)


@inner
def survey(x, n, tail, maxima):
    """Copy the last block of a row to `tail`, padded, and write the largest of each block to `maxima`. Returns the largest of all; NaN if any is NaN."""
    full = n // BLOCK
    at = tail.ctypes.data
    for j in range(BLOCK):
        tail[j] = read_float(x + 4 * (full * BLOCK + j)) if full * BLOCK + j < n else NOWHERE
    out = maxima.ctypes.data
    top, of_tail = lanes.block_maxima(x, full, out), lanes.block_maxima(at, 1, out + 4 * full)
    return of_tail if of_tail > top or of_tail != of_tail else top  # noqa: PLR0124  NaN alone differs from itself


@inner
def first_of(x, n, maxima, top):
    """Return the lowest id with the largest logit, `top`."""
    for block in range(len(maxima)):
        if maxima[block] == top:
            for token in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
                if read_float(x + 4 * token) == top:
                    return token
    return NO_TOKEN


@inner
def _kth_largest(values, k):
    """Return the k-th largest value, found with a heap of the k largest so far; minus infinity if there are fewer than k."""
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


@inner
def gather(x, n, tail, maxima, least):
    """Return (ids, orders) of the tokens with a logit of at least `least`, in the order of their ids."""
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
                    orders[found] = order_of(read_float(at + 4 * lane))
                    found += 1
    return ids[:found], orders[:found]


@inner
def select(ids, orders, worths, need):
    """Take tokens in order (largest logit first, of equal ones the lower id first) until their worths sum to `need`. Return (order, id) of the last one.

    `need` is above 0, and at most the sum of all worths.
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


@inner
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


_SLACK = 1.001
"""Bounds on noise keep this much more than they must: their rounding errors are 100 times smaller."""
_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@inner
def _splitmix(x):
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


@inner
def noise_key(seed, position):
    key = _splitmix(_splitmix(np.uint64(seed)) ^ (np.uint64(position) * _GOLDEN))
    return np.int64(key >> np.uint64(32)), np.int64(key & np.uint64(0xFFFFFFFF))


@inner
def _noise(token, high, low):
    """32 random bits of a token."""
    mask = np.int64(0xFFFFFFFF)
    x = token ^ high
    x = ((x ^ (x >> 16)) * HASH[0]) & mask
    x = x ^ (x >> 15) ^ low
    x = (x * HASH[1]) & mask
    return x ^ (x >> 16)


@inner
def log_of(x):
    bits = lanes.double_bits(x)
    exponent = (bits - ROOT_HALF) >> 52
    m = lanes.bits_double(bits - (exponent << 52))
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = LOG_SERIES[0]
    for coefficient in LOG_SERIES[1:]:
        series = series * square + coefficient
    return exponent * LN2 + 2.0 * s * series


@inner
def race(x, n, tail, maxima, bounds, best, top, inverse, log_min_p, least, last, high, low):
    """The token of the least log(E) - z among those that the filters leave.

    Args:
        best: a token that they leave, of the largest logit.
        bounds: scratch of a float32 a block.
        least, last: as `draw_filters.last_left` has them.
        high, low: the noise's key.
    """
    lanes.exp_near(maxima.ctypes.data, len(bounds) // 16, top, inverse, bounds.ctypes.data)
    score = log_of(-log_of(1.0 - (_noise(best, high, low) + 0.5) * 2.0**-32))
    bound = math.exp(score) * 2.0**32 * _SLACK
    for block in range(len(maxima)):
        # E is at least v, so a token that wins has noise of at most exp(score + z).
        most = bounds[block] * bound
        if most < 0.5 or maxima[block] < least:
            continue
        at = x + 4 * BLOCK * block if (block + 1) * BLOCK <= n else tail.ctypes.data
        # Of a block's ids as they are hashed, the last six bits alone differ, and a product is the sum of its parts' products.
        first = block * BLOCK ^ high
        first = first ^ (first >> 16)
        turn = first & (BLOCK - 1)
        hits = lanes.noise_near((first - turn) * HASH[0] & 0xFFFFFFFF, low, np.int64(min(most, 4294967295.0)))
        while hits:
            lane = lanes.trailing_zeros(hits) ^ turn
            hits &= hits - 1
            token, logit = block * BLOCK + lane, read_float(at + 4 * lane)
            z = (logit - top) * inverse
            if z >= log_min_p and (logit > least or (logit == least and token <= last)):
                here = log_of(-log_of(1.0 - (_noise(token, high, low) + 0.5) * 2.0**-32)) - np.float64(z)
                if here < score or (here == score and token < best):
                    best, score = token, here
                    bound = math.exp(score) * 2.0**32 * _SLACK
    return best


_LOG2E = np.float32(LOG2E)
_ONE = np.float32(1)
_CUT, _CUTS = 2.0, 9
"""Distance below the largest logit, over the temperature, in which a nucleus is searched first; and the most steps of it before all tokens are searched."""
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in EXP2)


@inner
def weight_of(z):
    t = max(z * _LOG2E, np.float32(WEIGHTLESS))
    whole = np.float32(math.floor(t))
    rest = t - whole
    p = ((((_C0 * rest + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest + _C5
    power = lanes.bits_double((np.int64(whole) + 1023) << 52)
    return lanes.double_bits(np.float64(p) * power + ROUNDER) - ROUNDER_BITS


@inner
def total_weight(x, n, tail, maxima, top, inverse):
    """Return the sum of the weights of all tokens, int64."""
    total = np.int64(0)
    for block in range(len(maxima)):
        if (maxima[block] - top) * inverse * _LOG2E > np.float32(WEIGHTLESS):
            total += lanes.block_weight(x + 4 * BLOCK * block if (block + 1) * BLOCK <= n else tail.ctypes.data, top, inverse)
    return total


@inner
def _share_of(top_p, total):
    """Return the sum of weights, an integer, that a nucleus must reach."""
    return min(total, max(np.int64(1), np.int64(math.ceil(top_p * np.float64(total)))))


@inner
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


@inner
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


@inner
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
