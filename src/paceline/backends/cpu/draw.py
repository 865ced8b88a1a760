"""Draws of rows of logits, compiled: the tokens that `engine.sampling` draws, bit for bit (docs/internals/arithmetic.md, Sampling).

Each row takes a pass over the vocabulary for the largest logit of each block, then the filters that the request asks for, then a race of noise
unless the draw is greedy (parts: `draw_filters`).

Shapes: R rows, V vocabulary, A adjusted tokens of all rows, W words of all rows.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from paceline.backends.compiling import inner
from paceline.backends.cpu import sync
from paceline.backends.cpu.draw_filters import NO_TOKEN, NOWHERE, first_of, last_left, noise_key, race, survey, write_logprobs
from paceline.backends.cpu.draw_lanes import BLOCK
from paceline.backends.cpu.lowering import read_float, write_float
from paceline.backends.kernel_cache import in_use
from paceline.engine.arithmetic import HUGE, TINY

MAX_TOP = 20

# Words (int64) of a row: where its logits are and what its draw is of; float64 of the same, as bits; what was drawn: the token, then the largest
# ones; their log probabilities (float64 bits).
(ROW, SEED, POSITION, TOP_K, N_TOP, GREEDY, FIRST_ADJUSTED, STOP_ADJUSTED,
 INVERSE_TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY, IDS) = range(15)  # fmt: skip
LOGPROBS = IDS + 1 + MAX_TOP
N_WORDS = LOGPROBS + 1 + MAX_TOP

# Words before those of the rows: rows claimed, rows done; a cache line apart.
CLAIMED, DONE, N_CONTROL = 0, 8, 16


@inner
def _adjust(x, n, whole, real, ids_A, bias_A, seen_A, count_A, saved_A):
    """Apply bias and penalties to a row at `x`, and save the logits that it changes."""
    penalty = max(np.float32(real[REPETITION]), np.float32(TINY))
    presence, frequency = np.float32(real[PRESENCE]), np.float32(real[FREQUENCY])
    for a in range(whole[FIRST_ADJUSTED], whole[STOP_ADJUSTED]):
        if ids_A[a] < n:
            at = x + 4 * np.int64(ids_A[a])
            logit = read_float(at)
            saved_A[a] = logit
            logit = logit + bias_A[a]
            if seen_A[a]:
                logit = min(logit, np.float32(HUGE) * penalty) / penalty if logit > np.float32(0) else logit * penalty
            if count_A[a] > np.float32(0):
                logit = logit - (presence + frequency * count_A[a])
            write_float(at, logit)


@inner
def _restore(x, n, whole, ids_A, saved_A):
    for a in range(whole[FIRST_ADJUSTED], whole[STOP_ADJUSTED]):
        if ids_A[a] < n:
            write_float(x + 4 * np.int64(ids_A[a]), saved_A[a])


@inner
def _draw(x, n, whole, real, ids_A, bias_A, seen_A, count_A, saved_A, tail, maxima, bounds):
    """Draw a row at `x`. Returns the token, or `NO_TOKEN`. `whole` and `real` are the row's words, which receive the log probabilities if wanted."""
    raw = top = survey(x, n, tail, maxima)
    if not math.isfinite(raw):
        return np.int64(NO_TOKEN)
    log_total = 0.0
    if whole[N_TOP] >= 0:
        log_total = write_logprobs(x, n, tail, maxima, raw, whole[N_TOP], whole[IDS + 1 :], real[LOGPROBS + 1 :])
    adjusts = whole[FIRST_ADJUSTED] < whole[STOP_ADJUSTED]
    if adjusts:
        _adjust(x, n, whole, real, ids_A, bias_A, seen_A, count_A, saved_A)
        top = survey(x, n, tail, maxima)
    token = np.int64(NO_TOKEN)
    if math.isfinite(top):
        token = np.int64(first_of(x, n, maxima, top))
        if not whole[GREEDY]:
            inverse = np.float32(real[INVERSE_TEMPERATURE])
            least, last = last_left(x, n, tail, maxima, top, inverse, whole[TOP_K], real[TOP_P])
            high, low = noise_key(whole[SEED], whole[POSITION])
            token = np.int64(race(x, n, tail, maxima, bounds, token, top, inverse, np.float32(real[LOG_MIN_P]), least, last, high, low))
    if adjusts:
        _restore(x, n, whole, ids_A, saved_A)
    if whole[N_TOP] >= 0 and token >= 0:
        real[LOGPROBS] = np.float64(read_float(x + 4 * token)) - np.float64(raw) - log_total
    return token


_SIGNATURE = types.void(
    types.float32[::1], types.int64, types.int64, types.int64[::1], types.int32[::1], types.float32[::1], types.boolean[::1], types.float32[::1],
    types.float32[::1], types.boolean,
)  # fmt: skip


@njit(_SIGNATURE, nogil=True, cache=in_use())
def draw_rows(first_V, stride, n, words_W, ids_A, bias_A, seen_A, count_A, saved_A, waits):
    """Claim rows and draw them until none is left. Any number of threads may do this at the same time.

    Args:
        first_V: the first row of logits; rows are `stride` bytes apart. Logits are changed meanwhile, and restored.
        n: tokens of the vocabulary.
        words_W: zeros for control, then the words of each row. Receives each row's token, or `NO_TOKEN`, and its log probabilities if wanted.
        ids_A, bias_A, seen_A, count_A: adjustments; those of one row are contiguous.
        saved_A: scratch.
        waits: return only when all rows are done, also those of other threads.
    """
    address, logits = words_W.ctypes.data, first_V.ctypes.data
    reals_W = words_W.view(np.float64)
    rows = (len(words_W) - N_CONTROL) // N_WORDS
    blocks = n // BLOCK + 1
    tail = np.empty(BLOCK, np.float32)
    # The length is a multiple of whole vectors. Places beyond the blocks hold minus infinity.
    padded = np.empty((blocks + 15) // 16 * 16, np.float32)
    padded[blocks:] = NOWHERE
    bounds = np.empty(len(padded), np.float32)
    while True:
        row = sync.fetch_add(address + 8 * CLAIMED, 1)
        if row >= rows:
            break
        start, stop = N_CONTROL + row * N_WORDS, N_CONTROL + (row + 1) * N_WORDS
        whole, real = words_W[start:stop], reals_W[start:stop]
        whole[IDS] = _draw(logits + stride * whole[ROW], n, whole, real, ids_A, bias_A, seen_A, count_A, saved_A,
                           tail, padded[:blocks], bounds)  # fmt: skip
        sync.fetch_add(address + 8 * DONE, 1)
    while waits and sync.load_acquire(address + 8 * DONE) < rows:
        sync.give_way()
