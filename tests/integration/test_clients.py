"""Chats of twenty turns by widely used clients on the real server: each reply is paired with the user's next message,
and the clients' own requests are no turns.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from breaking import Port, words_of
from harness.host import Host, Server
from harness.model import Vocabulary

from openclaw_rl.testing import FakeEngine, stub_app

SAID = [f"message {number} of the user" for number in range(20)]
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@dataclass(frozen=True)
class Served:
    server: Server

    async def turns(self) -> list[Any]:
        """Return the whole records of all turns, oldest first, once each but the last has its next state."""
        async with asyncio.timeout(60):
            while True:
                rows = (await self._admin("/v1/turns?limit=200"))["turns"]
                if sum(row["state"] == "served" for row in rows) <= 1:
                    break
                await asyncio.sleep(0.05)
        return [await self._admin(f"/v1/turns/{row['turn_id']}") for row in reversed(rows)]

    async def side_requests(self) -> dict[str, int]:
        counts = (await self._admin("/v1/admin/status"))["counts"]
        return {name: n for name, n in counts.items() if name.startswith("side.")}

    async def _admin(self, path: str) -> Any:
        return await asyncio.to_thread(self.server.admin, path)


@pytest.fixture
async def served(host: Host, model_folder: Path, tmp_path: Path) -> AsyncIterator[Served]:
    engine = Port(stub_app(FakeEngine(policy=words_of(Vocabulary.of(model_folder)))))
    await engine.up()
    given = {"engine.kind": "url", "engine.url": engine.url, "trainer.kind": "external", "judge.kind": "rules"}
    try:
        async with host.server(tmp_path, given) as server:
            yield Served(server)
    finally:
        await engine.down()
        engine.let_go()


def check_pairs(turns: list[Any], replies: list[str]) -> None:
    """Assert that each reply is the recorded one, and that its next state is the user's next message alone."""
    assert len(turns) == len(SAID)
    assert [turn["turn"]["reply"]["content"] for turn in turns] == replies
    asked = [turn["request"]["messages"][-1]["content"] for turn in turns]
    assert asked == SAID
    for turn, following in zip(turns[:-1], SAID[1:], strict=True):
        assert [message["content"] for message in turn["next_state"]["messages"]] == [following]
        assert turn["next_state"]["messages"][0]["role"] == "user"
    assert turns[-1]["next_state"] is None


async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    text = ""
    stream = await client.chat.completions.create(
        model="policy", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text


async def test_the_openai_sdk_streamed_and_plain(served: Served) -> None:
    messages: list[Any] = [SYSTEM]
    replies = []
    async with openai.AsyncOpenAI(base_url=f"{served.server.url}/v1", api_key="none") as client:
        for number, text in enumerate(SAID):
            messages.append({"role": "user", "content": text})
            if number % 2:
                replies.append(await streamed(client, messages))
                messages.append({"role": "assistant", "content": replies[-1]})
            else:
                reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
                message = reply.choices[0].message
                replies.append(message.content or "")
                messages.append(message.model_dump(exclude_none=True))  # as its users keep the history
    check_pairs(await served.turns(), replies)
    assert await served.side_requests() == {}


def quoted(messages: list[Any], last: int) -> str:
    """Return the last messages as Open WebUI quotes a chat in its own prompts."""
    lines = [f"{message['role'].upper()}: {message['content']}" for message in messages[-last:]]
    return "<chat_history>\n" + "\n".join(lines) + "\n</chat_history>"


def about(task: str, output: str, chat: str) -> dict[str, Any]:
    """Return the body of one of Open WebUI's own requests, in its documented form."""
    prompt = f"### Task:\n{task}\n### Guidelines:\n- Use the chat's language.\n### Output:\nJSON format: {output}\n"
    prompt += f"### Chat History:\n{chat}"
    return {
        "model": "policy",
        "messages": [{"role": "user", "content": prompt}],
        "stream": False,
        "max_completion_tokens": 1000,
    }


async def test_open_webui_with_its_titles_tags_and_follow_ups(served: Served) -> None:
    messages: list[Any] = [SYSTEM]
    replies = []
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    async with httpx.AsyncClient(
        base_url=f"{served.server.url}/v1", headers=headers, timeout=60, trust_env=False
    ) as http:

        async def side(task: str, output: str, last: int) -> None:
            body = about(task, output, quoted(messages, last))
            assert (await http.post("/chat/completions", json=body)).status_code == 200

        assert (await http.get("/models")).status_code == 200
        for number, text in enumerate(SAID):
            messages.append({"role": "user", "content": text})
            body = {
                "stream": True,
                "model": "policy",
                "messages": messages,
                "stream_options": {"include_usage": True},
                "max_tokens": 12,
            }
            if number % 5 == 4:  # a search: its queries are asked for between the message and the chat's own request
                await side("Find the search queries that the chat needs.", '{ "queries": ["query"] }', 6)
            reply = ""
            async with http.stream("POST", "/chat/completions", json=body) as stream:
                assert stream.status_code == 200
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        choices = httpx.Response(200, text=line[6:]).json()["choices"]
                        reply += "".join(choice["delta"].get("content") or "" for choice in choices)
            replies.append(reply)
            messages.append({"role": "assistant", "content": reply})
            await side("Suggest questions that the user may ask next.", '{ "follow_ups": ["question"] }', 6)
            if number == 0:
                await side("Write a short title of the chat.", '{ "title": "the title" }', 2)
                await side("Write tags for the themes of the chat.", '{ "tags": ["tag"] }', 6)
    check_pairs(await served.turns(), replies)
    assert await served.side_requests() == {"side.title": 1, "side.task": 20 + 1 + 4}


async def test_librechat_with_its_title(served: Served) -> None:
    """Its chats name a user and a penalty of 0; its prompt of a title follows the first reply."""
    messages: list[Any] = []
    replies = []
    async with openai.AsyncOpenAI(base_url=f"{served.server.url}/v1", api_key="user_provided") as client:
        for number, text in enumerate(SAID):
            messages.append({"role": "user", "content": text})
            stream = await client.chat.completions.create(
                model="policy", messages=messages, stream=True, max_tokens=12, user="65f1c0ffee", presence_penalty=0
            )
            reply = ""
            async for chunk in stream:
                reply += "".join(choice.delta.content or "" for choice in chunk.choices)
            replies.append(reply)
            messages.append({"role": "assistant", "content": reply})
            if number == 0:
                chat = f"User: {text}\nAI: {reply}"
                task = f"Analyze this conversation and provide:\n1. Its language\n2. A title in it\n\n{chat}"
                asked: Any = [{"role": "user", "content": task}]
                await client.chat.completions.create(model="policy", messages=asked)
    check_pairs(await served.turns(), replies)
    assert await served.side_requests() == {"side.title": 1}
