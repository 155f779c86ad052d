"""The page of a server that starts: it says so, and goes on by itself once the server is ready."""

from browsing import listening
from fastapi import FastAPI
from playwright.sync_api import Browser, expect

from openclaw_rl.server.api.app import Door, http_app
from openclaw_rl.server.api.page import build_page_router
from openclaw_rl.settings import ServerSettings


def ready() -> FastAPI:
    app = http_app()
    app.include_router(build_page_router())

    @app.get("/healthz")
    async def health() -> dict[str, object]:
        return {"status": "ok", "weight_version": 7}

    return app


def test_a_page_that_is_opened_too_early_needs_no_reload(browser: Browser) -> None:
    door = Door(ServerSettings(), "the-policy")
    with listening(door) as (url, _):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#line")).to_contain_text("starting…")
        page.get_by_role("textbox", name="Message").fill("hello")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="Reply")).to_contain_text("the server is not ready yet")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        door.open(ready())
        expect(page.locator("#line")).to_contain_text("all is well")
        expect(page.locator("#line")).to_contain_text("v7")
        context.close()
