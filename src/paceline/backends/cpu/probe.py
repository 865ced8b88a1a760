"""Measures the numerics id of these kernels on this machine, and refuses to run kernels that break the rules (`backends.numerics`).

The id also covers their exponential.
"""

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
"""Numerics id of `_USUAL` that conforming kernels give on every processor."""
_EXPERT: Final = re.compile(r"\.experts\.\d+")
BEHIND: Final = 2 * SEGMENT - BLOCK
"""Keys before the second run of the rows: its first rows see two segments, later ones a third."""
SCALES: Final[Mapping[Form, Sequence[tuple[int, float]]]] = {
    Form.Q4_0: ((0, 0.04),), Form.Q4_1: ((0, 0.04), (2, -0.3)), Form.Q5_0: ((0, 0.02),), Form.Q5_1: ((0, 0.02), (2, -0.3)),
    Form.Q8_0: ((0, 0.003),), Form.Q4_K: ((0, 0.001), (2, 0.0075)), Form.Q5_K: ((0, 0.0005), (2, 0.0075)), Form.Q6_K: ((208, 0.0002),),
    Form.MXFP4: (),
}  # fmt: skip
"""Half-precision numbers of a block by form, with their offsets, that give random codes the spread of weights."""
_POWERS: Final = 120
"""Least exponent (E8M0) of the seeded MXFP4 blocks."""


class SeededBlocks(SeededWeights):
    """Random codes in the given forms, which the matrices take in turn. bf16 is rounded from the seeded numbers."""

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
    """Return a digest of exp2, for inputs that softmax and gates of a small layer seldom have.

    The inputs are one number for each upper half of fp32, and about as many between -127 and 129, where the result is an ordinary number.
    """
    random = np.random.Generator(np.random.PCG64(0))
    count = 1 << 16
    of_all = (np.arange(count, dtype=np.uint32) << 16 | random.integers(0, count, count, np.uint32)).view(np.float32)
    ends = np.array([-127, -126, -0.5, 0.5, 127.5, 128], np.float32)
    beside = [np.nextafter(ends, np.float32(way)) for way in (-np.inf, np.inf)]
    x = np.concatenate([of_all, random.uniform(-127, 129, count - 3 * len(ends)).astype(np.float32), ends, *beside])
    out = np.empty_like(x)
    exponentials(x.ctypes.data, len(x), out.ctypes.data)
    out[np.isnan(out)] = np.nan  # processors may give different NaNs
    return hashlib.sha256(out).digest()


def numerics_id(spec: ModelSpec, forms: Collection[Form], threads: int) -> str:
    """Return the hex id of the kernels' results for a family and the forms of its matrices, measured on one thread and on `threads` threads.

    Raises:
        PacelineError: batching or threads changed a byte, so these kernels can't be trusted here.
    """
    # Rows consist of whole superblocks. The sums of the feed-forward have the most segments that any model has, of different lengths.
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
    """Return whether the kernels give the same bytes here as on every other processor, in the usual forms.

    Raises:
        PacelineError: batching or threads changed a byte.
    """
    return numerics_id(*_USUAL, threads) == _USUAL_ID
