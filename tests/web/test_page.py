"""The page at `/` in a real browser; skipped where there is no Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.stats import EngineStats
from paceline.server.settings import ServerSettings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
KEY = "open-sesame-open-sesame"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def opened(browser: Browser) -> Generator[Open]:
    """Opens the page of a server; nothing may fail in it."""
    servers: list[Served[ScriptedInference]] = []
    faults: list[str] = []

    def open_page(inference: ScriptedInference | None = None, settings: ServerSettings | None = None) -> Page:
        servers.append(Served(inference or ScriptedInference(), settings))
        page = browser.new_page(viewport={"width": 400, "height": 500})
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(servers[-1].url)
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    for server in servers:
        server.close()
    assert faults == []


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_an_answer_is_text_and_what_stands_between_backticks_a_block(opened: Open) -> None:
    question = "one\n```python\nx = 1\n```\n<b>two</b>"
    page = opened(ScriptedInference(max_context=2 * len(question)))  # the answer is the question, once
    ask(page, question)
    answer = page.locator("#talk > .assistant")
    expect(answer.locator("pre")).to_have_text("x = 1")
    expect(answer).to_contain_text("<b>two</b>")
    expect(answer.locator("b")).to_have_count(0)
    expect(answer).to_contain_text("the context is full")


def test_a_long_answer_is_followed_to_its_end(opened: Open) -> None:
    page = opened()
    ask(page, "and so on\n\n")
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
    assert page.evaluate("scrollY") > 0
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_an_answer_can_be_stopped_and_another_asked_for(opened: Open) -> None:
    page = opened(ScriptedInference(hold_after=3))
    ask(page, "abcdef")
    expect(page.locator("#talk > .assistant")).to_have_text("abc")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#talk > .assistant")).to_have_text("abc\n(stopped)")
    ask(page, "ghi")
    expect(page.locator("#talk > .assistant").nth(1)).to_have_text("ghi")


def test_a_key_is_asked_for(opened: Open) -> None:
    page = opened(settings=ServerSettings(api_key=KEY))
    field = page.get_by_label("This endpoint asks for a key")
    field.fill("not the key at all")
    field.press("Enter")
    expect(page.locator("#state")).to_have_text("That is not its key.")
    field.fill(KEY)
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#state")).to_have_text("Serves echo.")
    expect(field).to_be_hidden()
    expect(page.locator("#curl")).to_contain_text("$PACELINE_API_KEY")


def test_a_model_is_chosen_only_where_there_are_several(opened: Open) -> None:
    expect(opened().get_by_label("Model")).to_be_hidden()
    several = opened(settings=ServerSettings(served_names=("other",)))
    expect(several.get_by_label("Model")).to_be_visible()
    several.get_by_label("Model").select_option("other")
    expect(several.locator("#curl")).to_contain_text('"model":"other"')


def test_kv_on_the_disk_is_shown_where_there_is_some(opened: Open) -> None:
    class Keeping(ScriptedInference):
        def stats(self) -> EngineStats:
            kept = {"read": 512, "missed": 7, "damaged": 1, "written": 900, "evicted": 0, "failed": 2}
            return replace(super().stats(), kept_blocks=kept, kept_bytes=3 << 20)

    page = opened(Keeping())
    expect(page.locator("#disk")).to_have_text("KV on the disk: 3 MiB; blocks: 512 read, 7 missed, 900 written, 3 failed.")
    expect(opened().locator("#disk")).to_be_hidden()
