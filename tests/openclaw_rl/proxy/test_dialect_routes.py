"""The routes of the three dialects over a fake engine: one prompt, errors in each form, keys, counts, model lists."""

import json
from typing import Any

import anthropic
import openai
import pytest
from chats import CALL, TOOLS, ids_of
from pydantic import SecretStr

from openclaw_rl.sessions.commands import Command, CommandedChat
from openclaw_rl.settings import ApiKey, ServerSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.web.auth import Caller

THOUGHT, SAID, RESULT = "I use ls.", "I look.", "a.py"
FUNCTION = TOOLS[0]["function"]
CHAT = {
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "list files"},
        {
            "role": "assistant",
            "content": SAID,
            "reasoning_content": THOUGHT,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "exec", "arguments": '{"command": "ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
    ],
}
RESPONSES = {
    "instructions": "Be brief.",
    "tools": [{"type": "function", **FUNCTION}],
    "input": [
        {"role": "user", "content": "list files"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]},
        {"type": "function_call", "call_id": "call_1", "name": "exec", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
    ],
}
MESSAGES = {
    "max_tokens": 64,
    "system": "Be brief.",
    "tools": [{"name": "exec", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}],
    "messages": [
        {"role": "user", "content": "list files"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": ""},
                {"type": "text", "text": SAID},
                {"type": "tool_use", "id": "toolu_1", "name": "exec", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}]},
    ],
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}


async def test_one_conversation_with_a_thought_and_a_call_is_one_prompt(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        for path, body in BODIES.items():
            for more in ({}, {"stream": True}):
                proxy.fake.script(Scripted(ids=ids_of(qwen, f"Done.\n{CALL % 'pwd'}")))
                reply = await proxy.client.post(path, json={**body, **more})
                assert reply.status_code == 200, reply.text
        prompts = {request.prompt_ids for request in proxy.book.requests}
        assert len(proxy.book.requests) == 6
        assert len(prompts) == 1
        assert THOUGHT in qwen.decode(prompts.pop())
        assert [turn.turn_id.partition("_")[0].partition("-")[0] for turn in proxy.book.turns] == [
            *["chatcmpl"] * 2,
            *["resp"] * 2,
            *["msg"] * 2,
        ]
        count = await proxy.client.post("/v1/messages/count_tokens", json={**MESSAGES, "max_tokens": None})
        assert count.json() == {"input_tokens": len(proxy.book.requests[0].prompt_ids)}
        assert len(proxy.book.requests) == 6


class Noted:
    """Answers every command alike."""

    async def answer(self, command: Command, caller: Caller, chat: CommandedChat) -> str:
        return "Noted."


async def test_a_count_is_that_of_the_prompt_of_the_same_request(qwen, proxy_over) -> None:
    """A forced call has no thought, and commands are in no prompt."""
    asked, *rest = MESSAGES["messages"]
    command = [{"role": "user", "content": "/rl status"}, {"role": "assistant", "content": "Noted."}]
    body = {**MESSAGES, "messages": [*command, asked, *rest], "tool_choice": {"type": "any"}}
    async with proxy_over(qwen, has_grammars=True, commands=Noted()) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, '[{"name": "exec", "parameters": {"command": "ls"}}]')))
        assert (await proxy.client.post("/v1/messages", json=body)).status_code == 200
        count = await proxy.client.post("/v1/messages/count_tokens", json={**body, "max_tokens": None})
        (request,) = proxy.book.requests
        assert count.json() == {"input_tokens": len(request.prompt_ids)}
        plain = await proxy.client.post("/v1/messages/count_tokens", json=MESSAGES)
        assert plain.json() != count.json()  # an empty thought opens the forced reply


async def test_the_reply_names_its_turn_its_session_and_its_version(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        for path, body, header in (
            ("/v1/responses", RESPONSES, "thread-id"),
            ("/v1/messages", MESSAGES, "x-claude-code-session-id"),
        ):
            reply = await proxy.client.post(path, json=body, headers={header: "s1"})
            assert reply.json()["id"] == proxy.book.turns[-1].turn_id
            assert (reply.headers["x-session-id"], reply.headers["x-weight-version"]) == ("s1", "0")
            assert proxy.book.requests[-1].scope.session_id == "s1"
        assert reply.headers["request-id"]


async def test_each_dialect_has_its_own_form_of_errors(qwen, proxy_over) -> None:
    server = ServerSettings(port=0, api_keys=(ApiKey(key=SecretStr("sk-1")),), max_body_mb=0.01)
    large = {"x": "y" * 20_000}
    async with proxy_over(qwen, server=server) as proxy:
        for path, body in BODIES.items():
            fields = "input" if path.endswith("responses") else "messages"
            key = {"authorization": "Bearer sk-1"}
            tries = {
                401: await proxy.client.post(path, json=body),
                413: await proxy.client.post(path, json={**body, **large}, headers=key),
                400: await proxy.client.post(path, json={**body, fields: [7]}, headers=key),
            }
            for status, reply in tries.items():
                assert reply.status_code == status, (path, reply.text)
                error = reply.json()["error"]
                if path.endswith("/messages"):
                    assert reply.json()["type"] == "error"
                    assert set(error) == {"type", "message"}
                    assert reply.json()["request_id"] == reply.headers["request-id"]
                else:
                    assert set(error) == {"type", "message", "param", "code"}
            assert fields in tries[400].json()["error"]["message"]
        assert proxy.book.requests == []


async def test_a_prompt_that_is_too_long_is_told_in_each_dialects_words(qwen, proxy_over) -> None:
    long = "word " * 9000
    async with proxy_over(qwen) as proxy:
        reply = await proxy.client.post("/v1/responses", json={"input": long})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert reply.json()["error"]["param"] == "input"
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": long}]}
        reply = await proxy.client.post("/v1/messages", json=body)
        assert reply.json()["error"]["message"].startswith("prompt is too long")


async def test_a_silent_stream_of_messages_pings(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(keepalive_s=0.05)) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi"), hold_after=1))
        async with proxy.client.stream("POST", "/v1/messages", json={**MESSAGES, "stream": True}) as reply:
            pings = 0
            async for line in reply.aiter_lines():
                pings += line == "event: ping"
                if pings == 3:
                    proxy.fake.release()
        assert pings >= 3


async def test_the_engine_that_breaks_off_is_an_error_in_each_stream(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        for path, name in (("/v1/responses", "response.failed"), ("/v1/messages", "error")):
            proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi there"), break_after=2))
            proxy.fake.script(Scripted(ids=(), refuse=(400, "no")))  # the resumed call
            reply = await proxy.client.post(path, json={**BODIES[path], "stream": True})
            assert f"event: {name}\n" in reply.text, reply.text
            assert "event: response.completed" not in reply.text
            assert "message_stop" not in reply.text


async def test_both_sdks_list_the_model_and_find_it_by_name(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as client:
            assert [model.id async for model in client.models.list()] == ["the-policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
        async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none") as other:
            (model,) = [model async for model in other.models.list()]
            assert (model.id, model.type, model.display_name) == ("the-policy", "model", "the-policy")
            assert (await other.models.retrieve("policy")).max_input_tokens == 4096
            with pytest.raises(anthropic.NotFoundError) as missing:
                await other.models.retrieve("policy@v9")
            assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_the_sdks_read_the_refusals(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="policy", input="hi", previous_response_id="resp_gone")
            found = (refused.value.code, refused.value.param)
            assert found == ("previous_response_not_found", "previous_response_id")
        async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none") as other:
            counted = await other.messages.count_tokens(
                model="policy", messages=[{"role": "user", "content": "hi"}], system="Be brief."
            )
            assert counted.input_tokens > 0


async def test_a_stop_sequence_is_named(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "one END two")))
        reply = (await proxy.client.post("/v1/messages", json={**MESSAGES, "stop_sequences": ["END"]})).json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
        assert reply["content"][0]["text"] == "one "


async def test_a_limit_is_an_incomplete_response(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "one two three")))
        reply: Any = await proxy.client.post(
            "/v1/responses", json={"input": "hi", "max_output_tokens": 3, "stream": True}
        )
        last = json.loads(reply.text.strip().rpartition("data: ")[2])
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
