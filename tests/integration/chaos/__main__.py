"""`python scripts/chaos.py FOLDER`: one run. Progress on standard error, the summary as JSON on standard output; exit 1
when anything was found."""

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kill.__main__ import free_port
from kill.fork_server import ForkServer
from kill.toy import make_frontend, make_policy

import chaos
from chaos import report
from chaos.memory import Memory, held
from chaos.people import Manners, People
from chaos.roles import KEPT, MAX_TOKENS, Place, roles
from chaos.sides import EmbeddedSide, StubSide, so_far
from openclaw_rl.testing.running_server import RunningServer

READ_MEMORY_S, REST_S = 5.0, 600.0  # a step of the real trainer takes minutes where others have the cores
RUN_ON_S = 300.0
"""Bound of the time that the run goes on after its minutes until it has met `--least`."""


@dataclass(frozen=True, slots=True)
class Plan:
    folder: Path
    seconds: float
    sessions: int
    streams: int
    embedded: int
    """People on the embedded engine; 0: that server is left out."""
    embedded_model: str
    tokens_per_s: float
    think_s: float
    seed: int
    say_every_s: float
    kills: dict[str, int]
    embedded_kills: dict[str, int]
    least: dict[str, int]
    embedded_least: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    plan = _plan(argv)
    print(f"seed {plan.seed}", file=sys.stderr, flush=True)
    folder = plan.folder
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    frontend = make_frontend(folder / "tokenizer", memory=KEPT)
    policy = make_policy(frontend, mean_tokens=64)
    place = Place(folder / "stub", free_port(), free_port(), free_port(), plan.tokens_per_s)
    forks = ForkServer.start(roles(place, frontend, policy))
    manners = Manners(plan.streams, plan.seconds * plan.streams / plan.sessions, plan.think_s, MAX_TOKENS)
    people = People(place.server_port, manners, f"s{plan.seed}")
    stub = StubSide(place, forks, policy, people, random.Random(f"{plan.seed}-stub"))
    embedded = _embedded(plan) if plan.embedded else None
    summary = asyncio.run(_run(plan, stub, embedded))
    text = json.dumps(summary, indent=1)
    (folder / "summary.json").write_text(text)
    print(text)
    return 1 if summary["findings"] else 0


def _plan(argv: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(
        prog="chaos", description=chaos.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder; what is left in it tells what happened")
    parser.add_argument("--minutes", type=float, default=30.0, help="of chaos; starting and coming to rest come on top")
    parser.add_argument("--sessions", type=int, default=1000, help="conversations on the stub engine, about")
    parser.add_argument("--streams", type=int, default=64, help="people at once on the stub engine")
    parser.add_argument("--embedded", type=int, default=16, help="people on the embedded engine; 0 leaves it out")
    parser.add_argument("--embedded-model", default="bundled", help="of the embedded engine and its trainer")
    parser.add_argument("--tokens-per-s", type=float, default=25.0, help="of one stream of the stub engine")
    parser.add_argument("--think-s", type=float, default=2.0, help="between a reply and the next message, on average")
    parser.add_argument("--kills", default="engine=16,judge=14,trainer=20,server=7", help="of the stub side")
    parser.add_argument("--embedded-kills", default="engine=3,trainer=3,server=2")
    parser.add_argument("--least", default="", help="pairs=N,trained=N,versions=N: the stub side runs on until then")
    parser.add_argument("--embedded-least", default="")
    parser.add_argument("--seed", type=int, default=None, help="drawn when not given")
    parser.add_argument("--say-every-s", type=float, default=15.0)
    given = parser.parse_args(argv)
    return Plan(
        folder=given.folder.absolute(),
        seconds=60 * given.minutes,
        sessions=given.sessions,
        streams=given.streams,
        embedded=given.embedded,
        embedded_model=given.embedded_model,
        tokens_per_s=given.tokens_per_s,
        think_s=given.think_s,
        seed=secrets.randbelow(1 << 32) if given.seed is None else given.seed,
        say_every_s=given.say_every_s,
        kills=_numbers(given.kills),
        embedded_kills=_numbers(given.embedded_kills),
        least=_numbers(given.least),
        embedded_least=_numbers(given.embedded_least),
    )


def _numbers(text: str) -> dict[str, int]:
    pairs = (word.partition("=") for word in text.split(",") if word)
    return {name: int(number) for name, _, number in pairs}


def _embedded(plan: Plan) -> EmbeddedSide:
    port = free_port()
    arguments = ["--port", str(port), "--batch-size", "8", "--set", "log_format=json"]
    arguments += ["--set", f"model.path={plan.embedded_model}", "--set", "trainer.nice=0"]
    arguments += ["--set", "memory.texts_mb=1", "--set", "memory.words=500"]
    arguments += ["--set", "memory.ledger_mb=2", "--set", "engine.cache_tokens=4096"]
    server = RunningServer(plan.folder / "embedded", arguments)
    manners = Manners(plan.embedded, session_s=120.0, think_s=5 * plan.think_s, max_tokens=24)
    people = People(port, manners, f"e{plan.seed}")
    return EmbeddedSide(server, people, random.Random(f"{plan.seed}-embedded"))


async def _run(plan: Plan, stub: StubSide, embedded: EmbeddedSide | None) -> dict[str, Any]:
    begun, load = time.time(), os.getloadavg()
    await stub.forks.connect()
    sides = [side for side in (stub, embedded) if side is not None]
    memory = Memory(warm_up_s=min(120.0, plan.seconds / 6))
    try:
        await asyncio.gather(*(side.start() for side in sides))
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(plan, started, sides, memory))
            learning = group.create_task(stub.keep_learning())
            chats = [group.create_task(side.people.run()) for side in sides]
            killing = [group.create_task(stub.chaos(plan.seconds, plan.kills))]
            if embedded is not None:
                killing.append(group.create_task(embedded.chaos(plan.seconds, plan.embedded_kills)))
            await asyncio.sleep(plan.seconds)
            await asyncio.gather(*killing)
            await _run_on(plan, sides)
            for side in sides:
                side.people.stop.set()
            await asyncio.gather(*chats)
            watching.cancel()
            _say(report.line(started, sides) + " | coming to rest")
            await asyncio.gather(*(side.rest(REST_S) for side in sides))
            learning.cancel()
    finally:
        await stub.forks.close()
        if embedded is not None:
            await asyncio.to_thread(embedded.server.stop)
    for side in sides:
        await asyncio.to_thread(side.look)
    conditions = {
        "seed": plan.seed,
        "chaos_s": plan.seconds,
        "begun": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begun)),
        "seconds": round(time.time() - begun, 1),
        "cpus": os.cpu_count(),
        "load_average": [load, os.getloadavg()],
        "streams": plan.streams,
        "tokens_per_s": plan.tokens_per_s,
        "think_s": plan.think_s,
    }
    memory.write(plan.folder / "memory.csv")
    return report.summary(stub, embedded, memory, {"conditions": conditions})


async def _run_on(plan: Plan, sides: Sequence[StubSide | EmbeddedSide]) -> None:
    """Wait until each side has met its least, `RUN_ON_S` at most: a slow machine does less in the same minutes."""
    end = time.monotonic() + RUN_ON_S
    while time.monotonic() < end:
        wanted = [plan.least if isinstance(side, StubSide) else plan.embedded_least for side in sides]
        found = [await asyncio.to_thread(so_far, side) for side in sides]
        if all(has[name] >= n for least, has in zip(wanted, found, strict=True) for name, n in least.items()):
            return
        await asyncio.sleep(1)


async def _watch(plan: Plan, started: float, sides: Sequence[StubSide | EmbeddedSide], memory: Memory) -> None:
    said = 0.0
    while True:
        for side in sides:
            name = "stub" if isinstance(side, StubSide) else "embedded"
            if isinstance(side, EmbeddedSide):
                await side.look_at_pids()
            for role, pid in side.pids.items():
                memory.read(f"{name} {role}", pid)
            if isinstance(side, StubSide):
                for what, value in held(side.place.held).items():
                    memory.note(f"stub server: {what}", side.pids.get("server"), value)
        if time.monotonic() - said >= plan.say_every_s:
            said = time.monotonic()
            _say(report.line(started, sides))
        await asyncio.sleep(READ_MEMORY_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
