"""Time from the last feedback of a batch to the new version serving, gaps of a running chat, and resident memory.

    scripts/benchmarks.sh loop_latency [--chats 8] [--out FILE.json]

A real server runs on the embedded default. One chat streams long replies all the time. Its inter-token gaps are taken
in the same run, in three phases: the trainer is idle; the step runs (lease to commit); the version is published (gate,
load, self-test). The CPU seconds of each process between the last feedback and the new version tell a slow machine from
a busy one.
"""

import argparse
import asyncio
import json
import platform
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.chat_load import Reply, chat, quantile
from benchmarks.proxy.load import cpu_s
from openclaw_rl.testing.phases import moments, phases
from openclaw_rl.testing.running_server import RunningServer

QUESTIONS = [
    "sleep better",
    "learn a language",
    "save money",
    "cook rice",
    "stay focused",
    "write a letter",
    "grow basil",
    "plan a trip",
]


async def background(client: httpx.AsyncClient, stop: asyncio.Event, into: list[Reply]) -> None:
    """Run one side chat after another: served like any chat, never trained on."""
    number = 0
    while not stop.is_set():
        number += 1
        messages = [{"role": "user", "content": f"Tell me a long story about a river, part {number}."}]
        into.append(
            await chat(
                client, messages, session="running", headers={"X-Turn-Type": "side"}, max_tokens=200, ignore_eos=True
            )
        )


async def measure(server: RunningServer, chats: int) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        histories = []
        for number in range(chats):
            messages = [{"role": "user", "content": f"Give me one tip to {QUESTIONS[number % len(QUESTIONS)]}."}]
            reply = await chat(client, messages, session=f"chat-{number}", max_tokens=48)
            assert reply.error is None, reply.error
            histories.append([*messages, {"role": "assistant", "content": reply.text}])
        stop = asyncio.Event()
        running: list[Reply] = []
        task = asyncio.create_task(background(client, stop, running))
        await asyncio.sleep(20)
        for number, history in enumerate(histories):
            answer = "Thanks, perfect!" if number % 2 else "No, that is wrong. Shorter please."
            last = time.perf_counter()
            await chat(client, [*history, {"role": "user", "content": answer}], session=f"chat-{number}", max_tokens=1)
        before = cpu(server)
        while server.status()["serving"] < 1:
            await asyncio.sleep(0.2)
            if time.perf_counter() - last > 600:
                raise TimeoutError(json.dumps(server.status()))
        served = time.perf_counter()
        worked = {name: round(seconds - before[name], 2) for name, seconds in cpu(server).items() if name in before}
        used = memory(server)
        stop.set()
        await task
        turns, version = server.turns(), server.admin("GET", "/v1/admin/versions/1")
    metrics = json.loads(version["report_json"])["metrics"]
    log = server.data_dir / "server.log"
    at = moments(turns, log, 1)
    to_unix = time.time() - time.perf_counter()
    gaps = [(t + to_unix, gap) for reply in running for t, gap in zip(reply.token_times[1:], reply.gaps, strict=True)]
    windows = {
        "idle": (0.0, last + to_unix - 10),
        "in the step": (at.leased, at.committed),
        "in the publication": (at.committed, at.published),
    }
    during = {name: [gap for t, gap in gaps if start <= t <= end] for name, (start, end) in windows.items()}
    return {
        "chats": chats,
        "last feedback to serving, s": round(served - last, 2),
        "its phases, s": phases(turns, log, 1, metrics),
        "CPU, s": worked,
        "trainer's own figures": metrics,
        "inter-token gap p50 / p99, ms": {
            name: [round(1e3 * quantile(values, q), 1) for q in (0.5, 0.99)] for name, values in during.items()
        },
        "gap over idle p50 / p99": {
            name: [round(quantile(values, q) / quantile(during["idle"], q), 2) for q in (0.5, 0.99)]
            for name, values in during.items()
            if name != "idle"
        },
        "tokens counted": {name: len(values) for name, values in during.items()},
        "errors of the running chat": [reply.error for reply in running if reply.error],
        "resident memory, MB": used,
    }


def processes(server: RunningServer) -> dict[str, int]:
    assert server.process is not None
    return {"server": server.process.pid} | {child["name"]: child["pid"] for child in server.status()["children"]}


def cpu(server: RunningServer) -> dict[str, float]:
    """Return the CPU seconds that each process has used."""
    return {name: cpu_s(pid) for name, pid in processes(server).items()}


def memory(server: RunningServer) -> dict[str, float]:
    """Return the resident and the proportional set size of each process (the latter counts shared pages once)."""
    figures = {}
    for name, pid in processes(server).items():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            field, _, value = line.partition(":")
            if field in ("Rss", "Pss"):
                figures[f"{name} {field.upper()}"] = round(int(value.split()[0]) / 1024, 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer(Path(folder), ["--batch-size", str(options.chats), "--set", "log_format=json"]) as server,
    ):
        figures = asyncio.run(measure(server, options.chats)) | {
            "machine": f"{platform.machine()}, {platform.system()}"
        }
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
