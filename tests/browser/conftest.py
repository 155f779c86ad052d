"""The page in headless Chromium, on a real server: over a fake engine and a trainer without a model.

A browser lives as long as a module: Playwright's synchronous interface keeps an event loop in its thread, beside which
no other test could run its own. Each test has a fresh context. At its end the context has asked no other host for
anything, met no violation of the Content-Security-Policy and thrown no error.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from breaking import words_of
from browsing import PATIENCE_MS, Site, Visitor, listening, settings_of, visiting
from harness.host import Host
from harness.model import Vocabulary
from playwright.sync_api import Browser, Page, expect, sync_playwright

from openclaw_rl.testing import FakeEngine, stub_app

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Debian's packages, or the browser that `playwright install chromium` brought. The headless shell is Chromium
    # without the windows of a desktop: a page takes half the CPU time.
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        path = found or playwright.chromium.executable_path
        assert Path(path).exists(), "the tests of the page need Chromium: apt-get install chromium"
        # Root, as in a container, has no sandbox of its own; the pages are ours.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_site(
    host: Host, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Site]]:
    """`open_site(server__api_keys=…)`: a site with these settings, for the rest of the module."""
    vocabulary = Vocabulary.of(model_folder)
    with ExitStack() as stack:

        def start(**more: Any) -> Site:
            folder = tmp_path_factory.mktemp("site")
            engine = FakeEngine(policy=words_of(vocabulary), context_length=4096)
            url, loop = stack.enter_context(listening(stub_app(engine)))
            server = stack.enter_context(host.running(folder, settings_of(url, folder, **more)))
            return Site(server, engine, loop, vocabulary)

        yield start


@pytest.fixture(scope="module")
def site(open_site: Callable[..., Site]) -> Site:
    """A site without chat keys, as on a user's own machine. Practice waits for an hour of quiet."""
    return open_site(practice__idle_s=3600.0)


@pytest.fixture
def visitor(browser: Browser, site: Site) -> Iterator[Visitor]:
    with visiting(browser, site) as visitor:
        yield visitor


@pytest.fixture
def shot() -> Callable[[Page, str], None]:
    """Take a screenshot into the folder PAGE_SHOTS, where it is set: for people to look at."""
    folder = os.environ.get("PAGE_SHOTS")

    def take(page: Page, name: str) -> None:
        if folder:
            page.screenshot(path=str(Path(folder) / f"{name}.png"))

    return take
