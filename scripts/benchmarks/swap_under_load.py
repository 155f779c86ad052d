"""Publishing under load: replies that are refused, cut or mixed, and the growth of memory.

    scripts/benchmarks.sh swap_under_load [--clients 8] [--versions 10] [--out FILE.json]
    scripts/benchmarks.sh swap_under_load --keep FOLDER      # the load only; the scoring later:
    scripts/benchmarks.sh swap_under_load --score FOLDER

A real server serves the bundled model. Clients stream replies without a pause; meanwhile this script is the trainer and
commits synthetic adapters. Their scale is raised until any two neighbours differ by more than one nat a token on a
fixed text. Afterwards a plain transformers + PEFT forward scores every recorded reply under the version that the ledger
names, and every fourth under another one too. A reply that mixed two versions would agree with neither.

Memory is read once per version, as the median of several readings, in a short pause between replies and with the prefix
cache flushed: without the replies in flight. The slope comes with its 95 % interval.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from benchmarks.chat_load import Reply, chat, quantile
from openclaw_rl.models.resolve import load_model, resolve
from openclaw_rl.settings import ModelSettings
from openclaw_rl.testing.running_server import RunningServer
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.trainers.checkpoint import sha256
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.types import WeightKind

SETTINGS = [
    "trainer.kind=external",
    "training.batch_size=1",
    "training.min_batch=1",
    "training.max_staleness=100",
    "publisher.max_step_kl=1000",  # the adapters are far apart on purpose
    "publisher.max_base_kl=1000",
    "engine.cache_tokens=256",  # the content of the prefix cache is no leak, but as large as one
]
TEXT = (
    "The old lighthouse stood at the end of the pier. Every evening its keeper climbed the stairs, lit the lamp and "
    "wrote down the weather, the ships that passed and anything else that seemed worth remembering."
)
"""Text on which the adapters' distance is measured before the run."""
APART = 1.25
"""Distance on that text in nats a token, so that replies, which are other texts, stay more than one nat apart."""
UNLOAD_S, READINGS = 3.0, 5
"""The publisher checks every two seconds for versions to unload."""
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45}
"""Student's t for 95 %, by degrees of freedom."""
TOPICS = ["rivers", "bread", "stars", "trains", "gardens", "music", "winter", "bees"]


class Load:
    """The clients' replies, and a gate that holds all clients between two replies."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._running = 0

    async def chat(self, *args: Any, **fields: Any) -> Reply:
        await self._is_open.wait()
        self._running += 1
        try:
            self.replies.append(reply := await chat(*args, **fields))
            return reply
        finally:
            self._running -= 1

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        self._is_open.clear()
        try:
            while self._running:
                await asyncio.sleep(0.05)
            yield
        finally:
            self._is_open.set()


async def talk(client: httpx.AsyncClient, number: int, stop: asyncio.Event, load: Load) -> None:
    """Hold two-turn sessions, one after another: a question, then thanks, which makes the first reply a sample."""
    for session in itertools.count():
        if stop.is_set():
            return
        name, topic = f"client-{number}-{session}", TOPICS[number % len(TOPICS)]
        messages = [{"role": "user", "content": f"Tell me about {topic}, story {session}."}]
        first = await load.chat(client, messages, session=name, max_tokens=48)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Thanks, perfect!"}]
        await load.chat(client, messages, session=name, max_tokens=32)


def synthetic_adapter(model: Any, folder: Path, seed: int, scale: float) -> None:
    """Write a rank-4 adapter of Gaussian noise."""
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, scale)
    peft.save_pretrained(folder)
    peft.unload()


@torch.no_grad()
def make_adapters(model: Any, folder: Path, count: int, scale: float) -> tuple[list[Path], float, float]:
    """Return the folders, the scale, and the smallest distance between neighbours, the base being the first."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(ModelSettings(), folder / "data" / "cache").folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    adapters = [folder / f"adapter-{number}" for number in range(1, count + 1)]

    def log_probs(policy: Any) -> torch.Tensor:
        return policy(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    while True:
        for number, adapter in enumerate(adapters, 1):
            synthetic_adapter(model, adapter, number, scale)
        rows = [log_probs(model)]
        for adapter in adapters:
            policy = PeftModel.from_pretrained(model, adapter)
            rows.append(log_probs(policy))
            policy.unload()
        distance = min(float((a - b).abs().mean()) for a, b in itertools.pairwise(rows))
        print(f"scale {scale:.2f}: the closest neighbours are {distance:.2f} nats a token apart", flush=True)
        if distance > APART:
            return adapters, scale, distance
        scale *= 1.3


def commit_version(trainer: TrainerClient, data_dir: Path, adapter: Path) -> int:
    while (lease := trainer.lease("swap_under_load", wait_s=10)) is None:
        pass
    folder = f"versions/{lease.lease_id}"
    shutil.copytree(adapter, data_dir / folder)
    manifest = Manifest(
        folder=folder,
        kind=WeightKind.LORA,
        base_hash=trainer.tip().base_hash,
        sha256=sha256(data_dir / folder / "adapter_model.safetensors"),
    )
    report = Report(metrics={"loss": 0.0})
    body = Commit(lease_id=lease.lease_id, fence=lease.fence, parent=lease.parent, manifest=manifest, report=report)
    return trainer.commit(body)


def private_mb(pid: int) -> float:
    """Return the anonymous memory, which a leak would grow; pages of mapped weight files vary with the page cache."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Anonymous:")).split()[1]) / 1024


async def settled_mb(server: RunningServer, load: Load) -> dict[str, float]:
    """Return the memory of engine and server once all chats have ended and older versions are unloaded."""
    assert server.process is not None
    status = await asyncio.to_thread(server.status)
    pids = {child["name"]: child["pid"] for child in status["children"]} | {"server": server.process.pid}
    engine = json.loads((server.data_dir / "run" / "engine.port.json").read_text())["url"]
    readings: dict[str, list[float]] = {"engine": [], "server": []}
    async with load.held(), httpx.AsyncClient() as client:
        await asyncio.sleep(UNLOAD_S)
        for _ in range(READINGS):
            (await client.post(f"{engine}/flush_cache")).raise_for_status()
            await asyncio.sleep(0.3)
            for name, found in readings.items():
                found.append(private_mb(pids[name]))
    return {name: median(found) for name, found in readings.items()}


async def measure(
    server: RunningServer, adapters: list[Path], clients: int, settle_s: float
) -> tuple[dict[str, Any], list[Any]]:
    trainer = TrainerClient(server.url, (server.data_dir / "keys" / "trainer.token").read_text().strip())
    stop, load, memory, publish_s = asyncio.Event(), Load(), [], []
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client, asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(talk(client, number, stop, load))
        await asyncio.sleep(5)
        for adapter in adapters:
            version = await asyncio.to_thread(commit_version, trainer, server.data_dir, adapter)
            started = time.perf_counter()
            while (await asyncio.to_thread(server.status))["serving"] < version:
                await asyncio.sleep(0.1)
            publish_s.append(time.perf_counter() - started)
            await asyncio.sleep(settle_s)
            memory.append({"version": version, **await settled_mb(server, load)})
            print(f"version {version}: served after {publish_s[-1]:.1f} s, {len(load.replies)} replies, {memory[-1]}")
        stop.set()
    replies = load.replies
    trainer.close()
    late = [row for row in memory if row["version"] >= 4]
    return {
        "clients": clients,
        "replies": len(replies),
        "versions seen by clients": sorted(
            {reply.weight_version for reply in replies if reply.weight_version is not None}
        ),
        "refused or cut": [reply.error for reply in replies if reply.error],
        "commit to serving p50 / max, s": [round(quantile(publish_s, q), 2) for q in (0.5, 1.0)],
        "memory slope over versions 4 on, MB a version": {
            name: slope([(row["version"], row[name]) for row in late]) for name in ("engine", "server")
        },
        "memory": memory,
    }, server.turns(limit=1000)


def slope(points: list[tuple[float, float]]) -> dict[str, float]:
    """Return the least-squares slope, and half the width of its 95 % interval."""
    x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - x0) ** 2 for x, _ in points)
    found = sum((x - x0) * (y - y0) for x, y in points) / spread
    free = len(points) - 2
    rest = sum((y - y0 - found * (x - x0)) ** 2 for x, y in points) / free if free > 0 else float("nan")
    return {"slope": round(found, 3), "plus or minus": round(STUDENT.get(free, 2.0) * (rest / spread) ** 0.5, 3)}


@torch.no_grad()
def check_versions(model: Any, adapters: list[Path], turns: list[Any]) -> dict[str, Any]:
    """Return |recorded − plain forward| of every reply under its version, and of every fourth under the previous."""
    by_version: dict[int, list[Any]] = {}
    mixed = []
    for turn in turns:
        runs = turn["turn"]["versions"]
        if len(runs) > 1:
            mixed.append(turn["turn"]["turn_id"])
        elif turn["turn"]["response_ids"]:
            by_version.setdefault(runs[0]["weight_version"], []).append(turn)
    own: list[tuple[float, float]] = []
    other: list[tuple[float, float]] = []
    for version, its in sorted(by_version.items()):
        before = version - 1 if version else 1
        for under, chosen, into in ((version, its, own), (before, its[::4], other)):
            policy = model if under == 0 else PeftModel.from_pretrained(model, adapters[under - 1])
            into += [gap(policy, turn) for turn in chosen]
            if under:
                policy.unload()
        print(f"version {version}: {len(its)} replies scored", flush=True)
    apart = quantile([mean for _, mean in other], 0.5)
    return {
        "replies scored": len(own),
        "replies of two versions": mixed,
        "own version: max |Δ log-prob|": max(worst for worst, _ in own),
        "another version: smallest mean |Δ log-prob|": min(mean for _, mean in other),
        "another version: median of the mean |Δ log-prob|": apart,
        "versions are more than 1 nat a token apart": apart > 1,
    }


def gap(policy: Any, turn: Any) -> tuple[float, float]:
    """Return the largest and the mean |recorded − forced| over a reply's tokens."""
    prompt, reply = turn["request"]["prompt_ids"], turn["turn"]["response_ids"]
    hidden = policy(torch.tensor([prompt + reply]), logits_to_keep=len(reply) + 1).logits[0, :-1].float()
    log_probs = (hidden / turn["request"]["sampling"]["temperature"]).log_softmax(-1)
    forced = log_probs.gather(1, torch.tensor(reply)[:, None])[:, 0]
    difference = (forced - torch.tensor(turn["turn"]["rollout_log_probs"])).abs()
    return float(difference.max()), float(difference.mean())


def load(options: argparse.Namespace, folder: Path) -> None:
    """Serve and publish; leave the measurements and the records in the folder."""
    flags = [part for setting in SETTINGS for part in ("--set", setting)]
    model = load_model(resolve(ModelSettings(), folder / "data" / "cache"))
    adapters, scale, distance = make_adapters(model, folder, options.versions, options.scale)
    del model
    with RunningServer(folder / "data", flags) as server:
        figures, turns = asyncio.run(measure(server, adapters, options.clients, options.settle_s))
    figures["adapters"] = {"scale": round(scale, 3), "closest neighbours on a fixed text, nats a token": distance}
    (folder / "load.json").write_text(json.dumps({"figures": figures, "turns": turns}))


def score(options: argparse.Namespace, folder: Path) -> None:
    """Check every reply of the load, and write the result."""
    found = json.loads((folder / "load.json").read_text())
    adapters = [folder / f"adapter-{number}" for number in range(1, options.versions + 1)]
    model = load_model(resolve(ModelSettings(), folder / "data" / "cache"))
    figures = found["figures"] | check_versions(model, adapters, found["turns"])
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--scale", type=float, default=0.6, help="first scale of the synthetic adapters' B matrices")
    parser.add_argument(
        "--settle-s", type=float, default=6.0, help="seconds of load between a new version and the reading of memory"
    )
    parser.add_argument("--out", type=Path)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--keep", type=Path, help="only the load, which leaves its files in this folder")
    only.add_argument("--score", type=Path, help="only the scoring of a folder of --keep")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or options.score or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if not options.score:
            load(options, folder)
        if not options.keep:
            score(options, folder)


if __name__ == "__main__":
    main()
