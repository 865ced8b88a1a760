"""The operations of `simd` in the instructions of x86 processors: one class for each instruction set, all with the same bits.

Operations that LLVM splits automatically, from vectors of 16 lanes into two of 8, are written once, in `simd`. `cpu.lowering_in_use` chooses the class.
At the end are reads and writes of single numbers at any address, for compiled code that packs weights and reads rows back from records.

avx512bf16   VDPBF16PS, VPDPBUSD, VPDPWSSD, VCVTNEPS2BF16, VREDUCEPS, VSCALEFPS
avx512vnni   VPDPBUSD, VPDPWSSD; products of bf16 pairs as two fused multiply-adds in fp32, with denormals flushed by MXCSR
avxvnni      VPDPBUSD and VPDPWSSD on 8 lanes; the rest as avx2
avx2         VPMADDUBSW (its sums of two products of codes below 64 do not saturate), and VPMADDWD

The classes of ARM are in `neon`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.neon import Neon, NeonI8mm
from paceline.backends.cpu.simd import B16, BYTES, F32, I8, I16, I32, I64, Emit, F, I, ProductSum, RunningSum, Value
from paceline.backends.instructions import Lowering, is_arm, lowering_in_use

_FLUSH = 0x8040
"""Bits of MXCSR that make denormal inputs zero, and results that are denormal after rounding."""
_ALL_LANES, _CURRENT_ROUNDING = ir.Constant(I16, 0xFFFF), ir.Constant(I32, 4)
_LOW, _HIGH = range(8), range(8, 16)
_ROUNDER = 1.5 * 2.0**23
"""Added to a small number, it rounds it to an integer: between 2**23 and 2**24, the numbers of fp32 are the integers."""


class _X86(Emit):
    """Instructions that all x86 processors have."""

    def flush_denormals(self) -> Value:
        control = self.var(ir.Constant(I32, 0))
        place = self.b.bitcast(control, BYTES)
        self.call("llvm.x86.sse.stmxcsr", ir.VoidType(), place)
        before = self.b.load(control)
        self.b.store(self.b.or_(before, ir.Constant(I32, _FLUSH)), control)
        self.call("llvm.x86.sse.ldmxcsr", ir.VoidType(), place)
        return before

    def restore_denormals(self, before: Value) -> None:
        self.call("llvm.x86.sse.ldmxcsr", ir.VoidType(), self.b.bitcast(self.var(before), BYTES))

    def pause(self) -> None:
        self.call("llvm.x86.sse2.pause", ir.VoidType())

    def word_sums(self, acc: Value) -> ProductSum:
        return RunningSum(acc, self.dp_words)

    @abstractmethod
    def dp_words(self, acc: Value, a: Value, b: Value) -> Value:
        """Return acc[i] + the sum of the products of the two signed words in lane i of a and b, as VPDPWSSD does. All I."""
        ...


class _Halves(_X86):
    """Instructions on eight lanes, called once for each half of a vector."""

    def halves(self, value: Value) -> list[Value]:
        """Return the lower and the upper half of a vector's lanes."""
        n = value.type.count // 2
        undefined = ir.Constant(value.type, ir.Undefined)
        masks = [ir.Constant(ir.VectorType(I32, n), [ir.Constant(I32, i + first) for i in range(n)]) for first in (0, n)]
        return [self.b.shuffle_vector(value, undefined, mask) for mask in masks]

    def whole(self, halves: Sequence[Value]) -> Value:
        n = 2 * halves[0].type.count
        return self.b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, n), [ir.Constant(I32, i) for i in range(n)]))

    def by_halves(self, name: str, result: Any, *arguments: Value) -> Value:
        """Call an instruction of 256 bits for each half. `result`: the type of one half."""
        return self.whole([self.call(name, result, *part) for part in zip(*map(self.halves, arguments), strict=True)])


class _Avx2(_Halves):
    """AVX2, which sums products of bytes in words of 16 bits."""

    rows_at_once = 4

    def byte_sums(self, acc_M: list[Value], most: int) -> Sequence[ProductSum]:
        return [_WordSums(self, acc, most) for acc in acc_M]

    def dp_words(self, acc: Value, a: Value, b: Value) -> Value:
        return self.b.add(acc, self.add_pairs(*(self.b.bitcast(each, ir.VectorType(I16, 32)) for each in (a, b))))

    def add_pairs(self, a: Value, b: Value) -> Value:
        """Multiply signed words, and add neighbouring products, as VPMADDWD does."""
        return self.by_halves("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), a, b)

    def to_int(self, value: Value) -> Value:
        return self.by_halves("llvm.x86.avx.cvt.ps2dq.256", ir.VectorType(I32, 8), value)

    def gather(self, base: Value, offsets: Value, some: Value) -> Value:
        kind, once = ir.VectorType(I32, 8), ir.Constant(I8, 1)
        zero = ir.Constant(kind, [ir.Constant(I32, 0)] * 8)
        parts = zip(self.halves(offsets), self.halves(self.b.sext(some, I)), strict=True)
        return self.whole([self.call("llvm.x86.avx2.gather.d.d.256", kind, zero, base, *part, once) for part in parts])

    def look_up(self, table: Sequence[int], codes: Value) -> Value:
        kind = ir.VectorType(I8, 32)
        parts = [self.b.bitcast(half, kind) for half in self.halves(codes)]
        found = [self.call("llvm.x86.avx2.pshuf.b", kind, ir.Constant(kind, [*table] * 2), part) for part in parts]
        return self.b.bitcast(self.whole(found), I)

    def exp2(self, x: Value) -> Value:
        """Compute exp2 as the arithmetic defines it. Up to x = 128, adding n to the exponent multiplies by 2**n, and 128 gives infinity.

        Adding `_ROUNDER` rounds x to n, ties to even, and leaves n in the low bits of the sum.
        """
        b = self.b
        bounded = b.select(b.fcmp_ordered(">", x, self.const(128.0)), self.const(128.0), x)
        rounded = b.fadd(bounded, self.const(_ROUNDER))
        power = b.bitcast(self.power(b.fsub(bounded, b.fsub(rounded, self.const(_ROUNDER)))), I)
        power = b.bitcast(b.add(power, b.shl(b.bitcast(rounded, I), self.const_i(23))), F)
        small = b.select(b.fcmp_ordered(">", self.const(0.0), x), self.const(0.0), x)  # NaN passes too
        return b.select(b.fcmp_ordered(">=", x, self.const(-126.0)), power, small)


class _WordSums:
    """Sums of products of bytes, kept in words of 16 bits as long as none can overflow (VPMADDUBSW)."""

    def __init__(self, e: _Avx2, acc: Value, most: int) -> None:
        self._e, self._acc, self._words, self._added = e, acc, None, 0
        self._room: Final = 0x7FFF // (2 * most * 127)

    def add(self, a: Value, b: Value) -> None:
        e, bytes_ = self._e, ir.VectorType(I8, 64)
        products = e.by_halves("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), *(e.b.bitcast(each, bytes_) for each in (a, b)))
        if self._added == self._room:
            self._acc, self._words, self._added = self.total(), None, 0
        self._words = products if self._words is None else e.b.add(self._words, products)
        self._added += 1

    def total(self) -> Value:
        if self._words is None:
            return self._acc
        ones = ir.Constant(self._words.type, [ir.Constant(I16, 1)] * 32)
        return self._e.b.add(self._acc, self._e.add_pairs(self._words, ones))


class _AvxVnni(_Avx2):
    """AVX2 with sums of bytes and of words in one instruction: VPDPBUSD and VPDPWSSD of 256 bits."""

    def byte_sums(self, acc_M: list[Value], most: int) -> Sequence[ProductSum]:  # noqa: ARG002 - sums of 32 bits
        return [RunningSum(acc, partial(self.by_halves, "llvm.x86.avx512.vpdpbusd.256", ir.VectorType(I32, 8))) for acc in acc_M]

    def dp_words(self, acc: Value, a: Value, b: Value) -> Value:
        return self.by_halves("llvm.x86.avx512.vpdpwssd.256", ir.VectorType(I32, 8), acc, a, b)


class _Avx512(_X86):
    """AVX-512 with VNNI."""

    def byte_sums(self, acc_M: list[Value], most: int) -> Sequence[ProductSum]:  # noqa: ARG002 - sums of 32 bits
        return [RunningSum(acc, partial(self.call, "llvm.x86.avx512.vpdpbusd.512", I)) for acc in acc_M]

    def dp_words(self, acc: Value, a: Value, b: Value) -> Value:
        # Inline assembly, because LLVM turns its intrinsic into two instructions in chains of sums, at half the speed.
        instruction = ir.InlineAsm(ir.FunctionType(I, [I, I, I]), "vpdpwssd $3, $2, $0", "=v,0,v,v", side_effect=False)
        return self.b.call(instruction, [acc, a, b])

    def to_int(self, value: Value) -> Value:
        return self.call("llvm.x86.avx512.mask.cvtps2dq.512", I, value, self.const_i(0), _ALL_LANES, _CURRENT_ROUNDING)

    def narrow(self, value: Value, bits: int) -> Value:
        kind, name = (ir.VectorType(I8, 16), "db") if bits == 8 else (ir.VectorType(I16, 16), "dw")
        return self.call(f"llvm.x86.avx512.mask.pmovs.{name}.512", kind, value, ir.Constant(kind, ir.Undefined), _ALL_LANES)

    def gather(self, base: Value, offsets: Value, some: Value) -> Value:
        return self.call("llvm.x86.avx512.mask.gather.dpi.512", I, self.const_i(0), base, offsets, some, ir.Constant(I32, 1))

    def look_up(self, table: Sequence[int], codes: Value) -> Value:
        kind = ir.VectorType(I8, 64)
        return self.b.bitcast(
            self.call("llvm.x86.avx512.pshuf.b.512", kind, ir.Constant(kind, [*table] * 4), self.b.bitcast(codes, kind)), I
        )

    def exp2(self, x: Value) -> Value:
        """Compute exp2 with r from VREDUCEPS, rounded to the nearest: that is exact, unlike r for n = floor(x). VSCALEFPS multiplies by 2**n exactly."""
        rest = self.call("llvm.x86.avx512.mask.reduce.ps.512", F, x, ir.Constant(I32, 0), x, _ALL_LANES, _CURRENT_ROUNDING)
        whole, power = self.b.fsub(x, rest), self.power(rest)
        kept = self.b.bitcast(self.b.fcmp_unordered(">=", x, self.const(-126.0)), I16)
        return self.call("llvm.x86.avx512.mask.scalef.ps.512", F, power, whole, self.const(0.0), kept, _CURRENT_ROUNDING)


class _Avx512Bf16(_Avx512):
    def dp(self, acc: Value, a: Value, b: Value) -> Value:
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", F, acc, a, b)

    def flushed(self) -> nullcontext[None]:
        return nullcontext()

    def to_bf16(self, value: Value) -> Value:
        return self.b.bitcast(self.b.fptrunc(value, B16), ir.VectorType(I16, 16))

    def widened_weight(self, value: Value) -> Value:
        return self.b.shl(self.b.zext(self.to_bf16(value), I), self.const_i(16))


_LOWERINGS: Final[dict[Lowering, type[Emit]]] = {
    Lowering.AVX512_BF16: _Avx512Bf16,
    Lowering.AVX512_VNNI: _Avx512,
    Lowering.AVX_VNNI: _AvxVnni,
    Lowering.AVX2: _Avx2,
    Lowering.NEON_I8MM: NeonI8mm,
    Lowering.NEON: Neon,
}
EMIT: Final[type[Emit]] = _LOWERINGS[lowering_in_use() or (Lowering.NEON if is_arm() else Lowering.AVX2)]
"""Class of the instruction set in use. A processor without any runs only the sampler's kernels, which need no special instruction."""

Body = Callable[[Emit, Sequence[Value]], Value | None]


def lowered(body: Body, result: Any, *arguments: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the signature and the code of an `@intrinsic`. `body` receives the arguments that are not literals."""
    values = [i for i, kind in enumerate(arguments) if not isinstance(kind, types.IntegerLiteral)]

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Value]) -> Any:
        value = body(EMIT(builder), [args[i] for i in values])
        return context.get_dummy_value() if value is None else value

    return result(*arguments), codegen


@intrinsic(prefer_literal=True)
def read(_, bits, address):
    """Read the unsigned integer of `bits` bits at an address."""
    kind = ir.IntType(bits.literal_value)

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.zext(e.load(kind, args[0]), I64)

    return lowered(body, types.int64, bits, types.int64)


@intrinsic(prefer_literal=True)
def write(_, bits, address, value):
    kind = ir.IntType(bits.literal_value)

    def body(e: Emit, args: Sequence[Value]) -> None:
        e.store(e.b.trunc(args[1], kind), args[0])

    return lowered(body, types.void, bits, types.int64, types.int64)


@intrinsic
def read_half(_, address):
    """Read the IEEE half float at an address, as fp32."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.fpext(e.load(ir.HalfType(), args[0]), F32)

    return lowered(body, types.float32, types.int64)


@intrinsic
def read_float(_, address):
    """Read the fp32 at an address."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.load(F32, args[0], align=4)

    return lowered(body, types.float32, types.int64)


@intrinsic
def write_float(_, address, value):
    def body(e: Emit, args: Sequence[Value]) -> None:
        e.store(args[1], args[0], align=4)

    return lowered(body, types.void, types.int64, types.float32)
