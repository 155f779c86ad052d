"""Chats through the proxy beside an open page of the server: time to first token, and the gaps between tokens.

    scripts/benchmarks.sh open_page [--blocks 8] [--tabs 4] [--streams 8] [--browser] [--out FILE.json]

The real server runs over the stub engine, as in `proxy_overhead`. Short blocks of the same chats alternate: no page,
one page, several. A page asks as its busiest view does: *Versions*, with the admin key, asks for the status every two
seconds, and for the status and the history every three. `--browser` opens these pages in headless Chromium instead,
which then shares the cores with the server. The figures of a block with a page are divided by those of the block
without one beside it; the table has the median of the ratios, and the least and the largest.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, async_playwright

from benchmarks.browser import executable, launch_arguments, page_url
from benchmarks.chat_blocks import Block, block, ratios, told
from openclaw_rl.testing.running_server import RunningServer, running_stub

VIEW = "#/versions"
ASKED = (("/v1/admin/status", 2.0), ("/v1/admin/status", 3.0), ("/v1/admin/history?verdicts=1", 3.0))
"""Requests of a page with that view, and their periods in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each kind")
    parser.add_argument("--tabs", type=int, default=4, help="pages of the blocks with several")
    parser.add_argument("--streams", type=int, default=8, help="chats at once")
    parser.add_argument("--browser", action="store_true", help="pages in headless Chromium")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "open_page.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_stub(folder, "--mean-tokens", "0", "--tokens-per-s", "25") as engine:
            settings = {"engine.kind": "url", "engine.url": engine, "trainer.kind": "external"}
            flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
            with RunningServer(folder / "data", flags) as server:
                found = asyncio.run(measure(server, options))
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    text = json.dumps(found, indent=2)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n")


async def measure(server: RunningServer, options: argparse.Namespace) -> dict[str, Any]:
    """Run the blocks in turns; return the figures and the ratios."""
    kinds = {"no page": 0, "one page": 1, f"{options.tabs} pages": options.tabs}
    blocks: dict[str, list[Block]] = {kind: [] for kind in kinds}
    async with AsyncExitStack() as stack:
        browser = await stack.enter_async_context(chromium()) if options.browser else None
        await block(server, options.streams, 0)  # warm
        for number in range(options.blocks):
            for kind in random.Random(number).sample(list(kinds), len(kinds)):
                async with AsyncExitStack() as pages:
                    for _ in range(kinds[kind]):
                        await pages.enter_async_context(opened(server, browser))
                    blocks[kind].append(await block(server, options.streams, number + 1))
    return {
        "pages": "headless Chromium" if options.browser else "their requests",
        "chats at once": options.streams,
        "chats of each kind": sum(len(one.first) for one in blocks["no page"]),
        **{kind: told(found) for kind, found in blocks.items()},
        **{f"{kind} / no page": ratios(found, blocks["no page"]) for kind, found in blocks.items() if kinds[kind]},
    }


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable(), args=launch_arguments())
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(server: RunningServer, browser: Browser | None) -> AsyncIterator[None]:
    """A page of the server, while the block runs."""
    if browser is not None:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(page_url(server))
        await page.wait_for_selector("nav a[aria-current]")
        await page.evaluate("view => { location.hash = view; }", VIEW)
        await page.wait_for_selector("main table")
        yield
        await context.close()
        return
    key = (server.data_dir / "keys" / "admin.key").read_text().strip()
    async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:

        async def ask(path: str, every_s: float) -> None:
            while True:
                (await client.get(path)).raise_for_status()
                await asyncio.sleep(every_s)

        tasks = [asyncio.create_task(ask(path, every_s)) for path, every_s in ASKED]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"the page's requests failed: {failed[0]!r}")


if __name__ == "__main__":
    main()
