"""Some layers of a model from another node: only they travel, they open alone, and run to the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.conformance.suites.layer_runner import Rows, activation_bits, plan_of
from tests.fakes.seeded_models import shape, write_gguf
from tests.unit.machine.weights.nodes import Fleet, lying_about, staged_files
from tests.unit.net.member.nodes import in_loop

from paceline.backends import torch
from paceline.backends.options import LoadOptions
from paceline.core.errors import DownloadError, ModelFileError, ModelNotFound
from paceline.core.manifest import PIECE, ModelPart
from paceline.core.model import LayerRange, WeightsFormat
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, WeightSource
from paceline.machine.fetch import fetch_model, fetch_part
from paceline.store.catalog import list_models, open_model, resolve
from paceline.store.home import Home
from paceline.store.partial import covers, list_parts, open_part
from paceline.store.pull import pull

Homes = Callable[[str], Home]
Given = tuple[Home, str]


def residual(source: WeightSource, layers: LayerRange, weights: WeightsFormat) -> bytes:
    """What the layers make of seeded rows: a stage's work, without edges."""
    runner = torch.load(source, LoadOptions(layers, weights, n_blocks=8, edges=False))
    try:
        import torch as library

        x_TD = np.random.default_rng(1).standard_normal((20, source.spec.hidden)).astype(np.float32)
        rows = Rows([0] * 20, 0, [0, 1])
        return activation_bits(runner, runner.run_layers(library.from_numpy(x_TD).bfloat16(), plan_of([rows]))).tobytes()
    finally:
        runner.close()


@pytest.mark.parametrize("which", ["bundled", "sharded"])
@in_loop
async def test_layers_come_alone_and_run_to_the_same_bytes(
    fleet: Fleet, new_home: Homes, request: pytest.FixtureRequest, which: str
) -> None:
    home, digest = request.getfixturevalue(which)
    name = {"bundled": "smollm2-135m", "sharded": "sharded"}[which]
    taker = new_home("taker")
    whole = open_model(name, home).weights
    layers = LayerRange(2, 4)
    part = ModelPart(layers, edges=False)
    async with fleet.node(home) as node:
        await fetch_part(fleet.fetch(taker, node.source(digest, name)), part)
        came = len(node.library.reads)
        await fetch_part(fleet.fetch(taker, node.source(digest, name)), ModelPart(LayerRange(3, 4), edges=False))
        assert len(node.library.reads) == came, "what is here is not fetched again"
    wanted = sum(whole.nbytes(tensor) for tensor in whole.names() if part.needs(tensor))
    extras = PIECE * (2 + 2 * len(list(staged_files(taker))))
    assert came * PIECE < wanted + extras + (8 << 20 if which == "bundled" else 0)
    found = open_part(digest, part, taker)
    assert (found.digest, found.spec) == (digest, whole.spec)
    weights = WeightsFormat.STORED
    assert residual(found, layers, weights) == residual(whole, layers, weights)
    (held,) = list_parts(taker)
    assert (held.name, held.digest, held.n_layers, held.edges) == (name, digest, whole.spec.n_layers, False)
    assert any(layers.start in run and layers.stop - 1 in run for run in held.layers)
    assert sum(map(len, held.layers)) < whole.spec.n_layers


@in_loop
async def test_layers_of_a_file_with_rope_factors_tell_their_sizes(fleet: Fleet, new_home: Homes) -> None:
    """What a file has beside the model's tensors comes with every part of it, and is none of them."""
    home, taker = new_home("giver"), new_home("taker")
    file = home.root / "tiny.gguf"
    home.root.mkdir()
    write_gguf(file, shape("llama-1b", n_layers=3, hidden=256, n_heads=4, n_kv_heads=2, ffn=512, vocab=512))
    pull(str(file), home, lambda done, total: None)
    whole = open_model("tiny", home).weights
    part = ModelPart(LayerRange(1, 2), edges=False)
    async with fleet.node(home) as node:
        await fetch_part(fleet.fetch(taker, node.source(whole.digest, "tiny")), part)
    found = open_part(whole.digest, part, taker)
    assert set(found.names()) <= set(whole.names())
    assert {name: found.nbytes(name) for name in found.names()} == {name: whole.nbytes(name) for name in found.names()}


@in_loop
async def test_what_is_not_here_is_never_read_as_zeros(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    part = ModelPart(LayerRange(1, 3), edges=False)
    async with fleet.node(home) as node:
        await fetch_part(fleet.fetch(taker, node.source(digest, "sharded")), part)
    found = open_part(digest, part, taker)
    assert FINAL_NORM not in found.names()
    with pytest.raises(ModelFileError, match="never fetched"):
        found.read("model.layers.5.mlp.up_proj.weight")
    for other in (ModelPart(LayerRange(1, 6), edges=False), ModelPart(LayerRange(1, 3), edges=True)):
        assert not covers(digest, other, taker)
        with pytest.raises(ModelNotFound, match="not on this machine"):
            open_part(digest, other, taker)
    assert len(list_models(taker)) == 1
    with pytest.raises(ModelNotFound):
        open_model("sharded", taker)
    folder = taker.partial / digest
    for path in (folder, *folder.glob("*.safetensors")):
        with pytest.raises(ModelFileError, match="only parts of a model"):
            open_model(str(path) if path.is_dir() else f"{path}", taker)
    with pytest.raises(ModelNotFound):
        open_part("../../etc", part, taker)


@in_loop
async def test_ranges_add_up_and_a_whole_fetch_brings_the_rest(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    first, second = ModelPart(LayerRange(0, 2), edges=True), ModelPart(LayerRange(4, 6), edges=False)
    async with fleet.node(home) as node:
        for part in (first, second):
            await fetch_part(fleet.fetch(taker, node.source(digest, "sharded")), part)
            assert covers(digest, part, taker)
        assert covers(digest, first, taker), "a later range takes nothing away"
        (held,) = list_parts(taker)
        assert held.edges
        assert held.layers == (LayerRange(0, 2), LayerRange(4, 6))
        assert {EMBEDDING, FINAL_NORM, HEAD} <= set(open_part(digest, first, taker).names())
        model = await fetch_model(fleet.fetch(taker, node.source(digest, "sharded")))
        assert len(node.library.reads) == len(set(node.library.reads)), "no piece came twice"
    assert model.digest == digest
    made = resolve("sharded", home).path
    assert all((taker.models / "sharded" / file.name).read_bytes() == file.read_bytes() for file in made.iterdir())
    assert list_parts(taker) == []
    assert covers(digest, second, taker), "the whole model has every part"


@in_loop
async def test_layers_that_broke_off_are_not_there(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    part = ModelPart(LayerRange(0, 6), edges=False)
    async with fleet.node(home) as node, fleet.node(home, "giver-2") as other:
        node.dies_after(9)
        with pytest.raises(DownloadError):
            await fetch_part(fleet.fetch(taker, node.source(digest, "sharded")), part)
        assert list_parts(taker) == []
        assert not covers(digest, part, taker)
        await fetch_part(fleet.fetch(taker, other.source(digest, "sharded")), part)
    assert covers(digest, part, taker)


@in_loop
async def test_a_damaged_piece_is_fetched_anew_and_not_open_meanwhile(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    home, digest = sharded
    taker = new_home("taker")
    part, wider = ModelPart(LayerRange(0, 2), edges=False), ModelPart(LayerRange(0, 3), edges=False)
    async with fleet.node(home) as node:
        await fetch_part(fleet.fetch(taker, node.source(digest, "sharded")), part)
        (file, piece) = next(place for place in node.library.reads if place[1] == 1)
        damaged = taker.partial / digest / sorted(path.name for path in (resolve("sharded", home).path).glob("*.safetensors"))[file]
        with damaged.open("r+b") as opened:
            opened.seek(piece * PIECE)
            opened.write(b"rot")
        node.library.reads.clear()
        seen_open: list[bool] = []
        node.library.before_read = lambda count: seen_open.append(covers(digest, part, taker))
        await fetch_part(fleet.fetch(taker, node.source(digest, "sharded")), wider)
        assert (file, piece) in node.library.reads
        assert not any(seen_open)
    assert covers(digest, wider, taker)


@in_loop
async def test_a_description_that_puts_layers_elsewhere_is_found_out(fleet: Fleet, sharded: Given, new_home: Homes) -> None:
    """Which layers are here follows from the files' own tables, not from what the giver said."""
    home, digest = sharded
    async with fleet.node(home) as node:
        node.library.describe_as = lambda manifest: replace(
            lying_about(manifest), tensors=tuple(replace(at, offset=0, nbytes=1) for at in manifest.tensors)
        )
        taker, part = new_home("taker"), ModelPart(LayerRange(0, 2), edges=False)
        with pytest.raises(DownloadError, match="described as those layers holds others"):
            await fetch_part(fleet.fetch(taker, node.source(digest, "sharded")), part)
        assert [held.problem is None for held in list_parts(taker)] == [False]
        async with fleet.node(home, "giver-2") as other:
            await fetch_part(fleet.fetch(taker, node.source(digest, "sharded"), other.source(digest, "sharded")), part)
    assert covers(digest, part, taker)
