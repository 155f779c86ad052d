"""A pool of two engines: the real server in front of two stub engines, each in a process of its own over real HTTP.

A stub's log-probs show the adapter that gave them, so that a reply of another version, or of two, is found.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from breaking import words_of
from engine_processes import EngineProcess
from harness.host import Host
from harness.model import Vocabulary
from pooled import PATIENCE_S, Pool
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.types import WeightKind


@pytest.fixture
async def pool(host: Host, model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    kind: WeightKind = getattr(request, "param", WeightKind.LORA)
    words = words_of(Vocabulary.of(model_folder))
    policy = ToyPolicy(words.low_id, words.high_id, words.end_id, mean_tokens=0)
    flags = ["--low-id", str(policy.low_id), "--high-id", str(policy.high_id), "--end-id", str(policy.end_id)]
    flags += ["--mean-tokens", "0", "--tokens-per-s", "25", "--prefill-tokens-per-s", "200"]
    async with AsyncExitStack() as stack:
        hold = tmp_path / "hold"
        engines = [stack.enter_context(EngineProcess(tmp_path / f"engine{n}", *flags, hold=hold)) for n in range(2)]
        settings = {
            "log_format": "json",
            "engine.kind": "url",
            "engine.urls": [engine.url for engine in engines],
            "engine.hold_s": PATIENCE_S,
            "trainer.kind": "external",
            "training.weights": str(kind),
            "training.batch_size": 1,
            "training.min_batch": 1,
            "judge.kind": "rules",
            "publisher.self_test_tolerance": 1e-3,
        }
        server = await stack.enter_async_context(host.server(tmp_path / "server", settings))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False)
        )
        yield Pool(server, engines, policy, http, kind)


async def test_a_conversation_stays_on_its_engine_and_new_ones_are_spread(pool: Pool) -> None:
    homes: dict[str, int] = {}
    for _ in range(3):
        for session in ("a", "b", "c", "d"):
            before = [engine["calls"] for engine in (await pool.status())["engines"]]
            await pool.chat(session, tokens=2)
            after = [engine["calls"] for engine in (await pool.status())["engines"]]
            (home,) = [n for n in range(2) if after[n] > before[n]]
            assert homes.setdefault(session, home) == home
    assert sorted(homes.values()) == [0, 0, 1, 1]
    assert [engine["sessions"] for engine in (await pool.status())["engines"]] == [2, 2]
    figures = await pool.admin("/metrics")
    for engine in pool.engines:
        assert f'openclaw_rl_engine_up{{engine="{engine.url}"}} 1.0' in figures
        assert f'openclaw_rl_engine_sessions{{engine="{engine.url}"}} 2.0' in figures


async def test_an_engine_killed_under_chats_costs_none_and_comes_back_with_the_serving_adapter(
    pool: Pool, tmp_path: Path
) -> None:
    version = await pool.learn()
    long, hold = "train " * 1000, tmp_path / "hold"
    hold.touch()  # until the engine is killed, a long prompt gets no token, and the others get one
    short = {f"s{n}" for n in range(6)}
    chats = [asyncio.create_task(pool.chat(session, tokens=40)) for session in short]
    await pool.until(lambda now: [engine["running"] for engine in now["engines"]] == [3, 3])
    chats += [asyncio.create_task(pool.chat(f"long{n}", tokens=20, text=long)) for n in range(2)]
    await pool.until(lambda now: [engine["running"] for engine in now["engines"]] == [4, 4] and short <= pool.begun)
    await asyncio.to_thread(pool.engines[0].kill)
    assert not {"long0", "long1"} & pool.begun
    hold.unlink()
    records = await asyncio.gather(*chats)
    assert {run["weight_version"] for record in records for run in record["turn"]["versions"]} == {version}
    now = await pool.until(lambda now: now["problems"])
    assert [problem.partition(":")[0] for problem in now["problems"]] == ["engine 1"]
    assert [(engine["is_in"], bool(engine["fault"])) for engine in now["engines"]] == [(False, True), (True, False)]
    assert now["scoring"]["counts"]["engine_cut"] == 3, "the reply without a token moved at once"
    assert f'openclaw_rl_engine_up{{engine="{pool.engines[0].url}"}} 0.0' in await pool.admin("/metrics")
    newer = await pool.learn()  # the others go on without it
    stop = asyncio.Event()

    async def chat_on(session: str) -> None:
        while not stop.is_set():
            record = await pool.chat(session, tokens=4)
            assert record["turn"]["versions"][0]["weight_version"] == newer

    async with asyncio.TaskGroup() as tasks:
        for n in range(4):
            tasks.create_task(chat_on(f"on{n}"))
        await asyncio.to_thread(pool.engines[0].start)
        await pool.until(lambda now: now["engines"][0]["is_in"])
        assert await asyncio.to_thread(pool.engines[0].adapters) == {f"policy-v{newer}"}
        for n in range(4):  # new conversations go there, for the others stay
            await pool.chat(f"new{n}", tokens=2)
        stop.set()
    now = await pool.until(lambda now: not now["problems"])
    assert now["engines"][0]["sessions"]
    assert now["scoring"]["counts"]["engine_cut"] == 3, "no chat met an engine without its adapter"
    assert '"part_fails"' not in pool.server.log
    assert pool.server.log.count('"engine_left_pool"') == 1
    assert pool.server.log.count('"engine_joined_pool"') == 1


async def operator(pool: Pool, *words: str, fails: bool = False) -> str:
    """Run `openclaw-rl WORDS` on the pool's server; return what it printed."""
    argv = [*words, "--data-dir", str(pool.server.data_dir)]
    done = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert (done.exit_code != 0) == fails, done.output
    return done.output


async def test_the_operator_takes_an_engine_out_under_chats_and_brings_it_back(pool: Pool) -> None:
    running = {f"s{n}" for n in range(4)}
    chats = [asyncio.create_task(pool.chat(session, tokens=100)) for session in running]
    await pool.until(lambda now: [engine["running"] for engine in now["engines"]] == [2, 2] and running <= pool.begun)
    assert "engine 1 at" in (said := await operator(pool, "engines", "drain", "1"))
    assert said.endswith("is drained; 2 calls run on it\n")
    before = (await pool.status())["engines"][0]["calls"]
    for n in range(3):
        await pool.chat(f"new{n}", tokens=2)
    await asyncio.gather(*chats)
    for session in running:  # those that it had move with their next turn
        await pool.chat(session, tokens=2)
    now = await pool.status()
    assert now["engines"][0] | {"is_drained": True, "running": 0, "calls": before} == now["engines"][0]
    assert now["problems"] == []
    assert "engine_cut" not in now["scoring"]["counts"], "each reply ended where it began"
    figures = await pool.admin("/metrics")
    assert f'openclaw_rl_engine_drained{{engine="{pool.engines[0].url}"}} 1.0' in figures
    assert "it cannot be drained" in await operator(pool, "engines", "drain", "2", fails=True)
    assert "there is no engine 3" in await operator(pool, "engines", "drain", "3", fails=True)
    await asyncio.to_thread(pool.engines[0].kill)
    version = await pool.learn()
    await asyncio.to_thread(pool.engines[0].start)
    assert (await pool.status())["problems"] == [], "the operator works on it"
    assert "is drained" in await operator(pool, "engines")
    await operator(pool, "engines", "undrain", "1")
    now = await pool.until(lambda now: now["engines"][0]["is_in"])
    assert await asyncio.to_thread(pool.engines[0].adapters) == {f"policy-v{version}"}
    assert (await operator(pool, "status")).count(" serves: 0 running") == 2
    for n in range(2):
        await pool.chat(f"later{n}", tokens=2)
    assert (await pool.status())["engines"][0]["calls"] > before


async def test_new_versions_under_load_give_no_reply_of_two_or_of_another(pool: Pool) -> None:
    stop, seen = asyncio.Event(), set[int]()

    async def chat_on(session: str) -> None:
        while not stop.is_set():
            record = await pool.chat(session, tokens=20)
            seen.update(run["weight_version"] for run in record["turn"]["versions"])

    async with asyncio.TaskGroup() as tasks:
        for n in range(8):
            tasks.create_task(chat_on(f"s{n}"))
        for _ in range(3):
            version = await pool.learn()
            await pool.until(lambda _, version=version: version in seen)
        stop.set()
    assert seen == {0, 1, 2, 3}
    assert not (await pool.status())["problems"]
    assert "engine_cut" not in (await pool.status())["scoring"]["counts"]
    assert all([{"policy-v3"} <= await asyncio.to_thread(engine.adapters) for engine in pool.engines])


@pytest.mark.parametrize("pool", [WeightKind.FULL], indirect=True)
async def test_full_weights_roll_through_the_pool_under_load_and_an_engine_that_comes_back_gets_them(
    pool: Pool,
) -> None:
    stop, seen = asyncio.Event(), set[int]()

    async def chat_on(session: str) -> None:
        while not stop.is_set():
            record = await pool.chat(session, tokens=40)
            seen.update(run["weight_version"] for run in record["turn"]["versions"])

    async with asyncio.TaskGroup() as tasks:
        for n in range(8):
            tasks.create_task(chat_on(f"s{n}"))
        for _ in range(2):
            version = await pool.learn()
            await pool.until(lambda _, version=version: version in seen)
        await asyncio.to_thread(pool.engines[1].kill)
        await pool.until(lambda now: not now["engines"][1]["is_in"])
        await asyncio.to_thread(pool.engines[1].start)
        await pool.until(lambda now: now["engines"][1]["is_in"])
        stop.set()
    assert seen == {0, 1, 2}
    assert [await asyncio.to_thread(engine.weight_version) for engine in pool.engines] == ["2", "2"]
    swaps = [json.loads(line) for line in pool.server.log.splitlines() if '"weights_swapped"' in line]
    assert [swap["held_s"] for swap in swaps] == [0.0, 0.0], "no chat was held"
    driver = TrainerClient(pool.server.url, (pool.server.data_dir / "keys" / "trainer.token").read_text().strip())
    started = await asyncio.to_thread(driver.start, "slime", [])
    assert started.engine_urls == [engine.url for engine in pool.engines], "weights go to all of them"


async def test_a_client_that_leaves_ends_its_reply_on_its_own_engine(pool: Pool) -> None:
    kept = asyncio.create_task(pool.chat("kept", tokens=100))
    await pool.until(lambda now: sum(engine["running"] for engine in now["engines"]) == 1)
    left = asyncio.create_task(pool.chat("left", tokens=1000))
    await pool.until(lambda now: [engine["running"] for engine in now["engines"]] == [1, 1])
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await pool.until(lambda now: sum(engine["running"] for engine in now["engines"]) == 1)
    await kept  # it is whole


async def test_a_start_with_an_engine_of_another_model_is_refused_in_one_line(
    pool: Pool, host: Host, tmp_path: Path
) -> None:
    with EngineProcess(tmp_path / "other", "--context-length", "512") as other:
        settings = {"engine.kind": "url", "engine.urls": [pool.engines[0].url, other.url], "trainer.kind": "external"}
        with pytest.raises(RuntimeError, match=rf"engine\.urls: another model: {other.url} serves stub \(512 tokens"):
            async with host.server(tmp_path / "refused", settings):
                pass


async def test_a_pool_starts_without_an_engine_that_is_away(
    pool: Pool, host: Host, tmp_path: Path, model_folder: Path
) -> None:
    away = EngineProcess(tmp_path / "away", "--low-id", str(pool.policy.low_id))
    away.start()
    away.kill()
    settings = {
        "engine.kind": "url",
        "engine.urls": [away.url, pool.engines[0].url],
        "trainer.kind": "external",
        "judge.kind": "rules",
    }
    async with host.server(tmp_path / "second", settings) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        with away:
            other = Pool(server, [], pool.policy, pool.http)
            await other.until(lambda now: all(engine["is_in"] for engine in now["engines"]))
