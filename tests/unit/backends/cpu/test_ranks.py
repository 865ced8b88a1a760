"""Ranks of a tensor group give the bytes of one machine, however the model is split: each rank a thread of this process, with its own weights and KV."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.core.model import ModelSpec, RopeSpec
from paceline.engine.local import StepWatch, row_plan

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from paceline.backends.cpu.exchange import Exchange, exchange_bytes
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.probe import SeededBlocks
from paceline.backends.cpu.runner import CpuRunner
from paceline.backends.cpu.shares import deal
from paceline.backends.cpu.sizes import aligned
from paceline.backends.cpu.weights import pack_model

SPEC = ModelSpec("qwen3", 2, 256, 8, 4, 32, 768, 1000, 256, 1e-5, RopeSpec(1e4), tied_head=True, qkv_bias=True, qk_norm=True)
"""A head's inputs are an eighth of a superblock."""
UNTIED = replace(SPEC, tied_head=False, n_heads=6, n_kv_heads=3, head_dim=64, ffn=480, hidden=384, vocab=307)
"""Fifteen groups of inner activations, three KV heads, and rows that are no whole superblocks."""
CHUNKS = ((0, 40), (40, 41), (41, 50), (50, 114), (114, 115))
ROWS = 64


def group(spec: ModelSpec, source: SeededBlocks, speeds: tuple[float, ...]) -> list[CpuRunner]:
    shares = deal(spec, speeds)
    memory = aligned(exchange_bytes(spec, shares, ROWS, ROWS))
    return [
        CpuRunner(
            pack_model(source, spec.all_layers, source.forms.__getitem__, edges=True, share=share),
            n_blocks=16,
            threads=1 + rank % 2,
            numerics_id="",
            max_rows=ROWS,
            exchange=Exchange(spec, shares, rank, memory, ROWS) if len(speeds) > 1 else None,
        )
        for rank, share in enumerate(shares)
    ]


def run(ranks: list[CpuRunner], spec: ModelSpec) -> list[list[bytes]]:
    """What each rank has after each chunk of a prompt; the first one's logits among it."""
    ids = np.random.default_rng(3).integers(0, spec.vocab, CHUNKS[-1][1]).astype(np.int32)
    tables = np.arange(8, dtype=np.int32)[None]
    embedded = [ranks[0].embed(ids[start:stop]) for start, stop in CHUNKS]

    def go(rank: int) -> list[bytes]:
        found = list[bytes]()
        for (start, stop), x_TD in zip(CHUNKS, embedded, strict=True):
            out_TD = ranks[rank].run_layers(x_TD, row_plan([stop - start], [start], [0], tables))
            found.append(out_TD.tobytes())
            logits = ranks[rank].logits(out_TD, np.array([0, stop - start - 1], np.int32))
            found.append(logits.tobytes() if rank == 0 else b"")
        return found

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(go, range(len(ranks))))


@pytest.mark.parametrize(
    "forms", [(Form.Q4_1,), (Form.Q4_K, Form.Q6_K), (Form.BF16,), (Form.Q8_0, Form.Q5_K)], ids=lambda forms: "-".join(f.name for f in forms)
)
def test_any_split_gives_the_bytes_of_one_machine(forms: tuple[Form, ...]) -> None:
    source = SeededBlocks(SPEC, forms)
    one = group(SPEC, source, (1.0,))
    (alone,) = run(one, SPEC)
    for speeds in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (1.0, 1.0, 1.0), (1.0,) * 6):
        ranks = group(SPEC, source, speeds)
        first, *others = run(ranks, SPEC)
        assert first == alone, speeds
        assert all(other[::2] == alone[::2] for other in others), speeds
        for rank in ranks:
            rank.close()
    one[0].close()


def test_heads_groups_and_vocabularies_that_do_not_divide() -> None:
    source = SeededBlocks(UNTIED, (Form.Q5_1, Form.Q8_0))
    (alone,) = run(group(UNTIED, source, (1.0,)), UNTIED)
    for speeds in ((1.0, 1.0), (1.0, 2.0, 1.0), (1.0,) * 5):
        assert run(group(UNTIED, source, speeds), UNTIED)[0] == alone, speeds


def test_a_rank_holds_its_share_alone() -> None:
    source = SeededBlocks(SPEC, (Form.Q4_1,))
    whole_bytes = pack_model(source, SPEC.all_layers, source.forms.__getitem__, edges=False).arrays[0].nbytes
    parts = [
        pack_model(source, SPEC.all_layers, source.forms.__getitem__, edges=False, share=share).arrays[0].nbytes
        for share in deal(SPEC, (1, 1))
    ]
    assert max(parts) < 0.52 * whole_bytes
    ranks = group(SPEC, source, (1.0, 1.0))
    assert [rank.block_bytes for rank in ranks] == [SPEC.kv_bytes_per_token(SPEC.all_layers) * 16 // 2] * 2


def test_a_batch_that_one_rank_gives_up_ends_in_all() -> None:
    """The others wait for a rank that does not come; its word behind all ranks' lets them go."""
    source = SeededBlocks(SPEC, (Form.Q4_1,))
    ranks = group(SPEC, source, (1.0, 1.0))
    watch = StepWatch()
    plan = row_plan([4], [0], [0], np.arange(1, dtype=np.int32)[None], watch)
    x_TD: npt.NDArray[np.uint16] = ranks[0].embed(np.arange(4, dtype=np.int32))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks[0].run_layers, x_TD, plan)
        watch.give_up()
        waiting.result(60)
