"""A thin vocabulary over llvmlite for kernels of 16 lanes: operations that Numba itself can't express.

An `@intrinsic` body gets an `Emit` and writes straight-line vector code with it. Nothing here knows about models.
Every operation is the named IEEE one (no fast-math, no reassociation), so a kernel's order of operations determines its bytes.
`lowering` has the operations that differ between instruction sets.

Types: F = 16 x float, B = 32 x bfloat, H = 32 x i16, I = 16 x i32. Addresses are i64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

binding.initialize_native_asmparser()

LANES = 16


class _BFloat(ir.types.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16 = _BFloat()
F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F = ir.VectorType(F32, 16)
B = ir.VectorType(BF16, 32)
B16 = ir.VectorType(BF16, 16)
H = ir.VectorType(I16, 32)
I = ir.VectorType(I32, 16)  # noqa: E741 - the legend's letter
HALF = ir.VectorType(ir.HalfType(), 16)
BYTES = I8.as_pointer()

_EXP2 = (1.3264728e-3, 9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1)
"""2**r = 1 + r * (...) on [-0.5, 0.5], highest power first; relative error 1.7e-7 in fp32."""

Value = Any
"""An llvmlite value; llvmlite ships no types."""


class ProductSum(Protocol):
    """A sum to which products are added."""

    def add(self, a: Value, b: Value) -> None:
        """Add to each lane the products of its elements of a and b."""
        ...

    def total(self) -> Value: ...


class RunningSum:
    """A `ProductSum` that computes the sum after each product.

    Args:
        step: returns the next sum for (sum, a, b).
    """

    def __init__(self, acc: Value, step: Callable[[Value, Value, Value], Value]) -> None:
        self._acc, self._step = acc, step

    def add(self, a: Value, b: Value) -> None:
        self._acc = self._step(self._acc, a, b)

    def total(self) -> Value:
        return self._acc


class Emit(ABC):
    """Writes vector instructions at the builder's position."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, result: Any, *args: Value) -> Value:
        fn = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(fn, args)

    # --- constants and addresses

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def const(self, value: float) -> Value:
        return ir.Constant(F, [ir.Constant(F32, float(np.float32(value)))] * LANES)

    def const_i(self, value: int) -> Value:
        return ir.Constant(I, [ir.Constant(I32, value)] * LANES)

    def at(self, address: Value, offset: Value | int = 0) -> Value:
        """Return the byte pointer `address + offset`. `address` is an i64 or a byte pointer."""
        pointer = address if isinstance(address.type, ir.PointerType) else self.b.inttoptr(address, BYTES)
        return self.b.gep(pointer, [self.i64(offset) if isinstance(offset, int) else offset])

    def mul(self, a: Value, b: int) -> Value:
        return self.b.mul(a, self.i64(b))

    # --- memory

    def load(self, kind: Any, address: Value, offset: Value | int = 0, align: int = 1) -> Value:
        return self.b.load(self.b.bitcast(self.at(address, offset), kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, offset: Value | int = 0, align: int = 1) -> None:
        self.b.store(value, self.b.bitcast(self.at(address, offset), value.type.as_pointer()), align=align)

    def prefetch(self, address: Value, n_bytes: int) -> None:
        """Prefetch the cache lines of `n_bytes` from `address` into the second level. The address may lie beyond the end of an array.

        Prefetching into the first level, which allows few pending lines, gave 0.78 of a plain read's rate instead of 0.87.
        """
        for at in range(0, n_bytes, 64):
            flags = [ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)]
            self.call("llvm.prefetch.p0", ir.VoidType(), self.at(address, at), *flags)

    def word(self, address: Value, row: int, word: int) -> Value:
        """Return the 32-bit word `word` of the row of activations at `address` + `row` as the sums of products take it: here an I."""
        return self.splat(self.load(I32, address, row + 4 * word), I)

    def splat(self, scalar: Value, kind: Any) -> Value:
        undefined = ir.Constant(kind, ir.Undefined)
        lane = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(I32, kind.count), [ir.Constant(I32, 0)] * kind.count))

    def load_pair(self, address: Value, offset: Value | int = 0) -> Value:
        """Load two neighbouring bf16 values, repeated over all lanes, a B."""
        return self.b.bitcast(self.splat(self.load(I32, address, offset), I), B)

    def load_splat(self, address: Value, offset: Value | int = 0) -> Value:
        """Load one float, repeated over all lanes, an F."""
        return self.splat(self.load(F32, address, offset), F)

    def load_float_pair(self, address: Value, offset: Value, odd: bool) -> tuple[Value, Value]:  # noqa: ARG002 - where memory is read in fours
        """Load two neighbouring floats, each repeated over all lanes. Returns the second, then the first, an F each.

        `odd`: they are the third and the fourth float of a group of sixteen bytes.
        """
        return self.load_splat(address, self.b.add(offset, self.i64(4))), self.load_splat(address, offset)

    def load_bf16(self, address: Value, offset: Value | int = 0) -> Value:
        """Load sixteen bf16 values, widened to an F."""
        halves = self.load(ir.VectorType(I16, 16), address, offset)
        return self.b.bitcast(self.b.shl(self.b.zext(halves, I), self.const_i(16)), F)

    def load_half(self, address: Value, offset: Value | int = 0) -> Value:
        """Load sixteen IEEE half floats, widened to an F."""
        return self.b.fpext(self.load(HALF, address, offset), F)

    def store_every_second(self, halves: Value, address: Value, odd: Value) -> None:
        """Store 16 x i16 to every second i16 in memory from `address` on, or from the i16 after it if `odd` is 1. The others are not changed."""
        b = self.b
        words = b.bitcast(b.shl(b.zext(halves, I), self.splat(b.trunc(self.mul(odd, 16), I32), I)), H)
        kind = ir.VectorType(ir.IntType(1), 32)
        evens, odds = (ir.Constant(kind, [ir.Constant(ir.IntType(1), i % 2 == parity) for i in range(32)]) for parity in (0, 1))
        mask = b.select(b.trunc(odd, ir.IntType(1)), odds, evens)
        self.call("llvm.masked.store.v32i16.p0", ir.VoidType(), words, address, ir.Constant(I32, 2), mask)

    def var(self, value: Value) -> Value:
        """Return a mutable local variable, which LLVM turns into a register."""
        slot = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, slot)
        return slot

    # --- arithmetic

    # These attributes and operations differ between instruction sets: see `lowering`.

    rows_at_once = 8
    """Number of rows for which the sums of one block of outputs stay in registers."""
    parts_of_panels = False
    """True if tiles have at most `rows_at_once` rows."""
    flushes_early = False
    """True if the processor flushes results that are denormal before rounding. It may then flush one that rounding would have made normal."""

    @abstractmethod
    def flush_denormals(self) -> Value:
        """Treat denormals as zero from here on. Returns the former mode (i32) for `restore_denormals`."""
        ...

    @abstractmethod
    def restore_denormals(self, before: Value) -> None: ...

    @contextmanager
    def flushed(self) -> Generator[None]:
        """Make `pair_sums` treat denormals as zero in code that is emitted within this context."""
        before = self.flush_denormals()
        yield
        self.restore_denormals(before)

    def watch_underflow(self) -> None:
        """Forget results that were flushed so far."""
        return

    def has_underflowed(self) -> Value:
        """Return an i1: whether a result may have been flushed that would round up to a normal number.

        If so, everything since `watch_underflow` must be computed again with the careful operations.
        """
        return ir.Constant(ir.IntType(1), 0)

    @abstractmethod
    def pause(self) -> None:
        """Tell the processor that the thread waits for a change of memory."""
        ...

    def dp(self, acc: Value, a: Value, b: Value) -> Value:
        """Return acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1], the odd product first, each fused, as VDPBF16PS does. Denormals are zero within `flushed`."""
        (odd, even), (other_odd, other_even) = (self.widened(each) for each in (a, b))
        return self.fma(even, other_even, self.fma(odd, other_odd, acc))

    def widened(self, pairs: Value) -> tuple[Value, Value]:
        """Return the odd and the even elements of pairs of bf16 (B or I), an F each."""
        b, line = self.b, self.b.bitcast(pairs, I)
        return b.bitcast(b.and_(line, self.const_i(-0x10000)), F), b.bitcast(b.shl(line, self.const_i(16)), F)

    def pair_sums(self, acc: Value, careful: bool) -> ProductSum:  # noqa: ARG002 - as it is
        """Return a sum of products of bf16 pairs (`dp`) that begins at `acc` (F). `careful`: it is also right if `has_underflowed` is true."""
        return RunningSum(acc, lambda total, a, b: self.dp(total, self.b.bitcast(a, B), self.b.bitcast(b, B)))

    @abstractmethod
    def byte_sums(self, acc_M: list[Value], most: int) -> Sequence[ProductSum]:
        """Return, for each row, a sum that begins at `acc` (I) and adds products of the four bytes in each lane of a (unsigned, at most `most`) and b (signed).

        The caller adds the words of a row in order, each to all rows of `rows_at_once` before the next one.
        """
        ...

    @abstractmethod
    def word_sums(self, acc: Value) -> ProductSum:
        """Return a sum that begins at `acc` (I) and adds products of the two signed words in each lane of a (from `words`) and b.

        The caller adds all words of a row's group, in order.
        """
        ...

    def words(self, codes: Value) -> Value:
        """Return signed bytes (32 x i8, two for each lane) in the form that `word_sums` takes: here as words of 16 bits, I."""
        return self.b.bitcast(self.b.sext(codes, H), I)

    def nibbles(self, line: Value, high: bool) -> Value:
        """Return the low or the high four bits of each byte, an I."""
        return self.b.and_(self.b.lshr(line, self.const_i(4)) if high else line, self.const_i(0x0F0F0F0F))

    @abstractmethod
    def look_up(self, table: Sequence[int], codes: Value) -> Value:
        """Return the entry of a table of sixteen bytes for each byte of the codes (all below 16), an I."""
        ...

    def to_bf16(self, value: Value) -> Value:
        """Return F rounded to the nearest bf16, ties to even, denormals to a zero of their sign: 16 x i16, as VCVTNEPS2BF16. Here in integer arithmetic."""
        b = self.b
        bits = b.bitcast(value, I)
        upper = b.lshr(bits, self.const_i(16))
        rounded = b.lshr(b.add(b.add(bits, self.const_i(0x7FFF)), b.and_(upper, self.const_i(1))), self.const_i(16))
        size = b.and_(bits, self.const_i(0x7FFFFFFF))
        rounded = b.select(b.icmp_signed("<", size, self.const_i(0x00800000)), b.and_(upper, self.const_i(0x8000)), rounded)
        rounded = b.select(b.icmp_signed(">", size, self.const_i(0x7F800000)), b.or_(upper, self.const_i(0x40)), rounded)
        return b.trunc(rounded, ir.VectorType(I16, 16))

    def widened_weight(self, value: Value) -> Value:
        """Return a result of `exp2`, rounded as by `to_bf16` and widened again, an I. Such a result is never denormal, so rounding needs no cases."""
        b = self.b
        bits = b.bitcast(value, I)
        odd = b.and_(b.lshr(bits, self.const_i(16)), self.const_i(1))
        return b.and_(b.add(b.add(bits, self.const_i(0x7FFF)), odd), self.const_i(-0x10000))

    @abstractmethod
    def to_int(self, value: Value) -> Value:
        """Return F rounded to the nearest integer, ties to even, an I (VCVTPS2DQ). NaN and numbers out of range give the least integer."""
        ...

    def narrow(self, value: Value, bits: int) -> Value:
        """Return I saturated to 16 x i8 or 16 x i16 (VPMOVSDB, VPMOVSDW)."""
        most = 2 ** (bits - 1) - 1
        for limit, beyond in ((most, ">"), (-most - 1, "<")):
            value = self.b.select(self.b.icmp_signed(beyond, value, self.const_i(limit)), self.const_i(limit), value)
        return self.b.trunc(value, ir.VectorType(ir.IntType(bits), 16))

    @abstractmethod
    def gather(self, base: Value, offsets: Value, some: Value) -> Value:
        """Read the 32 bits at `base` + each offset (I, bytes); zero in lanes where `some` is not set. Returns an I."""
        ...

    @abstractmethod
    def exp2(self, x: Value) -> Value:
        """Return 2**x within 3 ulp, zero where x < -126; a NaN stays a NaN. Part of the arithmetic (docs/internals/arithmetic.md)."""
        ...

    def careful_fma(self, a: Value, b: Value, c: Value) -> Value:
        """Compute `fma` so that it is also right if `has_underflowed` is true. `careful_mul` does the same for a product."""
        return self.fma(a, b, c)

    def careful_mul(self, a: Value, b: Value) -> Value:
        return self.b.fmul(a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call("llvm.fma.v16f32", F, a, b, c)

    def maximum(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def power(self, rest: Value) -> Value:
        """Return 2**r for r in [-0.5, 0.5], computed by a minimax polynomial, an F."""
        power = self.const(_EXP2[0])
        for coefficient in (*_EXP2[1:], 1.0):
            power = self.fma(power, rest, self.const(coefficient))
        return power

    def _fold(self, value: Value, join: Callable[[Value, Value], Value]) -> Value:
        for width in (8, 4, 2, 1):
            lanes = [ir.Constant(I32, (i + width) % LANES) for i in range(LANES)]
            turned = self.b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, LANES), lanes))
            value = join(value, turned)
        return self.b.extract_element(value, ir.Constant(I32, 0))

    def sum(self, value: Value) -> Value:
        """Add all lanes in a tree of halves. Returns a float."""
        return self._fold(value, self.b.fadd)

    def max(self, value: Value) -> Value:
        return self._fold(value, self.maximum)

    def sum_int(self, value: Value) -> Value:
        return self._fold(value, self.b.add)

    def max_int(self, value: Value) -> Value:
        return self._fold(value, lambda a, b: self.b.select(self.b.icmp_signed(">", a, b), a, b))

    # --- control

    @contextmanager
    def loop(self, stop: Value, start: Value | None = None) -> Generator[Value]:
        with cgutils.for_range(self.b, stop, start=start, intp=I64) as frame:
            yield frame.index
