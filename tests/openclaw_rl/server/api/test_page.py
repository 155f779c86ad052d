"""The page as a file: its Content-Security-Policy, and the file that leads a browser to it.

(The route is tested in `tests/security/test_page.py`.)
"""

import base64
import hashlib
import html
import re
from importlib import resources
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.server.api.page import build_page_router, policy, redirect


@pytest.fixture(scope="module")
def text() -> str:
    return resources.files("openclaw_rl.server.api").joinpath("page.html").read_text(encoding="utf-8")


def test_its_own_script_and_style_are_all_that_may_run(text):
    rules = dict(rule.strip().split(" ", 1) for rule in policy(text).split(";"))
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'"


def test_it_needs_nothing_that_the_policy_forbids(text):
    assert not re.findall(r"\son\w+=|\sstyle=|<link|<img|<iframe|@import|javascript:", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_another_script_is_not_let_in_silently(text):
    with pytest.raises(ValueError, match="unpack"):
        policy(text.replace("</body>", "") + "<script>more()</script>")


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_the_redirect_leads_to_the_page_with_the_key(key):
    (address,) = re.findall(r'content="0; url=(.*)">', redirect("http://127.0.0.1:30000", key))
    parts = urlsplit(html.unescape(address))
    assert (parts.netloc, parts.path, unquote(parts.fragment)) == ("127.0.0.1:30000", "/", key)


def test_it_is_one_route():
    (route,) = build_page_router().routes
    assert (route.path, route.methods, route.include_in_schema) == ("/", {"GET"}, False)
