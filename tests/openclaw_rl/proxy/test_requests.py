"""Requests of clients: parameters, unknown fields, bad input; and the turns that they make."""

import json

import pytest
from chats import HI, TOOLS, ids_of

from openclaw_rl.settings import SamplingSettings, ServerSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.types import DropReason

_TEXT, _FIRST = "messages[0].content[0].text", "messages[0].content[0]"


async def test_a_session_id_with_line_breaks_adds_no_header(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        reply = await proxy.post({**HI, "session_id": "a\r\nX-Evil: 1\u6f22"})
        assert reply.status_code == 200
        assert reply.headers["x-session-id"] == "a  X-Evil: 1?"
        assert "x-evil" not in reply.headers


async def test_a_cache_key_names_a_group_and_no_session(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        first = await proxy.post({**HI, "prompt_cache_key": "my-app"})
        second = await proxy.post({**HI, "prompt_cache_key": "my-app"}, **{"X-Session-Id": "mine"})
        third = await proxy.post({**HI, "prompt_cache_key": ["no", "name"]})
        assert [reply.status_code for reply in (first, second, third)] == [200, 200, 200]
        assert "x-session-id" not in first.headers
        found = [(request.scope.session_id, request.group) for request in proxy.book.requests]
        assert found == [(None, "my-app"), ("mine", None), (None, None)]


@pytest.mark.parametrize(
    ("fields", "headers", "reason"),
    [
        ({}, {}, None),
        ({"temperature": 0}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"top_k": 1}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"presence_penalty": 0.5}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"logit_bias": {"5": 1.0}}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"top_p": 0.9}, {}, DropReason.TRUNCATED_SAMPLING),
        ({"seed": 7}, {}, None),
        ({}, {"X-OpenClaw-Train": "off"}, DropReason.OPTED_OUT),
    ],
)
async def test_what_can_never_be_trained_is_served_and_says_why(qwen, proxy_over, fields, headers, reason) -> None:
    async with proxy_over(qwen, sampling=SamplingSettings(truncated_sampling="drop")) as proxy:
        assert (await proxy.post({**HI, **fields}, **headers)).status_code == 200
        assert proxy.book.turns[0].drop is reason


async def test_sampling_is_always_explicit_the_clients_or_ours(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        await proxy.post(HI)
        await proxy.post({**HI, "temperature": 0.2, "top_p": 0.5, "max_completion_tokens": 7, "seed": 3})
        ours, theirs = (call.sampling_params for call in proxy.fake.calls)
        assert (ours.temperature, ours.top_p, ours.top_k, ours.max_new_tokens) == (0.7, 1.0, -1, 2048)
        assert (theirs.temperature, theirs.top_p, theirs.sampling_seed, theirs.max_new_tokens) == (0.2, 0.5, 3, 7)
        assert proxy.book.requests[1].sampling.temperature == 0.2
        assert proxy.fake.calls[0].extra_key == "v0"


@pytest.mark.parametrize(("seed", "sent"), [(-1, None), (-5, None), (0, 0), (2**63 - 1, 2**63 - 1)])
async def test_a_negative_seed_is_none(qwen, proxy_over, seed: int, sent: int | None) -> None:
    async with proxy_over(qwen) as proxy:
        assert (await proxy.post({**HI, "seed": seed})).status_code == 200
        assert proxy.fake.calls[0].sampling_params.sampling_seed == sent


def _deep(levels: int) -> dict[str, object]:
    found: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize("levels", [150, 220, 300, 900])
@pytest.mark.parametrize("field", ["tools[0]", "chat_template_kwargs", "messages[1]", "response_format", "tools[1]"])
async def test_a_deep_body_is_refused_by_the_fields_name(qwen, proxy_over, field: str, levels: int) -> None:
    deep = _deep(levels)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    body = {
        "tools[0]": {**HI, "tools": [tool]},
        "tools[1]": {**HI, "tools": [*TOOLS, tool], "tool_choice": "required"},
        "chat_template_kwargs": {**HI, "chat_template_kwargs": {"a": deep}},
        "response_format": {**HI, "response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        "messages[1]": {"messages": [*HI["messages"], {"role": "assistant", "tool_calls": [call]}, *HI["messages"]]},
    }[field]
    async with proxy_over(qwen, has_grammars=True) as proxy:
        reply = await proxy.post(body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
        assert not proxy.fake.calls


@pytest.mark.parametrize("field", ["tools", "demand", "template", "arguments", "format"])
async def test_a_body_of_ninety_levels_is_served(qwen, proxy_over, field: str) -> None:
    deep = _deep(90)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": deep}}}]
    body = {
        "tools": {**HI, "tools": tools},
        "demand": {**HI, "tools": tools, "tool_choice": "required"},
        "template": {**HI, "chat_template_kwargs": {"a": deep}},
        "format": {**HI, "response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        "arguments": {"messages": [*HI["messages"], {"role": "assistant", "tool_calls": [call]}, *HI["messages"]]},
    }[field]
    said = '[{"name": "f", "parameters": {}}]' if field == "demand" else "yes"
    async with proxy_over(qwen, has_grammars=True) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, said)))
        reply = await proxy.post(body)
        assert reply.status_code == 200, reply.text


_BROKEN = ('{"cut": "of', "", None, "[1]", [1], "null", "7", 7, True, '"{}"', '{"a": NaN}', "ls -l", {})
_TOO_DEEP = ("[" * 2000, '{"a":' * 300 + "1" + "}" * 300)


@pytest.mark.parametrize("arguments", [*_BROKEN, *_TOO_DEEP, '{"half": "\\ud800"}', '"\\ud800"', '{"n": 1e999}'])
async def test_a_history_with_a_broken_call_can_go_on(qwen, proxy_over, arguments: object) -> None:
    """The call that the token limit cut stays in the client's history, and so in each of its later requests."""
    call = {"id": "c1", "type": "function", "function": {"name": "exec", "arguments": arguments}}
    told = [
        *HI["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "error: these are no arguments", "tool_call_id": "c1"},
        {"role": "user", "content": "Try again."},
    ]
    async with proxy_over(qwen) as proxy:
        reply = await proxy.post({"messages": told, "tools": TOOLS})
        assert reply.status_code == 200, reply.text


async def test_a_bias_reaches_the_engine_by_token_id(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        assert (await proxy.post({**HI, "logit_bias": {"5": -100, "7": 1.5}})).status_code == 200
        assert proxy.fake.calls[0].sampling_params.model_dump()["logit_bias"] == {"5": -100.0, "7": 1.5}


async def test_harmless_fields_change_nothing(qwen, proxy_over) -> None:
    extra = {"store": False, "metadata": {"a": "b"}, "max_completion_tokens": 7, "tools": [], "tool_choice": "auto"}
    async with proxy_over(qwen) as proxy:
        await proxy.post(HI)
        assert (await proxy.post({**HI, **extra, "user": "u", "model": "my-alias"})).status_code == 200
        plain, full = proxy.fake.calls
        assert plain.input_ids == full.input_ids
        assert full.sampling_params.max_new_tokens == 7


async def test_an_output_limit_as_large_as_the_context_is_clamped(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        assert (await proxy.post({**HI, "max_tokens": 1_000_000})).status_code == 200
        call = proxy.fake.calls[0]
        assert len(call.input_ids) + call.sampling_params.max_new_tokens < qwen.context_length


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{not json", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'\xff\xfe{"messages": 1}', 400, "invalid_json", None),
        ({}, 400, None, "messages"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": "hello"}, 400, None, "messages"),
        ({"messages": [{"content": "x"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, None, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 400, None, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400, None, _TEXT),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, None, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": None}]}, 400, None, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, 400, None, "messages[0].content"),
        ({**HI, "temperature": "hot"}, 400, None, "temperature"),
        ({**HI, "temperature": -1}, 400, None, "temperature"),
        ({**HI, "top_p": 2}, 400, None, "top_p"),
        ({**HI, "max_tokens": 0}, 400, None, "max_tokens"),
        ({**HI, "max_tokens": "many"}, 400, None, "max_tokens"),
        ({**HI, "n": 2}, 400, None, "n"),
        ({**HI, "model": 5}, 400, None, "model"),
        ({**HI, "stream": "perhaps"}, 400, None, "stream"),
        ({**HI, "tools": [{"type": "function"}]}, 400, None, "tools[0]"),
        ({**HI, "tools": "all"}, 400, None, "tools"),
        ({**HI, "tools": [{"type": "web", "function": {"name": "f", "strict": 7}}]}, 400, None, "tools"),
        ({**HI, "stop": [1]}, 400, None, "stop[0]"),
        ({**HI, "stop": {}}, 400, None, "stop"),
        ({**HI, "stop": ["x"] * 65}, 400, None, "stop"),
        ({**HI, "tool_choice": 5}, 400, None, "tool_choice"),
        ({**HI, "reasoning_effort": "boundless"}, 400, None, "reasoning_effort"),
        ({**HI, "logit_bias": {"hello": 1}}, 400, None, "logit_bias.hello"),
        ({**HI, "logit_bias": {"-1": 1}}, 400, None, "logit_bias.-1"),
        ({**HI, "logit_bias": {"5": 101}}, 400, None, "logit_bias.5"),
        ({**HI, "stream_options": []}, 400, None, "stream_options"),
        ({**HI, "temperature": "hot", "messages": [{"role": "user", "content": ["x"]}]}, 400, None, _FIRST),
        ({**HI, "response_format": {"type": "xml"}}, 400, None, "response_format.type"),
        ({**HI, "response_format": {"type": "json_schema"}}, 400, None, "response_format.json_schema.schema"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            400,
            "unsupported_content",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "unsupported_content", None),
        ({"messages": [{"role": "user", "content": "hello " * 5000}]}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, 400, None, None),
        ({"messages": [{"role": "assistant", "tool_calls": "f()"}]}, 400, None, "messages[0].tool_calls"),
    ],
)
async def test_bad_input_is_a_4xx_in_openais_form_and_leaves_no_trace(
    qwen, proxy_over, body, status, code, param
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with proxy_over(qwen) as proxy:
        reply = await proxy.client.post("/v1/chat/completions", content=data)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert code is None or error["code"] == code
        assert param is None or error["param"] == param
        assert "instance of" not in error["message"]
        if code == "context_length_exceeded":
            assert str(qwen.context_length) in error["message"]
        assert proxy.fake.calls == []
        assert proxy.book.log == []


async def test_a_large_body_is_refused_without_being_read(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(max_body_mb=1)) as proxy:
        reply = await proxy.client.post("/v1/chat/completions", content=b"x" * 20_000_000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")

        async def endless():
            for _ in range(40):
                yield b"y" * 100_000

        reply = await proxy.client.post("/v1/chat/completions", content=endless())
        assert reply.status_code == 413
        assert (await proxy.post(HI)).status_code == 200


async def test_a_reply_without_tokens_is_served_and_never_a_sample(qwen, proxy_over) -> None:
    """Case TN-5: the reply is only the end token, or it was cut before its first token."""
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "END of it")))
        reply = await proxy.post({**HI, "stop": "END"})
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["message"]["content"] == ""
        assert proxy.book.turns[0].drop is DropReason.EMPTY
