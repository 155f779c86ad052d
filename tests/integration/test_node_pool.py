"""Two policy engines under the node's driver: real processes behind SGLang's command line, each a stub engine.

The driver is the plugin's own, over the stand-in for slime (`scripts/gpu/stand_ins`). Every reply is checked token by
token against the weights that its record names.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from breaking import words_of
from harness.host import Server
from harness.model import Vocabulary
from pooled import PATIENCE_S, Pool
from safetensors.torch import save_file
from stub_sglang import StubSGLang, with_gpus

from gpu.host import ROOT
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.running_server import RunningServer
from openclaw_rl.types import WeightKind

pytestmark = pytest.mark.timeout(600)

DRIVER = ROOT / "scripts" / "gpu" / "stand_ins" / "toy_driver.py"
START_AGAIN = 75


@dataclass
class Node:
    process: RunningServer
    sglang: StubSGLang
    policy: ToyPolicy
    model: Path

    @contextmanager
    def driver(self, push: str) -> Iterator["subprocess.Popen[bytes]"]:
        argv = [sys.executable, str(DRIVER), "--data-dir", str(self.process.data_dir), "--push", push]
        argv += ["--checkpoint-every", "100", "--", "--hf-checkpoint", str(self.model), "--global-batch-size", "1"]
        with (self.process.data_dir / "logs" / "driver.log").open("ab") as out:
            driver = subprocess.Popen(argv, stdout=out, stderr=out)
            try:
                yield driver
            finally:
                driver.terminate()
                driver.wait(60)

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[Pool]:
        """Yield the pool, while four people chat on it without a pause."""
        log, stop = self.process.data_dir / "server.log", asyncio.Event()
        url = self.process.url
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            pool = Pool(Server(url, self.process.data_dir, log), [], self.policy, http, kind=WeightKind.FULL)

            async def chat_on(session: str) -> None:
                while not stop.is_set():
                    await pool.chat(session, tokens=20)

            async with asyncio.TaskGroup() as people:
                for n in range(4):
                    people.create_task(chat_on(f"s{n}"))
                yield pool
                stop.set()

    async def teach(self, pool: Pool, session: str) -> None:
        """Chat, and praise the reply: one sample, which is one batch."""
        asked, headers = {"role": "user", "content": f"hello {session}"}, {"X-Session-Id": session}
        sent: dict[str, Any] = {"messages": [asked], "max_tokens": 8}
        first = (await pool.http.post("/v1/chat/completions", json=sent, headers=headers)).json()
        thanks = {"role": "user", "content": "Thanks, that is perfect!"}
        sent["messages"] = [asked, first["choices"][0]["message"], thanks]
        assert (await pool.http.post("/v1/chat/completions", json=sent, headers=headers)).status_code == 200

    async def held(self, pool: Pool) -> list[str]:
        """Return the version that each engine says it holds."""
        urls = [engine["engine"] for engine in (await pool.status())["engines"]]
        return [str((await pool.http.get(f"{url}/model_info")).json()["weight_version"]) for url in urls]

    async def until_both_hold(self, pool: Pool, version: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.held(pool) != [str(version)] * 2:
                await asyncio.sleep(0.1)

    async def second_version_waits(self, pool: Pool, *, at: int) -> Any:
        """Have version 1 on both engines, and version 2 under way, which engine `at` does not take. Return the status
        between the two."""
        await self.teach(pool, "first")
        await pool.until(lambda now: now["serving"] == 1)
        await self.until_both_hold(pool, 1)
        before = await pool.status()
        self.sglang.hold(before["engines"][at]["engine"])
        await self.teach(pool, "second")
        return before

    async def until_all_are_in(self, pool: Pool) -> None:
        await pool.until(lambda now: all(engine["is_in"] for engine in now["engines"]))

    def logged(self, event: str) -> list[Any]:
        lines = (self.process.data_dir / "server.log").read_text().splitlines()
        return [json.loads(line) for line in lines if f'"{event}"' in line]


@pytest.fixture
def node(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("PATH", f"{with_gpus(tmp_path / 'bin', 2)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    save_file({"layer.proj": torch.zeros(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    words = words_of(Vocabulary.of(model_folder))
    policy = ToyPolicy(words.low_id, words.high_id, words.end_id, mean_tokens=0)
    stub = ["--stub", "--low-id", policy.low_id, "--high-id", policy.high_id, "--end-id", policy.end_id]
    args = ", ".join(f"'{word}'" for word in [*stub, "--mean-tokens", 0, "--tokens-per-s", 25])
    sglang = StubSGLang(tmp_path / "sglang")
    sets = [
        *(f"engine.python={sglang.python}", "engine.replicas=2", f"engine.args=[{args}]", f"model.path={folder}"),
        *("training.weights=full", "trainer.kind=external", "training.batch_size=1", "training.min_batch=1"),
        *("judge.kind=rules", "publisher.max_step_kl=1000", "publisher.max_base_kl=1000", "watch.enabled=false"),
        *(f"engine.hold_s={PATIENCE_S}", "log_format=json"),
    ]
    flags = ["--engine", "sglang", *[word for one in sets for word in ("--set", one)]]
    with RunningServer(tmp_path / "data", flags) as process:
        yield Node(process, sglang, policy, folder)


async def test_one_of_two_engines_is_killed_in_its_turn_and_comes_back_with_old_weights(node: Node) -> None:
    async with node.pool() as pool:
        await node.until_all_are_in(pool)
        with node.driver("disk") as driver:
            before = await node.second_version_waits(pool, at=1)
            await pool.until(lambda now: now["serving"] == 2)
            assert await node.held(pool) == ["2", "1"], "the first has taken its turn, and the second is in it"
            os.kill(before["children"][1]["pid"], signal.SIGKILL)
            now = await pool.until(lambda now: now["children"][1]["restarts"] == 1 and now["engines"][1]["is_in"])
            assert now["engines"][1]["engine"] != before["engines"][1]["engine"]
            assert await node.held(pool) == ["2", "2"], "it came back with the base, and took what serves"
            await node.teach(pool, "third")
            await pool.until(lambda now: now["serving"] == 3)
            await node.until_both_hold(pool, 3)
            assert (await pool.status())["problems"] == []
            assert driver.poll() is None, "no death of an engine is the driver's matter"
    swaps = [(one["weight_version"], one["held_s"]) for one in node.logged("weights_swapped")]
    assert [swap for swap in swaps if swap[0]] == [(1, 0.0), (2, 0.0), (3, 0.0)], "nobody was held"
    assert len(node.logged("engine_missed_a_version")) == 1
    kept = [place.name for place in (node.process.data_dir / "push").glob("*/*")]
    assert kept == ["weight_v000003"]


async def test_an_engine_that_is_killed_first_in_its_turn_leaves_the_other_one_to_take_the_weights(node: Node) -> None:
    async with node.pool() as pool:
        await node.until_all_are_in(pool)
        with node.driver("disk") as driver:
            before = await node.second_version_waits(pool, at=0)
            await pool.until(lambda now: node.sglang.is_held(before["engines"][0]["engine"]))
            os.kill(before["children"][0]["pid"], signal.SIGKILL)
            await pool.until(lambda now: now["serving"] == 2)
            await pool.until(lambda now: now["children"][0]["restarts"] == 1 and now["engines"][0]["is_in"])
            assert await node.held(pool) == ["2", "2"]
            await node.teach(pool, "third")
            await pool.until(lambda now: now["serving"] == 3)
            assert driver.poll() is None, "no step was lost"


async def test_weights_by_nccl_reach_both_and_a_killed_engine_ends_the_drivers_group(node: Node) -> None:
    async with node.pool() as pool:
        await node.until_all_are_in(pool)
        with node.driver("nccl") as driver:
            await node.teach(pool, "first")
            await pool.until(lambda now: now["serving"] == 1)
            await node.until_both_hold(pool, 1)
            os.kill((await pool.status())["children"][1]["pid"], signal.SIGKILL)
            await pool.until(lambda now: now["children"][1]["restarts"] == 1 and now["engines"][1]["is_in"])
            assert await node.held(pool) == ["1", "1"], "the driver wrote its checkpoint, and the engine took it"
            assert await asyncio.to_thread(driver.wait, PATIENCE_S) == START_AGAIN
        with node.driver("nccl"):
            await node.teach(pool, "second")
            await pool.until(lambda now: now["serving"] == 2)
            await node.until_both_hold(pool, 2)
    assert all(one["held_s"] > 0 for one in node.logged("weights_received") if one["weight_version"])
    assert [one["weight_version"] for one in node.logged("weights_received")] == [0, 1, 1, 2]
