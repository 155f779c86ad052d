"""The page on the real embedded engine and the real trainer, with the first layers of the bundled model."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import PATIENCE_MS
from playwright.sync_api import Browser, expect

from openclaw_rl.testing.running_server import RunningServer

STEP_MS = 5 * PATIENCE_MS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, short_model: Path) -> Iterator[RunningServer]:
    arguments = ["--batch-size", "2", "--set", f"model.path={short_model}", "--set", "trainer.nice=0"]
    with RunningServer(
        tmp_path_factory.mktemp("page") / "data", [*arguments, "--set", "sampling.max_new_tokens=40"]
    ) as server:
        yield server


@pytest.mark.timeout(900)
def test_two_rated_replies_become_a_version_that_answers_next(server: RunningServer, browser: Browser, shot) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{server.url}/#/chat")
    replies = page.get_by_role("article", name="Reply")
    asked = (("Give me a tip to sleep better.", "Good reply"), ("And another one.", "Bad reply"))
    for count, (text, name) in enumerate(asked, start=1):
        page.get_by_role("textbox", name="Message").fill(text)
        page.keyboard.press("Enter")
        expect(replies).to_have_count(count)
        last = replies.last
        expect(last.locator(".way")).to_contain_text("waits for the next message or a rating")  # whatever it says
        last.get_by_role("button", name=re.compile(name)).click()
        expect(last.locator(".way")).to_contain_text("by you")
    expect(replies.last.locator(".way")).to_contain_text("trained in version 1", timeout=STEP_MS)
    expect(page.locator("#line")).to_contain_text("v1", timeout=STEP_MS)
    page.get_by_role("textbox", name="Message").fill("Thank you.")
    page.keyboard.press("Enter")
    expect(replies).to_have_count(3)
    expect(replies.last.get_by_role("link", name="v1")).to_be_visible()
    shot(page, "real-engine")
    context.close()
