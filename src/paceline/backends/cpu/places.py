"""Where kernels find what they work on: places in the arrays that a step is described by (`step`).

Shapes: T rows, D hidden, HQ query heads, HK key/value heads, HD head dimension, F feed-forward: of the rank's share. Strides are bytes.
"""

from __future__ import annotations

# Places in `sizes` (int64): what never changes. Of what `*_INPUTS` inputs of a shared sum are held, a rank's own begin at `*_FROM`.
# GROUPS: of the team's threads (`sync`). Queries are products of `Q_INPUTS` activations that are held at the place Q_X of `buffers`, keys and values of those at KV_X;
# a KV head has `KV_STEP` outputs of its matrix, and OWN_DIMS of a key. LOW: outputs of first products, before norms of LOW_EPS; 0: there are none.
(HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, EPS, SCALE, N_LAYERS, OUT_SEGMENTS, DOWN_SEGMENTS, TEAM, BLOCK_STRIDE, LAYER_STRIDE,
 HEAD_STRIDE, SCRATCH_STRIDE, EXPANDED, OUT_INPUTS, OUT_FROM, DOWN_INPUTS, DOWN_FROM, LOGITS_STRIDE, RANK, RANKS, ROTARY, ACTIVATION, RESIDUAL_SCALE, LOGITS_SCALE,
 WHOLE_NORM, EXPERTS, TOP_K, EXPERT_WIDTH, NORMED_SHARES, GROUPS, Q_X, Q_INPUTS, KV_X, KV_INPUTS, KV_STEP, OWN_DIMS, VALUE_DIM, LOW, LOW_EPS,
 N_SIZES) = range(44)  # fmt: skip

# Places in `weights` [layer, place, part]; the row after the last layer has the edges. 0 where a family has no such tensor. COS and SIN are a layer's tables of
# rotary embedding, WINDOW how many keys a row sees; the norms behind attention and feed-forward are `*_OUT_NORM`; SINKS has a record of attention a head. `*_LOW` are
# the first of two products.
(ATTN_NORM, Q, K, V, QKV_BIAS, Q_NORM, K_NORM, OUT, FFN_NORM, GATE, UP, DOWN, FINAL_NORM, HEAD, WINDOW,
 COS, SIN, ATTN_OUT_NORM, FFN_OUT_NORM, ROUTER, OUT_BIAS, SINKS, ROUTER_BIAS, GATE_BIAS, UP_BIAS, DOWN_BIAS, Q_LOW, KV_LOW, Q_LOW_NORM, KV_LOW_NORM,
 N_WEIGHTS) = range(31)  # fmt: skip

# Parts of a place: the address; of a matrix also its product's address (`products`), its bytes a block and eight groups, its `Inputs`.
AT, PRODUCT, EIGHT_GROUPS, INPUTS, N_PARTS = range(5)

# Places in `buffers` (addresses). H, ATT and ACT hold activations for products in panels, each as int8, int16 and bf16 where a matrix takes
# them so (`forms.Inputs`). ADDED has what attention or feed-forward adds, where that is normed first, TO_NORM
# queries and keys where their norm is over all heads, and what first products give; Q_HELD and KV_HELD hold that, normed. Q_BF16 has queries; each gives its place to what attention mixed for it. Of a group of ranks, `*_PARTS` has this rank's
# partial sums (`_multiply_parts`), `*_JOINS` how those of all ranks are added (`_add_partials`), ARRIVED, a cache line a rank, the exchange that each has reached.
# DO_*: the functions that do tasks (`tasks`).
# Of a mixture (`experts`): CHOICES, SHARES and PLACED have each row's experts, their shares, and where it lies among their rows; EXPERT_ROWS those rows.
(X, X_BF16, H, H_16, H_BF16, ATT, ATT_16, ATT_BF16, ACT, ACT_16, ACT_BF16, Q_BF16, KV, TABLES, ROW_POSITION, ROW_TABLE, ROW_LEFT, PIECES,
 RECORDS, UNFINISHED, HEAD_ROWS, LOGITS, SCRATCH, ZEROS, ADDED, TO_NORM, WHOLE_BOUNDS, OUT_BOUNDS, DOWN_BOUNDS, CONTROL, OUT_PARTS, DOWN_PARTS, OUT_JOINS, DOWN_JOINS, ARRIVED,
 EXPERT_ROWS, EXPERT_ROWS_16, EXPERT_ROWS_BF16, EXPERT_OUT, EXPERT_BOUNDS, EXPERT_SEGMENT, EXPERT_PARTS, COUNTS, CHOICES, SHARES, PLACED, ROUTED,
 Q_HELD, Q_HELD_16, Q_HELD_BF16, KV_HELD, KV_HELD_16, KV_HELD_BF16, Q_BOUNDS, KV_BOUNDS, DO_ROWS, DO_HEADS, DO_PRODUCTS, DO_EXPERTS, N_BUFFERS) = range(60)  # fmt: skip

# Places in `batch` (int64): what changes with each batch. EXCHANGE: the number of the one that the group is at; only grows.
ROWS, N_PIECES, TABLE_STRIDE, LOGIT_ROWS, ROWS_A_TASK, HEAD_SPLIT, FIRST_LAYER, STOP_LAYER, WATCH, EXCHANGE, N_EXPERT_PARTS, N_BATCH = (
    range(12)
)
