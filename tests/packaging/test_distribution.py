"""What is installed is whole, and the repository keeps its own rules."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import paceline

INSTALLED = Path(paceline.__file__).parent
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(INSTALLED)], "paceline.") if module.name != "paceline.__main__")
SOURCES = sorted(path for path in INSTALLED.rglob("*.py") if "_pb2" not in path.name)  # what protoc wrote is not ours to shorten
FROM_WHEEL = os.environ.get("PACELINE_TEST_WHEEL") == "1"


@pytest.mark.skipif(not FROM_WHEEL, reason="says something only where the wheel is installed")
def test_the_wheel_is_what_is_tested() -> None:
    assert "site-packages" in INSTALLED.parts
    names = {str(file) for file in distribution("paceline").files or []}
    assert "paceline/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "src/", "bench/"))]


def test_version_and_entry_point() -> None:
    installed = distribution("paceline")
    assert installed.version == paceline.__version__
    assert {entry.name: entry.value for entry in installed.entry_points} == {"paceline": "paceline.cli:main"}
    assert shutil.which("paceline", path=str(Path(sys.executable).parent)) is not None


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name: str) -> None:
    if name.startswith("paceline.backends.mlx."):
        pytest.importorskip("mlx", reason="an extra: the rest imports without it")
    importlib.import_module(name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(INSTALLED)))
def test_house_rules(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a module says its law first"
    assert len(text.splitlines()) <= 500
    assert not re.search(r"\b(TODO|FIXME|raise NotImplementedError)\b", text)
