"""A home of another layout is refused by name, and left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.store.home import LAYOUT, Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("written", [None, f"{LAYOUT} paceline 0.1.0\n", f"{LAYOUT}\n"])
def test_a_home_of_this_layout_is_used(home: Path, written: str | None) -> None:
    if written is not None:
        home.mkdir()
        (home / "layout").write_text(written)
    made = Home.from_environment()
    made.keep_layout("9.9")
    assert made.layout.read_text() == (written or f"{LAYOUT} paceline 9.9\n")
    assert Home.from_environment() == made


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (f"{LAYOUT - 1} paceline 0.0.9\n", "paceline 0.0.9"),
        (f"{LAYOUT + 1} paceline 2.0.0\n", "paceline 2.0.0"),
        ("7\n", "another version of Paceline"),
        ("", "another version of Paceline"),
        ("x" * 10**6, "another version of Paceline"),
        (f"{LAYOUT + 1} \x1b[2J\n", "?[2J"),
    ],
)
def test_a_home_of_another_layout_is_refused_by_name_and_not_changed(home: Path, written: str, named: str) -> None:
    home.mkdir()
    (home / "layout").write_text(written)
    (home / "config.toml").write_text("kept")
    with pytest.raises(ConfigError, match="was written by") as caught:
        Home.from_environment()
    assert named in caught.value.message
    assert str(home) in caught.value.message
    assert "PACELINE_HOME" in caught.value.hint
    assert len(caught.value.message) < 600
    assert sorted(path.name for path in home.iterdir()) == ["config.toml", "layout"]
    assert (home / "layout").read_text() == written
