"""Main or side: by the caller's word, then by OpenClaw's marks, then by the setting."""

import pytest

from openclaw_rl.messages import Message
from openclaw_rl.sessions.classify import classify
from openclaw_rl.types import TurnType

MAIN, SIDE = TurnType.MAIN, TurnType.SIDE


@pytest.mark.parametrize(
    ("recording", "kinds"),
    [
        ("chat_3_turns", ["user", "user", "user"]),
        ("interleaved_two_sessions", ["user", "user", "user", "user"]),
        ("retry_after_503", ["user", "recovery", "recovery", "user"]),
        ("session_affinity_headers", ["user", "user", "-memory_flush", "-title", "-compaction", "user"]),
        ("side_compaction", ["-compaction", "user"]),
        ("side_cron_and_subagent", ["-cron", "user", "tool", "-subagent", "-subagent"]),
        ("side_heartbeat", ["-heartbeat", "-heartbeat"]),
        ("side_memory_flush", ["user", "-memory_flush", "user"]),
        ("side_title_and_slug", ["-title", "-slug"]),
        ("telegram_reaction", ["user", "user"]),
        ("tool_call_turn", ["user", "tool", "user"]),
    ],
)
def test_recorded_requests(traffic, recording: str, kinds: list[str]) -> None:
    said = [request.classified for request in traffic(recording)]
    assert [("-" if c.type is SIDE else "") + c.kind for c in said] == kinds


@pytest.mark.parametrize("default", [MAIN, SIDE])
def test_openclaw_needs_no_default(traffic, default: TurnType) -> None:
    chat, heartbeat = traffic("chat_3_turns")[0], traffic("side_heartbeat")[0]
    assert classify({}, {}, chat.messages, True, default).type is MAIN
    assert classify({}, {}, heartbeat.messages, True, default).type is SIDE


@pytest.mark.parametrize(
    ("headers", "body", "default", "expected"),
    [
        ({"x-turn-type": "side"}, {"turn_type": "main"}, MAIN, (SIDE, "other")),
        ({"x-turn-type": "Main "}, {}, SIDE, (MAIN, "user")),
        ({}, {"turn_type": "side"}, MAIN, (SIDE, "other")),
        ({}, {"turn_type": "main"}, SIDE, (MAIN, "user")),
        ({"x-turn-type": "heartbeat"}, {}, MAIN, (SIDE, "heartbeat")),
        ({"x-turn-type": "user"}, {}, SIDE, (MAIN, "user")),
        ({"x-turn-type": "nonsense"}, {}, MAIN, (MAIN, "user")),
        ({"x-turn-type": "nonsense"}, {}, SIDE, (SIDE, "other")),
        ({}, {}, MAIN, (MAIN, "user")),
        ({}, {}, SIDE, (SIDE, "other")),
    ],
)
def test_what_the_caller_says_comes_first(headers, body, default, expected) -> None:
    found = classify(headers, body, [Message(role="user", content="hi")], False, default)
    assert (found.type, found.kind) == expected


def test_a_run_started_by_the_user_has_background_requests_too(traffic) -> None:
    flush = traffic("side_memory_flush")[1]
    assert classify({"x-turn-type": "user"}, {}, flush.messages, True, MAIN).type is SIDE
    assert classify({"x-turn-type": "main"}, {}, flush.messages, True, MAIN).type is MAIN  # said outright


def test_tool_steps_of_a_background_run_are_background(traffic) -> None:
    heartbeat = traffic("side_heartbeat")[0].messages[:-1]
    call = {"id": "c1", "function": {"name": "read", "arguments": "{}"}}
    step = [
        Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}),
        Message(role="tool", content="nothing due", tool_call_id="c1"),
    ]
    assert classify({}, {}, [*heartbeat, *step], True, MAIN).kind == "heartbeat"


def test_another_clients_words_are_no_marks() -> None:
    for text in ("Follow the heartbeat monitor scratch context when provided.", "Pre-compaction memory flush."):
        messages = [Message(role="system", content="You are helpful."), Message(role="user", content=text)]
        assert classify({}, {}, messages, False, MAIN).type is MAIN


TAGS = (
    "### Task:\nWrite tags.\n\n### Guidelines:\n- Few.\n\n### Output:\nJSON\n\n"
    "### Chat History:\n<chat_history>\nUSER: hi\n</chat_history>"
)
TITLE = TAGS.replace("tags", "a short title")
COMPLETES = "### Task:\nComplete it.\n### Output:\n{}\n### Input:\n<type>search</type>\n<text>wha</text>"
LIBRE = "Analyze this conversation and provide:\n1. Its language\n2. A title\n\nUser: hi\nAI: hello"
LIBRE_2 = "Provide a concise, 5-word-or-less title for it.\n\nConversation:\nUser: hi\nAI: hello"


def one(text: str, *before: Message) -> list[Message]:
    return [*before, Message(role="user", content=text)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TAGS, "task"),
        (TITLE, "title"),
        (COMPLETES, "task"),
        (LIBRE, "title"),
        (LIBRE_2, "title"),
        (f"\n{TAGS}", "task"),
    ],
)
def test_a_chat_clients_own_prompts_are_no_turns(text: str, kind: str) -> None:
    system = Message(role="system", content="Be kind.")
    for messages in (one(text), one(text, system)):
        said = classify({}, {}, messages, False, MAIN)
        assert (said.type, said.kind) == (SIDE, kind)
    assert classify({"x-turn-type": "main"}, {}, one(text), False, MAIN).type is MAIN
    assert classify({"x-turn-type": "side"}, {}, one(text), False, MAIN).kind == kind


@pytest.mark.parametrize(
    "messages",
    [
        one("### Task:\nWrite a title for my blog.\n### Output:\nOne line"),  # no chat is quoted
        one("What does <chat_history> mean in a prompt with ### Output: and ### Task:?"),
        one("Provide a concise, friendly title for my talk."),
        one("Analyze this conversation and provide: its mood.\nUser: hi"),
        one(TAGS, Message(role="user", content="hi"), Message(role="assistant", content="hello")),  # within a chat
        [Message(role="assistant", content=TAGS)],
    ],
)
def test_a_users_own_words_of_such_a_form_are_a_turn(messages: list[Message]) -> None:
    assert classify({}, {}, messages, False, MAIN).type is MAIN


def test_an_agent_with_tools_is_asked_by_its_user() -> None:
    assert classify({}, {}, one(TAGS), True, MAIN).type is MAIN
