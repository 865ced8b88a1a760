"""The sequence of phases of a forward pass, and the number of tasks of each. Changes no result."""

from __future__ import annotations

from paceline.backends.compiling import inner
from paceline.backends.cpu.forms import PANEL
from paceline.backends.cpu.places import (
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    FIRST_LAYER,
    HEAD_SPLIT,
    HIDDEN,
    KV_HEADS,
    LOGIT_ROWS,
    LOW,
    N_EXPERT_PARTS,
    N_LAYERS,
    N_PIECES,
    Q_HEADS,
    ROWS,
    ROWS_A_TASK,
    STOP_LAYER,
    TEAM,
    VOCAB,
    WHOLE_NORM,
)
from paceline.backends.cpu.products import WIDE_FROM
from paceline.backends.cpu.sizes import CHUNK, PART

# Kinds of phases: by rows, by heads, matrix products.
(START, NORM_ATTENTION, NORM_FFN, NORM_HEAD, END, NORM_HEADS, NORM_LOW, ATTEND, PROJECT_LOW, PROJECT_QKV, PROJECT_OUT, PROJECT_GATE, PROJECT_DOWN,
 PROJECT_HEAD) = range(14)  # fmt: skip
LAST_BY_ROWS = NORM_LOW
ROUTE, GATHER, EXPERTS_GATE, EXPERTS_DOWN = range(14, 18)
"""Phases of a mixture of experts, in place of gate and down."""

LAYERS, HEADS = 0, 1
"""Pieces of work: the layers, X_BF16 to X_BF16; final norm and head of HEAD_ROWS, X_BF16 to LOGITS (fp32 [rows, vocab])."""

HEAD_CHUNK = 4
"""Blocks of outputs in a chunk of the head, as `CHUNK` for other products."""

TASKS_A_THREAD = 16
"""Least tasks for each thread in a product of few rows. Raising it: threads wait less for the last task, but a task reads less contiguous memory."""


@inner
def chunks_a_task(chunks, rows, team):
    """Return the number of contiguous chunks of outputs in a task of a product: many for few rows, because each task starts a new stream of reads."""
    return 1 if rows >= WIDE_FROM else max(1, chunks // (TASKS_A_THREAD * team))


@inner
def _tasks(chunks, rows, team):
    """Return the number of tasks of a product with outputs of `chunks` chunks."""
    many = chunks_a_task(chunks, rows, team)
    return (chunks + many - 1) // many * ((rows + PART - 1) // PART)


@inner
def chunks_of(kind, sizes):
    """Return the number of chunks of a product's outputs; for experts, those of one expert."""
    if kind == PROJECT_QKV:
        return sizes[Q_HEADS] + 2 * sizes[KV_HEADS]
    if kind == PROJECT_HEAD:
        return (sizes[VOCAB] // 16 + HEAD_CHUNK - 1) // HEAD_CHUNK
    n = sizes[FFN] if kind == PROJECT_GATE else sizes[EXPERT_WIDTH] if kind == EXPERTS_GATE else sizes[HIDDEN]
    if kind == PROJECT_LOW:
        n = sizes[LOW]
    return (n // 16 + CHUNK - 1) // CHUNK


@inner
def prepare_batch(sizes, batch):
    """Set how the batch's rows and heads are cut into tasks. Changes no result."""
    rows, pieces, kv_heads = batch[ROWS], batch[N_PIECES], sizes[KV_HEADS]
    batch[ROWS_A_TASK] = max(1, min(8, rows // sizes[TEAM]))
    # With few rows, one query head for each task keeps the team evenly busy. With many, one KV head for each task reads its keys once.
    few = pieces * kv_heads < 4 * sizes[TEAM]
    batch[HEAD_SPLIT] = sizes[Q_HEADS] // max(1, kv_heads) if few else 1


@inner
def phase(work, position, sizes, batch):
    """Return (kind, layer, tasks) of the phase at `position` of a piece of work; kind -1 at its end."""
    rows, kv_heads = batch[ROWS], sizes[KV_HEADS]
    if work == HEADS:
        logit_rows, edges = batch[LOGIT_ROWS], sizes[N_LAYERS]
        if position == 0:
            return NORM_HEAD, edges, logit_rows
        return (PROJECT_HEAD, edges, _tasks(chunks_of(PROJECT_HEAD, sizes), logit_rows, sizes[TEAM])) if position == 1 else (-1, 0, 0)
    row_tasks = (rows + batch[ROWS_A_TASK] - 1) // batch[ROWS_A_TASK]
    phases = 7 + sizes[WHOLE_NORM] + (2 if sizes[EXPERTS] else 0) + (2 if sizes[LOW] else 0)
    layer, at = batch[FIRST_LAYER] + position // phases, position % phases
    if layer == batch[STOP_LAYER]:
        return (END, layer, row_tasks) if at == 0 else (-1, 0, 0)
    if at == 0:
        return (NORM_ATTENTION if position else START), layer, row_tasks
    if sizes[LOW]:
        if at == 1:
            return PROJECT_LOW, layer, _tasks(chunks_of(PROJECT_LOW, sizes), rows, sizes[TEAM])
        if at == 2:
            return NORM_LOW, layer, row_tasks
        at -= 2
    if sizes[WHOLE_NORM] and at > 1:
        if at == 2:
            return NORM_HEADS, layer, row_tasks
        at -= 1
    if at == 2:
        return ATTEND, layer, batch[N_PIECES] * kv_heads * batch[HEAD_SPLIT]
    if at == 4:
        return NORM_FFN, layer, row_tasks
    if sizes[EXPERTS] and at > 4:
        if at == 5:
            return ROUTE, layer, (rows + PANEL - 1) // PANEL
        if at == 6:
            return GATHER, layer, row_tasks
        kind = EXPERTS_GATE if at == 7 else EXPERTS_DOWN
        units = batch[N_EXPERT_PARTS] * chunks_of(kind, sizes)
        many = chunks_a_task(units, rows, sizes[TEAM])
        return kind, layer, (units + many - 1) // many
    kind = PROJECT_QKV if at == 1 else PROJECT_OUT if at == 3 else PROJECT_GATE if at == 5 else PROJECT_DOWN
    return kind, layer, _tasks(chunks_of(kind, sizes), rows, sizes[TEAM])


@inner
def is_shared(kind):
    """Return whether the result of a phase is made by all ranks of a tensor group together."""
    return kind in (PROJECT_OUT, PROJECT_DOWN, PROJECT_HEAD)
