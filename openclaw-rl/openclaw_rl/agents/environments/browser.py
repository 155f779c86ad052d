"""Chromium for environments: one headless browser of a run in bubblewrap, a context of its own for each episode.

Pages come from one folder of files, at `/pages`. The browser has no network: its namespace holds nothing but a loopback
of its own. It sees `/usr` and fonts, writes to a `/tmp` in memory, and ends with the runner and with Playwright's own
process, also by `kill -9`. Under root it runs as an unprivileged user. Needs playwright and Chromium.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser as Chromium
from playwright.async_api import Error, Page, Playwright, async_playwright

from openclaw_rl.agents.sandbox import Sandboxes
from openclaw_rl.agents.sandbox.bubblewrap import system_folders
from openclaw_rl.errors import EnvironmentFault, SandboxFault

_UID = 60_001
"""Of the browser under root; users of sandboxes end below it."""
_LAUNCH_S, _LOAD_S, _CLOSE_S = 120.0, 120.0, 20.0
_PROGRAMS = (
    "/usr/lib/chromium/chromium-headless-shell",
    "/usr/lib/chromium/chromium",
    "chromium",
    "chromium-browser",
    "google-chrome",
)
"""The headless shell has no windows of a desktop to draw, and takes less of the cores. Debian's program itself comes
before the script that starts it, which reads /etc."""
_INSTALL = "apt-get install chromium, or playwright install chromium"


class Browser:
    """Starts Chromium when the first page is asked for, and anew when it died."""

    def __init__(self, pages: Path, *, width: int, height: int, program: str = "") -> None:
        """pages: the folder that is shown as `/pages`. width, height: of each page. program: a Chromium."""
        self._pages, self._program = pages, program
        self._size = {"width": width, "height": height}
        self._lock = asyncio.Lock()
        self._playwright: Playwright | None = None
        self._chromium: Chromium | None = None
        self._launcher: Path | None = None

    @asynccontextmanager
    async def page(self, sandboxes: Sandboxes) -> AsyncIterator[Page]:
        """Yield a page in a fresh context. Raises EnvironmentFault where the browser fails, also from the block."""
        try:
            chromium = await self._started(sandboxes)
            context = await chromium.new_context(
                viewport={"width": self._size["width"], "height": self._size["height"]},
                offline=True,  # beside the namespace: a request fails at once
                accept_downloads=False,
                service_workers="block",
            )
        except Error as error:
            raise EnvironmentFault(f"the browser failed: {_first_line(error)}") from error
        try:
            context.set_default_timeout(1000 * _LOAD_S)
            yield await context.new_page()
        except Error as error:
            raise EnvironmentFault(f"the browser failed: {_first_line(error)}") from error
        finally:
            with contextlib.suppress(Error, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await context.close()

    async def close(self) -> None:
        """End the browser and Playwright's process."""
        with contextlib.suppress(Error, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                if self._chromium is not None:
                    await self._chromium.close()
        if self._playwright is not None:
            await self._playwright.stop()

    async def _started(self, sandboxes: Sandboxes) -> Chromium:
        async with self._lock:
            if self._chromium is not None and self._chromium.is_connected():
                return self._chromium
            if self._playwright is None:
                self._playwright = await async_playwright().start()
            brought = self._playwright.chromium.executable_path
            launcher = await asyncio.to_thread(self._write_launcher, sandboxes, brought)
            self._chromium = await self._playwright.chromium.launch(
                executable_path=launcher,
                # bubblewrap is the sandbox; Chromium's own needs user namespaces inside of it.
                args=["--no-sandbox", "--disable-gpu"],
                timeout=1000 * _LAUNCH_S,
                env={"PATH": os.defpath},
                handle_sigint=False,  # the runner closes it
            )
            return self._chromium

    async def launcher(self, sandboxes: Sandboxes) -> Path:
        """Return a program that starts Chromium in bubblewrap. Raises EnvironmentFault and SandboxFault."""
        async with self._lock:
            if self._launcher is None:  # once: it may run while another is asked for
                self._launcher = await asyncio.to_thread(self._write_launcher, sandboxes, "")
            return self._launcher

    def _write_launcher(self, sandboxes: Sandboxes, brought: str) -> Path:
        """Write the script, and copy the pages to where its user can read them."""
        if sandboxes.bwrap is None:
            raise SandboxFault("the browser needs bubblewrap: apt-get install bubblewrap")
        found = [self._program] if self._program else [*_PROGRAMS, brought]
        program = next((path for name in found if (path := shutil.which(name))), None)
        if program is None:
            raise EnvironmentFault(f"the browser needs Chromium: {_INSTALL}")
        folder = sandboxes.folder / "browser"
        pages, launcher = folder / "pages", folder / "chromium.sh"
        try:
            shutil.copytree(self._pages, pages, dirs_exist_ok=True)
            for here in (folder, pages, *pages.rglob("*")):
                here.chmod(0o755 if here.is_dir() else 0o644)
            launcher.write_text(f'#!/bin/sh\nexec {shlex.join(_words(sandboxes.bwrap, program, pages))} "$@"\n')
        except OSError as error:
            raise EnvironmentFault(f"the pages {self._pages} cannot be copied: {error.strerror or error}") from error
        launcher.chmod(0o755)
        return launcher


def _words(bwrap: str, program: str, pages: Path) -> list[str]:
    user = ["setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups"] if os.geteuid() == 0 else []
    folder = Path(program).resolve().parent
    own = [] if folder.is_relative_to("/usr") else ["--ro-bind", str(folder), str(folder)]
    # env -i: /proc/1/environ shows the environment of whoever starts bwrap. Descriptors 3 and 4 are Playwright's pipe.
    return [
        *(*user, "env", "-i", bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--hostname", "browser"),
        *system_folders(),
        *("--ro-bind-try", "/etc/fonts", "/etc/fonts", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm"),
        *("--tmpfs", "/tmp", *own, "--ro-bind", str(pages), "/pages", "--remount-ro", "/", "--chdir", "/"),
        *("--", str(Path(program).resolve())),
    ]


def _first_line(error: Exception) -> str:
    """Return the first line of an error, and what bubblewrap or its shell said to it."""
    lines = str(error).strip().splitlines() or [repr(error)]
    said = next((line.rpartition("[err] ")[2] for line in lines if "[err] " in line), "")
    return ": ".join(part[:300] for part in (lines[0], said) if part)
