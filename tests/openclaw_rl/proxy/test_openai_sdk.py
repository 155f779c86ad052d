"""The openai SDK as the client: demands, single calls, usage, and a server that is not ready at the first try."""

from typing import Any

import httpx
import openai
import pytest
from chats import CALL, HI, TOOLS, ids_of

from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.server.api.app import Door
from openclaw_rl.settings import ServerSettings
from openclaw_rl.testing import Scripted

ASKED: Any = HI["messages"]
OFFERED: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
"""The SDK's own streams take strict tools alone."""


def sdk(url: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", **more)


async def test_one_call_and_its_usage_are_what_the_sdk_reads(qwen: FrontEnd, proxy_over: Any) -> None:
    text = CALL % "a" + "\n" + CALL % "b"
    wanted = len(ids_of(qwen, CALL % "a", end=False))
    async with proxy_over(qwen) as proxy, sdk(proxy.url) as client:
        proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
        reply = await client.chat.completions.create(
            model="policy", messages=ASKED, tools=OFFERED, parallel_tool_calls=False, tool_choice="required"
        )
        (call,) = reply.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.arguments == '{"command": "a"}'
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == wanted
        assert reply.usage.completion_tokens_details is not None
        assert reply.usage.completion_tokens_details.reasoning_tokens == 0
        proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
        async with client.chat.completions.stream(
            model="policy",
            messages=ASKED,
            tools=OFFERED,
            parallel_tool_calls=False,
            stream_options={"include_usage": True},
        ) as stream:
            final = await stream.get_final_completion()
        assert [call.function.name for call in final.choices[0].message.tool_calls or []] == ["exec"]
        assert final.usage is not None
        assert final.usage.completion_tokens == wanted


async def test_a_demand_that_is_not_met_is_the_sdks_bad_request(qwen: FrontEnd, proxy_over: Any) -> None:
    async with proxy_over(qwen) as proxy, sdk(proxy.url, max_retries=5) as client:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "No call from me.")))
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="policy",
                messages=ASKED,
                tools=OFFERED,
                tool_choice={"type": "function", "function": {"name": "exec"}},
            )
        assert (refused.value.code, refused.value.param) == ("tool_choice_not_met", "tool_choice")
        assert len(proxy.fake.calls) == 1  # the SDK does not try again: the same request would fail again


async def test_the_sdk_lists_models_of_a_server_that_starts_and_tries_its_chat_again() -> None:
    door, tries = Door(ServerSettings(), "the-policy"), []
    body = b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[]}'

    async def ready(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    async def starting(scope: Any, receive: Any, send: Any) -> None:
        tries.append(scope["path"])
        await door(scope, receive, send)
        if scope["path"] == "/v1/chat/completions":
            door.open(ready)  # the engine is up behind this answer

    transport = httpx.AsyncClient(transport=httpx.ASGITransport(starting))
    async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=transport) as client:
        assert [model.id async for model in client.models.list()] == ["the-policy"]
        reply = await client.chat.completions.create(model="policy", messages=ASKED)
        assert reply.id == "c"
        assert tries == ["/v1/models", "/v1/chat/completions", "/v1/chat/completions"]
