"""Stage `latency`: time from the last feedback of a batch of 16 to the new version serving, by phase.

It measures two batches, one after the other; the first meets cold caches.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat_load import chat
from gpu import load
from gpu.host import SglangHost
from gpu.server_files import keep_logs, set_flags
from openclaw_rl.testing.phases import phases
from openclaw_rl.testing.running_server import RunningServer

BATCH, BATCHES, TOKENS = 16, 2, 128
TRAINER_S = 120.0


def run(host: SglangHost, data_dir: Path) -> dict[str, Any]:
    settings = [
        *load.SETTINGS, f"training.batch_size={BATCH}", f"training.min_batch={BATCH}",
        f'trainer.device="{host.device}"', "publisher.self_test_tolerance=0.3",
    ]  # fmt: skip
    if host.engine == "sglang":
        settings += ["model.context_length=4096"]
    flags = ["--engine-url", host.engine_url, "--model", str(host.model), "--judge", "rules"]
    flags += set_flags(settings)
    started = time.monotonic()
    try:
        with RunningServer(data_dir, flags, start_s=120) as server:
            figures: dict[str, Any] = {"server start_s": round(time.monotonic() - started, 1)}
            wait_for_trainer(data_dir / "logs" / "trainer.log", TRAINER_S * (4 if host.is_tiny else 1))
            figures["trainer ready_s"] = round(time.monotonic() - started, 1)
            for number in range(1, BATCHES + 1):
                figures[f"batch {number}"] = asyncio.run(_batch(server, number))
            figures["versions"] = [
                {key: row.get(key) for key in ("weight_version", "state", "reason")}
                for row in server.status()["versions"]
            ]
    finally:
        keep_logs(data_dir, host.out, f"latency-{host.model.name}")
    return figures


def wait_for_trainer(log: Path, timeout_s: float) -> None:
    """Wait until the trainer has loaded the version to train from."""
    end = time.monotonic() + timeout_s
    while not (log.exists() and "tip_loaded" in log.read_text(errors="replace")):
        if time.monotonic() > end:
            raise TimeoutError(f"no trainer within {timeout_s:g} s: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.2)


async def _batch(server: RunningServer, number: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        asked = []

        async def ask(at: int) -> None:
            question = {"role": "user", "content": f"Tell me about {load.TOPICS[at % 8]}, part {number}. " * 8}
            session = f"batch-{number}-{at}"
            reply = await chat(client, [question], session=session, max_tokens=TOKENS, ignore_eos=True)
            assert reply.error is None, reply.error
            asked.append((session, [question, {"role": "assistant", "content": reply.text}], load.ANSWERS[at % 2]))

        await asyncio.gather(*(ask(at) for at in range(BATCH)))
        for session, history, answer in asked:
            messages = [*history, {"role": "user", "content": answer}]
            last = time.perf_counter()
            await chat(client, messages, session=session, max_tokens=1)
        end = last + 150
        while (status := server.status())["serving"] < number:
            if status["counts"]["rejections_in_a_row"] or time.perf_counter() > end:
                raise RuntimeError(json.dumps(status["versions"])[:1500])
            await asyncio.sleep(0.05)
        took = time.perf_counter() - last
    version = server.admin("GET", f"/v1/admin/versions/{number}")
    metrics = json.loads(version["report_json"])["metrics"]
    return {
        "last feedback to serving, s": round(took, 2),
        "phases, s": phases(server.turns(), server.data_dir / "server.log", number, metrics),
        "trainer's own figures": {name: round(value, 3) for name, value in metrics.items()},
    }
