"""Stage `users`: many users with an adapter each, trained in turn by the local trainer while all of them chat.

An engine of the stage's own has places for `--places` adapters. First this module is the trainer: it commits a
synthetic adapter for each user, far from all others, so that a reply under a foreign one can be told. Then the server
starts again with its local trainer. `--streams` chats run as all users for `--minutes`, and then as one user for a
while, which is the measure of one adapter: the trainer still has work then. A chat is *cold* if the engine did not hold
its version when it was sent. Cold chats are measured once more at the end, one at a time.

Afterwards every reply is scored (`foreign`).
"""

import asyncio
import itertools
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.chat_load import Reply, chat
from benchmarks.many_users import People, commit_all, loaded, rate_all
from gpu import foreign, load, models
from gpu.engine_process import start_engine
from gpu.host import SglangHost
from gpu.latency import wait_for_trainer
from gpu.node_feedback import reading
from gpu.server_files import audit, keep_logs, set_flags
from gpu.stages import Figures
from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.sglang import launch
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.ledger.states import PASSED
from openclaw_rl.settings import PoliciesSettings, PublisherSettings, TrainerSettings
from openclaw_rl.testing.running_server import RunningServer
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.learner import STATE_FILE, LearnerState
from openclaw_rl.types import own_policy
from openclaw_rl.web.user_keys import UserKeys

RANDOM_NATS, NATS = 0.5, 1.0
"""Distance of each synthetic adapter from the base, in nats a token; two of them are further apart. Random weights have
flat distributions, which no adapter moves by a whole nat."""
PAUSE_S = 1.0
"""Mean pause of a person between two conversations."""
WARM_SHARE, ONE_SHARE, MOST_S = 0.05, 0.2, 60.0
"""Shares of `--minutes`: first chats, whose first tokens are not counted, and chats under one adapter."""
TELL_S = 10.0
ALONE_TOKENS = 16
TRAINER_S, SCORE_S = 120.0, 100.0
FILES = ("adapter_config.json", "adapter_model.safetensors")

_TRAINED = f"""
    SELECT policy, count(*) FROM version WHERE weight_version > ? AND lease_id NOT NULL
    AND state IN ({", ".join(f"'{state}'" for state in PASSED)}) GROUP BY 1"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat of the load."""

    user: str
    held: frozenset[str]
    """Adapters that the engine held when it was sent."""
    reply: Reply


@dataclass
class Crowd:
    """The streams of chats, and the replies so far."""

    server: RunningServer
    people: People
    engine_url: str
    streams: int
    asked: list[Asked] = field(default_factory=list)

    async def talk(self, seconds: float, user_of: Callable[[int], str], told: Callable[[], None]) -> list[Asked]:
        """Chat on all streams for so long; return those chats. told: called every TELL_S."""
        begin, stop = len(self.asked), asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=300, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self.streams):
                tasks.create_task(self._person(client, user_of(number), number, stop))
            end = time.monotonic() + seconds
            while (left_s := end - time.monotonic()) > 0:
                await asyncio.sleep(min(TELL_S, left_s))
                await asyncio.to_thread(told)
            stop.set()
        return self.asked[begin:]

    async def _person(self, client: httpx.AsyncClient, user: str, number: int, stop: asyncio.Event) -> None:
        """Hold two-turn sessions; the second message praises or rejects the first reply."""
        chance = random.Random(number)
        for session in itertools.count():
            await asyncio.sleep(2 * PAUSE_S * chance.random())
            if stop.is_set():
                return
            messages, fields = load.opening(number, session)
            name = f"{user}-{number}-{session}"
            first = await self.say(client, user, messages, name, 32 + 16 * (number % 4), **fields)
            answer = load.ANSWERS[(session + number) % 2]
            messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": answer}]
            await self.say(client, user, messages, name, 24, **fields)

    async def say(
        self,
        client: httpx.AsyncClient,
        user: str,
        messages: list[dict[str, str]],
        name: str,
        tokens: int,
        **fields: object,
    ) -> Reply:
        held = frozenset(await loaded(client, self.engine_url))
        headers = self.people.headers(user)
        reply = await chat(client, messages, session=name, headers=headers, max_tokens=tokens, **fields)
        self.asked.append(Asked(user, held, reply))
        return reply

    async def alone(self) -> list[Asked]:
        """Chat once as each user, one after the other; return those chats."""
        begin = len(self.asked)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=300, trust_env=False) as client:
            for user in self.people.keys:
                messages = [{"role": "user", "content": "Good morning. What is new?"}]
                await self.say(client, user, messages, f"alone-{user}", ALONE_TOKENS)
        return self.asked[begin:]


def run(host: SglangHost, data_dir: Path) -> Figures:
    figures: Figures = {"users": host.users, "places": host.places, "streams": host.streams, "minutes": host.minutes}
    work = host.work / "users"
    shutil.rmtree(work, ignore_errors=True)
    policies = PoliciesSettings(mode="per_user", loaded=host.places)
    slots = launch.Adapters.of(TrainerSettings(), PublisherSettings(), policies).slots
    engine, _ = start_engine(host, work, slots=slots, log="users-engine.log")
    figures["engine start_s"] = engine.start_s
    try:
        people = _people(host, data_dir)
        _seed(host, data_dir, people, engine.url, figures)
        with RunningServer(data_dir, _flags(host, engine.url, LEARN), start_s=120) as server:
            crowd = Crowd(server, people, engine.url, host.streams)
            _chats(host, data_dir, crowd, figures)
            figures["problems"] = server.status()["problems"]
        figures |= _looked_back(host, data_dir, crowd)
        figures["audit"] = audit(data_dir)
    finally:
        engine.kill()
        keep_logs(data_dir, host.out, "users")
    return figures | {"findings": findings(figures)}


LEARN = ("trainer.kind=local", "training.batch_size=8", "training.min_batch=2", "training.max_wait_s=2")
SEED = ("trainer.kind=external", "training.batch_size=1", "training.min_batch=1")


def _flags(host: SglangHost, engine_url: str, more: Sequence[str]) -> list[str]:
    settings = [
        *load.SETTINGS, *more, "policies.mode=per_user", f"policies.loaded={host.places}", "watch.enabled=false",
        "publisher.keep_versions=10000", "publisher.self_test_tolerance=0.3", f"trainer.rank={models.RANK}",
        f"trainer.alpha={models.RANK}", f'trainer.device="{host.device}"',
    ]  # fmt: skip
    settings += ["model.context_length=4096"] if host.engine == "sglang" else ["engine.max_running=8"]
    settings += ["trainer.nice=0"] if host.is_tiny else []
    flags = ["--engine-url", engine_url, "--model", str(host.model), "--judge", "rules", "--method", "binary_rl"]
    return [*flags, *set_flags(settings)]


# -- the users' adapters -----------------------------------------------------------------------------------------------


def _people(host: SglangHost, data_dir: Path) -> People:
    users = UserKeys(DataDir.prepare(data_dir).users)
    names = [f"user-{number:03}" for number in range(host.users)]
    return People({name: users.add(name, train=True, now=time.time()) for name in names})


def _seed(host: SglangHost, data_dir: Path, people: People, engine_url: str, figures: Figures) -> None:
    """Give each user a synthetic adapter as its policy's first version."""
    folders = [host.work / "users" / name for name in people.keys]
    apart = RANDOM_NATS if host.has_random_weights else NATS
    nats = models.synthetic_adapters(host.model, folders, 0, host.device, apart)
    figures["adapters: least distance from the base, nats a token"] = round(min(nats), 2)
    with RunningServer(data_dir, _flags(host, engine_url, SEED), start_s=120) as server:
        asyncio.run(rate_all(server, people))
        with reading(data_dir / "ledger.sqlite3") as db:
            (base_hash,) = db.execute("SELECT base_hash FROM version LIMIT 1").fetchone()
        commit_all(server, people, lambda folder, number: _checkpoint(folders[number], folder, base_hash))
    host.so_far("users", figures)


def _checkpoint(source: Path, folder: Path, base_hash: str) -> None:
    """Write an adapter as the local trainer would have: it goes on from there."""
    state = LearnerState(base_hash=base_hash, method="binary_rl", optimizer_steps=0, method_state={})

    def fill(into: Path) -> None:
        for name in FILES:
            shutil.copy(source / name, into)
        (into / STATE_FILE).write_text(json.dumps(state.model_dump()))

    checkpoint.write(folder.parent, folder.name, fill)


# -- the load ----------------------------------------------------------------------------------------------------------


def _chats(host: SglangHost, data_dir: Path, crowd: Crowd, figures: Figures) -> None:
    """Chat as all users, as one, and as each of them alone; note the figures as they are known."""
    users, whole_s, seeded = list(crowd.people.keys), 60 * host.minutes, max(crowd.people.versions.values())
    wait_for_trainer(data_dir / "logs" / "trainer.log", TRAINER_S * (4 if host.is_tiny else 1))

    def told() -> None:
        errors = [one.reply.error for one in crowd.asked if one.reply.error]
        made = trained(data_dir / "ledger.sqlite3", seeded)
        figures["replies so far"], figures["refused or cut"] = len(crowd.asked), dict(Counter(errors))
        figures["trained versions of each user"] = {user: made.get(own_policy(user), 0) for user in users}
        host.so_far("users", figures)

    def talk(share: float, user_of: Callable[[int], str]) -> list[Asked]:
        return asyncio.run(crowd.talk(share * whole_s, user_of, told))

    talk(WARM_SHARE, lambda number: users[number % len(users)])
    every = talk(1.0, lambda number: users[number % len(users)])
    figures["first token of all users' chats, ms"] = ms([asked.reply for asked in every])
    one = talk(min(ONE_SHARE, MOST_S / whole_s), lambda _: users[0])
    alone = asyncio.run(crowd.alone())
    told()
    ran = versions_of(data_dir / "ledger.sqlite3", [*every, *alone])
    figures |= first_tokens(one, every, alone, ran)
    host.so_far("users", figures)


def trained(ledger: Path, after: int) -> dict[str, int]:
    """Return the number of trained versions of each policy that passed the gate, of those after this one."""
    with reading(ledger) as db:
        return dict(db.execute(_TRAINED, (after,)).fetchall())


def versions_of(ledger: Path, asked: Sequence[Asked]) -> dict[str, int]:
    """Return the first version of each chat's reply, by the id of its turn."""
    ids = [one.reply.turn_id for one in asked if one.reply.turn_id]
    return {one.turn_id: one.versions[0] for one in foreign.said(ledger, ids) if one.versions}


def first_tokens(one: Sequence[Asked], every: Sequence[Asked], alone: Sequence[Asked], ran: dict[str, int]) -> Figures:
    """Return the first tokens of warm and of cold chats, and what they add to those under one adapter."""

    def is_cold(asked: Asked) -> bool:
        name = adapter_name(ran.get(asked.reply.turn_id or "", 0))
        return name is not None and name not in asked.held

    base, all_of = ms([asked.reply for asked in one]), ms([asked.reply for asked in every])
    warm = ms([asked.reply for asked in every if not is_cold(asked)])
    return {
        "first token under one adapter, ms": base,
        "first token of all users' chats, ms": all_of,
        "first token of their warm chats, ms": warm,
        "first token of their cold chats, ms": ms([asked.reply for asked in every if is_cold(asked)]),
        "first token of a cold chat alone, ms": ms([asked.reply for asked in alone if is_cold(asked)]),
        "added to one adapter's, ms: all": added(all_of, base),
        "added to one adapter's, ms: warm": added(warm, base),
    }


def ms(replies: Sequence[Reply]) -> dict[str, float]:
    firsts = [1000 * (reply.token_times[0] - reply.started) for reply in replies if reply.token_times]
    p50, p99 = load.p50_p99(firsts) if firsts else (float("nan"), float("nan"))
    return {"p50": round(p50, 1), "p99": round(p99, 1), "n": len(firsts)}


def added(of: dict[str, float], to: dict[str, float]) -> dict[str, float]:
    return {share: round(of[share] - to[share], 1) for share in ("p50", "p99")}


# -- afterwards --------------------------------------------------------------------------------------------------------


def _looked_back(host: SglangHost, data_dir: Path, crowd: Crowd) -> Figures:
    ledger = data_dir / "ledger.sqlite3"
    whole = [one.reply.turn_id for one in crowd.asked if one.reply.turn_id and not one.reply.error]
    versions = {
        number: (policy, data_dir / folder if folder else None)
        for number, (policy, folder) in foreign.owners(ledger).items()
    }
    return foreign.scored(foreign.said(ledger, whole), versions, host.model, host.device, SCORE_S)


def findings(figures: Figures) -> list[str]:
    errors, made = figures["refused or cut"], figures["trained versions of each user"]
    found = [f"{sum(errors.values())} chats were refused or cut: {errors}"] * bool(errors)
    found += foreign.findings(figures)
    found += [f"{user}: no version was trained" for user, count in made.items() if not count]
    if figures["users"] > figures["places"]:
        colds = ("first token of their cold chats, ms", "first token of a cold chat alone, ms")
        found += [f"no chat brought its adapter: {key}" for key in colds if not figures[key]["n"]]
    found += [f"{key}: {figures[key]}" for key in ("problems", "audit") if figures[key]]
    return found
