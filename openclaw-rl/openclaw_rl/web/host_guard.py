"""What a web page may not do to a listener without keys.

A page that somebody has open can send requests to 127.0.0.1. With a name of its own that resolves there (DNS rebinding)
it can read the answers too; without, it can still post chats and feedback that the model would learn from. So a
listener that asks for no key takes only requests

* whose `Host` is an address, `localhost`, or a name from `server.allowed_hosts` (rebinding needs a name), and
* that no page of another origin sent (browsers then say `Origin`, other clients do not).

Everything else is a 403 in OpenAI's error form, before its body is read. Where keys are asked for, they are the door.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.web import errors
from openclaw_rl.web.asgi import answer_unread


def local_only(app: ASGIApp, *, allowed_hosts: Collection[str] = ()) -> ASGIApp:
    """`app`, behind these two checks. They cost a microsecond a request, and nothing a token."""
    names = frozenset({"localhost", *(name.lower().rstrip(".") for name in allowed_hosts)})

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope, names) if scope["type"] == "http" else None
        if problem is None:
            await app(scope, receive, send)
            return
        code, message = problem
        await answer_unread(receive, send, 403, errors.error(message, status=403, code=code))

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
    """The host of `host:port`, without the brackets of an IPv6 address."""
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
