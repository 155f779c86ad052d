"""Classify a request: `main` (a turn of the conversation) or `side` (the client's own), and the session that it names.

`classify` takes the first of: the caller's word (`X-Turn-Type`, body `turn_type`), the marks of coding agents in the
headers, OpenClaw's text marks, the form of a chat client's prompt about its own chat (`about_a_chat`), the setting.
A retry that the client rewrote ("recovery") is main: its reply is the one that the user sees and answers.

`identify` takes the first of: the `X-Session-Id` header; the `session_id` or `x-session-affinity` header; the
`thread-id`, `session-id` or `x-claude-code-session-id` header; `session_id` in the body; OpenClaw's `Runtime:` line.
Without any it returns None. Pairing then recognises the conversation by its history; no id is made up. `group_of` takes
`prompt_cache_key`: clients give one key to all their chats, or to a session and its sub-agents, so the key narrows the
search and names no conversation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from openclaw_rl.messages import Message
from openclaw_rl.sessions import coding_agents, openclaw
from openclaw_rl.types import TurnType

_COMPACTIONS = re.compile(r":\d+\Z")
"""OpenClaw's suffix to a session id, which counts its compactions: the session stays the same."""
_TASK = "### Task:"
_TASK_PARTS = ("### Output:", "### Guidelines:", "### Instructions:")
_QUOTED_CHAT = ("<chat_history>", "<text>")
"""Form of Open WebUI's prompts: titles, tags, follow-up questions, search queries, image prompts, autocompletion."""
_TITLE_PROMPTS = ("Analyze this conversation and provide:", "Provide a concise,")
"""Starts of LibreChat's prompts of a title, behind which the conversation stands."""
_TITLE = re.compile(r"\btitles?\b", re.IGNORECASE)
_LONGEST = 1000
"""Characters; a longer id is replaced by its digest, because the reply's header holds it and clients bound headers."""
OTHER = "other"
"""Kind of a side request that nothing but the caller's word or the setting makes one."""
_TRIGGERS = {
    "heartbeat": "heartbeat",
    "cron": "cron",
    "memory": "memory_flush",
    "overflow": "compaction",
    "subagent": "subagent",
    "title": "title",
}
"""Cause of an OpenClaw run, as a plugin may send it in `X-Turn-Type`, and the kind of its requests."""
# `user` is not in the table: a run that a user started may hold background requests.


@dataclass(frozen=True, slots=True)
class Classified:
    """Kind of a request."""

    type: TurnType
    kind: str
    """Of a main turn: `user`, `tool` or `recovery`. Of a side request: `title`, `compaction`, `heartbeat`,
    `memory_flush`, `slug`, `subagent`, `cron`, `event` (another automatic prompt), `task` (a chat client's own
    prompt about a chat) or `other` (by the caller or the default)."""


def classify(
    headers: Mapping[str, str], body: Mapping[str, Any], messages: Sequence[Message], tools: bool, default: TurnType
) -> Classified:
    """Return the kind of the request. `headers`: by lower-case name. `tools`: True if the request offers tools."""
    said = str(headers.get("x-turn-type") or body.get("turn_type") or "").strip().lower()
    if said == TurnType.MAIN:
        return Classified(TurnType.MAIN, _main_kind(messages))
    marked = coding_agents.background_kind(headers) or openclaw.background_request(messages, tools=tools)
    marked = marked or (None if tools else about_a_chat(messages))
    if said == TurnType.SIDE:
        return Classified(TurnType.SIDE, marked or OTHER)
    if kind := _TRIGGERS.get(said) or marked:
        return Classified(TurnType.SIDE, kind)
    if said == "user" or openclaw.is_agent_request(messages) or default is TurnType.MAIN:
        return Classified(TurnType.MAIN, _main_kind(messages))
    return Classified(TurnType.SIDE, OTHER)


def about_a_chat(messages: Sequence[Message]) -> str | None:
    """Return `title` or `task` for a chat client's own prompt about a chat of its user, else None.

    Such a prompt stands alone, in a form that no user writes: sections with headings around the quoted chat.
    """
    told = [message for message in messages if message.role not in ("system", "developer")]
    if len(told) != 1 or told[0].role != "user":
        return None
    text = told[0].text().lstrip()
    head = text[:1000].partition("<chat_history>")[0]
    if text.startswith(_TITLE_PROMPTS) and "User:" in text:
        return "title" if _TITLE.search(head) else None
    if text.startswith(_TASK) and all(any(part in text for part in parts) for parts in (_TASK_PARTS, _QUOTED_CHAT)):
        return "title" if _TITLE.search(head) else "task"
    return None


def identify(headers: Mapping[str, str], body: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    """Return the session id that the client names, or None. `headers`: by lower-case name."""
    if named := _clean(headers.get("x-session-id")):
        return named
    for value in (headers.get("session_id"), headers.get("x-session-affinity")):
        if named := _COMPACTIONS.sub("", _clean(value)):
            return named
    if named := _clean(coding_agents.session_of(headers)) or _clean(body.get("session_id")):
        return named
    line = openclaw.runtime(messages)
    return None if line is None else line.session_id


def group_of(body: Mapping[str, Any]) -> str | None:
    """Return the group of requests that the client names, or None."""
    return _COMPACTIONS.sub("", _clean(body.get("prompt_cache_key"))) or None


def _main_kind(messages: Sequence[Message]) -> str:
    last = next((message for message in reversed(messages) if not openclaw.is_ephemeral(message)), None)
    if last is None or last.role == "tool":
        return "tool" if last is not None else "user"
    return "recovery" if openclaw.is_recovery(last) else "user"


def _clean(value: object) -> str:
    named = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    return named if len(named) <= _LONGEST else f"sha256-{sha256(named.encode()).hexdigest()}"
