"""`/rl` in a chat with the official SDKs: answered by the real server, in no prompt and in no next state."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from breaking import Port, words_of
from harness.host import Host, Server
from harness.model import Vocabulary

from openclaw_rl.testing import FakeEngine, stub_app

ANN, BOB = {"key": "sk-ann", "user": "ann"}, {"key": "sk-bob", "user": "bob", "chat_commands": False}
KEYS = {"server.api_keys": [ANN, BOB]}


@dataclass(frozen=True)
class Served:
    server: Server
    engine: FakeEngine

    async def turns(self) -> list[Any]:
        """Return whole records, oldest first."""
        rows = (await self.admin("/v1/turns?limit=50"))["turns"]
        return [await self.admin(f"/v1/turns/{row['turn_id']}") for row in reversed(rows)]

    async def admin(self, path: str) -> Any:
        return await asyncio.to_thread(self.server.admin, path)


@pytest.fixture
async def start(host: Host, model_folder: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    fake = FakeEngine(policy=words_of(Vocabulary.of(model_folder)))
    engine = Port(stub_app(fake))
    await engine.up()
    given = {"engine.kind": "url", "engine.url": engine.url, "trainer.kind": "external", "judge.kind": "rules"}

    def served(**more: Any) -> Any:
        return host.server(tmp_path, given | KEYS | more)

    served.fake = fake  # type: ignore[attr-defined]
    try:
        yield served
    finally:
        await engine.down()
        engine.let_go()


async def by_chat(url: str, key: str, history: list[Any], *, streamed: bool) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        if streamed:
            stream = await client.chat.completions.create(model="policy", messages=history, max_tokens=12, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        reply = await client.chat.completions.create(model="policy", messages=history, max_tokens=12)
        return reply.choices[0].message.content or ""


async def by_responses(url: str, key: str, history: list[Any], *, streamed: bool) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        if streamed:
            async with client.responses.stream(model="policy", input=history, max_output_tokens=12) as stream:
                found: Any = None
                async for event in stream:
                    found = getattr(event, "response", found)
                return "".join(part.text for item in found.output for part in item.content)
        return (await client.responses.create(model="policy", input=history, max_output_tokens=12)).output_text


async def by_messages(url: str, key: str, history: list[Any], *, streamed: bool) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
        if streamed:
            async with client.messages.stream(model="policy", messages=history, max_tokens=12) as stream:
                return await stream.get_final_text()
        reply = await client.messages.create(model="policy", messages=history, max_tokens=12)
        return "".join(block.text for block in reply.content if block.type == "text")


CLIENTS: tuple[Callable[..., Awaitable[str]], ...] = (by_chat, by_responses, by_messages)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_chat_with_commands_between_its_messages(start: Any, client: Any, streamed: bool) -> None:
    async with start() as server:
        served, history = Served(server, start.fake), []

        async def say(text: str) -> str:
            history.append({"role": "user", "content": text})
            answer: str = await client(server.url, "sk-ann", history, streamed=streamed)
            history.append({"role": "assistant", "content": answer})
            return answer

        assert "Version 0 serves" in await say("/rl status")
        assert "no recorded reply" in await say("/rl good")
        first = await say("Tell me about the long river, please.")
        assert "rated bad" in await say("/rl bad too long")
        (turn,) = await served.turns()
        assert [(said["value"], said["comment"]) for said in turn["feedback"]] == [(-1.0, "too long")]
        assert turn["verdict"]["value"] == -1
        assert "taken back" in await say("/rl undo")
        (turn,) = await served.turns()
        assert (turn["state"], turn["feedback"], turn["verdict"]) == ("served", [], None)
        assert "rated good" in await say("/rl good")
        assert "(+1 by feedback)" in await say("/rl status")
        assert "No wishes yet" in await say("/rl wishes")
        assert "Commands of OpenClaw-RL" in await say("/rl goood")
        await say("And about the short one?")
        assert len(start.fake.calls) == 2  # the model saw two messages alone
        before, after = await served.turns()
        assert before["verdict"]["value"] == 1
        assert [message["content"] for message in before["next_state"]["messages"]] == ["And about the short one?"]
        assert [message["content"] for message in after["request"]["messages"]] == [
            "Tell me about the long river, please.",
            first,
            "And about the short one?",
        ]
        counts = (await served.admin("/v1/admin/status"))["counts"]
        assert counts["requests"] == 2
        assert not [name for name in counts if name.startswith("side.")]


async def test_a_key_without_commands_sends_them_to_the_model(start: Any) -> None:
    async with start() as server:
        history = [{"role": "user", "content": "/rl status"}]
        assert "serves" not in await by_chat(server.url, "sk-bob", history, streamed=False)
        assert len(start.fake.calls) == 1


async def test_the_setting_switches_them_off_for_all(start: Any) -> None:
    async with start(**{"server.chat_commands": False}) as server:
        history = [{"role": "user", "content": "/rl status"}]
        assert "serves" not in await by_messages(server.url, "sk-ann", history, streamed=False)
        assert len(start.fake.calls) == 1


async def test_a_command_rates_no_reply_of_another_user_and_no_other_chat(start: Any) -> None:
    async with start() as server:
        served = Served(server, start.fake)
        asked = [{"role": "user", "content": "Tell me about the long river, please."}]
        reply = await by_chat(server.url, "sk-bob", asked, streamed=False)
        history = [*asked, {"role": "assistant", "content": reply}, {"role": "user", "content": "/rl bad"}]
        assert "no recorded reply" in await by_chat(server.url, "sk-ann", history, streamed=False)
        (turn,) = await served.turns()
        assert turn["feedback"] == []


async def test_in_a_session_the_reply_that_the_chat_shows_is_rated_and_no_other(start: Any) -> None:
    async with start() as server:
        served = Served(server, start.fake)
        headers = {"Authorization": "Bearer sk-ann", "X-Session-Id": "s1"}
        async with httpx.AsyncClient(base_url=f"{server.url}/v1", headers=headers, trust_env=False) as http:

            async def say(*messages: Any) -> httpx.Response:
                return await http.post("/chat/completions", json={"messages": messages, "max_tokens": 9})

            asked = {"role": "user", "content": "Tell me about the long river, please."}
            shown = (await say(asked)).json()["choices"][0]["message"]
            history = [asked, {"role": "assistant", "content": shown["content"]}]
            alone = await say({"role": "user", "content": "/rl good"})
            assert "no recorded reply" in alone.json()["choices"][0]["message"]["content"]
            other = [asked, {"role": "assistant", "content": "It is another reply."}]
            elsewhere = await say(*other, {"role": "user", "content": "/rl good"})
            assert "no recorded reply" in elsewhere.json()["choices"][0]["message"]["content"]
            reply = await say(*history, {"role": "user", "content": "/rl good"})
        assert "rated good" in reply.json()["choices"][0]["message"]["content"]
        assert (reply.headers["x-session-id"], reply.headers["x-openclaw-recorded"]) == ("s1", "false")
        (turn,) = await served.turns()
        assert [said["value"] for said in turn["feedback"]] == [1.0]


async def test_a_side_request_of_no_kind_gives_a_command(start: Any) -> None:
    async with start(**{"sessions.turn_type_default": "side"}) as server:
        history = [{"role": "user", "content": "/rl status"}]
        assert "Version 0 serves" in await by_chat(server.url, "sk-ann", history, streamed=False)
        assert start.fake.calls == []


async def test_a_clients_own_request_gives_no_command(start: Any) -> None:
    async with start() as server:
        headers = {"Authorization": "Bearer sk-ann", "X-Turn-Type": "title"}
        async with httpx.AsyncClient(base_url=f"{server.url}/v1", headers=headers, trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "/rl status"}], "max_tokens": 9}
            reply = await http.post("/chat/completions", json=body)
        assert "serves" not in (reply.json()["choices"][0]["message"]["content"] or "")
        assert len(start.fake.calls) == 1
