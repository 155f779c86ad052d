"""Load of the node check: streamed chats from a thread of their own, and their recorded log-probs."""

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chat_load import Reply, chat, quantile
from gpu import models
from gpu.host import NodeHost
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer

TOPICS = ("rivers", "bread", "stars", "trains", "gardens", "music", "winter", "bees")
ANSWERS = ("Thanks, that is perfect!", "No, that is wrong. Please answer in one short sentence.")
VISITORS = 16
MOST_TURNS, MOST_COMPARED = 120, 24


@dataclass
class Load:
    """Chats in a thread of their own: the steps of a part may block meanwhile."""

    url: str
    streams: int
    replies: list[Reply] = field(default_factory=list)
    offset: float = field(default_factory=lambda: time.time() - time.perf_counter())
    _stop: threading.Event = field(default_factory=threading.Event)
    _burst: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def burst(self) -> None:
        """Start VISITORS chats at about the same time."""
        self._burst.set()

    def stop(self, timeout_s: float = 120) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(timeout_s)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self.streams):
                tasks.create_task(self._talk(client, number))
            while not self._stop.is_set():
                await asyncio.sleep(0.003)
                if self._burst.is_set():
                    self._burst.clear()
                    for number in range(VISITORS):
                        tasks.create_task(self._visit(client, number))

    async def _talk(self, client: httpx.AsyncClient, number: int) -> None:
        """Hold two-turn sessions; the second message praises or rejects the first reply."""
        for session in itertools.count():
            if self._stop.is_set():
                return
            name = f"person-{number}-{session}-{time.time():.0f}"
            ask = f"Tell me about {TOPICS[number % 8]}, story {session}. " * (1 + number % 5)
            messages = [{"role": "user", "content": ask}]
            first = await chat(client, messages, session=name, max_tokens=64 + 16 * (number % 12))
            self.replies.append(first)
            messages += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": ANSWERS[(session + number) % 2]},
            ]
            self.replies.append(await chat(client, messages, session=name, max_tokens=16))
            if first.error:
                await asyncio.sleep(0.5)

    async def _visit(self, client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(0.001 * number)
        messages = [{"role": "user", "content": f"Good morning, visitor {number} here. What is new?"}]
        self.replies.append(await chat(client, messages, session=f"visitor-{time.time_ns()}", max_tokens=24))

    def figures(self, pauses: list[tuple[float, float]]) -> dict[str, Any]:
        """Return the figures of all replies. pauses: wall-clock intervals in which the server held chats."""
        replies, shift = list(self.replies), self.offset
        gaps = [gap for reply in replies for gap in reply.gaps]
        errors = Counter(reply.error for reply in replies if reply.error)
        inside = [reply for reply in replies if any(a <= reply.started + shift <= b for a, b in pauses)]
        mid = [
            reply
            for reply in replies
            if reply.token_times
            and any(reply.token_times[0] + shift < a < reply.token_times[-1] + shift for a, _ in pauses)
        ]
        ttft = [reply.token_times[0] - reply.started for reply in replies if reply.token_times]
        held = [reply.token_times[0] - reply.started for reply in inside if reply.token_times]
        tokens = sum((reply.usage or {}).get("completion_tokens", 0) for reply in replies)
        took = max((r.token_times[-1] for r in replies if r.token_times), default=0) - min(r.started for r in replies)
        return {
            "replies": len(replies),
            "tokens_per_s": round(tokens / max(took, 1e-9), 1),
            "refused or cut": dict(errors),
            "arrived during a pause": len(inside),
            "most in one pause": max((sum(a <= r.started + shift <= b for r in replies) for a, b in pauses), default=0),
            "running at a pause": len(mid),
            "wait of those that arrived, p50/max s": [_r(quantile(held, 0.5)), _r(max(held, default=0.0))],
            "ttft p50/p99 s": [_r(quantile(ttft, 0.5)), _r(quantile(ttft, 0.99))],
            "gap p50/p99/max s": [_r(quantile(gaps, 0.5)), _r(quantile(gaps, 0.99)), _r(max(gaps, default=0.0))],
            "finish": dict(Counter(reply.finish_reason for reply in replies)),
            "versions said in headers": sorted({r.weight_version for r in replies if r.weight_version is not None}),
        }


def _r(value: float) -> float:
    return round(value, 4)


# -- recorded log-probs ------------------------------------------------------------------------------------------------


def keep_turns(host: NodeHost, server: RunningServer, part: str) -> None:
    """Write the newest recorded turns, and the folders of the versions that sampled them, for `recorded`."""
    folders = {row["weight_version"]: row["folder"] for row in server.status()["versions"]}
    rows = []
    for turn in reversed(server.turns(limit=MOST_TURNS)):
        reply, runs = turn["turn"], turn["turn"]["versions"]
        if len(runs) == 1 and reply["response_ids"]:
            rows.append(
                {
                    "version": runs[0]["weight_version"],
                    "prompt_ids": turn["request"]["prompt_ids"],
                    "response_ids": reply["response_ids"],
                    "log_probs": reply["rollout_log_probs"],
                    "temperature": turn["request"]["sampling"]["temperature"],
                }
            )
    (host.work / f"turns-{part}.json").write_text(json.dumps({"folders": folders, "turns": rows}))


def recorded(host: NodeHost) -> Figures:
    """Compare the engine's log-probs of recorded turns with plain passes under Megatron's export of their version."""
    figures: Figures = {}
    for file in sorted(host.work.glob("turns-*.json")):
        kept = json.loads(file.read_text())
        by_version: dict[int, list[models.Forced]] = {}
        for row in kept["turns"]:
            forced = models.Forced(row["prompt_ids"], row["response_ids"], row["log_probs"], row["temperature"])
            by_version.setdefault(row["version"], []).append(forced)
        for version, replies in sorted(by_version.items(), key=lambda pair: -len(pair[1])):
            name = kept["folders"].get(str(version))
            folder = host.data_dir / name if name else host.checkpoint if version == 0 else None
            if folder is None or not any(folder.glob("*.safetensors")) or len(figures) >= 6:
                continue
            label = f"{file.stem.removeprefix('turns-')}, version {version}, {len(replies)} turns"
            figures[label] = models.compare(replies[:MOST_COMPARED], folder, None, host.device)
    return figures | {"findings": models.too_far(figures) + ["nothing was compared"] * (not figures)}
