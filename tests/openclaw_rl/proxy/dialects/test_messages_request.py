"""Blocks of the Messages API as chat messages; one request has the documented form of Claude Code's."""

import json
from typing import Any

import pytest

from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.dialects.messages_request import read, read_count, without_attribution
from openclaw_rl.sessions.classify import classify, identify
from openclaw_rl.types import TurnType

HI: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
REMINDER = "<system-reminder>\nThe date is 2026-11-29.\n</system-reminder>"
SESSION = "0f8fad5b-d9cb-469f-a165-70867728950e"


def attribution(cch: str) -> dict[str, Any]:
    return {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.36.a1b; cc_entrypoint=cli; cch={cch};"}


def claude_code(cch: str = "00001") -> dict[str, Any]:
    """A request as the gateway page documents it: attribution first, reminders, a thought, a tool's result."""
    return {
        "model": "policy",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            attribution(cch),
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        "metadata": {"user_id": f"user_abc_account__session_{SESSION}"},
        "thinking": {"type": "adaptive"},
        "tools": [
            {"name": "Bash", "description": "Run it.", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": REMINDER}, {"type": "text", "text": "list files"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I use ls.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_01",
                        "content": [{"type": "text", "text": "a.py"}],
                        "cache_control": {"type": "ephemeral"},
                    },
                    {"type": "text", "text": REMINDER},
                ],
            },
        ],
    }


def parsed(body: dict[str, Any]) -> ParsedBody:
    return read(json.dumps(body).encode())


def messages(*told: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    chat = parsed({**HI, "messages": list(told), **more}).chat
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_a_request_of_claude_code() -> None:
    body = parsed(claude_code())
    system, asked, reply, result = body.chat.messages
    assert (system.role, system.content) == ("system", "You are Claude Code.")
    assert asked.text() == f"{REMINDER}\nlist files"
    assert (reply.reasoning_content, reply.content) == ("I use ls.", "I look.")
    (made,) = reply.tool_calls or []
    assert (made.id, made.function.as_object()) == ("call_01", {"command": "ls"})
    assert (result.role, result.tool_call_id, result.content) == ("tool", "call_01", f"a.py\n{REMINDER}")
    assert [tool["function"]["name"] for tool in body.chat.offered_tools] == ["Bash"]
    assert body.skipped == ("tools of type web_search_20250305",)
    assert body.chat.template_kwargs == {"enable_thinking": True}
    headers = {"x-claude-code-session-id": SESSION, "anthropic-version": "2023-06-01"}
    found = classify(headers, body.raw, body.chat.messages, True, TurnType.MAIN)
    assert (found.type, found.kind) == (TurnType.MAIN, "tool")
    assert identify(headers, body.raw, body.chat.messages) == SESSION
    assert identify({}, body.raw, body.chat.messages) == SESSION  # older versions name it in the body alone


def test_the_attribution_line_changes_no_prompt() -> None:
    first, second = parsed(claude_code("00001")), parsed(claude_code("0fffe"))
    assert first.chat == second.chat
    whole = {"system": attribution("1")["text"] + "\nBe brief.\nx-anthropic-billing-header: mine"}
    assert parsed({**HI, **whole}).chat.messages[0].content == "Be brief.\nx-anthropic-billing-header: mine"
    assert without_attribution("Be brief.") == "Be brief."


def test_the_users_words_beside_a_result_are_a_message_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
    told = messages({"role": "user", "content": [result, {"type": "text", "text": "No, the other one."}]})
    assert [(message["role"], message["content"]) for message in told] == [
        ("tool", "done"),
        ("user", "No, the other one."),
    ]


def test_reminders_alone_belong_to_the_result_and_words_between_them_to_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
    for text in (REMINDER, f"\n{REMINDER}\n{REMINDER}\n"):
        (told,) = messages({"role": "user", "content": [result, {"type": "text", "text": text}]})
        assert (told["role"], told["content"]) == ("tool", f"done\n{text}")
    between = f"{REMINDER}\nNo, the other one.\n{REMINDER}"
    told, said = messages({"role": "user", "content": [result, {"type": "text", "text": between}]})
    assert (told["content"], said["role"], said["content"]) == ("done", "user", between)


def test_texts_of_a_reply_belong_together_and_a_redacted_thought_is_left_out() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_2", "name": "f", "input": {}},
        {"type": "text", "text": " Wait."},
    ]
    (reply,) = messages({"role": "assistant", "content": blocks})
    assert reply["content"] == "I look. Wait."
    assert "reasoning_content" not in reply
    assert reply["tool_calls"][0]["id"] == "call_2"


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: Any, is_parallel: bool | None) -> None:
    chat = parsed({**HI, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": choice}).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, is_parallel)


def test_the_other_fields_have_their_chat_names() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    more = {"stop_sequences": ["END"], "top_k": 5, "thinking": {"type": "disabled"}, "output_config": form}
    chat = parsed({**HI, **more}).chat
    assert (chat.stop, chat.top_k, chat.max_tokens, chat.json_schema) == (["END"], 5, 9, '{"type":"object"}')
    assert chat.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": HI["messages"]}, "max_tokens", "required"),
        ({"max_tokens": 9, "messages": []}, "messages", "at least 1"),
        ({**HI, "messages": [{"role": "bard", "content": "a"}]}, "messages[0].role", "'user'"),
        ({**HI, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "a source"),
        (
            {**HI, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "a text",
        ),
        ({**HI, "tools": [{"input_schema": {}}]}, "tools[0]", "name"),
        ({**HI, "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
        ({**HI, "output_config": {"format": {"type": "xml"}}}, "output_config.format", "json_schema"),
    ],
)
def test_a_fault_is_named_in_the_clients_terms(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        parsed(body)
    assert refused.value.param == param
    assert words in refused.value.message


def test_a_count_needs_no_limit_and_a_probe_is_no_turn() -> None:
    count = {name: value for name, value in claude_code().items() if name != "max_tokens"}
    assert read_count(json.dumps(count).encode()).chat.messages == parsed(claude_code()).chat.messages
    probe = parsed({**HI, "max_tokens": 1})
    assert classify({}, probe.raw, probe.chat.messages, False, TurnType.MAIN).type is TurnType.SIDE
