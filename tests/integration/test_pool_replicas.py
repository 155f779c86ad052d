"""Three engines that the server starts itself: real processes behind SGLang's command line, each a stub engine."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from breaking import words_of
from harness.host import Server
from harness.model import Vocabulary
from pooled import PATIENCE_S, Pool
from stub_sglang import StubSGLang, with_gpus
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.running_server import RunningServer

REPLICAS, GPUS = 3, 6


@dataclass
class Replicas:
    process: RunningServer
    sglang: StubSGLang
    policy: ToyPolicy
    stack: Any = None

    def pool(self, http: httpx.AsyncClient) -> Pool:
        """Return the pool of the server that runs now."""
        log = self.process.data_dir / "server.log"
        return Pool(Server(self.process.url, self.process.data_dir, log), [], self.policy, http)

    def pids(self) -> list[int]:
        return [self.sglang.seen(engine["engine"])["pid"] for engine in self.process.status()["engines"]]


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False)


async def until_ended(pids: list[int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Return True while the process runs; one that ended and was not collected by its parent runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
async def replicas(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replicas]:
    monkeypatch.setenv("PATH", f"{with_gpus(tmp_path / 'bin', GPUS)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").touch()  # a plain folder: nothing is converted, and the stub names its own base
    words = words_of(Vocabulary.of(model_folder))
    policy = ToyPolicy(words.low_id, words.high_id, words.end_id, mean_tokens=0)
    stub = ["--low-id", policy.low_id, "--high-id", policy.high_id, "--end-id", policy.end_id]
    stub += ["--mean-tokens", 0, "--tokens-per-s", 25]
    sglang = StubSGLang(tmp_path / "sglang")
    args = ", ".join(f"'{word}'" for word in ["--tp", "2", "--stub", *stub])
    sets = [
        *(f"engine.python={sglang.python}", f"engine.replicas={REPLICAS}", f"engine.args=[{args}]"),
        *(f"model.path={folder}", "trainer.kind=external", "training.batch_size=1", "training.min_batch=1"),
        *("judge.kind=rules", "publisher.self_test_tolerance=1e-3", f"engine.hold_s={PATIENCE_S}", "log_format=json"),
    ]
    flags = ["--engine", "sglang", *[word for one in sets for word in ("--set", one)]]
    with RunningServer(tmp_path / "data", flags) as process:
        yield Replicas(process, sglang, policy)


async def test_one_of_three_is_killed_under_chats_and_starts_again(replicas: Replicas) -> None:
    async with client(replicas.process.url) as http:
        pool = replicas.pool(http)
        status = await pool.status()
        assert [child["name"] for child in status["children"]] == ["engine 1", "engine 2", "engine 3"]
        assert [engine["name"] for engine in status["engines"]] == ["engine 1", "engine 2", "engine 3"]
        assert [replicas.sglang.seen(one["engine"])["gpus"] for one in status["engines"]] == ["0,1", "2,3", "4,5"]
        version = await pool.learn()
        sessions = {f"s{n}" for n in range(9)}
        chats = [asyncio.create_task(pool.chat(session, tokens=100)) for session in sessions]
        await pool.until(
            lambda now: [engine["running"] for engine in now["engines"]] == [3, 3, 3] and sessions <= pool.begun
        )
        old = status["children"][1]["pid"]
        os.kill(old, signal.SIGKILL)
        records = await asyncio.gather(*chats)
        assert {run["weight_version"] for record in records for run in record["turn"]["versions"]} == {version}
        now = await pool.until(lambda now: now["engines"][1]["is_in"] and not now["problems"])
        assert now["scoring"]["counts"]["engine_cut"] == 3, "the replies of one engine went on elsewhere"
        assert [child["restarts"] for child in now["children"]] == [0, 1, 0]
        assert now["children"][1]["pid"] != old
        again = now["engines"][1]
        assert again["engine"] != status["engines"][1]["engine"], "a port of its own for each start"
        assert replicas.sglang.seen(again["engine"])["gpus"] == "2,3"
        listed = (await http.get(f"{again['engine']}/v1/models")).json()["data"]
        assert f"policy-v{version}" in {card["id"] for card in listed}
        for n in range(6):  # new conversations reach it, with the adapter
            await pool.chat(f"new{n}", tokens=2)
        assert (await pool.status())["engines"][1]["calls"] > again["calls"]
        figures = await pool.admin("/metrics")
        assert 'openclaw_rl_engine_up{engine="engine 2"} 1.0' in figures
        assert 'openclaw_rl_restarts_total{part="engine 2"} 1.0' in figures


async def test_engines_end_with_the_server_and_a_restart_keeps_what_is_drained(replicas: Replicas) -> None:
    process = replicas.process
    words = ["engines", "drain", "2", "--data-dir", str(process.data_dir)]
    done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert done.exit_code == 0, done.output
    first = replicas.pids()
    assert all(map(is_alive, first))
    process.kill()
    await until_ended(first)
    await asyncio.to_thread(process.start)
    async with client(process.url) as http:
        pool = replicas.pool(http)
        now = await pool.until(lambda now: [one["is_in"] for one in now["engines"]] == [True, False, True])
        assert [one["is_drained"] for one in now["engines"]] == [False, True, False]
        assert now["problems"] == []
        for n in range(4):
            await pool.chat(f"s{n}", tokens=2)
        assert (await pool.status())["engines"][1]["calls"] == 0
    second = replicas.pids()
    assert not set(first) & set(second)
    process.stop()
    await until_ended(second)
