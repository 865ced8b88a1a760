"""Arrays of 64-bit words that compiled code knows by their address alone.

A kernel passes `sizes`, `weights`, `buffers` and `batch` to each function that it calls. As Numba's arrays each of them is seven values, is counted, and
has its indices wrapped: compiling that took a third of a first start. Here each is a pointer, and an index is an offset.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from paceline.backends.cpu.places import N_PARTS, N_WEIGHTS

_I64 = ir.IntType(64)


class _Words(types.Type):
    """int64 [N]."""

    key_type: types.Type = types.int64
    strides = (1,)


class _Table(_Words):
    """int64 [layer, place, part], as `places` names them."""

    key_type = types.UniTuple(types.int64, 3)
    strides = (N_WEIGHTS * N_PARTS, N_PARTS, 1)


WORDS, TABLE = _Words("paceline.words"), _Table("paceline.table")


@register_model(_Words)
@register_model(_Table)
class _Address(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: types.Type) -> None:
        super().__init__(manager, kind, _I64.as_pointer())


def _is_index(kind: types.Type, index: types.Type) -> bool:
    return isinstance(kind, _Words) and (isinstance(index, types.BaseTuple) == isinstance(kind, _Table))


@infer_global(operator.getitem)
class _TypeOfItem(AbstractTemplate):
    def generic(self, args: tuple[types.Type, ...], kws: Any) -> Any:
        assert not kws
        kind, index = args
        return signature(types.int64, kind, kind.key_type) if _is_index(kind, index) else None


@infer_global(operator.setitem)
class _TypeOfStore(AbstractTemplate):
    def generic(self, args: tuple[types.Type, ...], kws: Any) -> Any:
        assert not kws
        kind, index, _ = args
        return signature(types.none, kind, kind.key_type, types.int64) if _is_index(kind, index) else None


def _place(builder: Any, kind: _Words, words: Any, index: Any) -> Any:
    """Pointer to a word."""
    parts = [index] if len(kind.strides) == 1 else [builder.extract_value(index, i) for i in range(len(kind.strides))]
    offset: Any = None
    for part, stride in zip(parts, kind.strides, strict=True):
        step = builder.mul(part, ir.Constant(_I64, stride)) if stride > 1 else part
        offset = step if offset is None else builder.add(offset, step)
    return builder.gep(words, [offset])


@lower_builtin(operator.getitem, _Words, types.Any)
def _read(_: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.load(_place(builder, sig.args[0], *args))


@lower_builtin(operator.setitem, _Words, types.Any, types.Any)
def _write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    words, index, value = args
    builder.store(value, _place(builder, sig.args[0], words, index))
    return context.get_dummy_value()


def _pointer(_: Any, builder: Any, __: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], _I64.as_pointer())


@intrinsic
def words_at(_, address):
    """The words at an address."""
    return WORDS(types.int64), _pointer


@intrinsic
def table_at(_, address):
    """The table at an address."""
    return TABLE(types.int64), _pointer
