"""Items of the Responses API as chat messages; one of the requests is a real one of Codex 0.171, with its texts cut."""

import json
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.dialects.responses_request import read
from openclaw_rl.sessions.classify import classify, group_of, identify
from openclaw_rl.types import TurnType

CODEX = json.loads((Path(__file__).parents[3] / "data" / "codex_request.json").read_text())
HI = {"input": "hello"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "done"}


def parsed(body: dict[str, Any]) -> ParsedBody:
    return read(json.dumps(body).encode())


def messages(items: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in parsed({"input": items, **more}).chat.messages]


def text(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def test_a_request_of_codex() -> None:
    body = parsed(CODEX["body"])
    told = body.chat.messages
    assert [message.role for message in told] == [
        *("system", "user", "user"),
        *("assistant", "tool", "assistant", "tool", "assistant", "user"),
    ]
    assert told[0].text().startswith("You are a coding agent")
    assert "<permissions instructions>" in told[0].text()
    assert (told[3].reasoning_content, told[3].content) == ("thinking", "Let me look.")
    (made,) = told[3].tool_calls or []
    assert (made.id, made.function.name, made.function.as_object()) == ("call_1", "exec_command", {"cmd": "echo hi0"})
    assert told[4].tool_call_id == "call_1"
    assert told[7].content == "All done."
    assert [tool["function"]["name"] for tool in body.chat.offered_tools] == ["exec_command", "view_image"]
    assert set(body.skipped) == {"tools of type namespace", "tools of type web_search"}
    assert body.chat.stream
    found = classify(CODEX["headers"], body.raw, told, True, TurnType.MAIN)
    assert (found.type, found.kind) == (TurnType.MAIN, "user")
    assert identify(CODEX["headers"], body.raw, told) == CODEX["headers"]["thread-id"]
    assert group_of(body.raw) == CODEX["headers"]["session-id"]


def test_the_items_of_one_reply_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    other = {**CALL, "call_id": "call_2"}
    told = messages([text("user", "a"), thought, text("assistant", "I look."), CALL, other, text("assistant", "Wait.")])
    assert [message["role"] for message in told] == ["user", "assistant"]
    assert told[1]["reasoning_content"] == "hm"
    assert told[1]["content"] == "I look.Wait."
    assert [made["id"] for made in told[1]["tool_calls"]] == ["call_1", "call_2"]


def test_two_texts_in_a_row_and_a_new_thought_are_new_replies() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    told = messages([text("user", "a"), text("assistant", "one"), text("assistant", "two"), thought, CALL, OUTPUT])
    assert [message["role"] for message in told] == ["user", *["assistant"] * 3, "tool"]
    assert [message.get("content") for message in told[1:3]] == ["one", "two"]
    assert told[3]["reasoning_content"] == "hm"


def test_instructions_and_system_messages_at_the_start_are_one() -> None:
    told = messages([text("developer", "b", "c"), text("user", "d"), text("system", "e")], instructions="a")
    assert [(message["role"], message["content"]) for message in told] == [
        ("system", "a\n\nb\nc"),
        ("user", "d"),
        ("system", "e"),
    ]


def test_an_encrypted_thought_is_left_out() -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert messages([text("user", "a"), thought, text("assistant", "b")])[1] == {"role": "assistant", "content": "b"}


def test_an_output_may_be_a_list_of_texts() -> None:
    told = messages([text("user", "a"), CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "done"}]}])
    assert told[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "done"}


def test_the_fields_have_their_chat_names() -> None:
    schema = {"type": "object"}
    chat = parsed(
        {
            **HI,
            "max_output_tokens": 7,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "parallel_tool_calls": False,
            "temperature": 0.5,
            "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": None}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        }
    ).chat
    assert (chat.max_tokens, chat.reasoning_effort, chat.temperature, chat.parallel_tool_calls) == (
        7,
        "low",
        0.5,
        False,
    )
    assert chat.json_schema == '{"type":"object"}'
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert chat.offered_tools == [{"type": "function", "function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "a text, or a list of items"),
        ({"input": []}, "input", "a text, or a list of items"),
        ({"input": [{"type": "message", "role": "bard", "content": "a"}]}, "input[0].role", "user, assistant"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "no files of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0]",
            "no",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "a text"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content", "a text"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "a text"),
        ({**HI, "previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({**HI, "conversation": {"id": "c"}}, "conversation", "keeps no responses"),
        ({**HI, "background": True}, "background", "not served"),
        ({**HI, "prompt": {"id": "p"}}, "prompt", "keeps no prompts"),
        ({**HI, "max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({**HI, "tools": [{"type": "function"}]}, "tools[0].name", "a text"),
        ({**HI, "tool_choice": {"type": "web_search"}}, "tool_choice", "auto, none, required"),
        ({**HI, "text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
        ({**HI, "stream": "yes please"}, "stream", "boolean"),
    ],
)
def test_a_fault_is_named_in_the_clients_terms(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        parsed(body)
    assert refused.value.param == param
    assert words in refused.value.message


def test_an_unknown_response_is_refused_with_openais_code() -> None:
    with pytest.raises(RequestError) as refused:
        parsed({**HI, "previous_response_id": "resp_gone"})
    assert (refused.value.status, refused.value.code) == (400, "previous_response_not_found")
    assert "'resp_gone'" in refused.value.message


@pytest.mark.parametrize("body", [{"instructions": "Be brief.", "input": []}, {**HI, "max_output_tokens": 1}])
def test_a_probe_is_no_turn(body: dict[str, Any]) -> None:
    found = parsed(body)
    assert classify({}, found.raw, found.chat.messages, False, TurnType.MAIN).type is TurnType.SIDE


def test_a_deep_body_is_refused_by_name() -> None:
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    with pytest.raises(RequestError) as refused:
        parsed({**HI, "metadata": {"a": deep}})
    assert refused.value.param == "metadata"
