"""The real server in a process of its own, over an engine, a judge and a teacher that break on command."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from breaking import BrokenEngine, BrokenJudge, Port, Webhook, words_of
from harness.host import Host, Server
from harness.model import Vocabulary

from openclaw_rl.testing import ToyPolicy

PATIENCE_S = 240
"""Against hanging alone: nothing that is shown here may depend on how fast the machine is."""


@dataclass
class Place:
    """One server, with its engine, judge, teacher and webhook."""

    server: Server
    engine: BrokenEngine
    judge: BrokenJudge
    engine_port: Port
    judge_port: Port
    teacher: BrokenEngine
    teacher_port: Port
    webhook: Webhook
    http: httpx.AsyncClient
    said: int = field(default=0)

    async def chat(self, *more: dict[str, str], session: str = "s", **body: Any) -> httpx.Response:
        self.said += 1
        messages = [{"role": "user", "content": f"hello {self.said}"}, *more]
        sent = {"messages": messages, "max_tokens": 12, **body}
        return await self.http.post("/v1/chat/completions", json=sent, headers={"X-Session-Id": session})

    async def turn(self, following: str, session: str) -> str:
        """Chat once, send the user's next message, and return the turn's id."""
        asked = {"role": "user", "content": f"hello {session}"}
        sent = {"messages": [asked], "max_tokens": 12}
        headers = {"X-Session-Id": session}
        first = (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).json()
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        sent["messages"] = [asked, reply, {"role": "user", "content": following}]
        assert (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).status_code == 200
        return str(first["id"])

    async def admin(self, path: str) -> Any:
        return await asyncio.to_thread(self.server.admin, path)

    async def served_by(self) -> str:
        """Return the version that answers a new chat."""
        reply = await self.chat(session="who")
        assert reply.status_code == 200
        return str(reply.headers["x-weight-version"])

    async def admin_post(self, path: str, body: dict[str, Any]) -> Any:
        key = (self.server.data_dir / "keys" / "admin.key").read_text().strip()
        reply = await self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def state(self, turn_id: str) -> tuple[str, str | None]:
        turn = await self.admin(f"/v1/turns/{turn_id}")
        return turn["state"], turn["reason"]

    async def health(self) -> str:
        """Return the word of `/healthz` that every client may read; the body holds no more."""
        told = (await self.http.get("/healthz")).json()
        assert set(told) == {"status", "weight_version"}
        return str(told["status"])

    async def problems(self) -> list[str]:
        """Return the problems of `/healthz`, which need the admin key."""
        return list((await self.admin("/healthz"))["problems"])

    async def until(self, what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not await what():
                await asyncio.sleep(0.05)

    async def until_well(self) -> None:
        async def is_well() -> bool:
            return await self.health() == "ok"

        await self.until(is_well)

    @property
    def lines(self) -> Counter[str]:
        """Count the server's log events by name: warnings and above, and those of a recovery."""
        events: Counter[str] = Counter()
        for row in self.server.log.splitlines():
            if row.startswith("{"):
                events[json.loads(row)["event"]] += 1
            else:
                events["not an event"] += 1
        return events


@pytest.fixture
def place(host: Host, model_folder: Path, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Place]]:
    """Return `async with place(settings…) as here`."""

    @asynccontextmanager
    async def start(
        folder: Path = tmp_path, *, policy: ToyPolicy | None = None, has_teacher: bool = False, **settings: Any
    ) -> AsyncIterator[Place]:
        """policy: of the engine. has_teacher: an engine of its own scores hints. Every time limit is long; a test of a
        limit sets its own.
        """
        words = words_of(Vocabulary.of(model_folder))
        engine, judge, teacher, webhook = BrokenEngine(policy or words), BrokenJudge(), BrokenEngine(words), Webhook()
        engine_port, judge_port, teacher_port, hook_port = Port(engine), Port(judge), Port(teacher), Port(webhook)
        given = {
            "log_format": "json",
            "engine.kind": "url",
            "engine.url": engine_port.url,
            "engine.hold_s": PATIENCE_S,
            "engine.token_timeout_s": PATIENCE_S,
            "trainer.kind": "external",
            "judge.kind": "llm",
            "judge.url": f"{judge_port.url}/v1",
            "judge.timeout_s": PATIENCE_S,
            "alerts.webhook_url": f"{hook_port.url}/alerts",
        }
        given |= {"method.teacher_url": teacher_port.url} if has_teacher else {}
        given |= {name.replace("__", "."): value for name, value in settings.items()}
        async with AsyncExitStack() as stack:
            for port in (engine_port, judge_port, teacher_port, hook_port):
                stack.callback(port.let_go)
                await port.up()
                stack.push_async_callback(port.down)
            server = await stack.enter_async_context(host.server(folder, given))
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False)
            )
            yield Place(server, engine, judge, engine_port, judge_port, teacher, teacher_port, webhook, http)

    return start
