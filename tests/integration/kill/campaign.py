"""Kill, audit and restart the processes until the kills suffice; then bring the system to rest and audit all of it.

One loop kills the server and another the trainer, so either may be away while the other dies; some kills take both.
Meanwhile people chat, and an operator rolls back, pins and pauses. Drawn kills meet most stages of a commit and of a
checkpoint. The campaign then runs on with aimed kills until every stage was met, within `RUN_ON_S`.
"""

import asyncio
import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kill import points
from kill.chats import Chats
from kill.fork_server import ForkServer, Process
from kill.pairing import mispaired, unrecorded
from kill.points import Fate
from kill.replay import replay
from kill.roles import ADMIN_KEY, Place
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.ledger_audit import DEAD, audit, open_read_only

PATIENCE_S = {"server": (0.5, 3.0), "trainer": (1.5, 5.0), "engine": (3.0, 8.0)}
"""A process that has not met its fate within a time drawn from here is killed wherever it is."""
RUN_ON_S, AIMED_S = 300.0, 30.0
"""Bounds of the aimed kills together, and of the wait for one of them."""
BOTH_SHARE, DEEP_EVERY, REST_S = 0.15, 20, 240.0
LEAST_VERSIONS = 6
"""The rest begins when so many versions were trained, and more replies acknowledged than processes killed."""
MOMENT, SEEN_FILE = "moment", "seen.json"


@dataclass(slots=True)
class Outcome:
    kills: dict[str, int] = field(default_factory=dict)
    """By `server <point> <works>` and `trainer <point> <works>`; `moment`: at no transition of ours."""
    both: int = 0
    """Of which so many took both processes at once."""
    audits: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Campaign:
    def __init__(self, place: Place, forks: ForkServer, policy: ToyPolicy, *, seed: int, kills: int) -> None:
        self._place, self._forks, self._policy, self._seed, self._wanted = place, forks, policy, seed, kills
        self._users = place.users
        self._chats = Chats(place.url, seed, people=max(4, len(place.users)), users=place.users)
        self._audited = 0
        self._auditing = asyncio.Lock()
        self._enough = asyncio.Event()
        self._running: dict[str, Process] = {}
        self._births = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        started = time.monotonic()
        await self._forks.connect()
        try:
            engine = None if self._users else await self._forks.spawn("engine", self.log("engine"))
            async with asyncio.TaskGroup() as group:
                chats = group.create_task(self._chats.run())
                operator = group.create_task(self._operate())
                fates = {"server": points.server_fate, "trainer": points.trainer_fate}
                if self._users:
                    fates |= {"server": points.policies_fate, "engine": points.engine_fate}
                await asyncio.gather(*(self._kill(role, draw) for role, draw in fates.items()))
                if self._users:
                    engine, _ = await self._start("engine", None)
                elif not self.outcome.findings:
                    await self._run_on()
                operator.cancel()
                self.outcome.facts["killing_s"] = round(time.monotonic() - started, 1)
                if not self.outcome.findings:
                    await self._come_to_rest(chats)
                self._chats.stop.set()
                chats.cancel()
            if engine is not None and engine.exited.done():
                self.outcome.findings.append("the stub engine ended")
        finally:
            await self._forks.close()
        if not self.outcome.findings:
            await asyncio.to_thread(self._look_at_it_whole)
        self.outcome.seconds = round(time.monotonic() - started, 1)
        return self.outcome

    # Killing

    async def _kill(self, role: str, draw: Callable[[random.Random], Fate]) -> None:
        """Kill one role at drawn transitions until both loops together have killed enough."""
        chance = random.Random(f"{self._seed}-{role}")
        while not self._enough.is_set():
            fate, patience_s = draw(chance), chance.uniform(*PATIENCE_S[role])
            process, report = await self._start(role, fate)
            where = await self._await_death(role, process, report, patience_s)
            if where is None:
                return
            if chance.random() < BOTH_SHARE:
                self._kill_too("trainer" if role == "server" else "server")
            await self._audit(f"{role} killed at {where}")
            if sum(self.outcome.kills.values()) >= self._wanted:
                self._enough.set()

    async def _run_on(self) -> None:
        """Kill one process at the stage that was met least, while the other one runs, until `_aim` is satisfied."""
        end = time.monotonic() + RUN_ON_S
        beside: dict[str, tuple[Process, Path]] = {}
        while (aim := self._aim()) is not None and time.monotonic() < end and not self.outcome.findings:
            role, stage = aim
            other = "trainer" if role == "server" else "server"
            if role in beside:
                await self._end_beside(role, *beside.pop(role))
            if other not in beside or beside[other][0].exited.done():
                beside[other] = await self._start(other, None)
            process, report = await self._start(role, Fate(1, stage))
            where = await self._await_death(role, process, report, AIMED_S)
            if not self.outcome.both:
                self._kill_too(other)
            await self._audit(f"{role} killed at {where}")
            self.outcome.facts["aimed"] = self.outcome.facts.get("aimed", 0) + 1
        for role, (process, report) in beside.items():
            await self._end_beside(role, process, report)

    def _aim(self) -> tuple[str, str] | None:
        """Return the role and the stage to kill next; None when every stage was met and kills at stages suffice."""
        met = {(role, stage): 0 for role, stages in points.STAGES.items() for stage in stages}
        at_stages = 0
        for where, kills in self.outcome.kills.items():
            role, point = where.split()[:2]
            at_stages += kills * (point != MOMENT)
            if (role, point) in met:
                met[role, point] += kills
        least = min(met, key=lambda stage: met[stage])
        is_enough = met[least] > 0 and at_stages > self._wanted / 3 and self.outcome.both > 0
        return None if is_enough else least

    async def _end_beside(self, role: str, process: Process, report: Path) -> None:
        await self._await_death(role, process, report, 0)
        await self._audit(f"{role} killed at rest")

    async def _await_death(self, role: str, process: Process, report: Path, patience_s: float) -> str | None:
        """Kill the process unless it meets its fate in time; count where it died. None: it ended by itself."""
        try:
            async with asyncio.timeout(patience_s):
                status = await asyncio.shield(process.exited)
        except TimeoutError:
            self._forks.signal(process, signal.SIGKILL)
            status = await process.exited
        if status != -signal.SIGKILL:
            self._find(f"the {role} ended by itself, exit {status}:\n{self._tail(role)}")
            return None
        where = report.read_text() or MOMENT
        self.outcome.kills[f"{role} {where}"] = self.outcome.kills.get(f"{role} {where}", 0) + 1
        return where

    def _kill_too(self, role: str) -> None:
        """The other one's own loop counts it."""
        other = self._running[role]
        if not other.exited.done():
            self._forks.signal(other, signal.SIGKILL)
            self.outcome.both += 1

    async def _start(self, role: str, fate: Fate | None) -> tuple[Process, Path]:
        self._births += 1
        report = self._place.data_dir.parent / "reports" / f"{self._births}-{role}"
        report.touch()
        drawn = None if fate is None else asdict(fate)
        process = await self._forks.spawn(role, self.log(role), fate=drawn, report=str(report))
        self._running[role] = process
        return process, report

    async def _audit(self, when: str) -> None:
        async with self._auditing:
            seen = self._chats.seen[self._audited :]
            self._audited += len(seen)
            self.outcome.audits += 1
            is_deep = self.outcome.audits % DEEP_EVERY == 0
            findings = await asyncio.to_thread(audit, self._place.ledger, seen, is_deep=is_deep)
        for finding in [*findings, *self._chats.faults]:
            self._find(f"{when}: {finding}")
        self._chats.faults.clear()

    def _find(self, finding: str) -> None:
        self.outcome.findings.append(finding)
        self._enough.set()

    # The operator

    async def _operate(self) -> None:
        """Now and then a person does what people do; the server may be away."""
        chance = random.Random(f"{self._seed}-operator")
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=self._place.url, headers=headers, timeout=10, trust_env=False) as client:
            while True:
                await asyncio.sleep(chance.uniform(1, 5))
                path, body = chance.choice(
                    (
                        ("rollback", {"requeue": True}),
                        ("rollback", {"requeue": False}),
                        ("pin", None),
                        ("pin", {"weight_version": None}),
                        ("pin", {"weight_version": None}),
                        ("learning", {"on": False}),
                        ("learning", {"on": True}),
                        ("learning", {"on": True}),
                        ("train", {}),
                    )
                )
                of = {"policy": f"user:{chance.choice(self._users)}"} if self._users and chance.random() < 0.8 else {}
                try:
                    if body is None:
                        status = (await client.get("/v1/admin/status", params=of)).json()
                        body = {"weight_version": status["serving"]}
                    body |= of if path != "train" else {}
                    answer = await client.post(f"/v1/admin/{path}", json=body)
                except (httpx.TransportError, KeyError, ValueError):
                    continue
                if answer.status_code >= 500 and answer.status_code != 503:
                    self._find(f"the operator's {path} {body} was answered {answer.status_code}: {answer.text[:500]}")

    # Rest

    async def _come_to_rest(self, chats: "asyncio.Task[None]") -> None:
        """No more kills: whatever was begun is finished, and the processes leave when asked to."""
        server, _ = await self._start("server", None)
        trainer, _ = await self._start("trainer", None)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        unrest = "the server did not come up"
        try:
            async with asyncio.timeout(REST_S):
                async with httpx.AsyncClient(base_url=self._place.url, headers=headers, trust_env=False) as client:
                    while unrest:
                        await asyncio.sleep(0.2)
                        if server.exited.done() or trainer.exited.done():
                            self._find(f"a process ended by itself:\n{self._tail('server')}\n{self._tail('trainer')}")
                            return
                        try:
                            for policy in ("policy", *(f"user:{user}" for user in self._users)):
                                await client.post("/v1/admin/pin", json={"weight_version": None, "policy": policy})
                            # Three versions refused in a row have paused it; that is how it should be, and the end.
                            await client.post("/v1/admin/learning", json={"on": True})
                        except httpx.TransportError:
                            continue
                        if unrest := await asyncio.to_thread(self._too_little):
                            continue
                        self._chats.stop.set()
                        await chats
                        unrest = await asyncio.to_thread(self._unrest)
        except TimeoutError:
            self._find(f"it did not come to rest: {unrest}")
        for role, process in (("trainer", trainer), ("server", server)):
            self._forks.signal(process, signal.SIGTERM)
            async with asyncio.timeout(120):
                status = await process.exited
            if status != 0:
                self._find(f"asked to stop, the {role} ended with {status}:\n{self._tail(role)}")

    def _too_little(self) -> str:
        """Return how much was said and trained while that is too little to prove something; else ""."""
        with closing(open_read_only(self._place.ledger)) as db:
            (versions,) = db.execute("SELECT count(*) FROM version JOIN lease USING (lease_id)").fetchone()
        said = len(self._chats.seen)
        kills = sum(self.outcome.kills.values())
        return "" if said > kills and versions >= LEAST_VERSIONS else f"{said} replies, {versions} versions"

    def _unrest(self) -> str:
        """What still moves, by the file; "" when nothing does."""
        with closing(open_read_only(self._place.ledger)) as db:
            moving = dict(
                db.execute(
                    "SELECT state, count(*) FROM turn"
                    " WHERE state IN ('paired', 'judged', 'sampled', 'leased') GROUP BY 1"
                ).fetchall()
            )
            moving |= dict(
                db.execute(
                    "SELECT state, count(*) FROM version WHERE state IN ('candidate', 'gated', 'loading') GROUP BY 1"
                ).fetchall()
            )
            (running,) = db.execute("SELECT count(*) FROM request WHERE outcome = 'running'").fetchone()
            return ", ".join(f"{n} {what}" for what, n in (moving | ({"running": running} if running else {})).items())

    def _look_at_it_whole(self) -> None:
        """Everything again, over all that was seen, and what only holds at rest."""
        find, ledger, seen = self.outcome.findings, self._place.ledger, self._chats.seen
        (self._place.data_dir.parent / SEEN_FILE).write_text(json.dumps([asdict(reply) for reply in seen]))
        find += audit(ledger, seen, is_deep=True)
        find += mispaired(ledger, seen, engines_die=bool(self._users))
        find += unrecorded(ledger, self._chats.heard)
        replayed = replay(ledger, self._policy)
        find += replayed.findings
        with closing(open_read_only(ledger)) as db:
            find += self._at_rest(db)
            self.outcome.facts |= {
                "acknowledged": len(seen),
                "began": self._chats.heard.total(),
                "cut": dict(self._chats.cut),
                "replayed_versions": replayed.versions,
                "fresh_moments": replayed.fresh,
                "replayed_replies": replayed.replies,
                "turns": dict(db.execute("SELECT name, n FROM counter WHERE n").fetchall()),
                "versions": dict(db.execute("SELECT state, count(*) FROM version GROUP BY 1").fetchall()),
                "policies": len(db.execute("SELECT DISTINCT policy FROM version").fetchall()),
                "leases": dict(db.execute("SELECT state, count(*) FROM lease GROUP BY 1").fetchall()),
            }

    def _at_rest(self, db: sqlite3.Connection) -> list[str]:
        found = []
        dead = ", ".join(f"'{state}'" for state in DEAD)
        serving = dict(db.execute("SELECT policy, weight_version FROM version WHERE state = 'serving'").fetchall())
        query = f"SELECT policy, max(weight_version) FROM version WHERE state NOT IN ({dead}) GROUP BY policy"
        for policy, newest in db.execute(query).fetchall():
            if serving.get(policy) != newest:
                found.append(f"version {serving.get(policy)} serves {policy}, and {newest} is the newest that passed")
        states = {state for (state,) in db.execute("SELECT DISTINCT state FROM turn")}
        if left := states - {"served", "trained", "dropped"}:
            found.append(f"at rest there are turns {left}")
        (sides,) = db.execute("SELECT count(*) FROM side WHERE status = 200").fetchone()
        if sides < self._chats.sides:
            found.append(f"{self._chats.sides} background requests were answered, {sides} counted")
        named = {Path(folder).name for (folder,) in db.execute("SELECT folder FROM version WHERE folder IS NOT NULL")}
        if unnamed := {entry.name for entry in (self._place.data_dir / "versions").iterdir()} - named:
            found.append(f"no version names the folders {sorted(unnamed)}")
        return found

    def log(self, role: str) -> Path:
        return self._place.data_dir.parent / f"{role}.log"

    def _tail(self, role: str) -> str:
        log = self.log(role)
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""
