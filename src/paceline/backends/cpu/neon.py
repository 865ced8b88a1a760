"""The operations of `simd` in the instructions of 64-bit ARM processors: a vector of 16 lanes is four registers, and there are 32.

neon        SDOT
neon-i8mm   SMMLA for pairs of four rows or more, SDOT for others

Activations are read sixteen bytes at once. An instruction multiplies by one of their four words, which it takes as a lane of a register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from llvmlite import ir

from paceline.backends.cpu.simd import F32, I8, I16, I32, I64, Emit, F, I, ProductSum, Value

_F4, _I4, _I64_2, _I8_16 = ir.VectorType(F32, 4), ir.VectorType(I32, 4), ir.VectorType(I64, 2), ir.VectorType(I8, 16)
_FLUSH, _UNDERFLOW = 1 << 24, 1 << 3
"""Bit of FPCR that makes denormal inputs zero, and results that are denormal before rounding; bit of FPSR that says that a result was flushed."""
_UP: Final = 2.0**64
"""Factor that keeps a result near 2**-126 from being flushed, while its operands stay far from infinity."""


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a row of activations."""

    address: Value
    row: int
    """Offset of the row's beginning."""
    word: int


class Neon(Emit):
    rows_at_once = 4
    parts_of_panels = flushes_early = True

    # --- registers

    def quarters(self, value: Value) -> list[Value]:
        """Return the four registers of a vector of 16 lanes."""
        n = value.type.count // 4
        undefined = ir.Constant(value.type, ir.Undefined)
        return [self.b.shuffle_vector(value, undefined, _places(range(i * n, i * n + n))) for i in range(4)]

    def whole(self, quarters: Sequence[Value]) -> Value:
        n = quarters[0].type.count
        halves = [self.b.shuffle_vector(*quarters[i : i + 2], _places(range(2 * n))) for i in (0, 2)]
        return self.b.shuffle_vector(*halves, _places(range(4 * n)))

    def by_quarters(self, name: str, result: ir.VectorType, *arguments: Value) -> Value:
        return self.whole([self.call(name, result, *part) for part in zip(*map(self.quarters, arguments), strict=True)])

    def lane(self, register: Value, lane: int) -> Value:
        """Return a register with one lane of `register` in all lanes."""
        return self.b.shuffle_vector(register, ir.Constant(register.type, ir.Undefined), _places([lane] * register.type.count))

    # --- the processor's state

    def flush_denormals(self) -> Value:
        before = self.call("llvm.aarch64.get.fpcr", I64)
        self.call("llvm.aarch64.set.fpcr", ir.VoidType(), self.b.or_(before, self.i64(_FLUSH)))
        return self.b.trunc(before, I32)

    def restore_denormals(self, before: Value) -> None:
        self.call("llvm.aarch64.set.fpcr", ir.VoidType(), self.b.zext(before, I64))

    def watch_underflow(self) -> None:
        self.call("llvm.aarch64.set.fpsr", ir.VoidType(), self.i64(0))

    def has_underflowed(self) -> Value:
        flags = self.call("llvm.aarch64.get.fpsr", I64)
        return self.b.icmp_unsigned("!=", self.b.and_(flags, self.i64(_UNDERFLOW)), self.i64(0))

    def pause(self) -> None:
        self.call("llvm.aarch64.isb", ir.VoidType(), ir.Constant(I32, 15))

    # --- products

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def careful_fma(self, a: Value, b: Value, c: Value) -> Value:
        """Compute `fma`, but keep a result that rounding raises to 2**-126. The processor flushes results that are denormal before they are rounded.

        A result is such a one exactly if the same operation on numbers 2**64 times as large gives 2**-62.
        """
        up = self._like(_UP, a)
        return self._kept(self.fma(a, b, c), self.fma(self.b.fmul(a, up), b, self.b.fmul(c, up)))

    def careful_mul(self, a: Value, b: Value) -> Value:
        return self._kept(self.b.fmul(a, b), self.b.fmul(self.b.fmul(a, self._like(_UP, a)), b))

    def _kept(self, result: Value, up: Value) -> Value:
        b, n = self.b, result.type.count
        whole = ir.VectorType(I32, n)
        size = b.and_(b.bitcast(up, whole), ir.Constant(whole, [0x7FFFFFFF] * n))
        least = b.icmp_signed("==", size, ir.Constant(whole, [(127 - 62) << 23] * n))
        return b.select(least, b.fmul(up, self._like(1 / _UP, up)), result)

    def _like(self, value: float, vector: Value) -> Value:
        return ir.Constant(vector.type, [ir.Constant(F32, value)] * vector.type.count)

    def word(self, address: Value, row: int, word: int) -> _Word:
        return _Word(address, row, word)

    def load_float_pair(self, address: Value, offset: Value, odd: bool) -> tuple[Value, Value]:
        four = self.load(_F4, address, self.b.sub(offset, self.i64(8)) if odd else offset)
        undefined = ir.Constant(_F4, ir.Undefined)
        second, first = (self.b.shuffle_vector(four, undefined, _places([2 * odd + i] * 16)) for i in (1, 0))
        return second, first

    def byte_sums(self, acc_M: list[Value], most: int) -> Sequence[ProductSum]:  # noqa: ARG002 - sums of 32 bits
        return [_ByteSums(self, acc) for acc in acc_M]

    def word_sums(self, acc: Value) -> ProductSum:
        return _WordSums(self, acc)

    def pair_sums(self, acc: Value, careful: bool) -> ProductSum:
        return _PairSums(self, acc, self.careful_fma if careful else self.fma)

    def words(self, codes: Value) -> Value:
        return codes

    def nibbles(self, line: Value, high: bool) -> Value:
        kind = ir.VectorType(I8, 64)
        codes = self.b.bitcast(line, kind)
        codes = self.b.lshr(codes, ir.Constant(kind, [4] * 64)) if high else self.b.and_(codes, ir.Constant(kind, [15] * 64))
        return self.b.bitcast(codes, I)

    def look_up(self, table: Sequence[int], codes: Value) -> Value:
        quarters = [self.b.bitcast(quarter, _I8_16) for quarter in self.quarters(codes)]
        found = [self.call("llvm.aarch64.neon.tbl1.v16i8", _I8_16, ir.Constant(_I8_16, [*table]), quarter) for quarter in quarters]
        return self.whole([self.b.bitcast(each, _I4) for each in found])

    def sdot(self, acc: Value, a: Value, b: Value) -> Value:
        """Return acc + the sum of the four products of signed bytes in each lane of one register."""
        return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", _I4, acc, self.b.bitcast(a, _I8_16), self.b.bitcast(b, _I8_16))

    # --- conversions

    def to_int(self, value: Value) -> Value:
        rounded = self.by_quarters("llvm.aarch64.neon.fcvtns.v4i32.v4f32", _I4, value)
        return self.b.select(self.b.fcmp_ordered("<", value, self.const(2.0**31)), rounded, self.const_i(-(2**31)))

    def gather(self, base: Value, offsets: Value, some: Value) -> Value:
        """Read 32 bits at each offset where `some` is set. The other lanes read at offset 0, which is safe, and become zero."""
        b, zero = self.b, ir.Constant(I, [0] * 16)
        found, safe = ir.Constant(I, ir.Undefined), b.select(some, offsets, zero)
        for i in range(16):
            lane = ir.Constant(I32, i)
            found = b.insert_element(found, self.load(I32, base, b.sext(b.extract_element(safe, lane), I64)), lane)
        return b.select(some, found, zero)

    def exp2(self, x: Value) -> Value:
        """Compute exp2 as the arithmetic defines it. For x from -126 to 128, adding n to the exponent multiplies by 2**n: no result is denormal,
        and 128 gives infinity.
        """
        b = self.b
        bounded = self.call("llvm.minimum.v16f32", F, self.call("llvm.maximum.v16f32", F, x, self.const(-126.0)), self.const(128.0))
        whole = self.call("llvm.roundeven.v16f32", F, bounded)
        n = self.by_quarters("llvm.aarch64.neon.fcvtns.v4i32.v4f32", _I4, whole)
        power = b.bitcast(self.power(b.fsub(bounded, whole)), I)
        power = b.bitcast(b.add(power, b.shl(n, self.const_i(23))), F)
        return b.select(b.fcmp_unordered(">=", x, self.const(-126.0)), power, self.const(0.0))

    def store_every_second(self, halves: Value, address: Value, odd: Value) -> None:
        first = self.at(address, self.mul(odd, 2))
        for i in range(16):
            self.store(self.b.extract_element(halves, ir.Constant(I32, i)), first, 4 * i, align=2)


class NeonI8mm(Neon):
    def byte_sums(self, acc_M: list[Value], most: int) -> Sequence[ProductSum]:
        # Two rows alone gain nothing, because their sums must be put in order.
        pairs = [_RowPair(self, acc_M[i : i + 2]) for i in range(0, len(acc_M) - 1, 2)] if len(acc_M) >= 4 else []
        of_pairs = [_OfPair(pair, i) for pair in pairs for i in range(2)]
        return [*of_pairs, *super().byte_sums(acc_M[len(of_pairs) :], most)]


class _Sums:
    """The sums of 16 lanes in four registers."""

    def __init__(self, e: Neon, acc: Value) -> None:
        self._e = e
        self._acc = e.quarters(acc)

    def total(self) -> Value:
        return self._e.whole(self._acc)


class _ByteSums(_Sums):
    def add(self, a: Value, b: _Word) -> None:
        e = self._e
        word = e.lane(e.load(_I4, b.address, b.row + b.word // 4 * 16), b.word % 4)
        self._acc = [e.sdot(acc, codes, word) for acc, codes in zip(self._acc, e.quarters(a), strict=True)]


class _RowPair:
    """Sums of two rows by SMMLA. Each of eight registers holds two rows by two outputs; one instruction adds the products of eight inputs."""

    def __init__(self, e: Neon, acc_2: Sequence[Value]) -> None:
        self._e, self._acc_2 = e, acc_2
        self._sums = [ir.Constant(_I4, [0] * 4)] * 8
        self._waiting: list[tuple[Value, _Word]] = []

    def add(self, codes: Value, word: _Word) -> None:
        """Add the products of one word. The caller passes words of both rows in turn."""
        self._waiting.append((codes, word))
        if len(self._waiting) == 4:
            (before, first), (_, second), (after, _), _ = self._waiting
            self._multiply(before, after, self._inputs(first, second))
            self._waiting = []

    def _inputs(self, first: _Word, second: _Word) -> Value:
        """Return eight inputs of each of the two rows in one register."""
        e, half = self._e, first.word % 4 // 2
        rows = [e.load(_I64_2, each.address, each.row + each.word // 4 * 16) for each in (first, second)]
        return e.b.bitcast(e.b.shuffle_vector(*rows, _places([half, 2 + half])), _I8_16)

    def _multiply(self, before: Value, after: Value, inputs: Value) -> None:
        e = self._e
        for i, quarters in enumerate(zip(e.quarters(before), e.quarters(after), strict=True)):
            for half in range(2):
                outputs = e.b.bitcast(e.b.shuffle_vector(*quarters, _places([2 * half, 4 + 2 * half, 1 + 2 * half, 5 + 2 * half])), _I8_16)
                at = 2 * i + half
                self._sums[at] = e.call("llvm.aarch64.neon.smmla.v4i32.v16i8", _I4, self._sums[at], inputs, outputs)

    def total(self, row: int) -> Value:
        e = self._e
        both = [e.b.bitcast(each, _I64_2) for each in self._sums]
        quarters = [e.b.bitcast(e.b.shuffle_vector(*both[i : i + 2], _places([row, 2 + row])), _I4) for i in range(0, 8, 2)]
        return e.b.add(self._acc_2[row], e.whole(quarters))


@dataclass(frozen=True, slots=True)
class _OfPair:
    """The `ProductSum` of one row of a pair."""

    pair: _RowPair
    row: int

    def add(self, a: Value, b: _Word) -> None:
        self.pair.add(a, b)

    def total(self) -> Value:
        return self.pair.total(self.row)


class _WordSums(_Sums):
    """Sums of products of 16-bit words, made of byte sums: a word is 256 * its upper byte + (its lower byte - 128) + 128.

    The last term adds 128 times the sum of the codes.
    """

    def __init__(self, e: Neon, acc: Value) -> None:
        super().__init__(e, acc)
        zero = ir.Constant(_I4, [0] * 4)
        self._upper, self._codes = [zero] * 4, [zero] * 4
        self._before: Value = None

    def add(self, a: Value, b: _Word) -> None:
        if b.word % 2 == 0:
            self._before = a
            return
        e = self._e
        # Each lane has two codes of a word. Those of this word and the one before are combined to four in a lane.
        pairs = [e.b.bitcast(each, _HALVES_16) for each in (self._before, a)]
        both = e.b.shuffle_vector(*pairs, _places([i // 2 + 16 * (i % 2) for i in range(32)]))
        codes = e.quarters(e.b.bitcast(both, I))
        upper, lower = self._bytes(b)
        ones = ir.Constant(_I8_16, [1] * 16)
        self._upper = [e.sdot(acc, each, upper) for acc, each in zip(self._upper, codes, strict=True)]
        self._acc = [e.sdot(acc, each, lower) for acc, each in zip(self._acc, codes, strict=True)]
        self._codes = [e.sdot(acc, each, ones) for acc, each in zip(self._codes, codes, strict=True)]

    def _bytes(self, word: _Word) -> tuple[Value, Value]:
        """Return the upper bytes of four inputs, and their lower bytes minus 128, each in every lane."""
        e = self._e
        bytes_ = [e.load(_I8_16, word.address, word.row + word.word // 8 * 32 + 16 * i) for i in range(2)]
        upper, lower = (e.b.shuffle_vector(*bytes_, _places(range(odd, 32, 2))) for odd in (1, 0))
        lower = e.b.xor(lower, ir.Constant(_I8_16, [0x80] * 16))
        upper, lower = (e.lane(e.b.bitcast(each, _I4), word.word % 8 // 2) for each in (upper, lower))
        return upper, lower

    def total(self) -> Value:
        b = self._e.b
        byte, seven = (ir.Constant(_I4, [bits] * 4) for bits in (8, 7))
        parts = zip(self._acc, self._upper, self._codes, strict=True)
        return self._e.whole([b.add(acc, b.add(b.shl(upper, byte), b.shl(codes, seven))) for acc, upper, codes in parts])


class _PairSums(_Sums):
    def __init__(self, e: Neon, acc: Value, fma: Callable[[Value, Value, Value], Value]) -> None:
        super().__init__(e, acc)
        self._fma = fma

    def add(self, a: Value, b: _Word) -> None:
        e = self._e
        four = e.load(_I4, b.address, b.row + b.word // 4 * 16)
        odd = e.b.and_(four, ir.Constant(_I4, [-0x10000] * 4))
        even = e.b.shl(four, ir.Constant(_I4, [16] * 4))
        for weights, inputs in zip(e.widened(a), (odd, even), strict=True):
            word = e.lane(e.b.bitcast(inputs, _F4), b.word % 4)
            self._acc = [self._fma(each, word, acc) for acc, each in zip(self._acc, e.quarters(weights), strict=True)]


_HALVES_16 = ir.VectorType(I16, 16)


def _places(places: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(I32, len(places)), list(places))
