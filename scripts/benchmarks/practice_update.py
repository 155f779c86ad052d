"""Time and CPU of one update of practice on an idle server: sampling, scoring, the step, and the publication.

    scripts/benchmarks.sh practice_update [--updates 2] [--out FILE.json]

A real server runs OPD on the embedded default, and practises as soon as it is idle. Four chats end with a correction.
Then nobody chats, and each update begins with the replies of practice and ends with its version serving. The figures
are medians of the updates after the first, whose time includes the reading of the corrections.
"""

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.chat_load import chat
from benchmarks.loop_latency import cpu
from openclaw_rl.testing.running_server import RunningServer

QUESTIONS = ("sleep better", "learn a language", "save money", "grow basil")
CORRECTION = "That is too long. Please answer in one short sentence."
FLAGS = ("method.name=opd", "practice.idle_s=0", "log_format=json")


async def talk(url: str) -> None:
    """Hold the chats, each with a correction."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for number, about in enumerate(QUESTIONS):
            messages = [{"role": "user", "content": f"Give me tips to {about}."}]
            reply = await chat(client, messages, session=f"chat-{number}", max_tokens=96)
            assert reply.error is None, reply.error
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": CORRECTION}]
            await chat(client, messages, session=f"chat-{number}", max_tokens=8)


def measure(server: RunningServer, updates: int, timeout_s: float = 900.0) -> dict[str, object]:
    """Wait for the first update and `updates` more. Raises TimeoutError."""
    asyncio.run(talk(server.url))
    end = time.monotonic() + timeout_s
    versions, moments, used = [0], [time.monotonic()], [cpu(server)]
    while len(versions) < updates + 2:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(versions) - 1} updates in {timeout_s:g} s")
        time.sleep(0.2)
        serving = server.status()["serving"]
        if serving != versions[-1]:
            versions.append(serving)
            moments.append(time.monotonic())
            used.append(cpu(server))
    reports = [
        json.loads(server.admin("GET", f"/v1/admin/versions/{number}")["report_json"])["metrics"]
        for number in versions[2:]
    ]
    took = [after - before for before, after in itertools.pairwise(moments[1:])]
    return {
        "update, s": [round(seconds, 2) for seconds in took],
        "CPU, s": {
            name: round(statistics.median(b[name] - a[name] for a, b in itertools.pairwise(used[1:])), 2)
            for name in used[0]
        },
        "step, s": [round(report["learner_s"], 2) for report in reports],
        "replies": [report["samples"] for report in reports],
        "computed tokens": [report["computed_tokens"] for report in reports],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2, help="measured updates, after the first")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = [part for flag in FLAGS for part in ("--set", flag)]
    with tempfile.TemporaryDirectory() as folder, RunningServer(Path(folder), flags) as server:
        figures = measure(server, options.updates) | {"machine": f"{platform.machine()}, {platform.system()}"}
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
