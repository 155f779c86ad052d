"""A site (a real server over a fake engine) and a visitor (a browser context that notes what it asked for)."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import uvicorn
from harness.host import Server
from harness.model import Vocabulary
from playwright.sync_api import Browser, BrowserContext, Page
from stub_trainer import shim

from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Scripted

PATIENCE_MS = 60_000
"""Against hanging alone."""
_WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI || event.sample}`));
"""


@dataclass
class Site:
    """A running server, and the engine behind it."""

    server: Server
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    """The engine's."""
    vocabulary: Vocabulary

    @property
    def admin_key(self) -> str:
        return (self.server.data_dir / "keys" / "admin.key").read_text().strip()

    def says(self, *texts: str, hold_after: int | None = None) -> None:
        """Script the next replies. hold_after: tokens before `release`; the engine of a site holds once."""
        for text in texts:
            ids = tuple(self.vocabulary.ids([text, "<eos>"]))
            self.engine.script(Scripted(ids, (-0.5,) * len(ids), hold_after=hold_after))

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.release)

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {key or self.admin_key}"}
        reply = httpx.request(method, self.server.url + path, headers=headers, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, text: str, *, session: str = "before", key: str | None = None, **more: Any) -> str:
        """Chat without a browser; return the turn's id. more: other fields of the request."""
        reply = httpx.post(
            f"{self.server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more},
            headers={"X-Session-Id": session, **({} if key is None else {"Authorization": f"Bearer {key}"})},
            timeout=120,
        )
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    def rate(self, turn_id: str, **said: Any) -> None:
        reply = httpx.post(f"{self.server.url}/v1/feedback", json={"turn_id": turn_id, **said}, timeout=120)
        assert reply.status_code == 200, reply.text

    def trained(self) -> int:
        """Rate two replies, let the trainer make a version of them, and return its number once it serves."""
        before = self.ask("GET", "/v1/admin/status")["serving"]
        for n, value in enumerate((True, False)):
            self.rate(self.chat(f"question {before} {n}"), value=value, comment="Please answer more briefly.")
        while (now := self.ask("GET", "/v1/admin/status"))["serving"] == before:
            assert not now["problems"], now["problems"]
        return int(now["serving"])


def settings_of(engine_url: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a server that learns: the rules judge, OPD makes samples and wishes, a stub takes the steps."""
    return {
        "engine.kind": "url",
        "engine.url": engine_url,
        "trainer.kind": "local",
        "trainer.python": str(shim(folder / "python")),
        "training.batch_size": 2,
        "method.name": "opd",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


@contextmanager
def listening(app: Any) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    listener = socket.create_server(("127.0.0.1", 0))
    runner = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(runner.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", loop
    finally:
        runner.should_exit = True
        thread.join(10)
        loop.close()


@dataclass
class Visitor:
    """One browser context, and what it asked for."""

    context: BrowserContext
    site: Site
    hosts: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def open(self, view: str = "#/chat", *, as_admin: bool = False) -> Page:
        """Open the page as `openclaw-rl page` does, or without a key."""
        page = self.context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if self._is_bad(message) else None)
        url = self.site.server.url
        if as_admin:
            page.goto(f"{url}/#{quote(self.site.admin_key, safe='')}")
            page.wait_for_selector("nav a")
            page.evaluate("view => { location.hash = view; }", view)
        else:
            page.goto(f"{url}/{view}")
        page.wait_for_selector("nav a[aria-current]")
        return page

    def _is_bad(self, message: Any) -> bool:
        # The browser itself notes answers of 4xx and 5xx, which the page tells in its own words.
        return message.type == "error" and not message.text.startswith("Failed to load resource")

    def check(self) -> None:
        for page in self.context.pages:
            assert page.evaluate("window.violations") == []
        assert self.errors == []
        assert self.hosts <= {urlsplit(self.site.server.url).netloc}


@contextmanager
def visiting(browser: Browser, site: Site, **options: Any) -> Iterator[Visitor]:
    context = browser.new_context(**options)
    context.add_init_script(_WATCH)
    visitor = Visitor(context, site)
    yield visitor
    visitor.check()
    context.close()
