"""The first page that a stranger sees: short, with pictures, with links that lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.scripted_encoder import ScriptedEncoders
from tests.fakes.scripted_inference import ScriptedInference

from paceline.server.app import create_app

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/guide.md")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the tests travel without the documentation")


def test_the_front_page_is_short_and_has_pictures() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1000
    assert re.findall(r"^!\[.+\]\(.+\.svg\)$", text, re.MULTILINE)
    assert "pip install paceline" not in text


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_and_headings_lead_somewhere(page: str) -> None:
    at = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", at.read_text()):
        file, _, heading = target.partition("#")
        found = (at.parent / file).resolve() if file else at
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^a-z0-9 _-]", "", each.lower()).replace(" ", "-") for each in headings}, target


def test_every_command_of_the_guide_exists() -> None:
    from typer.main import get_group

    from paceline.cli.app import app

    known = set(get_group(app).commands)
    used = {
        word
        for page in PAGES
        for word in re.findall(r"^(?:\S* \| )?(?:\.venv/bin/)?paceline ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert {"up", "chat", "init", "join"} <= used
    assert used <= known


def test_the_chart_is_of_the_table() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools/draw_chart.py"), "--check"], check=True, timeout=100)


def test_each_endpoint_has_an_example_with_its_answer() -> None:
    text = (ROOT / "docs/reference/examples.md").read_text()
    shown = set(re.findall(r"^`(\w+) (\S+)`$", text, re.MULTILINE))
    paths = create_app(ScriptedInference(), encoders=ScriptedEncoders()).openapi()["paths"]
    asked = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    kept = {path: re.sub(r"\{\w+\}", r"[^/]+", path) for _, path in asked}
    lacking = {
        (method, path) for method, path in asked if not any(method == verb and re.fullmatch(kept[path], place) for verb, place in shown)
    }
    assert lacking == set()
    assert text.count("```sh") == len(re.findall(r"```(?:json|text)", text)) == len(re.findall(r"^## ", text, re.MULTILINE))
