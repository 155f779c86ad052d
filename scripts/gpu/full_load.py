"""Stage `full`: streamed chats through the whole server while the engine's own weights are replaced under them.

A trainer in this module, whose step is noise, makes two versions over the trainer API; they pass the gate and the
self-test. Then the check pins each of them in turn. Every pin is a swap at a known time, so that requests can be sent
right into it. Afterwards recorded log-probs are compared with plain forward passes under the weights that each token
names.
"""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from benchmarks.chat_load import Reply, chat
from gpu import load, models
from gpu.host import SglangHost
from gpu.server_files import audit, events, keep_logs, set_flags
from openclaw_rl.data_dir import DataDir
from openclaw_rl.testing.running_server import RunningServer
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.client import LeaseSession, TrainerClient
from openclaw_rl.trainers.loop import TrainerLoop
from openclaw_rl.types import Sample, WeightKind

MADE = 2
"""Versions that the trainer makes."""
PROBE_TOKENS = 48
NOISE = 0.3
"""Share of each weight's standard deviation: moves log-probs by some tenths of a nat a token."""
BETWEEN_S, SOON_S, SPREAD_S = 1.5, 1.2, 0.15
SCORED_TURNS = 400
TEMPLATE_TOKENS = 8
"""Common start of all prompts: other chats of the new version may have cached it already."""


def run(host: SglangHost, data_dir: Path) -> dict[str, Any]:
    settings = [
        *load.SETTINGS, "training.weights=full", "trainer.kind=external", "training.batch_size=8",
        "training.min_batch=4", "training.max_wait_s=2", "publisher.self_test_tolerance=0.1",
        "watch.enabled=false",  # the pin decides which version serves
    ]  # fmt: skip
    if host.engine == "sglang":
        settings += ["model.context_length=4096"]
    flags = ["--engine-url", host.engine_url, "--model", str(host.model), "--judge", "rules"]
    flags += set_flags(settings)
    server = RunningServer(data_dir, flags, start_s=120)
    figures: dict[str, Any] = {}
    try:
        with server:
            figures |= asyncio.run(_load(host, server, data_dir))
            turns = server.turns(limit=SCORED_TURNS)
            versions = {row["weight_version"]: row for row in server.status()["versions"]}
            figures["counts"] = server.status()["counts"]
        figures["phases of each swap, s"] = swap_phases(data_dir / "server.log")
        host.so_far("full", figures)
        looked = recorded(host, data_dir, turns, versions)
        figures |= looked | {"findings": figures["findings"] + [f"audit: {one}" for one in looked["audit"]]}
    finally:
        keep_logs(data_dir, host.out, "full")
    return figures


# -- the trainer -------------------------------------------------------------------------------------------------------


class NoisyLearner:
    """Full weights whose step is noise, large enough to tell from each token which version sampled it."""

    kind = WeightKind.FULL

    def __init__(self, base: Path, base_hash: str, device: str) -> None:
        self.base_hash, self._base, self._device = base_hash, base, device

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        where = folder or self._base
        self._model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).to(self._device).eval()
        self._round()

    def _round(self) -> None:
        """Round the weights to bfloat16, in which they are written and served."""
        with torch.no_grad():
            for weight in self._model.parameters():
                weight.copy_(weight.bfloat16())

    def step(self, samples: Sequence[Sample], between: Callable[[], None], parent: int | None = None) -> Step | NoStep:
        between()
        started, sample = time.perf_counter(), samples[0]
        reply = list(sample.response_ids[:PROBE_TOKENS])
        forced = models.Forced(list(sample.prompt_ids), reply, [], 1.0)
        before = models.forced_log_probs(self._model, forced, self._device)
        torch.manual_seed(len(samples))
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                if "proj" in name:
                    weight.add_(torch.randn_like(weight) * NOISE * weight.std())
        self._round()
        after = models.forced_log_probs(self._model, forced, self._device)
        probe = Probe(
            prompt_ids=forced.prompt_ids,
            response_ids=reply,
            log_probs=after.tolist(),
            parent_log_probs=before.tolist(),
        )
        shift = float((after - before).abs().mean())
        return Step({"learner_s": time.perf_counter() - started, "probe_shift": shift}, {}, (probe,))

    def write(self, folder: Path) -> str:
        self._model.to(torch.bfloat16).save_pretrained(folder)
        self._model.to(torch.float32)
        return "model.safetensors"


def train(server: RunningServer, host: SglangHost, data_dir: Path, stop: threading.Event) -> None:
    """Train until MADE versions are committed."""
    token = (DataDir.of(data_dir).keys / "trainer.token").read_text().strip()
    client = TrainerClient(server.url, token)
    try:
        learner = NoisyLearner(host.model, client.tip().base_hash, host.device)
        loop = TrainerLoop(LeaseSession(client, "noise", stop), learner, data_dir)
        made = 0
        while made < MADE and not stop.is_set():
            made += loop.turn() is not None
    finally:
        client.close()


# -- the load ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Signals:
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_soon: bool = False
    """A swap comes soon: a client without a running reply keeps its next request for it."""
    swapping: asyncio.Event = field(default_factory=asyncio.Event)


async def _load(host: SglangHost, server: RunningServer, data_dir: Path) -> dict[str, Any]:
    replies: list[Reply] = []
    windows: list[tuple[float, float]] = []
    cached: list[tuple[int, int]] = []
    signals, halt = Signals(), threading.Event()
    began = time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    training = asyncio.create_task(asyncio.to_thread(train, server, host, data_dir, halt))
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            talking = [asyncio.create_task(_talk(client, n, signals, replies)) for n in range(host.streams)]
            await asyncio.to_thread(server.wait_for, "versions serve", lambda now: now["serving"] >= MADE, 120)
            await training
            calm = time.perf_counter()
            await asyncio.sleep(2 * BETWEEN_S)
            await _cached(client)
            for number in range(host.full_swaps):
                before = await _cached(client)
                signals.is_soon = True
                await asyncio.sleep(SOON_S)
                version = MADE - 1 + number % 2 if number < host.full_swaps - 1 else 0
                pin = asyncio.create_task(
                    asyncio.to_thread(server.admin, "POST", "/v1/admin/pin", {"weight_version": version})
                )
                start = time.perf_counter()
                signals.swapping.set()
                await pin
                windows.append((start, time.perf_counter()))
                signals.is_soon = False
                signals.swapping.clear()
                cached.append((before, await _cached(client)))
                await asyncio.sleep(BETWEEN_S)
            signals.stop.set()
            ended = time.perf_counter()
            await asyncio.gather(*talking)
    finally:
        halt.set()
        signals.stop.set()
        signals.swapping.set()
    return _figures(host, [r for r in replies if r.started > calm], replies, windows) | {
        "load_s": round(ended - began, 1),
        "cached tokens of a salted prompt, before and after each swap": cached,
        "findings": [f"stale or no prefixes: {cached}"]
        if any(before < 100 or not 0 <= after <= TEMPLATE_TOKENS for before, after in cached)
        else [],
    }


def _figures(
    host: SglangHost, replies: list[Reply], every: list[Reply], windows: list[tuple[float, float]]
) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"calm": [], "over a swap": []}
    for reply in replies:
        for a, b in itertools.pairwise(reply.token_times):
            over = any(a < end and b > start for start, end in windows)
            gaps["over a swap" if over else "calm"].append(b - a)
    during = [reply for reply in replies if any(start <= reply.started <= end for start, end in windows)]
    refused = [reply.error for reply in every if reply.error and not reply.error.startswith("cut")]
    cut = [reply.error for reply in every if reply.error and reply.error.startswith("cut")]
    tokens = sum((reply.usage or {}).get("completion_tokens", 0) for reply in replies)
    return {
        "streams": host.streams,
        "requests": len(replies),
        "sent during a swap": len(during),
        "share sent during a swap": round(len(during) / max(1, len(replies)), 3),
        "refused": dict(Counter(refused)),
        "cut": dict(Counter(cut)),
        "finish": dict(Counter(reply.finish_reason for reply in every)),
        "tokens": tokens,
        "seconds of each pin, client's view": [round(end - start, 3) for start, end in windows],
        **{f"gap {name} p50/p99/max s": [*load.p50_p99(v), round(max(v, default=0.0), 3)] for name, v in gaps.items()},
        "ttft of those sent during a swap p50/p99 s": load.p50_p99(
            [reply.token_times[0] - reply.started for reply in during if reply.token_times]
        ),
    }


async def _talk(client: httpx.AsyncClient, number: int, signals: Signals, into: list[Reply]) -> None:
    """Chat until the stop. One client in four streams long replies, which swaps cut; the others wait for the swaps."""
    pauses, is_long = random.Random(number), number % 4 == 1

    async def turn() -> None:
        if signals.is_soon and not is_long and not signals.stop.is_set():
            await signals.swapping.wait()
            await asyncio.sleep(SPREAD_S * pauses.random())

    for session in itertools.count():
        if signals.stop.is_set():
            return
        messages, fields = load.opening(number, session)
        name = f"person-{number}-{session}"
        await turn()
        tokens = 400 + 50 * (number % 4) if is_long else 96 + 32 * (number % 5)
        first = await chat(client, messages, session=name, max_tokens=tokens, **fields)
        into.append(first)
        answer = load.ANSWERS[(session + number) % 2]
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": answer}]
        await turn()
        into.append(await chat(client, messages, session=name, max_tokens=tokens if is_long else 96, **fields))
        if first.error:
            await asyncio.sleep(0.5)


async def _cached(client: httpx.AsyncClient) -> int:
    """Return the cached tokens of a fixed prompt: none right after a swap, all when asked again. -1: it failed."""
    messages = [
        {"role": "system", "content": "What grows in the desert? " * 40},
        {"role": "user", "content": "Say it."},
    ]
    reply = await chat(
        client, messages, session="salted", headers={"X-Turn-Type": "side"}, max_tokens=2, ignore_eos=True
    )
    details = (reply.usage or {}).get("prompt_tokens_details") or {}
    return -1 if reply.error else int(details.get("cached_tokens", -1))


# -- what was recorded -------------------------------------------------------------------------------------------------


def recorded(
    host: SglangHost, data_dir: Path, turns: Sequence[Any], versions: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    whole: list[models.Recorded] = []
    joined: list[models.Recorded] = []
    for turn in turns:
        reply, runs = turn["turn"], [(run["weight_version"], run["length"]) for run in turn["turn"]["versions"]]
        if not reply["response_ids"] or None in reply["rollout_log_probs"]:
            continue
        (joined if len(runs) > 1 else whole).append(models.Recorded(models.forced_of(turn), runs))
    folders = {n: data_dir / row["folder"] if row["folder"] else host.model for n, row in versions.items()}
    scored = models.compare_runs([*whole[-60:], *joined[-80:]], folders, host.device)
    return {
        "recorded replies looked at": len(turns),
        "joined replies": len(joined),
        "most versions in one reply": max((len(recorded.runs) for recorded in joined), default=1),
        "log-probs against fp32 under each token's version": scored,
        "audit": audit(data_dir),
    }


def swap_phases(log: Path) -> list[dict[str, float]]:
    kept = ("weight_version", "finish_s", "cut_s", "push_s", "held_s")
    return [{key: round(event[key], 3) for key in kept if key in event} for event in events(log, "weights_swapped")]
