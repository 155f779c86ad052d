"""A policy for each user on a pool of two engines: no reply under a foreign adapter, also while an engine is away.

Every reply's log-probs are compared with its version's adapter, and the version must be of the reply's own user.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from breaking import words_of
from engine_processes import EngineProcess
from harness.host import Host
from harness.model import Vocabulary
from harness.trainer import ToyTrainer
from pooled import PATIENCE_S, Pool

from openclaw_rl.testing import ToyPolicy

USERS = ("ann", "bob", "eve", "joe", "kim")
PAIR = USERS[:2]


class House(Pool):
    """A pool whose users have a policy each."""

    async def say(self, user: str, session: str, *, tokens: int = 8) -> int:
        """Chat as a user; return the version that answered, and check that it is the user's own."""
        record = await self.chat(f"{user} {session}", tokens=tokens, headers={"Authorization": f"Bearer sk-{user}"})
        (run,) = record["turn"]["versions"]
        assert record["request"]["scope"]["user"] == user
        assert self.owner(run["weight_version"]) == f"user:{user}"
        return int(run["weight_version"])

    def owner(self, version: int) -> str:
        ledger = self.server.data_dir / "ledger.sqlite3"
        with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
            (policy,) = db.execute("SELECT policy FROM version WHERE weight_version = ?", (version,)).fetchone()
        return str(policy)

    async def teach(self, user: str) -> int:
        """Let a trainer commit a version of the user's policy; return it once it answers the user."""
        before = await self.say(user, "before")
        asked = {"role": "user", "content": f"hello {user} {before}"}
        sent: dict[str, Any] = {"messages": [asked], "max_tokens": 8}
        headers = {"X-Session-Id": f"taught {user} {before}", "Authorization": f"Bearer sk-{user}"}
        first = (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).json()
        sent["messages"] = [asked, first["choices"][0]["message"], {"role": "user", "content": "Thanks, perfect!"}]
        assert (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).status_code == 200
        trainer = ToyTrainer(self.server.url, self.server.data_dir, self.policy)
        lease = await asyncio.to_thread(trainer.lease)
        assert lease is not None
        commit = await asyncio.to_thread(trainer.checkpoint, lease)
        await asyncio.to_thread(trainer.client.commit, commit)
        async with asyncio.timeout(PATIENCE_S):
            while (version := await self.say(user, "after", tokens=2)) == before:
                pass
        return version


@pytest.fixture
async def house(host: Host, model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[House]:
    words = words_of(Vocabulary.of(model_folder))
    policy = ToyPolicy(words.low_id, words.high_id, words.end_id, mean_tokens=0)
    flags = ["--low-id", str(policy.low_id), "--high-id", str(policy.high_id), "--end-id", str(policy.end_id)]
    flags += ["--mean-tokens", "0", "--tokens-per-s", "25"]
    async with AsyncExitStack() as stack:
        engines = [stack.enter_context(EngineProcess(tmp_path / f"engine{n}", *flags)) for n in range(2)]
        settings = {
            "server.api_keys": [{"key": f"sk-{user}", "user": user} for user in USERS],
            "log_format": "json",
            "engine.kind": "url",
            "engine.urls": [engine.url for engine in engines],
            "engine.hold_s": PATIENCE_S,
            "policies.mode": "per_user",
            "trainer.kind": "external",
            "training.batch_size": 1,
            "training.min_batch": 1,
            "judge.kind": "rules",
            "publisher.self_test_tolerance": 1e-3,
            **getattr(request, "param", {}),
        }
        server = await stack.enter_async_context(host.server(tmp_path / "server", settings))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False)
        )
        yield House(server, engines, policy, http)


async def test_two_users_are_answered_by_their_own_adapters_while_an_engine_is_away(house: House) -> None:
    versions = {user: await house.teach(user) for user in PAIR}
    names = {f"policy-v{version}" for version in versions.values()}
    for engine in house.engines:
        assert names <= await asyncio.to_thread(engine.adapters)
    stop, seen = asyncio.Event(), set[tuple[str, int]]()

    async def chat_on(user: str, session: str) -> None:
        while not stop.is_set():
            seen.add((user, await house.say(user, session, tokens=20)))

    async with asyncio.TaskGroup() as tasks:
        for n in range(4):
            for user in PAIR:
                tasks.create_task(chat_on(user, f"on{n}"))
        await house.until(lambda now: min(engine["running"] for engine in now["engines"]) >= 2)
        await asyncio.to_thread(house.engines[0].kill)
        await house.until(lambda now: not now["engines"][0]["is_in"])
        versions["bob"] = await house.teach("bob")  # it comes while one engine is away
        await asyncio.to_thread(house.engines[0].start)
        now = await house.until(lambda now: now["engines"][0]["is_in"])
        before = now["engines"][0]["calls"]
        held = await asyncio.to_thread(house.engines[0].adapters)
        assert {f"policy-v{version}" for version in versions.values()} <= held, "before its first chat"
        for n in range(4):
            for user in PAIR:
                assert await house.say(user, f"new{n}", tokens=2) == versions[user]
        assert (await house.status())["engines"][0]["calls"] > before
        stop.set()
    assert {user for user, _ in seen} == set(PAIR)
    assert '"version_not_loaded"' not in house.server.log


@pytest.mark.parametrize("house", [{"policies.loaded": 2}], indirect=True)
async def test_an_engine_that_comes_back_gets_an_adapter_on_demand_before_its_request_runs(house: House) -> None:
    """The engines hold two versions for the requests of five users: most turns load one, on both engines."""
    versions = {user: await house.teach(user) for user in USERS}
    for _ in range(2):
        for user in USERS:
            assert await house.say(user, "turns", tokens=2) == versions[user]
    await asyncio.to_thread(house.engines[1].kill)
    for user in USERS:
        assert await house.say(user, "alone", tokens=2) == versions[user]
    await asyncio.to_thread(house.engines[1].start)
    await house.until(lambda now: now["engines"][1]["is_in"])
    held = set[frozenset[str]]()
    for n in range(2):
        for user in USERS:
            assert await house.say(user, f"back{n}", tokens=2) == versions[user]
            for engine in house.engines:
                held.add(frozenset(await asyncio.to_thread(engine.adapters)))
                assert f"policy-v{versions[user]}" in await asyncio.to_thread(engine.adapters)
    assert len(held) >= len(USERS), "adapters came and left"
    assert all(engine["calls"] for engine in (await house.status())["engines"])
