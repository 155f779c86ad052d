"""Cases TN-2, TN-3 and TN-5 as the cases have them: from the case's chats to a published commit.

The chats run on the real server, their samples are leased over the trainer API, and one real step of LoRA runs on a
random Llama of the same vocabulary. Server, ledger, trainer loop, learner and checkpoint are real. The engine is the
case's script, so its scores differ from the learner's: the self-test and the KL gate have their own tests and let every
version pass here.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.cases import CASES
from harness.checks import failures
from harness.evidence import clients
from harness.host import Host, Server, stub_settings
from harness.listen import served
from harness.model import Vocabulary
from harness.play import play
from harness.policy import scripted
from harness.stubs import Stubs
from harness.tiny import LENIENT, tiny_settings, tiny_trainer
from harness.trainer import ToyTrainer
from safetensors.torch import load_file

from openclaw_rl.settings import TrainerSettings
from openclaw_rl.testing import FakeEngine, stub_app


@asynccontextmanager
async def case_server(case: Mapping[str, Any], host: Host, vocabulary: Vocabulary, folder: Path) -> AsyncIterator[Any]:
    async with served(Stubs(case, vocabulary, pace=1.0)) as url:
        settings = {
            **stub_settings(url),
            "training.min_batch": 1,
            **LENIENT,
        }
        batch = {"training.batch_size": case.get("settings", {"batch_size": 4})["batch_size"]}
        async with host.server(folder, settings | batch) as server:
            yield server


async def trained(server: Server, settings: TrainerSettings) -> dict[str, Any]:
    """Run one step on the waiting samples and publish it; return its figures and its weights."""

    def step() -> Path:
        with tiny_trainer(server, settings) as loop:
            assert loop.turn() == 1
        (folder,) = (server.data_dir / "versions").iterdir()
        return folder

    folder = await asyncio.to_thread(step)
    async with asyncio.timeout(120):
        while (await asyncio.to_thread(server.admin, "/healthz"))["weight_version"] != 1:
            await asyncio.sleep(0.02)
    (row,) = [
        row
        for row in (await asyncio.to_thread(server.admin, "/v1/admin/history"))["versions"]
        if row["weight_version"] == 1
    ]
    metrics = row["metrics"]
    extremes = [abs(metrics["advantage_min"]), abs(metrics["advantage_max"])]
    weights = load_file(folder / "adapter_model.safetensors")
    return {
        "metrics": metrics | {"advantage_abs_max": max(extremes)},
        "weights": [value for tensor in weights.values() for value in tensor.flatten().tolist()],
    }


async def judged(server: Server, samples: int) -> None:
    async with asyncio.timeout(120):
        while True:
            counts = (await asyncio.to_thread(server.admin, "/v1/admin/status"))["counts"]
            if counts["sampled"] >= samples and not counts["paired"] + counts["judged"]:
                return
            await asyncio.sleep(0.02)


async def test_a_very_unlikely_token_spoils_nothing(host: Host, model_folder: Path, tmp_path: Path) -> None:
    case = CASES["TN-2"]
    async with case_server(case, host, Vocabulary.of(model_folder), tmp_path) as server:
        seen = await play(server.url, case["requests"][:2])
        await judged(server, 1)
        found = await trained(server, tiny_settings())
        seen += await play(server.url, case["requests"][2:])
        assert failures(case["expect"]["checks"], found | clients(seen), said={}) == []
        assert "loss" in found["metrics"]
        turn_id = seen[0].json["id"]
        sample = (await asyncio.to_thread(server.admin, f"/v1/turns/{turn_id}"))["sample"]
        assert min(sample["rollout_log_probs"]) == -91.0


async def test_equal_rewards_make_a_step_of_bounded_advantages(host: Host, model_folder: Path, tmp_path: Path) -> None:
    case = CASES["TN-3"]
    async with case_server(case, host, Vocabulary.of(model_folder), tmp_path) as server:
        await play(server.url, case["requests"])
        await judged(server, 4)
        found = await trained(server, tiny_settings())
    assert failures(case["expect"]["checks"], found, said={}) == []
    assert (found["metrics"]["samples"], found["metrics"]["reward_mean"]) == (4, 1.0)


async def test_an_empty_reply_and_the_cut_of_a_batch_change_nothing(
    host: Host, model_folder: Path, tmp_path: Path
) -> None:
    case = CASES["TN-5"]
    runs = []
    for micro_batch_tokens in (64, 4096):  # a sample each, and all together; padded, so that the cut shows
        folder = tmp_path / str(micro_batch_tokens)
        async with case_server(case, host, Vocabulary.of(model_folder), folder) as server:
            seen = await play(server.url, case["requests"])
            assert {one.status for one in seen} == {200}
            await judged(server, 3)
            key = (server.data_dir / "keys" / "admin.key").read_text().strip()
            async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120) as client:
                answer = await client.post(
                    "/v1/admin/train", json={}, headers={"Authorization": f"Bearer {key}"}
                )  # the fourth reply was empty: its batch would never be full
                assert answer.status_code == 200
                found = await trained(server, tiny_settings(micro_batch_tokens=micro_batch_tokens, packing="off"))
                health = (await client.get("/healthz", headers={"Authorization": f"Bearer {key}"})).json()
                # The stub's log-probs are not the tiny trainer's, and the server says so: the one problem there may be.
                problems = [problem for problem in health["problems"] if not problem.startswith("log-probs:")]
                found["proc"] = {"alive": problems == []}
            runs.append(found)
    checks = case["expect"]["checks"]
    for found in runs:
        assert failures([check for check in checks if check["op"] != "close_between_runs"], found, said={}) == []
        assert found["metrics"]["samples"] == 3
    (between,) = [check for check in checks if check["op"] == "close_between_runs"]
    one, other = (run["metrics"]["grad_norm"] for run in runs)
    assert one > 0
    assert abs(one - other) <= between["value"] * one
    computed = [run["metrics"]["computed_tokens"] for run in runs]
    assert computed[0] != computed[1], "the batch was cut alike"


@pytest.mark.parametrize("value", ["NaN", "1e999"])
async def test_a_step_without_numbers_never_serves_and_chats_go_on(
    value: str, host: Host, model_folder: Path, tmp_path: Path
) -> None:
    """A trainer that does not check its own numbers: its report is refused in each spelling of NaN."""
    vocabulary = Vocabulary.of(model_folder)
    policy = scripted(vocabulary, ["tea"])
    async with served(stub_app(FakeEngine(policy=policy))) as url:
        settings = {
            "server.api_keys": [{"key": "test-key", "user": "tester"}],
            "engine.kind": "url",
            "engine.url": url,
            "trainer.kind": "external",
            "training.batch_size": 1,
            "training.min_batch": 1,
        }
        async with host.server(tmp_path, settings) as server:
            ask, answer, probe = CASES["TN-2"]["requests"]
            await play(server.url, [ask, answer])
            trainer = ToyTrainer(server.url, server.data_dir, policy)
            lease = await asyncio.to_thread(trainer.lease)
            assert lease is not None
            body = (await asyncio.to_thread(trainer.checkpoint, lease)).model_dump_json()
            assert '"loss":0.1' in body
            token = (server.data_dir / "keys" / "trainer.token").read_text().strip()
            async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120) as client:
                reply = await client.post(
                    "/v1/trainer/commit",
                    content=body.replace('"loss":0.1', f'"loss":{value}'),
                    headers={"Authorization": f"Bearer {token}"},
                )
            if reply.status_code == 200:  # taken, and then the gate's to refuse
                async with asyncio.timeout(120):
                    while True:
                        version = await asyncio.to_thread(server.admin, "/v1/admin/versions/1")
                        if version["state"] == "rejected":
                            break
                        assert version["state"] == "candidate"
                        await asyncio.sleep(0.02)
                assert "not finite" in version["reason"]
            else:
                assert reply.status_code in (409, 422), reply.text
            (seen,) = await play(server.url, [probe])
            assert (seen.status, seen.headers["x-weight-version"]) == (200, "0")
            assert seen.json["choices"][0]["message"]["content"] == "tea"
