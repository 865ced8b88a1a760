"""A folder that came with a download may be the one a person starts Paceline in: no code in it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.fleet import LocalFleet
from paceline.store.bounded_tokenizer import BoundedTokenizer
from paceline.store.catalog import BUNDLED, open_model
from paceline.store.home import Home
from paceline.store.tokenizer import ModelTokenizer

RAN = "ran"


@pytest.fixture(autouse=True)
def started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules by names that Paceline's processes import, each of which says that it ran."""
    folder = tmp_path / "model"
    (folder / "paceline").mkdir(parents=True)
    for module in ("paceline/__init__", "paceline/__main__", "shutil", "json"):
        (folder / f"{module}.py").write_text(f"open({str(folder / RAN)!r}, 'a').write({module!r})")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(folder)
    return folder


def test_a_tokenizers_process_imports_nothing_from_it(started_in: Path, bundled_gguf: Path) -> None:
    own = open_model(BUNDLED, Home.from_environment()).tokenizer
    assert isinstance(own, ModelTokenizer)
    tokenizer = BoundedTokenizer(own)
    try:
        assert tokenizer.encode("hello") == own.encode("hello")
    finally:
        tokenizer.close()
        assert not (started_in / RAN).exists()


def test_local_nodes_import_nothing_from_it(started_in: Path, tmp_path: Path) -> None:
    fleet = LocalFleet(2, 1, model=tmp_path / "no model")  # so that the node ends at once
    fleet.close()
    assert not (started_in / RAN).exists()
