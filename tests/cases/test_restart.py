"""Cases CR-1 and CR-2 as the cases have them, on the real server: a kill while judged turns wait, and a start beside
a torn checkpoint."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.cases import CASES
from harness.checks import failures
from harness.host import Host, Server, stub_settings
from harness.listen import served
from harness.model import Vocabulary
from harness.play import play
from harness.policy import FlatPolicy
from harness.stubs import Stubs
from harness.trainer import ToyTrainer

TORN_LINE = '{"turn_id":'


def settings(url: str, batch_size: int) -> dict[str, Any]:
    return {
        **stub_settings(url),
        "training.batch_size": batch_size,
        "training.min_batch": batch_size,
    }


async def waiting(server: Server, samples: int) -> None:
    async with asyncio.timeout(120):
        while (await asyncio.to_thread(server.admin, "/v1/admin/status"))["counts"]["sampled"] < samples:
            await asyncio.sleep(0.02)


async def serves(server: Server, version: int) -> None:
    async with asyncio.timeout(120):
        while (await asyncio.to_thread(server.admin, "/healthz"))["weight_version"] != version:
            await asyncio.sleep(0.02)


def talk(number: int) -> list[dict[str, Any]]:
    """A judged turn like the case's six."""
    first, second = CASES["CR-1"]["requests"][:2]

    def renamed(request: dict[str, Any]) -> dict[str, Any]:
        return request | {"headers": request["headers"] | {"X-Session-Id": f"cr1-{number}"}}

    return [renamed(first), renamed(second)]


async def test_after_a_kill_each_judged_turn_is_trained_exactly_once(
    host: Host, model_folder: Path, tmp_path: Path
) -> None:
    case, policy = CASES["CR-1"], FlatPolicy()
    async with served(Stubs(case, Vocabulary.of(model_folder), pace=1.0)) as url:
        rules = settings(url, case["settings"]["batch_size"])
        async with host.server(tmp_path, rules) as server:
            seen = await play(server.url, case["requests"])
            await waiting(server, 6)
            six = [one.json["id"] for one in seen[::2]]
            await asyncio.to_thread(server.kill)
        with (server.data_dir / "ledger.sqlite3-wal").open("ab") as records:
            records.write(TORN_LINE.encode())
        async with host.server(tmp_path, rules) as server:
            turns = (await asyncio.to_thread(server.admin, "/v1/turns?limit=500"))["turns"]
            await play(server.url, [*talk(6), *talk(7)])
            trainer = ToyTrainer(server.url, server.data_dir, policy)
            trained: list[str] = []
            while (lease := await asyncio.to_thread(trainer.lease, wait_s=1.0 if trained else 120.0)) is not None:
                trained += [sample.sample_id for sample in lease.samples]
                await asyncio.to_thread(trainer.client.commit, await asyncio.to_thread(trainer.checkpoint, lease))
            await serves(server, 1)
            file = tmp_path / "turns.jsonl"
            argv = [sys.executable, "-m", "openclaw_rl", "export", str(file), "--data-dir", str(server.data_dir)]
            await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True, timeout=120)
            found = {
                "after_restart": {"turns": turns},
                "trained_ids": {one: trained.count(one) for one in (*six, *trained)},
                "files": {"records": file.read_bytes()},
            }
    assert failures(case["expect"]["checks"], found, said={}) == []
    assert len(trained) == case["settings"]["batch_size"]


async def test_a_torn_checkpoint_is_named_and_the_last_whole_one_serves(
    host: Host, model_folder: Path, tmp_path: Path
) -> None:
    case, policy = CASES["CR-2"], FlatPolicy()
    async with served(Stubs(CASES["CR-1"], Vocabulary.of(model_folder), pace=1.0)) as url:
        async with host.server(tmp_path, settings(url, 1)) as server:
            trainer = ToyTrainer(server.url, server.data_dir, policy)
            for step in range(1, 5):
                await play(server.url, talk(step))
                lease = await asyncio.to_thread(trainer.lease)
                assert lease is not None
                last = await asyncio.to_thread(trainer.checkpoint, lease)
                await asyncio.to_thread(trainer.client.commit, last)
                await serves(server, step)
        torn = server.data_dir / "versions" / "lease-6-0a1b2c3d"
        shutil.copytree(server.data_dir / last.manifest.folder, torn)
        largest = max(torn.iterdir(), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        async with host.server(tmp_path, settings(url, 1)) as server:
            seen = await play(server.url, [*case["requests"], *talk(9)])
            lease = await asyncio.to_thread(ToyTrainer(server.url, server.data_dir, policy).lease)
            assert lease is not None
            found = {
                "proc": {"started": seen[0].status == 200, "log": server.log},
                "metrics": {"resumed_step": lease.parent},
            }
            assert failures(case["expect"]["checks"], found, said={}) == []
            assert (torn.name in server.log, torn.exists()) == (True, False)
            assert seen[-1].headers["x-weight-version"] == "4"
