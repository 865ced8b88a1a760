from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.store.catalog import BUNDLED, MANIFEST, list_models, open_model, resolve
from paceline.store.home import Home
from paceline.store.selection import HubRef, choose_files, choose_gguf, gguf_models, parse_ref


def pulled(home: Home, name: str, files: Any) -> Any:
    """What a pull leaves: files and a manifest that names them."""
    folder = home.models / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps({"repo": name, "files": {file: {} for file in files}}))
    return folder


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2", "SmolLM2-135M-Instruct"])
def test_the_bundled_model_has_its_names(name: str, bundled_gguf: Path, home: Home) -> None:
    found = resolve(name, home)
    assert (found.name, found.path) == (BUNDLED, bundled_gguf)


def test_the_bundled_model_opens(home: Home) -> None:
    opened = open_model(BUNDLED, home)
    assert opened.name == BUNDLED
    assert opened.spec.n_layers == 30
    assert opened.spec == opened.weights.spec
    assert opened.tokenizer.size == opened.spec.vocab
    assert opened.tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "x"))
    assert Home.from_environment() == Home(tmp_path / "x")
    monkeypatch.delenv("PACELINE_HOME")
    assert Home.from_environment() == Home(Path.home() / ".paceline")


def test_paths_to_files_and_folders(gguf_model: Any, make_folder: Any, tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_model().write(tmp_path / "tiny.gguf")
    folder = make_folder(tmp_path / "folder")
    assert open_model(str(path), home).name == "tiny"
    assert open_model(str(folder), home).name == "folder"
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny.gguf", home).path == path
    assert resolve("./folder", home).path == folder
    assert resolve("folder", home).path == folder
    (tmp_path / "lone").mkdir()
    lone = gguf_model().write(tmp_path / "lone" / "inside.gguf")
    assert resolve("./lone", home).path == lone
    gguf_model().write(tmp_path / "lone" / "other.gguf")
    with pytest.raises(ModelNotFound, match="2 GGUF files"):
        resolve("./lone", home)


def test_pulled_models_are_found_by_name_and_quantisation(gguf_model: Any, make_folder: Any, home: Home) -> None:
    folder = pulled(home, "org/Tiny-GGUF", ["tiny-q4_0.gguf", "tiny-q8_0.gguf"])
    for quant in ("q4_0", "q8_0"):
        gguf_model("llama", quant.upper()).write(folder / f"tiny-{quant}.gguf")
    (folder / "half.gguf").write_bytes(b"not in the manifest")
    make_folder(pulled(home, "org/plain", ["config.json", "model.safetensors"]))
    assert resolve("org/plain", home).path == home.models / "org/plain"
    assert resolve("org/tiny-gguf:tiny-q8_0.gguf", home).path == folder / "tiny-q8_0.gguf"
    assert resolve("org/Tiny-GGUF:Q4_0", home).path == folder / "tiny-q4_0.gguf"
    with pytest.raises(ModelNotFound, match=r"2 GGUF files.*tiny-q4_0\.gguf, tiny-q8_0\.gguf"):
        resolve("org/Tiny-GGUF", home)
    with pytest.raises(ModelNotFound, match="match 'Q2_K'"):
        resolve("org/Tiny-GGUF:Q2_K", home)


def test_a_single_gguf_goes_by_the_name_of_its_repository(gguf_model: Any, home: Home) -> None:
    folder = pulled(home, "org/one", ["one.gguf"])
    path = gguf_model().write(folder / "one.gguf")
    assert resolve("org/one", home).path == path
    assert resolve("org/one:one.gguf", home).name == "org/one"


def test_the_list_tells_what_each_model_is(gguf_model: Any, make_folder: Any, home: Home) -> None:
    gguf_model("qwen3", "Q4_0").write(pulled(home, "org/b", ["b.gguf"]) / "b.gguf")
    make_folder(pulled(home, "org/a", ["model.safetensors"]))
    pulled(home, "org/c", ["c.gguf"])
    (home.models / "org/c/c.gguf").write_bytes(b"GGUF")
    bundled, a, b, c = list_models(home)
    assert (bundled.name, bundled.format, bundled.family, bundled.context) == (BUNDLED, "GGUF Q4_1", "llama", 8192)
    assert (a.name, a.format, a.family, a.problem) == ("org/a", "safetensors F32", "llama", None)
    assert (b.name, b.format, b.family, b.context, b.nbytes) == ("org/b", "GGUF Q4_0", "qwen3", 128, b.path.stat().st_size)
    assert c.name == "org/c"
    assert c.problem is not None
    assert "too few" in c.problem
    assert b.digest is None
    digest = open_model("org/b", home).weights.digest
    assert [model.digest for model in list_models(home) if model.name == "org/b"] == [digest]


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("smollm2-135n", "Did you mean smollm2-135m"),
        ("org/tinny", r"Did you mean org/tiny\?.*paceline pull org/tinny"),
        ("./no.gguf", "no file or folder .*no.gguf"),
        ("", "no model ''"),
        ("a\x00b", "no model"),
        ("../../etc", "no file or folder"),
        ("x" * 5000, "no model"),
        ("./" + "x" * 5000, "no file or folder"),
        ("org/" + "x" * 5000, "no model"),
    ],
)
def test_what_is_not_here_is_named_with_what_is_near(
    ref: Any, words: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pulled(home, "org/tiny", ["tiny.gguf"])
    with pytest.raises(ModelNotFound, match=words) as caught:
        resolve(ref, home)
    assert "paceline models" in caught.value.hint


def test_a_model_that_went_away_is_a_problem_with_its_file(home: Home, tmp_path: Path) -> None:
    folder = home.models / "gone"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"path": str(tmp_path / "gone.gguf")}))
    with pytest.raises(ModelFileError, match=r"gone\.gguf can't be read"):
        open_model("gone", home)
    (listed,) = (model for model in list_models(home) if model.name == "gone")
    assert listed.problem is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubRef("org/name", None, None)),
        ("org/name:Q4_K_M", HubRef("org/name", None, "Q4_K_M")),
        ("org/na.me-2@refs/pr/1:a/b.gguf", HubRef("org/na.me-2", "refs/pr/1", "a/b.gguf")),
        ("org/name@v1", HubRef("org/name", "v1", None)),
        ("name", None),
        ("../name", None),
        ("org/..", None),
        ("org/name@..", None),
        ("a/b/c", None),
        ("org/name:a:b", None),
        ("org/na me", None),
    ],
)
def test_hub_references(text: str, expected: Any) -> None:
    assert parse_ref(text) == expected


def test_gguf_files_are_grouped_and_chosen() -> None:
    names = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "big/m-Q8_0-00002-of-00002.gguf", "big/m-Q8_0-00001-of-00002.gguf", "mmproj-m.gguf", "x.txt"]
    assert set(gguf_models(names)) == {"m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "big/m-Q8_0-00001-of-00002.gguf"}
    assert choose_gguf("here", names, "q4_k_m") == ["m-Q4_K_M.gguf"]
    assert choose_gguf("here", names, "q8_0") == ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"]
    assert choose_gguf("here", names, "m-Q4_K_S.gguf") == ["m-Q4_K_S.gguf"]
    for selector in (None, "Q4", "Q5"):
        with pytest.raises(ModelNotFound):
            choose_gguf("here", names, selector)


def test_safetensors_come_with_what_they_need() -> None:
    names = [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "consolidated.safetensors",
        "README.md",
        "onnx/model.onnx",
        "chat_template.jinja",
    ]
    assert choose_files("here", names, None) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
