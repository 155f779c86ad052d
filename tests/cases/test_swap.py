"""Case WS-1 as the case has it: ten chats stream at the case's own pace, and new weights come while they run.

The engine is the project's stub over HTTP: it loads adapters, refuses a flush while a request runs, and gives each
token the log-prob of the weights that sampled it. The same on the real engines: `tests/conformance`,
`scripts/benchmarks/swap_under_load.py`.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from harness.cases import CASES
from harness.checks import failures
from harness.evidence import clients
from harness.host import Host, Server
from harness.listen import served
from harness.model import Vocabulary
from harness.play import play
from harness.policy import scripted
from harness.trainer import ToyTrainer
from tolerances import rel

from openclaw_rl.testing import FakeEngine, stub_app
from openclaw_rl.testing.fake_engine import Pacing
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.types import WeightKind

CASE = CASES["WS-1"]
(ENGINE,) = CASE["engine"]
STARTS_S = 2.0
"""Seconds after the first request, by the case."""
SLOW, FAST = 2.0, 2000.0
"""Tokens a second during the swap, and after it. The first is slow, so that no reply ends before the swap on a busy
machine. The second is fast, to shorten the test."""


def asked(session: str, *said: str) -> dict[str, Any]:
    """Return a streamed request. said: texts of the user and the policy in turn."""
    (case,) = CASE["requests"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    headers = case["headers"] | {"X-Session-Id": session}
    return {
        "method": "POST",
        "path": case["path"],
        "headers": headers,
        "body": {"model": "policy", "messages": messages, "stream": True},
    }


async def weight_version(server: Server) -> int:
    text = await asyncio.to_thread(server.admin, "/metrics")
    return next(
        int(float(line.split()[1])) for line in text.splitlines() if line.startswith("openclaw_rl_weight_version ")
    )


@pytest.mark.parametrize("kind", list(WeightKind))
async def test_ten_requests_around_a_swap_all_succeed(
    kind: WeightKind, host: Host, model_folder: Path, tmp_path: Path
) -> None:
    vocabulary = Vocabulary.of(model_folder)
    policy, text = scripted(vocabulary, ENGINE["pieces"]), "".join(ENGINE["pieces"])
    engine = FakeEngine(policy=policy, pacing=Pacing(tokens_per_s=FAST))
    async with served(stub_app(engine)) as url:
        settings = {
            "server.api_keys": [{"key": "test-key", "user": "tester"}],
            "engine.kind": "url",
            "engine.url": url,
            "trainer.kind": "external",
            "training.weights": str(kind),
            "training.batch_size": 1,
            "training.min_batch": 1,
            "judge.kind": "rules",
            "publisher.self_test_tolerance": 1e-3,
            "publisher.unbroken_drain_s": 0.0,
            **({"judge.url": f"{url}/v1"} if kind is WeightKind.FULL else {}),
        }
        async with host.server(tmp_path, settings) as server:
            trainer = ToyTrainer(server.url, server.data_dir, policy, kind=kind)
            await play(server.url, [asked("before", "hello"), asked("before", "hello", text, "Thanks, perfect!")])
            lease = await asyncio.to_thread(trainer.lease)
            assert lease is not None
            update = await asyncio.to_thread(trainer.checkpoint, lease)
            versions = [await weight_version(server)]

            engine.pacing.tokens_per_s = min(SLOW, 1 / ENGINE["chunk_delay_s"])  # no reply ends before all ten began
            began = time.monotonic()
            chats = asyncio.create_task(play(server.url, CASE["requests"]))
            async with asyncio.timeout(120):
                while engine.running < 10:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(max(0.0, began + STARTS_S - time.monotonic()))
                engine.pacing.tokens_per_s = SLOW
                await asyncio.to_thread(trainer.client.commit, update)
                while await weight_version(server) == versions[0]:
                    await asyncio.sleep(0.02)
            assert not chats.done()
            late = asyncio.create_task(play(server.url, [asked("after", "talk for a while, part 11")]))
            async with asyncio.timeout(120):
                while engine.running < 11:  # all ten go on, beside one that came later
                    await asyncio.sleep(0.02)
            engine.pacing.tokens_per_s = FAST
            seen = await chats
            (after,) = await late
            versions.append(await weight_version(server))
            found = clients(seen) | {"metrics": {"weight_version": versions}}
            assert failures(CASE["expect"]["checks"], found, said={}) == []

            assert len(seen) == 10
            assert (after.status, after.headers["x-weight-version"]) == (200, "1")
            for stream in found["sse"]:
                assert (stream["content"], stream["finish_reasons"], stream["done_last"]) == (text, ["stop"], True)
            seeds = [BASE_SEED, next(iter(engine.adapters.values()), BASE_SEED ^ 1)]
            for one in seen:
                turn_id = json.loads(one.body.partition("data: ")[2].partition("\n\n")[0])["id"]
                record = await asyncio.to_thread(server.admin, f"/v1/turns/{turn_id}")
                check_tokens(record, policy, seeds, kind)


def check_tokens(record: Any, policy: Any, seeds: list[int], kind: WeightKind) -> None:
    """Check that each token has the log-prob of its run's weights, and that an adapter's reply keeps its adapter."""
    turn = record["turn"]
    runs = [(run["weight_version"], run["length"]) for run in turn["versions"]]
    assert [version for version, _ in runs] == ([0] if kind is WeightKind.LORA else [0, 1])
    ids, at = [*record["request"]["prompt_ids"], *turn["response_ids"]], len(record["request"]["prompt_ids"])
    wanted: list[float] = []
    for version, length in runs:
        wanted += [policy.log_prob(ids[: n + 1], n, seeds[version]) for n in range(at, at + length)]
        at += length
    assert turn["rollout_log_probs"] == pytest.approx(wanted, rel=rel())
