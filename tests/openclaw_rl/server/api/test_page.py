"""The page as files: its Content-Security-Policy, what the files may hold, and the file that leads a browser to it.

(The routes are tested in `tests/security/test_page.py`, the page itself in `tests/browser`.)
"""

import html
import re
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.server.api.app import http_app
from openclaw_rl.server.api.page import POLICY, build_page_router, page_files, redirect

FILES = {name: content.decode() for name, content in page_files().items()}
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
SVG = "http://www.w3.org/2000/svg"
"""A name, and no address that is asked for."""


@pytest.fixture
def app() -> FastAPI:
    app = http_app()
    app.include_router(build_page_router())
    return app


def test_scripts_and_styles_of_this_server_alone_may_run_and_none_may_write_html():
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == rules["img-src"] == "'self'"
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_needs_what_the_policy_forbids(name):
    text = FILES[name]
    assert not re.findall(r"<script(?![^>]* src=)|\sstyle=|\son\w+=\"|<style|<iframe|@import|javascript:|url\(", text)
    writes = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML|DOMParser|srcdoc"
    assert not re.findall(writes, text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {SVG}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_import_is_a_file_of_the_page_and_what_is_imported_is_there(name):
    for names, file in re.findall(r"import (?:\{([^}]*)\}|\* as \w+) from \"\./([\w.]+)\"", FILES[name]):
        assert file in FILES
        for one in filter(None, (part.split(" as ")[0].strip() for part in names.split(","))):
            declared = rf"export (?:async )?(?:const|let|class|function\*?) {one}\b"
            assert re.search(declared, FILES[file]), f"{file} exports no {one}"
            assert len(re.findall(rf"\b{one}\b", FILES[name])) > 1, f"{one} is imported and not used"
    assert FILES[name].count(' from "') == FILES[name].count(' from "./')


def test_every_file_is_used():
    for name in FILES:
        assert name == "index.html" or any(name in text for other, text in FILES.items() if other != name), name


async def test_a_browser_that_has_a_file_gets_no_body_again(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for path in ("/", "/page/main.js", "/page/base.css", "/page/icon.svg"):
            first = await client.get(path)
            assert (first.status_code, first.headers["cache-control"]) == (200, "no-cache")
            again = await client.get(path, headers={"if-none-match": first.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/none.js", "/page/..%2fapi%2fpage.py", "/page/__init__.py", "/page/"):
            assert (await client.get(path)).status_code == 404, path


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_the_redirect_leads_to_the_page_with_the_key(key):
    (address,) = re.findall(r'content="0; url=(.*)">', redirect("http://127.0.0.1:30000", key))
    parts = urlsplit(html.unescape(address))
    assert (parts.netloc, parts.path, unquote(parts.fragment)) == ("127.0.0.1:30000", "/", key)
    assert not parts.fragment.startswith("/"), "the page would take it for one of its views"


def test_its_routes_are_open_and_in_no_document():
    routes = [(route.path, route.methods, route.include_in_schema) for route in build_page_router().routes]
    assert routes == [("/", {"GET"}, False), ("/page/{name}", {"GET"}, False)]
