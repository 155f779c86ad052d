"""Protection of a listener without keys against web pages.

A page in the user's browser can send requests to 127.0.0.1. With a name of its own that resolves to 127.0.0.1 (DNS
rebinding) it can read the answers too. Without such a name it can still post chats and feedback, and the model would
learn from them. A listener without keys therefore accepts only requests

* whose `Host` is an address, `localhost`, or a name from `server.allowed_hosts`, because rebinding needs a name; and
* that no page of another origin sent: browsers then send `Origin`, other clients do not.

Every other request gets a 403 in OpenAI's error form before its body is read. A listener with keys needs no such check:
a page does not have a key.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.web import bodies
from openclaw_rl.web.bodies import answer_unread


def local_only(app: ASGIApp, *, allowed_hosts: Collection[str] = ()) -> ASGIApp:
    """Return `app` behind these two checks. They cost 1 µs a request, and no time a token."""
    names = frozenset({"localhost", *(name.lower().rstrip(".") for name in allowed_hosts)})

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope, names) if scope["type"] == "http" else None
        if problem is None:
            await app(scope, receive, send)
            return
        code, message = problem
        await answer_unread(receive, send, 403, bodies.error_for(scope["path"], message, status=403, code=code))

    return guarded


def _problem(scope: Scope, names: frozenset[str]) -> tuple[str, str] | None:
    host = origin = None
    for name, value in scope["headers"]:
        if name == b"host":
            host = value.decode("latin-1").strip().lower()
        elif name == b"origin":
            origin = value.decode("latin-1").strip().lower()
    if host is not None and not _is_ours(_name(host), names):
        return "host_not_allowed", (
            "this server has no keys and answers to addresses and localhost alone: name others in"
            " server.allowed_hosts, or set server.api_keys"
        )
    if origin is not None and (host is None or urlsplit(origin).netloc != host):
        return "origin_not_allowed", (
            "this server has no keys and takes no requests from web pages: set server.api_keys"
        )
    return None


def _name(host: str) -> str:
    """Return the host of `host:port`, without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_ours(name: str, names: frozenset[str]) -> bool:
    if name.rstrip(".") in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
