"""tests/capabilities.toml names tests for each capability, or says what is missing or why it is left out."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ENDS = {"tests", "planned", "not_doing"}
"""An entry has exactly one of these: tests that show it, what is missing, or why it is left out."""

pytestmark = pytest.mark.skipif(not README.is_file(), reason="the tests travel without the source")


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Return the entries by `section.key`. Reading fails if an id occurs twice: TOML allows a key only once."""
    sections = tomllib.loads((ROOT / "tests/capabilities.toml").read_text())
    return {f"{section}.{key}": entry for section, table in sections.items() for key, entry in table.items()}


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the tests of a module as pytest names them, `Class::test` for methods. The module is parsed, not imported."""
    if not (ROOT / path).is_file():
        return frozenset()
    names = set[str]()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return frozenset(name for name in names if name.split("::")[-1].startswith("test_"))


def readme_claims(text: str) -> list[str]:
    """Return the first line of each list item and each table row, without Markdown marks. Skip code and table headers."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|.*\n\|[-:| ]+\|$", "", text, flags=re.MULTILINE)
    found = re.findall(r"^\s*(?:[-*+]|\d+[.)]) +(.+)$|^\|(.+)\|$", text, flags=re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", item or row) for item, row in found)
    return [re.sub(r"[*`]", "", each).strip() for each in plain]


def test_each_entry_has_tests_or_a_plan_or_a_reason() -> None:
    wrong = [
        name
        for name, entry in entries().items()
        if len(ENDS & entry.keys()) != 1
        or entry.keys() - ENDS - {"says", "readme"}
        or not all([entry.get("says"), *(entry[key] for key in entry)])
        or not isinstance(entry.get("tests", []), list)
    ]
    assert wrong == []


def test_no_two_entries_say_the_same() -> None:
    says = [entry["says"] for entry in entries().values()]
    assert sorted(set(says)) == sorted(says)


def test_each_named_test_exists() -> None:
    named = [(name, test) for name, entry in entries().items() for test in entry.get("tests", [])]
    missing = [f"{name}: {test}" for name, test in named if test.partition("::")[2] not in names_in(test.partition("::")[0])]
    assert missing == []


def test_each_claim_of_the_readme_has_one_entry() -> None:
    """`readme` holds beginnings of list items or table rows. Each matches one of them, and each of them is matched once."""
    starts = [start for entry in entries().values() for start in entry.get("readme", [])]
    claims = readme_claims(README.read_text())
    assert {claim: found for claim in claims if len(found := [start for start in starts if claim.startswith(start)]) != 1} == {}
    assert {start: found for start in starts if len(found := [claim for claim in claims if claim.startswith(start)]) != 1} == {}


def test_claims_of_any_markdown_are_found() -> None:
    page = "- **A** [b](c)\n  more\n\n| head | er |\n|---|---|\n| `x` | y |\n\n```sh\n- no claim\n```\n1. First\n\nProse.\n"
    assert readme_claims(page) == ["A b", "x | y", "First"]
