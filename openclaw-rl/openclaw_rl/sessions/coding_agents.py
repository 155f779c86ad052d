"""Marks of coding agents in the headers of their requests: the session, and requests that no user sees.

Recorded from Codex 0.171, and as documented for Claude Code's gateways. Both name a session in each request. A
sub-agent has a conversation of its own with another agent, and a compaction is a summary for the client: both are side
requests.
"""

from collections.abc import Mapping
from typing import Any

import orjson

_KINDS = {"compaction": "compaction", "memory": "memory_flush", "prewarm": "other"}
"""Codex's kinds of requests that are no turns, and ours."""


def session_of(headers: Mapping[str, str]) -> str | None:
    """Return the session that the headers name. Codex's thread is narrower than its session, which sub-agents share."""
    for name in ("thread-id", "session-id", "x-claude-code-session-id"):
        if found := headers.get(name):
            return found
    return None


def background_kind(headers: Mapping[str, str]) -> str | None:
    """Return the kind of a request that the agent makes for itself; None for a turn of a user."""
    if headers.get("x-claude-code-agent-id", "").strip():
        return "subagent"
    data = headers.get("x-codex-turn-metadata")
    told = _object(data) if data else {}
    if kind := _KINDS.get(str(told.get("request_kind"))):
        return kind
    asked = headers.get("x-openai-subagent", "").strip()
    if asked:
        return "compaction" if asked == "compact" else "subagent"
    return "subagent" if told.get("thread_source") == "subagent" else None


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = orjson.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
