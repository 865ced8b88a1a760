"""The four functions that do tasks of a phase, and how a thread claims tasks and calls them.

Each is compiled apart and called by its address: several processes compile them at the same time, and a model compiles only those that it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llvmlite import ir
from numba import cfunc
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu import step, sync
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.phases import ATTEND, LAST_BY_ROWS, ROUTE
from paceline.backends.cpu.places import CONTROL, DO_EXPERTS, DO_HEADS, DO_PRODUCTS, DO_ROWS, GROUPS, TEAM, WATCH
from paceline.backends.cpu.simd import I64, Emit, Value
from paceline.backends.cpu.words import TABLE, WORDS, table_at, words_at
from paceline.backends.kernel_cache import in_use

_N_ARGUMENTS = 8


def do_rows(rank, kind, layer, task, sizes, weights, buffers, batch):
    step.do_rows(rank, kind, layer, task, words_at(sizes), table_at(weights), words_at(buffers), words_at(batch))


def do_heads(rank, kind, layer, task, sizes, weights, buffers, batch):
    step.do_heads(rank, kind, layer, task, words_at(sizes), table_at(weights), words_at(buffers), words_at(batch))


def do_products(rank, kind, layer, task, sizes, weights, buffers, batch):
    step.do_products(rank, kind, layer, task, words_at(sizes), table_at(weights), words_at(buffers), words_at(batch))


def do_experts(rank, kind, layer, task, sizes, weights, buffers, batch):
    step.do_experts(rank, kind, layer, task, words_at(sizes), table_at(weights), words_at(buffers), words_at(batch))


_FUNCTIONS = {DO_ROWS: do_rows, DO_HEADS: do_heads, DO_PRODUCTS: do_products, DO_EXPERTS: do_experts}


def task_places(*, mixture: bool) -> tuple[int, ...]:
    """Places in `buffers` of the functions that a model runs."""
    return tuple(place for place in _FUNCTIONS if mixture or place != DO_EXPERTS)


@cache
def task_function(place: int) -> int:
    """Address of the compiled function for a place in `buffers`; it takes 64-bit integers."""
    return cfunc(types.void(*[types.int64] * _N_ARGUMENTS), error_model="numpy", cache=in_use())(_FUNCTIONS[place]).address


@intrinsic
def _call(_, address, rank, kind, layer, task, sizes, weights, buffers, batch):
    """Call the function at an address."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * _N_ARGUMENTS)
        arrays = [e.b.ptrtoint(each, I64) for each in args[5:]]
        e.b.call(e.b.inttoptr(args[0], kind.as_pointer()), [*args[1:5], *arrays])

    return lowered(body, types.void, *[types.int64] * 5, WORDS, TABLE, WORDS, WORDS)


@inner
def take_part(rank, sizes, weights, buffers, batch):
    """Claim and do tasks of the phase posted last until none is left. Returns the word of the thread's group as last seen."""
    control, groups = buffers[CONTROL], sizes[GROUPS]
    own = rank * groups // sizes[TEAM]
    while True:
        task, word = sync.claim(control, own, groups)
        if task < 0:
            return word
        if batch[WATCH] and sync.load_acquire(batch[WATCH]):  # given up
            sync.finish(control, own)
            continue
        kind, layer = sync.kind_and_layer(word)
        do = DO_ROWS if kind <= LAST_BY_ROWS else DO_EXPERTS if kind >= ROUTE else DO_HEADS if kind == ATTEND else DO_PRODUCTS
        _call(buffers[do], rank, kind, layer, task, sizes, weights, buffers, batch)
        sync.finish(control, own)
