"""Forms: how the weights of a matrix lie in memory, and as what the activations that meet them are held.

A matrix is cut into blocks of 16 outputs, one a lane of a vector, and each block into records of one or eight groups of 32 inputs.
A record holds, each field for all of its groups before the next one: low four bits of codes, planes of higher bits, scales. What
GGUF stores is held bit for bit, in other places: a record takes exactly the bytes of its 16 rows in the file.
`docs/internals/arithmetic.md` says what each form computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

LANES = 16
"""Outputs of a block."""
GROUPS_OF_SUPERBLOCK = 8


class Form(IntEnum):
    """Under GGML's names. Q4_1 and Q8_0 also hold what is quantised at load (`int4`, `int8`)."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    BF16 = 8
    MXFP4 = 9


PANEL = 8
"""Rows whose activations lie together, group by group: a tile of them needs one address."""


class Inputs(IntEnum):
    """What a product takes activations as. Integers have a scale a group of 32 (`rows.quantize`).

    T rows of G groups lie in panels of 8 rows, the last with what is left: [panel][group][row], each a record of `GROUP_BYTES`.
    """

    INT8 = 0
    INT16 = 1
    BF16 = 2


GROUP_BYTES = {Inputs.INT8: 48, Inputs.INT16: 72, Inputs.BF16: 64}
"""A group of a row: its codes; of integers then scale and scale * sum (fp32), of int8 then -32 * the sum of each half's codes (int32)."""


POINTS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the codes of MXFP4 name, doubled."""


class Scales(Enum):
    """What turns a group's whole sum into its part of the output."""

    NONE = auto()
    """The codes are the weights: bf16."""
    SCALE = auto()
    """An fp16 scale a group; the code `zero` means 0."""
    SCALE_OFFSET = auto()
    """An fp16 scale and an fp16 offset a group."""
    SUB_MINIMUMS = auto()
    """An fp16 scale and an fp16 minimum a superblock, each times a 6-bit whole number a group; the minimum is subtracted."""
    SUB_SCALES = auto()
    """An fp16 scale a superblock, times an int8 for each half of a group; the code `zero` means 0."""
    POWER = auto()
    """A power of two a group, by a byte: the exponent of E8M0. Codes name points of E2M1, which are whole numbers once doubled."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fields of a record lie. Sizes and places are bytes."""

    bits: int
    """Of a code."""
    scales: Scales
    zero: int = 0

    @property
    def groups(self) -> int:
        """Groups a record holds."""
        return GROUPS_OF_SUPERBLOCK if self.scales in {Scales.SUB_MINIMUMS, Scales.SUB_SCALES} else 1

    @property
    def codes_bytes(self) -> int:
        """A group's codes; of 5 and 6 bits, their low four."""
        return 256 if self.bits < 8 else 64 * self.bits

    @property
    def plane_bytes(self) -> int:
        """A group's bits above the fourth, where codes have five or six."""
        return 64 * (self.bits - 4) if self.bits < 8 else 0

    @property
    def plane_at(self) -> int:
        return self.groups * self.codes_bytes

    @property
    def scales_at(self) -> int:
        return self.plane_at + self.groups * self.plane_bytes

    @property
    def record_bytes(self) -> int:
        sizes = {
            Scales.NONE: 0,
            Scales.SCALE: 32,
            Scales.SCALE_OFFSET: 64,
            Scales.SUB_MINIMUMS: 256,
            Scales.SUB_SCALES: 288,
            Scales.POWER: 16,
        }
        return self.scales_at + sizes[self.scales]

    @property
    def bytes_of_eight_groups(self) -> int:
        return self.record_bytes * (GROUPS_OF_SUPERBLOCK // self.groups)

    @property
    def inputs(self) -> Inputs:
        return Inputs.BF16 if self.bits == 16 else Inputs.INT16 if self.bits == 8 else Inputs.INT8

    def packed_bytes(self, n: int, k: int) -> int:
        """Bytes that N x K weights take. K is a multiple of 32, and of 256 where records are superblocks."""
        return -(-n // LANES) * (k // 32) * self.bytes_of_eight_groups // GROUPS_OF_SUPERBLOCK


LAYOUT = {
    Form.Q4_0: Layout(4, Scales.SCALE, 8),
    Form.Q4_1: Layout(4, Scales.SCALE_OFFSET),
    Form.Q5_0: Layout(5, Scales.SCALE, 16),
    Form.Q5_1: Layout(5, Scales.SCALE_OFFSET),
    Form.Q8_0: Layout(8, Scales.SCALE),
    Form.Q4_K: Layout(4, Scales.SUB_MINIMUMS),
    Form.Q5_K: Layout(5, Scales.SUB_MINIMUMS),
    Form.Q6_K: Layout(6, Scales.SUB_SCALES, 32),
    Form.BF16: Layout(16, Scales.NONE),
    Form.MXFP4: Layout(4, Scales.POWER),
}
