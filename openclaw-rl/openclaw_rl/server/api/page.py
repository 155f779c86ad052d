"""The status page at `/`: the content of `openclaw-rl status`, live and with curves.

The file holds no data, so it is served without a key; the page then asks for its data as an admin does. The user types
the key, or it comes behind the `#` of the address, which browsers do not send (`openclaw-rl page`). The
Content-Security-Policy names script and style by hash: no text of a model, a client or a file can run there, and the
page calls only this server.
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


def redirect(server: str, key: str) -> str:
    """Return an HTML file that leads a browser to the page of `server`, with the key."""
    # Every user of the machine can read a program's arguments, such as an address given to a browser.
    address = html.escape(f"{server}/#{quote(key, safe='')}")
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}">\n'


def policy(text: str) -> str:
    """Return the Content-Security-Policy of a page with one script and one style."""
    script, style = (_hash(text, tag) for tag in ("script", "style"))
    own = f"script-src {script}; style-src {style}; connect-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _hash(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
