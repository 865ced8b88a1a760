"""Places of the sizes, addresses and counters in the arrays that describe a step to the kernels (`step`).

Shapes, of the rank's share: T rows, D hidden, HQ query heads, HK key/value heads, HD head dimension, F feed-forward. Strides are bytes.
"""

from __future__ import annotations

# Places in `sizes` (int64), which never change. A rank holds `*_INPUTS` inputs of a shared sum, and its own begin at `*_FROM`.
# GROUPS: groups of the team's threads (`sync`). Queries are products of `Q_INPUTS` activations at place Q_X of `buffers`, keys and values of KV_INPUTS
# at KV_X. A KV head has `KV_STEP` outputs of its matrix, of which OWN_DIMS belong to a key. LOW: outputs of the first low-rank products, before norms
# with LOW_EPS; 0: the model has none.
(HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, EPS, SCALE, N_LAYERS, OUT_SEGMENTS, DOWN_SEGMENTS, TEAM, BLOCK_STRIDE, LAYER_STRIDE,
 HEAD_STRIDE, SCRATCH_STRIDE, EXPANDED, OUT_INPUTS, OUT_FROM, DOWN_INPUTS, DOWN_FROM, LOGITS_STRIDE, RANK, RANKS, ROTARY, ACTIVATION, RESIDUAL_SCALE, LOGITS_SCALE,
 WHOLE_NORM, EXPERTS, TOP_K, EXPERT_WIDTH, NORMED_SHARES, GROUPS, Q_X, Q_INPUTS, KV_X, KV_INPUTS, KV_STEP, OWN_DIMS, VALUE_DIM, LOW, LOW_EPS,
 N_SIZES) = range(44)  # fmt: skip

# Places in `weights` [layer, place, part]. The row after the last layer has the final norm and the head. An entry is 0 if the family has no such tensor.
# COS and SIN are a layer's tables of rotary embedding, WINDOW is the number of keys that a row sees. `*_OUT_NORM` are the norms after attention and
# feed-forward. SINKS has one record of attention for each head. `*_LOW` are the first of two low-rank products.
(ATTN_NORM, Q, K, V, QKV_BIAS, Q_NORM, K_NORM, OUT, FFN_NORM, GATE, UP, DOWN, FINAL_NORM, HEAD, WINDOW,
 COS, SIN, ATTN_OUT_NORM, FFN_OUT_NORM, ROUTER, OUT_BIAS, SINKS, ROUTER_BIAS, GATE_BIAS, UP_BIAS, DOWN_BIAS, Q_LOW, KV_LOW, Q_LOW_NORM, KV_LOW_NORM,
 N_WEIGHTS) = range(31)  # fmt: skip

# Parts of a place: the address; for a matrix also its product's address (`products`), its bytes in each block for eight groups, and its `Inputs`.
AT, PRODUCT, EIGHT_GROUPS, INPUTS, N_PARTS = range(5)

# Places in `buffers` (addresses). H, ATT and ACT hold activations for products in panels, as int8, int16 and bf16 if a matrix takes them so
# (`forms.Inputs`). ADDED holds the result of attention or feed-forward if it is normed before it is added. TO_NORM holds queries and keys if their norm
# is over all heads, and the results of the first low-rank products; Q_HELD and KV_HELD hold the latter after the norm. Q_BF16 holds queries, which
# attention overwrites with its results. In a group of ranks, `*_PARTS` describes this rank's partial sums (`_multiply_parts`), and `*_JOINS` how those of
# all ranks are added (`_add_partials`). ARRIVED has one cache line for each rank, with the exchange that it has reached.
# DO_*: the functions that do tasks (`tasks`).
# In a mixture (`experts`), CHOICES, SHARES and PLACED hold each row's experts, their shares, and the row's places among their rows, EXPERT_ROWS.
(X, X_BF16, H, H_16, H_BF16, ATT, ATT_16, ATT_BF16, ACT, ACT_16, ACT_BF16, Q_BF16, KV, TABLES, ROW_POSITION, ROW_TABLE, ROW_LEFT, PIECES,
 RECORDS, UNFINISHED, HEAD_ROWS, LOGITS, SCRATCH, ZEROS, ADDED, TO_NORM, WHOLE_BOUNDS, OUT_BOUNDS, DOWN_BOUNDS, CONTROL, OUT_PARTS, DOWN_PARTS, OUT_JOINS, DOWN_JOINS, ARRIVED,
 EXPERT_ROWS, EXPERT_ROWS_16, EXPERT_ROWS_BF16, EXPERT_OUT, EXPERT_BOUNDS, EXPERT_SEGMENT, EXPERT_PARTS, COUNTS, CHOICES, SHARES, PLACED, ROUTED,
 Q_HELD, Q_HELD_16, Q_HELD_BF16, KV_HELD, KV_HELD_16, KV_HELD_BF16, Q_BOUNDS, KV_BOUNDS, DO_ROWS, DO_HEADS, DO_PRODUCTS, DO_EXPERTS, N_BUFFERS) = range(60)  # fmt: skip

# Places in `batch` (int64), which change with each batch. EXCHANGE: the number of the group's present exchange; it only grows.
ROWS, N_PIECES, TABLE_STRIDE, LOGIT_ROWS, ROWS_A_TASK, HEAD_SPLIT, FIRST_LAYER, STOP_LAYER, WATCH, EXCHANGE, N_EXPERT_PARTS, N_BATCH = (
    range(12)
)
