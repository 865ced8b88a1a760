"""Files made to do harm: small ones that ask for much memory or time, and text that should not reach a terminal or the engine."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from paceline.core.errors import ConfigError, InvalidRequest, ModelFileError, UnsupportedModel
from paceline.store import hub
from paceline.store.catalog import open_model, resolve
from paceline.store.home import Home
from paceline.store.tokenizer_files import tokenizer_from_folder

BOUND = 64 << 20
"""A first read of 4 MiB, copies of small files, and libraries being imported."""


@pytest.fixture(autouse=True)
def bounded_memory() -> Any:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BOUND


def with_tensor(model: Any, name: str, values: Any) -> Any:
    model.stored[name] = (values, GGMLQuantizationType.F32)
    return model


def test_a_configuration_of_millions_of_experts(make_folder: Any, tmp_path: Path, home: Home) -> None:
    sizes = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    folder = make_folder(tmp_path / "m", num_hidden_layers=4096, num_experts=4096, **sizes)
    with pytest.raises(ModelFileError, match="4096 layers of 4096 experts"):
        open_model(str(folder), home)


def test_metadata_of_millions_of_experts(gguf_model: Any, tmp_path: Path, home: Home) -> None:
    model = gguf_model("qwen3moe")
    model.metadata |= {"block_count": 4096, "expert_count": 4096}
    with pytest.raises(ModelFileError, match="4096 layers of 4096 experts"):
        open_model(str(model.write(tmp_path / "m.gguf")), home)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
@pytest.mark.parametrize("layer", ["0", "00", "9"])
def test_a_stack_of_a_million_experts(gguf_model: Any, tmp_path: Path, home: Home, arch: str, layer: str) -> None:
    model = with_tensor(gguf_model(arch), f"blk.{layer}.ffn_gate_exps.weight", np.zeros((1_000_000, 1, 1), np.float32))
    path = model.write(tmp_path / "m.gguf")
    tracemalloc.reset_peak()  # writing it took more
    with pytest.raises((UnsupportedModel, ModelFileError)):
        open_model(str(path), home)


def test_heads_of_a_billion(gguf_model: Any, tmp_path: Path, home: Home) -> None:
    model = with_tensor(gguf_model(), "rope_freqs.weight", np.ones(8, np.float32))
    model.metadata["attention.key_length"] = (1 << 31) - 2
    with pytest.raises(ModelFileError, match="8 rope factors"):
        open_model(str(model.write(tmp_path / "m.gguf")), home)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": float("inf")},
        {"rms_norm_eps": float("inf")},
        {"rope_scaling": {"type": "linear", "factor": float("inf")}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": float("inf"),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ],
    ids=["base", "epsilon", "linear", "llama3"],
)
def test_infinite_numbers(make_folder: Any, tmp_path: Path, home: Home, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="rope"):
        open_model(str(make_folder(tmp_path / "m", **changes)), home)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_not_a_file_is_not_read(make_folder: Any, tmp_path: Path, home: Home, name: str, kind: str) -> None:
    path = make_folder(tmp_path / "m") / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)  # whose opening waits for a writer
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ModelFileError, match=name):
        open_model(str(path.parent), home)


def test_an_index_that_points_outside(make_folder: Any, tmp_path: Path, home: Home) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..\\outside.safetensors", "..", ""):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ModelFileError, match="which its index names, is not there"):
            open_model(str(folder), home)


def test_what_a_file_says_does_not_command_a_terminal(make_folder: Any, gguf_model: Any, tmp_path: Path, home: Home) -> None:
    model = with_tensor(gguf_model(), "blk.0.\x1b[2J" + "x" * 2000, np.ones(1, np.float32))
    for path in (model.write(tmp_path / "m.gguf"), make_folder(tmp_path / "m", model_type="\x1b]0;owned\x07")):
        with pytest.raises(UnsupportedModel) as caught:
            open_model(str(path), home)
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 1000


def test_names_at_a_hub_that_command_a_terminal_are_not_taken() -> None:
    assert [name for name in ("a.gguf", "a\x1b[2J.gguf", "a\n.gguf", "a\0.gguf", "a/../b", "\u202efugg.a") if hub.is_safe(name)] == [
        "a.gguf"
    ]


# Tokenizers


def changed_tokenizer(folder: Path, change: Any) -> Path:
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))
    return folder


def single(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
CHANGES: dict[str, Any] = {
    "a first token that is not there": lambda t: t.update(post_processor=single({"SpecialToken": {"id": "no", "type_id": 0}}, SEQUENCE)),
    "a damaged table": lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a replacement of nothing": lambda t: t.update(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    "no unknown token": lambda t: t.update(
        model={
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "#",
            "max_input_chars_per_word": 9,
            "vocab": {"a": 0},
        }
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_tokenizer_on_which_its_library_fails(make_folder: Any, tmp_path: Path, home: Home, change: Any) -> None:
    folder = changed_tokenizer(make_folder(tmp_path / "m"), change)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        open_model(str(folder), home)


def test_a_text_on_which_the_library_fails(make_folder: Any, tmp_path: Path) -> None:
    words = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "#", "max_input_chars_per_word": 9}
    folder = changed_tokenizer(make_folder(tmp_path / "m"), lambda t: t.update(model=words | {"vocab": {"a": 0, "Ġword": 1}}))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("a word") == [0, 1]
    with pytest.raises(InvalidRequest, match="tokenizer fails"):
        tokenizer.encode("another")


def test_tokens_without_a_row_in_the_embedding_are_not_tokens_of_the_model(
    make_folder: Any, gguf_model: Any, tmp_path: Path, home: Home
) -> None:
    vocab = open_model(str(make_folder(tmp_path / "whole")), home).spec.vocab
    added = {"id": vocab, "content": "<pad>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    folder = changed_tokenizer(make_folder(tmp_path / "m", eos_token_id=[vocab, 10**30, -1, 5]), lambda t: t["added_tokens"].append(added))
    model = open_model(str(folder), home)
    assert model.tokenizer.encode("<pad>", add_special=False) == [vocab]
    assert model.tokenizer.size == vocab
    assert {5, *model.tokenizer.encode("<|im_end|>", add_special=False)} == model.tokenizer.eos_ids
    short = gguf_model()
    rows, kind = short.stored["token_embd.weight"]
    short.stored["token_embd.weight"] = (rows[:100], kind)
    cut = open_model(str(short.write(tmp_path / "m.gguf")), home)
    assert (cut.spec.vocab, cut.tokenizer.size, cut.tokenizer.eos_ids) == (100, 100, frozenset())


def test_a_tokenizer_that_throws_dice_for_its_merges(make_folder: Any, tmp_path: Path) -> None:
    folder = changed_tokenizer(make_folder(tmp_path / "m"), lambda t: t["model"].update(dropout=0.5))
    tokenizer = tokenizer_from_folder(folder)
    assert len({tuple(tokenizer.encode("the hat the hat the hat")) for _ in range(20)}) == 1


# Homes


def test_homes_that_nobody_has(monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    with pytest.raises(ConfigError, match="no home folder"):
        resolve("~nobody-of-this-name/m.gguf", home)
    monkeypatch.setenv("PACELINE_HOME", "~nobody-of-this-name/x")
    with pytest.raises(ConfigError, match="no home folder"):
        Home.from_environment()
