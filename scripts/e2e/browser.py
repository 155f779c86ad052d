"""Headless Chromium on the server's page, as `openclaw-rl page` opens it. Needs Playwright and Debian's `chromium`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from playwright.sync_api import Browser, Page, sync_playwright

from openclaw_rl.testing.running_server import RunningServer

PATIENCE_MS = 60_000
"""Against hanging alone."""


@contextmanager
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox of its own; the page is ours.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def opened(browser: Browser, server: RunningServer, *, is_dark: bool = False, width: int = 1200) -> Page:
    """Open the page with the admin key, in a fresh context."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if is_dark else "light", locale="en-GB"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    key = (server.data_dir / "keys" / "admin.key").read_text().strip()
    page.goto(f"{server.url}/#{quote(key, safe='')}")
    page.wait_for_selector("nav a[aria-current]")
    return page


def go(page: Page, view: str) -> None:
    """Change the view, as a link of the page does."""
    page.evaluate("view => { location.hash = view; }", view)
