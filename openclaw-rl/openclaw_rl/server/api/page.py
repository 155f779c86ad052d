"""The page at `/`: chat, wishes, turns, versions, curves and the server's state, in the browser.

The files hold no data, so they are served without a key. The page is a client of the public API alone: it asks as a
user does, and for the operator's routes with the admin key. The user types a key, or it comes behind the `#` of the
address, which browsers do not send (`openclaw-rl page`).

The Content-Security-Policy lets scripts and styles of this server alone run, and connections go to this server alone.
Trusted Types are demanded and none is allowed. So no script can write text into the page as HTML: the words of a model,
of a client or of a file stay text.
"""

import hashlib
import html
from importlib import resources
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from openclaw_rl.errors import RequestError

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def page_files() -> dict[str, bytes]:
    """Return the page's files by name."""
    folder = resources.files("openclaw_rl.server").joinpath("page")
    return {file.name: file.read_bytes() for file in folder.iterdir() if _ending(file.name) in _TYPES}


def build_page_router() -> APIRouter:
    # Read once: a request names a key of this table, and never a file.
    answers = {name: _Answer(name, content) for name, content in page_files().items()}
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return answers[INDEX].to(request)

    @router.get("/page/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in answers:
            raise RequestError(f"the page has no file {name[:100]!r}", status=404, code="unknown_route")
        return answers[name].to(request)

    return router


def redirect(server: str, key: str) -> str:
    """Return an HTML file that leads a browser to the page of `server`, with the key."""
    # Every user of the machine can read a program's arguments, such as an address given to a browser.
    address = html.escape(f"{server}/#{quote(key, safe='')}")
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}">\n'


class _Answer:
    """One file, ready to send: with a tag, so that a browser that has it asks and gets no body."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._headers = _HEADERS | {
            "content-type": _TYPES[_ending(name)],
            "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }

    def to(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def _ending(name: str) -> str:
    return name[name.rfind(".") :]
