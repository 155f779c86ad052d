"""Headless Chromium on the server's page, as `openclaw-rl page` opens it. Needs Playwright and Debian's `chromium`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.parse import quote

from playwright.sync_api import Browser, Page, sync_playwright

from openclaw_rl.testing.running_server import RunningServer

PATIENCE_MS = 60_000
"""Against hanging alone."""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=launch_arguments())
        try:
            yield browser
        finally:
            browser.close()


def executable() -> str | None:
    """Return Debian's Chromium; None: the one that `playwright install` brought."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def launch_arguments() -> list[str]:
    # Root, as in a container, has no sandbox of its own; the page is ours.
    return ["--no-sandbox"] if os.geteuid() == 0 else []


def page_url(server: RunningServer) -> str:
    """Return the page's address with the admin key, as `openclaw-rl page` opens it."""
    key = (server.data_dir / "keys" / "admin.key").read_text().strip()
    return f"{server.url}/#{quote(key, safe='')}"


def opened(browser: Browser, server: RunningServer, *, is_dark: bool = False) -> Page:
    """Open the page with the admin key, in a fresh context."""
    scheme: Literal["dark", "light"] = "dark" if is_dark else "light"
    context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme=scheme, locale="en-GB")
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(page_url(server))
    page.wait_for_selector("nav a[aria-current]")
    return page


def go(page: Page, view: str) -> None:
    """Change the view, as a link of the page does."""
    page.evaluate("view => { location.hash = view; }", view)
