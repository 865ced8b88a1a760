"""Forms: the layouts of a matrix's weights in memory, and the kinds of activations that they are multiplied with.

A matrix is cut into blocks of 16 outputs, one for each lane of a vector, and each block into records of one or eight groups of 32 inputs.
A record holds low four bits of codes, then planes of higher bits, then scales, each for all of its groups. GGUF's bits are all kept, in other
places: a record takes exactly the bytes of its 16 rows in the file.
`docs/internals/arithmetic.md` defines what each form computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

LANES = 16
"""Outputs of a block."""
GROUPS_OF_SUPERBLOCK = 8


class Form(IntEnum):
    """A form, by GGML's name. Q4_1 and Q8_0 also hold matrices that are quantised at load (`int4`, `int8`)."""

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
"""Rows of a panel. Their activations are stored together, group by group, so that a tile of rows needs one address."""


class Inputs(IntEnum):
    """The kind of activations that a product takes. Integers have one scale for each group of 32 (`rows.quantize`).

    T rows of G groups are stored in panels of 8 rows (the last one may have fewer): [panel][group][row], each a record of `GROUP_BYTES`.
    """

    INT8 = 0
    INT16 = 1
    BF16 = 2


GROUP_BYTES = {Inputs.INT8: 48, Inputs.INT16: 72, Inputs.BF16: 64}
"""Bytes of a group of a row: its codes, for integers then scale and scale * sum (fp32), for int8 then -32 * the sum of each half's codes (int32)."""


POINTS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the codes of MXFP4, doubled."""


class Scales(Enum):
    """The numbers that turn a group's integer sum into its part of the output."""

    NONE = auto()
    """No scales: the codes are the weights, in bf16."""
    SCALE = auto()
    """An fp16 scale for each group; the code `zero` means 0."""
    SCALE_OFFSET = auto()
    """An fp16 scale and an fp16 offset for each group."""
    SUB_MINIMUMS = auto()
    """An fp16 scale and an fp16 minimum for each superblock, times a 6-bit integer each for every group; the minimum is subtracted."""
    SUB_SCALES = auto()
    """An fp16 scale for each superblock, times an int8 for each half of a group; the code `zero` means 0."""
    POWER = auto()
    """A power of two for each group, in a byte: the exponent of E8M0. Codes are points of E2M1, which are integers when doubled."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the fields of a record, in bytes."""

    bits: int
    """Bits of a code."""
    scales: Scales
    zero: int = 0

    @property
    def groups(self) -> int:
        """Number of groups in a record."""
        return GROUPS_OF_SUPERBLOCK if self.scales in {Scales.SUB_MINIMUMS, Scales.SUB_SCALES} else 1

    @property
    def codes_bytes(self) -> int:
        """Bytes of a group's codes for all 16 outputs; for codes of 5 and 6 bits, of their low four bits."""
        return 256 if self.bits < 8 else 64 * self.bits

    @property
    def plane_bytes(self) -> int:
        """Bytes of a group's bits above the fourth, for codes of five or six bits; otherwise 0."""
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
        """Return the bytes of N x K weights. K is a multiple of 32; if records are superblocks, of 256."""
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
