"""Stages `attached` and `child`: chats streamed through the whole server while its trainer steps and adapters swap.

Afterwards the recorded log-probs are compared with plain forward passes.
"""

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat_load import Reply, chat, quantile
from gpu import models
from gpu.host import SglangHost
from gpu.server_files import audit, keep_logs, set_flags
from openclaw_rl.testing.running_server import RunningServer

TOPICS = ("rivers", "bread", "stars", "trains", "gardens", "music", "winter", "bees")
ANSWERS = ("Thanks, that is perfect!", "No, that is wrong. Shorter please.")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
SETTINGS = (
    "training.max_staleness=100", "publisher.max_step_kl=1000", "publisher.max_base_kl=1000", "engine.hold_s=280",
    "sampling.temperature=0.8", "log_format=json", "server.max_streams=512",
)  # fmt: skip


def run(host: SglangHost, data_dir: Path, flags: list[str], *, kill: bool) -> dict[str, Any]:
    """Stream chats through a server of its own. kill: SIGKILL its engine in the middle."""
    settings = [
        *SETTINGS, "training.batch_size=8", "training.min_batch=4", "training.max_wait_s=5",
        f'trainer.device="{host.device}"',
    ]  # fmt: skip
    settings += ["model.context_length=4096"] if host.engine == "sglang" else ["engine.max_running=8"]
    flags = ["--model", str(host.model), "--judge", "rules", *flags]
    flags += set_flags(settings)
    started = time.monotonic()
    figures: dict[str, Any] = {}
    server = RunningServer(data_dir, flags, start_s=280)
    try:
        with server:
            figures["start_s"] = round(time.monotonic() - started, 1)
            monitor = ServerMonitor(server)
            monitor.start()
            try:
                figures |= asyncio.run(_load(host, server, monitor, kill=kill))
                sampled = _sampled(server, data_dir, host.work / "sampled-under")
                figures |= _rest(server)
            finally:
                monitor.stop()
            figures |= monitor.figures()
            host.so_far("child" if kill else "attached", figures)
            rows = server.admin("GET", "/v1/admin/history?versions=20")["versions"]
            ratios = [row["metrics"]["abs_log_ratio"] for row in rows if "abs_log_ratio" in row["metrics"]]
            figures["trainer against engine, mean |log ratio| of the last steps"] = [round(r, 5) for r in ratios[-5:]]
        recorded = _recorded(host, data_dir, sampled)
        figures |= recorded | {"findings": figures["findings"] + recorded["findings"]}
    finally:
        keep_logs(data_dir, host.out, "child" if kill else "attached")
    return figures


class ServerMonitor:
    """Polls the server twice a second: when each version began to serve, its problems, the memory of GPU processes."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.served: dict[int, float] = {}
        self._memory: dict[str, int] = {}
        self._problems: Counter[str] = Counter()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _look(self) -> None:
        while not self._stop.wait(0.5):
            try:
                status = self._server.status()
            except (httpx.HTTPError, OSError):
                continue
            self.served.setdefault(status["serving"], time.perf_counter())
            self._problems.update(status["problems"])
            query = ["nvidia-smi", "--query-compute-apps=process_name,used_memory", "--format=csv,noheader,nounits"]
            try:
                rows = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
            except (OSError, subprocess.SubprocessError):
                continue
            for name, _, used in (row.rpartition(",") for row in rows):
                if used.strip().isdigit():
                    self._memory[name] = max(self._memory.get(name, 0), int(used))

    def figures(self) -> dict[str, Any]:
        return {"gpu MiB at most": self._memory, "problems seen": dict(self._problems)}


async def _load(host: SglangHost, server: RunningServer, monitor: ServerMonitor, *, kill: bool) -> dict[str, Any]:
    replies: list[Reply] = []
    stop = asyncio.Event()
    figures: dict[str, Any] = {}
    started = time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(host.streams):
            tasks.create_task(_talk(client, number, stop, replies))
        if kill:
            await asyncio.sleep(min(20.0, host.load_s / 2))
            figures["killed"] = await asyncio.to_thread(_kill_engine, server)
        while True:
            await asyncio.sleep(0.5)
            lasted = time.perf_counter() - started
            if lasted > host.load_s and (len(monitor.served) > host.swaps or lasted > 2 * host.load_s):
                break
        stop.set()
    took = time.perf_counter() - started
    gaps = [gap for reply in replies for gap in reply.gaps]
    swaps = sorted(monitor.served.values())[1:]
    near = [
        b - a
        for reply in replies
        for a, b in itertools.pairwise(reply.token_times)
        if any(a <= at <= b + 0.5 for at in swaps)
    ]
    tokens = sum((reply.usage or {}).get("completion_tokens", 0) for reply in replies)
    errors = Counter(reply.error for reply in replies if reply.error)
    return figures | {
        "streams": host.streams,
        "load_s": round(took, 1),
        "replies": len(replies),
        "tokens_per_s": round(tokens / took, 1),
        "ttft p50/p99 s": p50_p99(
            sorted(reply.token_times[0] - reply.started for reply in replies if reply.token_times)
        ),
        "gap p50/p99/max s": [*p50_p99(gaps), round(max(gaps, default=0.0), 3)],
        "gap near a swap p50/p99/max s": [*p50_p99(near), round(max(near, default=0.0), 3)],
        "finish": dict(Counter(reply.finish_reason for reply in replies)),
        "swaps": len(swaps),
        "seconds between swaps": [round(b - a, 1) for a, b in itertools.pairwise(sorted(monitor.served.values()))],
        "refused or cut": dict(errors),
        "findings": [f"{sum(errors.values())} requests were refused or cut"] * bool(errors)
        + [f"only {len(swaps)} swaps"] * (len(swaps) < host.swaps),
    }


async def _talk(client: httpx.AsyncClient, number: int, stop: asyncio.Event, into: list[Reply]) -> None:
    """Hold two-turn sessions; the second user message praises or rejects the first reply."""
    for session in itertools.count():
        if stop.is_set():
            return
        name = f"person-{number}-{session}"
        messages, fields = opening(number, session)
        answer = ANSWERS[
            (session + number) % 2
        ]  # mixed at any time: the server would take a run of bad verdicts for a regression
        first = await chat(client, messages, session=name, max_tokens=32 + 16 * (number % 6), **fields)
        into.append(first)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": answer}]
        into.append(await chat(client, messages, session=name, max_tokens=16, **fields))
        if first.error:
            await asyncio.sleep(0.5)


def opening(number: int, session: int) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Return a first message and more fields: some requests have tools, some stop strings, some are long."""
    times = {6: 120, 7: 180}.get(number % 8, 1 + number % 5)
    message = {"role": "user", "content": f"Tell me about {TOPICS[number % 8]}, story {session}. " * times}
    kinds: dict[int, dict[str, Any]] = {0: {"tools": [TOOL]}, 3: {"stop": ["the end", "#"]}}
    return [message], kinds.get(number % 4, {})


def _kill_engine(server: RunningServer) -> dict[str, Any]:
    def of(status: Any) -> Any:
        return next(child for child in status["children"] if child["name"] == "engine")

    status = server.status()
    pid, before = of(status)["pid"], status["serving"]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    status = server.wait_for(
        "the engine is back", lambda now: not now["problems"] and of(now)["pid"] not in (None, pid), 250
    )
    return {"serving before": before, "serving after": status["serving"], "back_s": round(time.monotonic() - killed, 1)}


def _rest(server: RunningServer) -> dict[str, Any]:
    """Wait until the last samples are trained; return the counts of the ledger."""

    def is_so(now: Any) -> bool:
        moving = sum(now["counts"].get(state, 0) for state in ("running", "paired", "judged", "leased"))
        return not moving and now["serving"] == now["tip"]

    try:
        status = server.wait_for("everything came to rest", is_so, 15)
    except TimeoutError:
        status = server.status()
    reasons = Counter(f"{row['state']}: {row.get('reason')}" for row in status["versions"] if row.get("reason"))
    return {
        "serving": status["serving"],
        "tip": status["tip"],
        "counts": status["counts"],
        "versions": dict(Counter(row["state"] for row in status["versions"])),
        "version reasons": dict(reasons),
    }


@dataclass(frozen=True, slots=True)
class Sampled:
    """Newest turns of one version, and a copy of its adapter, which the server may delete meanwhile."""

    version: int
    adapter: Path | None
    replies: list[models.Forced]


def _sampled(server: RunningServer, data_dir: Path, copies: Path) -> list[Sampled]:
    """Return the turns of the two versions that sampled most of the newest turns."""
    shutil.rmtree(copies, ignore_errors=True)
    by_version: dict[int, list[models.Forced]] = {}
    for turn in server.turns(limit=120):
        runs, reply = turn["turn"]["versions"], turn["turn"]
        if len(runs) == 1 and reply["response_ids"]:
            by_version.setdefault(runs[0]["weight_version"], []).append(models.forced_of(turn))
    found: list[Sampled] = []
    rows = {row["weight_version"]: row["folder"] for row in server.status()["versions"]} | {0: None}
    for version, replies in sorted(by_version.items(), key=lambda pair: -len(pair[1])):
        adapter = copies / str(version) if rows.get(version) else None
        if version not in rows or len(found) == 2:
            continue
        with suppress(shutil.Error, OSError):  # the server deleted it meanwhile
            if adapter is not None:
                shutil.copytree(data_dir / rows[version], adapter)
            found.append(Sampled(version, adapter, replies))
    return found


def _recorded(host: SglangHost, data_dir: Path, sampled: list[Sampled]) -> dict[str, Any]:
    """Compare recorded log-probs with plain forward passes; audit the ledger."""
    figures = {
        f"recorded under v{one.version}": models.compare(one.replies[:24], host.model, one.adapter, host.device)
        for one in sampled
    }
    found = audit(data_dir)
    findings = [*models.too_far(figures), *(f"audit: {one}" for one in found)]
    findings += ["no recorded log-probs were compared"] * (not figures)
    return {"recorded log-probs": figures, "audit": found, "findings": findings}


def p50_p99(values: list[float]) -> list[float]:
    return [round(quantile(values, q), 4) for q in (0.5, 0.99)]
