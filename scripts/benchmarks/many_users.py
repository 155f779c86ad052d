"""Many users with an adapter each, and few places on the engine: foreign adapters, refusals, memory, cold first tokens.

    scripts/benchmarks.sh many_users                                    # 50 users, 16 at once, 2 minutes, stub engine
    scripts/benchmarks.sh many_users --users 200 --at-once 64 --minutes 10 [--embedded] [--out FILE.json]

Each user's adapter comes the usual way: a rated reply, a batch of that user's policy, a commit of this script, the
gate, the publication. Then so many chats run at once, each of a user drawn at random. A chat is *cold* if the engine
did not hold its user's adapter when it was sent. Where more users chat than the engine has places, a cold chat also
waits for a place; so the first tokens of cold chats are measured once more at the end, one chat at a time.

Afterwards every reply of the ledger is scored: on the stub by the tokens' numbers under each adapter, with --embedded
by a plain transformers + PEFT forward of the bundled model. A reply that its own user's adapter does not explain is
*foreign*, and is counted; so is one whose version is another user's. Every tenth reply is also scored under another
user's adapter, which shows that the check can tell.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.chat_load import Reply, chat, quantile
from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.ledger.records import TurnRecord
from openclaw_rl.ledger.snapshot import Snapshot
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.running_server import RunningServer, engine_flags, running_stub
from openclaw_rl.testing.toy_policy import adapter_seed
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Manifest, Report
from openclaw_rl.trainers.checkpoint import sha256
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.types import WeightKind
from openclaw_rl.web.user_keys import UserKeys

WEIGHTS = "adapter_model.safetensors"
TOPICS = ["rivers", "bread", "stars", "trains", "gardens", "music", "winter", "bees"]
LOOK_S, EVERY = 5.0, 10
SCALE = 1.5
"""Scale of the synthetic adapters' B matrices: two of them are nats a token apart."""
TOLERANCE = {"stub": 1e-5, "embedded": 0.01}
"""Largest mean difference of a reply's log-probs from its own adapter's forward, in nats a token."""

Write = Callable[[Path, int], None]
"""Makes the adapter of a number in a folder."""
Gap = Callable[[TurnRecord, Path], float]
"""Mean |recorded − forced| of a reply's log-probs under an adapter."""


@dataclass
class People:
    """The users, their keys, and the version that each one's adapter became."""

    keys: dict[str, str]
    versions: dict[str, int] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)

    def headers(self, user: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[user]}"}


@dataclass
class Load:
    replies: list[tuple[str, bool, Reply]] = field(default_factory=list)
    """User, whether the chat was cold, and the reply."""
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def firsts_ms(self, *, is_cold: bool) -> list[float]:
        found = [reply for _, cold, reply in self.replies if cold is is_cold and reply.token_times]
        return [1000 * (reply.token_times[0] - reply.started) for reply in found]


async def say(client: httpx.AsyncClient, people: People, user: str, number: int, tokens: int) -> Reply:
    asked = [{"role": "user", "content": f"Tell me about {TOPICS[number % len(TOPICS)]}, story {number}."}]
    name = f"{user}-{number}"
    return await chat(client, asked, session=name, headers=people.headers(user), max_tokens=tokens)


async def rate(client: httpx.AsyncClient, people: People, user: str) -> None:
    """Give the user's policy one sample."""
    reply = await say(client, people, user, 0, 12)
    if reply.error is not None:
        raise RuntimeError(f"the first chat of {user}: {reply.error}")
    said = {"turn_id": reply.turn_id, "value": True}
    answer = await client.post("/v1/feedback", json=said, headers=people.headers(user))
    answer.raise_for_status()


async def rate_all(server: RunningServer, people: People) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as client:
        for user in people.keys:
            await rate(client, people, user)


def commit_all(server: RunningServer, people: People, write: Write) -> None:
    """Be the trainer until each policy has a version that serves; `write` makes the adapter of a number."""
    trainer = TrainerClient(server.url, (server.data_dir / "keys" / "trainer.token").read_text().strip())
    while len(people.versions) < len(people.keys):
        if (lease := trainer.lease("many_users", wait_s=10)) is None:
            continue
        user, number = lease.policy.removeprefix("user:"), len(people.versions)
        people.folders[user] = server.data_dir / "versions" / lease.lease_id
        people.versions[user] = commit(trainer, lease, people.folders[user], write, number)
        if len(people.versions) % 10 == 0:
            print(f"{len(people.versions)} adapters are committed", flush=True)
    trainer.close()
    while True:
        rows = {row["policy"]: row["serving"] for row in server.admin("GET", "/v1/admin/policies")["policies"]}
        if all(rows[f"user:{user}"] == number for user, number in people.versions.items()):
            return
        time.sleep(0.2)


def commit(trainer: TrainerClient, lease: LeaseBody, folder: Path, write: Write, number: int) -> int:
    """Let `write` make the adapter of this number, and commit it as the lease's step; return its version."""
    write(folder, number)
    base, digest = trainer.tip().base_hash, sha256(folder / WEIGHTS)
    manifest = Manifest(folder=f"versions/{folder.name}", kind=WeightKind.LORA, base_hash=base, sha256=digest)
    step = Commit(
        lease_id=lease.lease_id,
        fence=lease.fence,
        parent=lease.parent,
        manifest=manifest,
        report=Report(metrics={"loss": 0.0}),
    )
    return trainer.commit(step)


def stub_adapter(folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(f"adapter {number}".encode() * 4)


def engine_url(server: RunningServer, stub: str | None) -> str:
    return stub or str(json.loads((server.data_dir / "run" / "engine.port.json").read_text())["url"])


def private_mb(pid: int) -> float:
    """Anonymous memory, which a leak would grow."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Anonymous:")).split()[1]) / 1024


async def loaded(client: httpx.AsyncClient, engine: str) -> set[str]:
    """Return the names that the engine holds."""
    return {card["id"] for card in (await client.get(f"{engine}/v1/models")).json()["data"]}


async def run_load(
    server: RunningServer, people: People, engine: str, options: argparse.Namespace
) -> tuple[Load, list[float]]:
    """Return the load, and the first tokens of cold chats that ran alone after it, in ms."""
    found, stop = Load(), asyncio.Event()
    pids = {child["name"]: child["pid"] for child in server.status()["children"] if child["pid"]}
    assert server.process is not None
    pids["server"] = server.process.pid
    users, chance = sorted(people.keys), random.Random(options.seed)
    started = time.perf_counter()
    # A connection is given up before the servers close it, which they do after five seconds.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)

    async def look() -> None:
        while not stop.is_set():
            found.memory.append((time.perf_counter() - started, {name: private_mb(pid) for name, pid in pids.items()}))
            await asyncio.sleep(LOOK_S)

    async def one(client: httpx.AsyncClient, user: str, number: int) -> None:
        is_cold = adapter_name(people.versions[user]) not in await loaded(client, engine)
        found.replies.append((user, is_cold, await say(client, people, user, number, options.tokens)))

    async def keep_asking(client: httpx.AsyncClient, place: int) -> None:
        number = place
        while not stop.is_set():
            number += options.at_once
            await one(client, chance.choice(users), number)

    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as client:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look())
            for place in range(options.at_once):
                tasks.create_task(keep_asking(client, place))
            await asyncio.sleep(60 * options.minutes)
            stop.set()
        alone = Load()
        for number, user in enumerate((users * options.alone)[: options.alone]):
            held = await loaded(client, engine)
            reply = await say(client, people, user, 10**6 + number, 4)
            alone.replies.append((user, adapter_name(people.versions[user]) not in held, reply))
    return found, alone.firsts_ms(is_cold=True)


def stub_gap(record: TurnRecord, folder: Path) -> float:
    ids, start = (*record.request.prompt_ids, *record.turn.response_ids), len(record.request.prompt_ids)
    forced = ToyPolicy().log_probs(ids, start, adapter_seed(folder))
    return sum(abs(a - b) for a, b in zip(forced, record.turn.rollout_log_probs, strict=True)) / len(forced)


def embedded_parts(folder: Path) -> tuple[Write, Gap]:
    """Return the maker of a synthetic adapter of the bundled model, and the plain forward."""
    import torch
    from peft import PeftModel

    from benchmarks.swap_under_load import synthetic_adapter
    from openclaw_rl.models.resolve import load_model, resolve
    from openclaw_rl.settings import ModelSettings

    model = load_model(resolve(ModelSettings(), folder / "data" / "cache"))
    policies: dict[Path, Any] = {}

    def write(target: Path, number: int) -> None:
        synthetic_adapter(model, target, number, SCALE)

    @torch.no_grad()
    def gap(record: TurnRecord, adapter: Path) -> float:
        if adapter not in policies:
            for other in policies.values():
                other.unload()
            policies.clear()
            policies[adapter] = PeftModel.from_pretrained(model, adapter)
        prompt, reply = list(record.request.prompt_ids), list(record.turn.response_ids)
        logits = policies[adapter](torch.tensor([prompt + reply]), logits_to_keep=len(reply) + 1).logits[0, :-1]
        log_probs = (logits.float() / record.request.sampling.temperature).log_softmax(-1)
        forced = log_probs.gather(1, torch.tensor(reply)[:, None])[:, 0]
        return float((forced - torch.tensor(record.turn.rollout_log_probs)).abs().mean())

    return write, gap


def scored(ledger: Path, people: People, seen: set[str], gap: Gap, tolerance: float) -> dict[str, Any]:
    """Score each reply of the load under its own user's adapter, and every tenth under another user's."""
    own: list[float] = []
    other: list[float] = []
    foreign: list[str] = []
    for user, records in _by_user(ledger, seen):
        apart = next(name for name in sorted(people.folders) if name != user)
        for record in records:
            own.append(gap(record, people.folders[user]))
            runs = {run.weight_version for run in record.turn.versions}
            if runs != {people.versions[user]} or not own[-1] <= tolerance:
                foreign.append(f"{record.turn.turn_id} of {user}: versions {sorted(runs)}, {own[-1]:.3g} nats a token")
        other += [gap(record, people.folders[apart]) for record in records[::EVERY]]
        print(f"{len(own)} replies are scored", end="\r", flush=True)
    return {
        "replies scored": len(own),
        "replies under a foreign adapter": len(foreign),
        "foreign": foreign[:20],
        "own adapter: largest mean |Δ log-prob|, nats a token": max(own, default=None),
        "another's adapter: smallest mean |Δ log-prob|, nats a token": min(other, default=None),
    }


def _by_user(ledger: Path, seen: set[str]) -> Iterator[tuple[str, list[TurnRecord]]]:
    found: dict[str, list[TurnRecord]] = {}
    with Snapshot.of(ledger) as snapshot:
        for record in snapshot.turns():
            if record.turn.turn_id in seen and record.turn.response_ids:
                found.setdefault(record.request.scope.user, []).append(record)
    yield from sorted(found.items())


def figures_of(load: Load, options: argparse.Namespace, alone_ms: list[float]) -> dict[str, Any]:
    cold, warm = load.firsts_ms(is_cold=True), load.firsts_ms(is_cold=False)
    quarter = max(1, len(load.memory) // 4)

    def level(part: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
        return {name: round(median(row[name] for _, row in part), 1) for name in part[0][1]}

    def ms(values: list[float]) -> dict[str, float | None]:
        if not values:
            return {"p50": None, "p99": None, "n": 0}
        return {"p50": round(quantile(values, 0.5), 1), "p99": round(quantile(values, 0.99), 1), "n": len(values)}

    return {
        "engine": "embedded" if options.embedded else "stub",
        "users": options.users,
        "at once": options.at_once,
        "places": options.loaded,
        "minutes": options.minutes,
        "replies": len(load.replies),
        "refused or cut": [reply.error for _, _, reply in load.replies if reply.error],
        "first token of a cold chat under load, ms": ms(cold),
        "first token of a warm chat under load, ms": ms(warm),
        "first token of a cold chat alone, ms": ms(alone_ms),
        "memory, MB: first and last quarter": [level(load.memory[:quarter]), level(load.memory[-quarter:])],
    }


def measure(folder: Path, options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    users = UserKeys(DataDir.prepare(folder / "data").users)
    names = [f"user-{number}" for number in range(options.users)]
    people = People({name: users.add(name, train=True, now=time.time()) for name in names})
    chosen = {
        "policies.mode": "per_user",
        "policies.loaded": str(options.loaded),
        "training.batch_size": "1",
        "training.min_batch": "1",
        "publisher.max_step_kl": "1000",  # the adapters are far apart on purpose
        "publisher.max_base_kl": "1000",
    }
    stub: str | None = None
    write: Write = stub_adapter
    gap: Gap = stub_gap
    if options.embedded:
        write, gap = embedded_parts(folder)
        chosen["trainer.kind"] = "external"
        flags = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    else:
        stub = stack.enter_context(running_stub(folder, "--mean-tokens", "0"))
        flags = engine_flags(stub, chosen)
    with RunningServer(folder / "data", flags) as server:
        asyncio.run(rate_all(server, people))
        commit_all(server, people, write)
        load, alone_ms = asyncio.run(run_load(server, people, engine_url(server, stub), options))
    seen = {reply.turn_id for _, _, reply in load.replies if reply.turn_id and not reply.error}
    tolerance = TOLERANCE["embedded" if options.embedded else "stub"]
    found = scored(folder / "data" / "ledger.sqlite3", people, seen, gap, tolerance)
    return figures_of(load, options, alone_ms) | found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--loaded", type=int, default=8, help="places of the engine (policies.loaded)")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=16, help="longest reply")
    parser.add_argument("--alone", type=int, default=40, help="chats one at a time after the load")
    parser.add_argument("--embedded", action="store_true", help="the bundled model in place of the stub engine")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the users")
    parser.add_argument("--beside", action="store_true", help="note in the figures that other jobs ran meanwhile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        figures = measure(folder, options, stack)
    if options.beside:
        figures["beside other jobs"] = True
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    return 0 if not figures["replies under a foreign adapter"] and not figures["refused or cut"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
