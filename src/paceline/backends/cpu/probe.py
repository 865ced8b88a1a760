"""The numerics id of these kernels on this machine, their exponential included, and a refusal to run where they do not hold the rules (`backends.numerics`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.backends import numerics
from paceline.backends.cpu.attention import SEGMENT
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.pack import row_bytes
from paceline.backends.cpu.pages import BLOCK
from paceline.backends.cpu.rows import exponentials
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.weights import pack_model
from paceline.backends.numerics import SeededWeights
from paceline.core.errors import PacelineError
from paceline.core.model import ARITHMETIC, ModelSpec, RopeSpec
from paceline.core.weights import BlockTensor, StoredTensor, WeightSource, columns_of

_USUAL: Final = (
    ModelSpec("llama", 1, 256, 8, 2, 32, 512, 1000, 256, 1e-5, RopeSpec(10000.0), tied_head=True),
    (Form.Q4_1, Form.Q8_0, Form.Q4_K, Form.Q6_K),
)
_USUAL_ID: Final = "91aa6651afc340a4"
"""What kernels that conform compute of it, on every processor."""
_EXPERT: Final = re.compile(r"\.experts\.\d+")
BEHIND: Final = 2 * SEGMENT - BLOCK
"""Keys before the rows that run again: they see two segments, then a third."""
SCALES: Final[Mapping[Form, Sequence[tuple[int, float]]]] = {
    Form.Q4_0: ((0, 0.04),), Form.Q4_1: ((0, 0.04), (2, -0.3)), Form.Q5_0: ((0, 0.02),), Form.Q5_1: ((0, 0.02), (2, -0.3)),
    Form.Q8_0: ((0, 0.003),), Form.Q4_K: ((0, 0.001), (2, 0.0075)), Form.Q5_K: ((0, 0.0005), (2, 0.0075)), Form.Q6_K: ((208, 0.0002),),
    Form.MXFP4: (),
}  # fmt: skip
"""Half-precision numbers of a block, and where they lie, that give random codes the spread of weights."""
_POWERS: Final = 120
"""Of E8M0, the least that blocks have."""


class SeededBlocks(SeededWeights):
    """Random codes in every form asked for, in turn over the matrices; bf16 is rounded from the seeded numbers."""

    def __init__(self, spec: ModelSpec, forms: Collection[Form]) -> None:
        super().__init__(spec)
        turns, places = cycle(sorted(forms)), dict[str, Form]()
        self.forms = dict[str, Form]()
        for name in self.names():
            if len(self.shape_of(name)) == 2:
                place = _EXPERT.sub("", name)  # experts of one layer are alike
                if place not in places:
                    places[place] = next(turns)
                self.forms[name] = places[place]

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        form = self.forms.get(name, Form.BF16)
        if form is Form.BF16:
            return super().read(name, rows, columns)
        n, k = self.shape_of(name)
        raw_NB = self.random_of(name).integers(0, 256, (n, row_bytes(form, k)), np.uint8)
        block = row_bytes(form, 256 if form in {Form.Q4_K, Form.Q5_K, Form.Q6_K} else 32)
        blocks = raw_NB.reshape(-1, block)
        for at, value in SCALES[form]:
            blocks[:, at : at + 2] = np.array([value], "<f2").view(np.uint8)
        if form is Form.MXFP4:
            blocks[:, 0] = _POWERS + blocks[:, 0] % 4
        part = raw_NB if rows is None else raw_NB[rows]
        return columns_of(BlockTensor(form.name, (len(part), k), part), columns)


def _digest_of_exponentials() -> bytes:
    """Of exp2 where softmax and gates of a small layer seldom come: a number of each upper half of fp32, and as many of those whose result is one."""
    random = np.random.Generator(np.random.PCG64(0))
    count = 1 << 16
    of_all = (np.arange(count, dtype=np.uint32) << 16 | random.integers(0, count, count, np.uint32)).view(np.float32)
    ends = np.array([-127, -126, -0.5, 0.5, 127.5, 128], np.float32)
    beside = [np.nextafter(ends, np.float32(way)) for way in (-np.inf, np.inf)]
    x = np.concatenate([of_all, random.uniform(-127, 129, count - 3 * len(ends)).astype(np.float32), ends, *beside])
    out = np.empty_like(x)
    exponentials(x.ctypes.data, len(x), out.ctypes.data)
    out[np.isnan(out)] = np.nan  # which one is the processor's affair
    return hashlib.sha256(out).digest()


def numerics_id(spec: ModelSpec, forms: Collection[Form], threads: int) -> str:
    """Hex id of what the kernels compute for a family and the forms of its matrices, on one thread and on as many as are in use.

    Raises:
        PacelineError: batching or threads changed a byte: these kernels can't be trusted here.
    """
    # Rows of whole superblocks.
    # The sums of its feed-forward have as many segments as any model's, of unlike lengths.
    small = numerics.small(spec)
    moe = small.moe and replace(small.moe, ffn=256)
    low = small.low and replace(small.low, queries=512, keys=256)
    small = replace(small, hidden=256, n_heads=8, ffn=768, max_context=BEHIND + 4 * BLOCK, moe=moe, low=low)
    source = SeededBlocks(small, forms)
    model = pack_model(source, small.all_layers, source.forms.__getitem__, edges=True)

    def make(_: WeightSource, count: int) -> CpuRunner:
        return CpuRunner(model, n_blocks=small.max_context // BLOCK, threads=count, numerics_id="", max_rows=64)

    def to_bytes(x_TD: npt.NDArray[np.uint16]) -> bytes:
        return x_TD.tobytes()

    label = f"arithmetic-{ARITHMETIC}-cpu-{'-'.join(form.name for form in sorted(forms))}"
    measured = numerics.measure(make, source, {1, threads}, to_bytes, label, BEHIND)
    if not measured.holds_identity:
        raise PacelineError(
            f"The compiled kernels gave other bytes for other cuts of one prompt, on 1 or {threads} threads",
            "This breaks the promise that batching changes nothing; run with --device torch-cpu and report the processor.",
        )
    return hashlib.sha256(measured.id.encode() + _digest_of_exponentials()).hexdigest()[:16]


def conforms(threads: int) -> bool:
    """Whether the kernels compute here what they do on every other processor, in the usual forms.

    Raises:
        PacelineError: batching or threads changed a byte.
    """
    return numerics_id(*_USUAL, threads) == _USUAL_ID
