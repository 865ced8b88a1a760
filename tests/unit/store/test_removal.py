"""Models leave the disk, with what caches keep of them, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.seeded_models import TINY, write_folder, write_gguf

from paceline.core.errors import ConfigError, FetchInProgress, ModelFileError, ModelNotFound
from paceline.store.catalog import MANIFEST, PART, locations, open_model
from paceline.store.home import Home, only_one
from paceline.store.pull import folder_lock, remove_model


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def pulled(home: Home, name: str, *files: str) -> Path:
    """A folder as a pull leaves it."""
    folder = home.models / name
    for seed, file in enumerate(files):
        write_gguf(folder / file, TINY, "Q8_0", seed)
    (folder / MANIFEST).write_text(json.dumps({"files": {file: {} for file in files}}))
    return folder


def names(home: Home) -> set[str]:
    return {place.name for place in locations(home) if place.path.is_relative_to(home.root) or "elsewhere" in place.path.parts}


def held(home: Home) -> list[Path]:
    return [path for path in home.root.rglob("*") if path.is_file()]


def test_all_of_a_pulled_model_goes(home: Home) -> None:
    folder = pulled(home, "org/one", "one.gguf")
    open_model("org/one", home).weights.digest  # noqa: B018 - computed, and remembered
    n_bytes = (folder / "one.gguf").stat().st_size
    assert len(held(home)) >= 4
    removed = remove_model("ORG/one", home)
    assert removed.freed_bytes >= n_bytes
    assert not removed.kept
    assert held(home) == []
    assert not folder.parent.exists()
    with pytest.raises(ModelNotFound):
        remove_model("org/one", home)


def test_of_several_in_a_folder_one_goes(home: Home) -> None:
    folder = pulled(home, "org/two", "a.gguf", "b.gguf")
    assert names(home) == {"org/two:a.gguf", "org/two:b.gguf"}
    remove_model("org/two:a.gguf", home)
    assert names(home) == {"org/two"}
    assert not (folder / "a.gguf").exists()
    remove_model("org/two", home)
    assert held(home) == []


def test_a_folder_within_another_models_stays(home: Home) -> None:
    pulled(home, "outer", "o.gguf")
    pulled(home, "outer/inner", "i.gguf")
    remove_model("outer", home)
    assert names(home) == {"outer/inner"}
    open_model("outer/inner", home)


def test_what_lies_elsewhere_is_taken_from_the_list_and_stays(home: Home, tmp_path: Path) -> None:
    place = write_folder(tmp_path / "elsewhere" / "mine", TINY)
    (home.models / "mine").mkdir(parents=True)
    (home.models / "mine" / MANIFEST).write_text(json.dumps({"path": str(place)}))
    before = sorted(place.iterdir())
    removed = remove_model("mine", home)
    assert removed.kept
    assert names(home) == set()
    assert sorted(place.iterdir()) == before


def test_what_was_not_pulled_is_refused(home: Home, tmp_path: Path) -> None:
    stray = write_gguf(tmp_path / "stray.gguf", TINY, "Q8_0")
    outside = pulled(Home(tmp_path / "other"), "evil", "e.gguf")
    home.models.mkdir(parents=True)
    (home.models / "linked").symlink_to(outside, target_is_directory=True)
    for name in (str(stray), "smollm2-135m", str(home.models / "linked" / "e.gguf")):
        with pytest.raises(ConfigError, match="was not pulled"):
            remove_model(name, home)
    assert stray.exists()
    assert (outside / "e.gguf").exists()


def test_one_that_is_being_pulled_is_refused(home: Home) -> None:
    pulled(home, "org/one", "one.gguf")
    with folder_lock("org/one", home), pytest.raises(FetchInProgress):
        remove_model("org/one", home)
    assert names(home) == {"org/one"}


@pytest.mark.parametrize("kind", ["layers", "broken pull", "both"])
def test_a_model_that_is_here_in_part_goes(home: Home, kind: str) -> None:
    pulled(home, "org/other", "other.gguf")
    stays = held(home)
    if kind != "broken pull":
        layers = home.partial / ("a" * 64)
        layers.mkdir(parents=True)
        (layers / PART).write_text(json.dumps({"name": "org/one", "held": {}}))
        (layers / "one.gguf").write_bytes(bytes(8192))
    if kind != "layers":
        (home.models / "org/one").mkdir()
        (home.models / "org/one" / "one.gguf.0123.part").write_bytes(bytes(8192))
    removed = remove_model("ORG/one", home)
    assert not removed.kept
    assert removed.freed_bytes >= 8192
    assert held(home) == stays
    with pytest.raises(ModelNotFound):
        remove_model("org/one", home)


def test_layers_that_are_being_fetched_stay(home: Home) -> None:
    layers = home.partial / ("a" * 64)
    layers.mkdir(parents=True)
    (layers / PART).write_text(json.dumps({"name": "org/one", "held": {}}))
    with only_one(layers.with_name(f"{layers.name}.lock"), "org/one"), pytest.raises(FetchInProgress):
        remove_model("org/one", home)
    assert layers.exists()
    for name in ("org", "../models", "org/..", "."):
        with pytest.raises((ModelNotFound, ConfigError, ModelFileError)):
            remove_model(name, home)
