"""The page for people, at `/`: what `openclaw-rl status` says, while it happens, with curves.

Promises: the file holds nothing of anybody's, so it is served without a key; what it shows it asks for as an admin
does. The key is typed, or comes behind the `#` of the address, which browsers do not send (`openclaw-rl page`). Script
and style are named by hash: nothing that a model, a client or a file name says can run there, and the page asks nobody
but this server.
"""

import hashlib
import html
import re
from base64 import b64encode
from importlib import resources
from urllib.parse import quote

from fastapi import APIRouter, Response


def build_page_router() -> APIRouter:
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": policy(text),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(text, media_type="text/html", headers=headers)

    return router


def door(server: str, key: str) -> str:
    """A file that leads a browser to the page of `server` with the key. A program's arguments, as a browser is started
    with, are for every user of the machine to read; a private file is not."""
    address = html.escape(f"{server}/#{quote(key, safe='')}")
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}">\n'


def policy(text: str) -> str:
    """Of a page with one script and one style."""
    script, style = (_hash(text, tag) for tag in ("script", "style"))
    own = f"script-src {script}; style-src {style}; connect-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _hash(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
