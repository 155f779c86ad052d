"""Headers of coding agents: the session, and requests that are no turns."""

import json

import pytest

from openclaw_rl.messages import Message
from openclaw_rl.sessions.classify import classify, identify
from openclaw_rl.sessions.coding_agents import background_kind
from openclaw_rl.types import TurnType

ASKED = [Message(role="user", content="hi")]


@pytest.mark.parametrize(
    ("headers", "session_id"),
    [
        ({"thread-id": "t", "session-id": "s"}, "t"),
        ({"session-id": "s"}, "s"),
        ({"x-claude-code-session-id": "c"}, "c"),
        ({"x-session-id": "mine", "thread-id": "t"}, "mine"),
        ({"session_id": "native:1", "session-id": "s"}, "native"),
        ({"thread-id": " "}, None),
    ],
)
def test_the_session_of_the_headers(headers: dict[str, str], session_id: str | None) -> None:
    assert identify(headers, {}, ASKED) == session_id


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({}, None),
        ({"x-claude-code-session-id": "s"}, None),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "subagent"),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "turn", "thread_source": "user"})}, None),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}, "compaction"),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "memory"})}, "memory_flush"),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "prewarm"})}, "other"),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "turn", "thread_source": "subagent"})}, "subagent"),
        ({"x-openai-subagent": "compact"}, "compaction"),
        ({"x-openai-subagent": "review"}, "subagent"),
        ({"x-codex-turn-metadata": "no JSON"}, None),
        ({"x-codex-turn-metadata": "[1]"}, None),
    ],
)
def test_a_request_that_the_agent_makes_for_itself_is_no_turn(headers: dict[str, str], kind: str | None) -> None:
    assert background_kind(headers) == kind
    found = classify(headers, {}, ASKED, True, TurnType.MAIN)
    assert (found.type, found.kind) == ((TurnType.MAIN, "user") if kind is None else (TurnType.SIDE, kind))


def test_the_callers_own_word_comes_first() -> None:
    headers = {"x-turn-type": "main", "x-claude-code-agent-id": "a"}
    assert classify(headers, {}, ASKED, True, TurnType.MAIN).type is TurnType.MAIN
