"""Session identity: each source, in its order."""

import pytest

from openclaw_rl.messages import Message
from openclaw_rl.sessions.classify import identify

LINE = "hi\n\nRuntime: agent=main | session=agent:main:a | sessionId=from-line | host=h"
ALL_HEADERS = {"x-session-id": "from-header", "session_id": "from-native:0", "x-session-affinity": "from-affinity:3"}
BODY = {"prompt_cache_key": "from-cache-key:1", "session_id": "from-body"}


@pytest.mark.parametrize(
    ("headers", "body", "session_id"),
    [
        (ALL_HEADERS, BODY, "from-header"),
        ({name: ALL_HEADERS[name] for name in ("session_id", "x-session-affinity")}, BODY, "from-native"),
        ({"x-session-affinity": "from-affinity:3"}, BODY, "from-affinity"),
        ({}, BODY, "from-body"),
        ({}, {"prompt_cache_key": "from-cache-key:1"}, "from-line"),
        ({}, {"session_id": "from-body"}, "from-body"),
        ({}, {"session_id": 7}, "7"),
        ({}, {}, "from-line"),
        ({"x-session-id": "  ", "session_id": ""}, {"prompt_cache_key": None, "session_id": {}}, "from-line"),
        ({"x-session-id": "mine:0"}, {}, "mine:0"),  # only OpenClaw's own headers carry its suffix
    ],
)
def test_order(headers, body, session_id) -> None:
    assert identify(headers, body, [Message(role="user", content=LINE)]) == session_id


def test_nothing_said_is_none_and_never_a_made_up_session() -> None:
    assert identify({}, {}, [Message(role="user", content="hi")]) is None
    assert identify({}, {}, []) is None


@pytest.mark.parametrize(
    "recording", ["session_affinity_headers", "chat_3_turns", "tool_call_turn", "telegram_reaction"]
)
def test_one_recorded_session_has_one_id(traffic, recording: str) -> None:
    ids = {request.scope.session_id for request in traffic(recording) if request.classified.kind != "title"}
    assert len(ids) == 1
    assert None not in ids


def test_recorded_interleaved_sessions_have_two(traffic) -> None:
    a, b, a_again, b_again = (request.scope.session_id for request in traffic("interleaved_two_sessions"))
    assert a == a_again != b == b_again
