"""Whether a request is a turn of the conversation (`main`) or the client's own business (`side`).

First that is present: what the caller says (`X-Turn-Type`, body `turn_type`), what OpenClaw's text marks say, the
setting. A retry that the client rewrote ("recovery") is main: its reply is what the user sees and answers.

Which session a request belongs to, as the client itself says it.

First that is present: the `X-Session-Id` header; the `session_id` or `x-session-affinity` header; `prompt_cache_key`;
`session_id` in the body; OpenClaw's `Runtime:` line. Else None: the conversation is then recognised by its history
alone, never by a made-up id.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from openclaw_rl.messages import Message
from openclaw_rl.sessions import openclaw
from openclaw_rl.sessions.openclaw import runtime
from openclaw_rl.types import TurnType

_TRIGGERS = {
    "heartbeat": "heartbeat",
    "cron": "cron",
    "memory": "memory_flush",
    "overflow": "compaction",
    "subagent": "subagent",
    "title": "title",
}
"""Why an OpenClaw run started, as a plugin may send it in `X-Turn-Type`; `user` says nothing about the single requests
of the run."""


@dataclass(frozen=True, slots=True)
class Classified:
    type: TurnType
    kind: str
    """A main turn's `user`, `tool` or `recovery`; a side request's `title`, `compaction`, `heartbeat`, `memory_flush`,
    `slug`, `subagent`, `cron`, `event` (any other automatic prompt) or `other` (the caller said so, or the default is
    side)."""


def classify(
    headers: Mapping[str, str], body: Mapping[str, Any], messages: Sequence[Message], tools: bool, default: TurnType
) -> Classified:
    """`headers` by lower-case name (Starlette's mapping will do); `tools`: whether the request offers any."""
    said = str(headers.get("x-turn-type") or body.get("turn_type") or "").strip().lower()
    if said == TurnType.MAIN:
        return Classified(TurnType.MAIN, _main_kind(messages))
    marked = openclaw.background_request(messages, tools=tools)
    if said == TurnType.SIDE:
        return Classified(TurnType.SIDE, marked or "other")
    if kind := _TRIGGERS.get(said) or marked:
        return Classified(TurnType.SIDE, kind)
    if said == "user" or openclaw.is_agent_request(messages) or default is TurnType.MAIN:
        return Classified(TurnType.MAIN, _main_kind(messages))
    return Classified(TurnType.SIDE, "other")


def _main_kind(messages: Sequence[Message]) -> str:
    last = next((message for message in reversed(messages) if not openclaw.is_ephemeral(message)), None)
    if last is None or last.role == "tool":
        return "tool" if last is not None else "user"
    return "recovery" if openclaw.is_recovery(last) else "user"


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
