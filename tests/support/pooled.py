"""A pool of engines behind a server, as a test drives it: chats that are checked, and a trainer without a model.

A stub's log-probs show the adapter that gave them, so that a reply of another version, or of two, is found.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from engine_processes import EngineProcess
from harness.host import Server
from harness.trainer import ToyTrainer
from tolerances import rel

from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.types import WeightKind

PATIENCE_S = 120.0
"""Against hanging alone."""


@dataclass
class Pool:
    server: Server
    engines: list[EngineProcess]
    policy: ToyPolicy
    http: httpx.AsyncClient
    kind: WeightKind = WeightKind.LORA
    said: int = field(default=0)
    begun: set[str] = field(default_factory=set)
    """Sessions whose reply has a first token."""

    async def chat(
        self, session: str, *, tokens: int = 8, text: str = "hello", headers: Mapping[str, str] | None = None
    ) -> Any:
        """Chat as a stream; return the turn's record, and check that the reply is whole."""
        self.said += 1
        body = {
            "messages": [{"role": "user", "content": f"{text} {self.said}"}],
            "max_tokens": tokens,
            "stream": True,
        }
        turn_id, last = "", ""
        sent = {"X-Session-Id": session, **(headers or {})}
        async with self.http.stream("POST", "/v1/chat/completions", json=body, headers=sent) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    turn_id = event["id"]
                    if any(choice["delta"].get("content") for choice in event["choices"]):
                        self.begun.add(session)
                last = line or last
        assert last == "data: [DONE]", last
        record = await self.admin(f"/v1/turns/{turn_id}")
        assert len(record["turn"]["response_ids"]) == tokens
        await self.check(record)
        return record

    async def check(self, record: Any) -> None:
        """Check by its log-probs that each token is of its run's weights, and that an adapter gave the whole reply."""
        turn, prompt = record["turn"], record["request"]["prompt_ids"]
        assert self.kind is WeightKind.FULL or len(turn["versions"]) == 1
        ids, at, wanted = [*prompt, *turn["response_ids"]], len(prompt), list[float]()
        for run in turn["versions"]:
            seed = await self.seed(run["weight_version"])
            wanted += self.policy.log_probs(ids[: at + run["length"]], at, seed)
            at += run["length"]
        assert turn["rollout_log_probs"] == pytest.approx(wanted, rel=rel()), turn["versions"]

    async def seed(self, version: int) -> int:
        if self.kind is WeightKind.FULL:
            return BASE_SEED ^ version
        folder = (await self.admin(f"/v1/admin/versions/{version}"))["folder"]
        return BASE_SEED if folder is None else adapter_seed(self.server.data_dir / folder)

    async def admin(self, path: str) -> Any:
        return await asyncio.to_thread(self.server.admin, path)

    async def status(self) -> Any:
        return await self.admin("/v1/admin/status")

    async def running(self) -> list[int]:
        return [engine["running"] for engine in (await self.status())["engines"]]

    async def until(self, is_so: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so(now := await self.status()):
                await asyncio.sleep(0.02)
        return now

    async def learn(self) -> int:
        """Let a trainer commit a version; return it once it serves."""
        before = (await self.status())["serving"]
        asked = {"role": "user", "content": f"hello {self.said}"}
        headers = {"X-Session-Id": f"taught {before}"}
        sent: dict[str, Any] = {"messages": [asked], "max_tokens": 8}
        first = (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).json()
        thanks = {"role": "user", "content": "Thanks, that is perfect!"}
        sent["messages"] = [asked, first["choices"][0]["message"], thanks]
        assert (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).status_code == 200
        trainer = ToyTrainer(self.server.url, self.server.data_dir, self.policy, kind=self.kind)
        lease = await asyncio.to_thread(trainer.lease)
        assert lease is not None
        commit = await asyncio.to_thread(trainer.checkpoint, lease)
        await asyncio.to_thread(trainer.client.commit, commit)
        return int((await self.until(lambda now: now["serving"] > before))["serving"])
