"""Which session a request belongs to, as the client itself says it.

First that is present: the `X-Session-Id` header; the `session_id` or `x-session-affinity` header; `prompt_cache_key`;
`session_id` in the body; OpenClaw's `Runtime:` line. Else None: the conversation is then recognised by its history
alone, never by a made-up id.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from openclaw_rl.messages import Message
from openclaw_rl.sessions.openclaw import runtime

_COMPACTIONS = re.compile(r":\d+\Z")
"""OpenClaw's suffix to a session id, which counts its compactions: the session stays the same."""

_LONGEST = 1000
"""Characters; a longer id goes by its digest. It is told in a header of the reply, and clients bound those."""


def identify(headers: Mapping[str, str], body: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    """The session id, or None. `headers` by lower-case name (Starlette's mapping will do)."""
    if named := _clean(headers.get("x-session-id")):
        return named
    affinity = (headers.get("session_id"), headers.get("x-session-affinity"), body.get("prompt_cache_key"))
    for value in affinity:
        if named := _COMPACTIONS.sub("", _clean(value)):
            return named
    if named := _clean(body.get("session_id")):
        return named
    line = runtime(messages)
    return None if line is None else line.session_id


def _clean(value: object) -> str:
    named = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    return named if len(named) <= _LONGEST else f"sha256-{sha256(named.encode()).hexdigest()}"
