"""The two servers: their processes, their kills, and what their ledgers must say at the end."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from kill.fork_server import ForkServer, Process
from kill.pairing import mispaired
from kill.replay import replay
from kill.roles import ADMIN_KEY

from chaos.people import People, cut_without_cause
from chaos.roles import Place
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.ledger_audit import audit, open_read_only
from openclaw_rl.testing.running_server import RunningServer

MOVING = ("paired", "judged", "sampled", "leased")
PAUSE_S = (0.2, 4.0)
"""For how long a killed process stays away."""
BACK_S, LEARN_AGAIN_S = 3.0, 15.0
CHILD_S = 240.0
"""Bound of the wait for a child of the embedded server, before it is killed and after."""


@dataclass(slots=True)
class Outages:
    """When the server of a side was not there."""

    spans: list[list[float]] = field(default_factory=list)

    def begin(self) -> Callable[[], None]:
        """What it returns ends it."""
        span = [time.monotonic(), float("inf")]
        self.spans.append(span)

        def end() -> None:
            span[1] = time.monotonic()

        return end

    def cover(self, begun: float, ended: float) -> bool:
        return any(begun <= back and ended >= gone for gone, back in self.spans)


async def on_schedule(
    kill: Callable[[], Awaitable[None]], times: int, duration_s: float, chance: random.Random
) -> None:
    """`kill`, so many times, spread over the run at random moments. Two that are due at once follow each other."""
    started = time.monotonic()
    for number in range(times):
        at = started + (number + chance.uniform(0.2, 0.9)) * duration_s / times
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        await kill()


@dataclass(slots=True)
class StubSide:
    """Forked processes over stubs."""

    place: Place
    forks: ForkServer
    policy: ToyPolicy
    people: People
    chance: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    outages: Outages = field(default_factory=Outages)
    disturbances: Outages = field(default_factory=Outages)
    """When server or engine was away, or had just come back."""
    findings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    pids: dict[str, int | None] = field(default_factory=dict)
    _running: dict[str, Process] = field(default_factory=dict)
    _births: int = 0
    _is_faulty: bool = True

    async def start(self) -> None:
        self.place.faults.mkdir(parents=True)
        for role in ("engine", "judge", "server", "trainer"):
            await self._spawn(role)
        await self._until_ready()

    async def chaos(self, duration_s: float, times: Mapping[str, int]) -> None:
        async with asyncio.TaskGroup() as group:
            for role, number in times.items():
                # The server's last life is long: memory is to be seen growing, if it does.
                span = duration_s * (0.4 if role == "server" else 1.0)
                group.create_task(on_schedule(partial(self._kill, role), number, span, self.chance))

    async def keep_learning(self) -> None:
        """The learner reports some steps wrong; three refused versions in a row pause learning, as they should."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"http://127.0.0.1:{self.place.server_port}/v1/admin/learning"
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=5) as client:
            while True:
                with suppress(httpx.HTTPError):
                    await client.post(url, json={"on": True})
                await asyncio.sleep(LEARN_AGAIN_S)

    async def _kill(self, role: str) -> None:
        process = self._running[role]
        if process.exited.done():
            self.findings.append(f"the {role} ended by itself:\n{self._tail(role)}")
            return
        ends = []
        if role == "server":
            ends.append(self.outages.begin())
        if role in ("server", "engine"):
            ends.append(self.disturbances.begin())
        self.forks.signal(process, signal.SIGKILL)
        await process.exited
        self.pids[role] = None
        self.kills[role] += 1
        await asyncio.sleep(self.chance.uniform(*PAUSE_S))
        await self._spawn(role)
        if role == "server":
            await self._until_ready()
            ends.pop(0)()
        if ends:
            await asyncio.sleep(BACK_S)
            ends[0]()

    async def _spawn(self, role: str) -> None:
        self._births += 1
        process = await self.forks.spawn(
            role, self.place.folder / f"{role}.log", seed=self._births, name=role, is_faulty=self._is_faulty
        )
        self._running[role], self.pids[role] = process, process.pid

    async def rest(self, patience_s: float) -> None:
        """No more faults, and one more start: turns that wait for their next try are taken up at once."""
        self._is_faulty = False
        for role in ("engine", "judge", "server"):
            self.forks.signal(self._running[role], signal.SIGTERM if role == "server" else signal.SIGKILL)
            async with asyncio.timeout(60):
                status = await self._running[role].exited
            if role == "server" and status != 0:
                self.findings.append(f"asked to stop, the server ended with {status}:\n{self._tail(role)}")
        for role in ("engine", "judge", "server"):
            await self._spawn(role)
        await self._until_ready()
        await _until_at_rest(self.place.data_dir / "ledger.sqlite3", patience_s, self.findings)
        for role in ("trainer", "server"):
            self.forks.signal(self._running[role], signal.SIGTERM)
            async with asyncio.timeout(60):
                await self._running[role].exited

    def look(self) -> None:
        """The proof, from the file and from what people saw. Blocks."""
        ledger = self.place.data_dir / "ledger.sqlite3"
        _look(ledger, self)
        replayed = replay(ledger, self.policy)
        self.findings += replayed.findings
        self.facts |= {"replayed_versions": replayed.versions, "replayed_replies": replayed.replies}

    async def _until_ready(self) -> None:
        url = f"http://127.0.0.1:{self.place.server_port}/v1/admin/status"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        end = time.monotonic() + 120
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=5) as client:
            while time.monotonic() < end:
                with suppress(httpx.HTTPError):
                    if (await client.get(url)).status_code == 200:
                        return
                if self._running["server"].exited.done():
                    break
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the server did not come up:\n{self._tail('server')}")

    def _tail(self, role: str) -> str:
        log = self.place.folder / f"{role}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""


@dataclass(slots=True)
class EmbeddedSide:
    """`openclaw-rl serve` as people run it, in real processes."""

    server: RunningServer
    people: People
    chance: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    outages: Outages = field(default_factory=Outages)
    findings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    pids: dict[str, int | None] = field(default_factory=dict)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def chaos(self, duration_s: float, times: Mapping[str, int]) -> None:
        # One after the other. The engine's last life is long, as the stub side's server's is.
        trainers = times.get("trainer", 0)
        plan = [role for role, number in times.items() if role != "trainer" for _ in range(number)]
        plan += ["trainer"] * (trainers // 2)
        self.chance.shuffle(plan)
        early, late = len(plan), trainers - trainers // 2
        roles = iter([*plan, *["trainer"] * late])

        async def kill() -> None:
            role = next(roles)
            await (self._kill_server() if role == "server" else self._kill_child(role))

        half = time.monotonic() + duration_s / 2
        await on_schedule(kill, early, duration_s / 2, self.chance)
        await asyncio.sleep(max(0.0, half - time.monotonic()))
        await on_schedule(kill, late, duration_s * 0.4, self.chance)

    async def look_at_pids(self) -> None:
        """Who is who now; children come and go."""
        process = self.server.process
        self.pids["server"] = None if process is None or process.poll() is not None else process.pid
        with suppress(httpx.HTTPError, OSError):
            status = await asyncio.to_thread(self.server.status)
            self.pids |= {child["name"]: child["pid"] for child in status["children"]}

    async def _kill_server(self) -> None:
        end = self.outages.begin()
        await asyncio.to_thread(self.server.kill)
        self.kills["server"] += 1
        await asyncio.to_thread(self.server.start)
        end()

    async def _kill_child(self, name: str) -> None:
        pid = await self._pid_of(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        self.kills[name] += 1

        def is_back(now: Any) -> bool:
            (child,) = (child for child in now["children"] if child["name"] == name)
            is_missed = any(problem.startswith(f"{name}:") for problem in now["problems"])
            return not is_missed and child["pid"] not in (None, pid)

        try:
            await asyncio.to_thread(self.server.wait_for, f"the {name} is back", is_back, CHILD_S)
        except TimeoutError as error:
            self.findings.append(str(error))

    async def _pid_of(self, name: str) -> int | None:
        """Return the child's process id; it may be starting. None, and a finding, when it does not come."""
        end = time.monotonic() + CHILD_S
        while time.monotonic() < end:
            self.pids.pop(name, None)
            await self.look_at_pids()
            if (pid := self.pids.get(name)) is not None:
                return pid
            await asyncio.sleep(0.2)
        self.findings.append(f"there was no {name} to kill within {CHILD_S:g} s")
        return None

    async def rest(self, patience_s: float) -> None:
        with suppress(httpx.HTTPError):
            await asyncio.to_thread(self.server.admin, "POST", "/v1/admin/train", {})
        await _until_at_rest(self.server.data_dir / "ledger.sqlite3", patience_s, self.findings, but=("sampled",))
        await asyncio.to_thread(self.server.stop)

    def look(self) -> None:
        _look(self.server.data_dir / "ledger.sqlite3", self)


async def _until_at_rest(ledger: Path, patience_s: float, findings: list[str], but: tuple[str, ...] = ()) -> None:
    """Wait until nothing moves but what is named: a last batch may be too small."""
    moving = tuple(state for state in MOVING if state not in but)
    end = time.monotonic() + patience_s
    while True:
        left = await asyncio.to_thread(_moving, ledger, moving)
        if not left:
            return
        if time.monotonic() > end:
            findings.append(f"it did not come to rest within {patience_s:g} s: {left}")
            return
        await asyncio.sleep(0.5)


def _moving(ledger: Path, states: tuple[str, ...]) -> dict[str, int]:
    marks = ", ".join("?" for _ in states)
    with closing(open_read_only(ledger)) as db:
        left = dict(
            db.execute(f"SELECT state, count(*) FROM turn WHERE state IN ({marks}) GROUP BY 1", states).fetchall()
        )
        left |= dict(
            db.execute(
                "SELECT 'version ' || state, count(*) FROM version"
                " WHERE state IN ('candidate', 'gated', 'loading') GROUP BY 1"
            ).fetchall()
        )
        (running,) = db.execute("SELECT count(*) FROM request WHERE outcome = 'running'").fetchone()
    return left | ({"running": running} if running else {})


def so_far(side: StubSide | EmbeddedSide) -> dict[str, int]:
    """Return what the side has proved up to now: pairs that people can check, replies trained, versions. Blocks."""
    ledger = (side.place if isinstance(side, StubSide) else side.server).data_dir / "ledger.sqlite3"
    with closing(open_read_only(ledger)) as db:
        (trained,) = db.execute("SELECT coalesce(sum(n), 0) FROM counter WHERE name = 'trained'").fetchone()
        (versions,) = db.execute("SELECT count(*) FROM version JOIN lease USING (lease_id)").fetchone()
    pairs = sum(reply.said_next is not None for reply in side.people.seen)
    return {"pairs": pairs, "trained": trained, "versions": versions}


def _look(ledger: Path, side: StubSide | EmbeddedSide) -> None:
    people = side.people
    side.findings += people.faults
    side.findings += audit(ledger, people.seen, is_deep=True)
    side.facts["wrong_pairs"] = wrong = mispaired(ledger, people.seen, engines_die=True)
    side.findings += wrong
    side.facts["cut_without_cause"] = cut = cut_without_cause(people.cut, side.outages.cover)
    side.findings += cut
    with closing(open_read_only(ledger)) as db:
        side.facts |= {
            "acknowledged": len(people.seen),
            "pairs_checked": sum(reply.said_next is not None for reply in people.seen),
            "not_answered_while_the_server_was_away": len(people.cut) - len(cut),
            "counters": dict(db.execute("SELECT name, n FROM counter WHERE n ORDER BY name").fetchall()),
            "versions": dict(db.execute("SELECT state, count(*) FROM version GROUP BY 1").fetchall()),
            "sessions": people.counts["sessions"],
            "hung_up": people.counts["hung up"],
            "kills": dict(side.kills),
        }
