"""Where a process may be killed: the transitions of the ledger and of a checkpoint, as hooks around the real code.

A process gets one `Fate`: at its n-th transition that fits, it writes which one it was and sends itself SIGKILL.
"""

import functools
import inspect
import os
import random
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.ledger import syncer as ledger_syncer
from openclaw_rl.ledger import writer as ledger_writer
from openclaw_rl.publishing import version_folders
from openclaw_rl.testing import FakeEngine, fake_engine
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.trainers.loop import TrainerLoop

GROUP_POINTS = ("taken", "mid_group", "before_commit", "committed", "answered")
"""Of one group of the writer: taken from the queue; some jobs done; all done, not committed; committed, not answered;
answered, and nobody has acted on it yet."""
_OFTEN = ("begin", "finish", "pair", "record_verdict", "record_sample", "_grant", "commit", "set_version_state")
_RARELY = ("abandon", "drop", "count_side", "renew", "release", "reject", "rollback", "set_pin", "set_learning")
"""What jobs of the ledger's writer do, by the ledger's method that handed them in."""
_OPENING = ("migrate", "_claim", "abandon_interrupted", "expire")
_ADAPTERS = ("adapter_loaded", "switched", "adapter_unloaded")
_CALLS = ("asked", "in_flight", "got_answer")
_STEPS = ("remember", "stepped", "writing", "fsync", "renamed", "written", "forget", "prune", "discard")
STAGES = {"server": (*GROUP_POINTS, *_OPENING), "trainer": (*_CALLS, *_STEPS)}
"""Stages that a campaign must meet: a start of either process, or a batch of the trainer, passes each of them."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Die at the n-th transition of this point (any when None), of a group with this work in it (any when None)."""

    n: int
    point: str | None = None
    work: str | None = None


class Death:
    """Counts transitions; called at each of them, from whichever thread is there."""

    def __init__(self, fate: Fate | None, report: Path) -> None:
        self._fate, self._left = fate, 0 if fate is None else fate.n
        self._report = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def __call__(self, point: str, *works: str) -> None:
        if self.is_due(point, *works):
            self.die(point, *works)

    def is_due(self, point: str, *works: str) -> bool:
        fate = self._fate
        if fate is None or fate.point not in (None, point) or not (fate.work is None or fate.work in works):
            return False
        self._left -= 1
        return self._left == 0

    def die(self, point: str, *works: str) -> None:
        os.write(self._report, f"{point} {'+'.join(sorted(set(works)))}".strip().encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, point: str) -> None:
        """A transition before and one after a function."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            self(point, "before")
            value = real(*args, **kwargs)
            self(point, "after")
            return value

        setattr(owner, name, hooked)

    def after(self, owner: Any, name: str, point: str) -> None:
        """A transition after an async function."""
        real = getattr(owner, name)

        @functools.wraps(real)
        async def hooked(*args: Any, **kwargs: Any) -> Any:
            value = await real(*args, **kwargs)
            self(point)
            return value

        setattr(owner, name, hooked)


def hook_server(death: Death) -> None:
    """Every group of the ledger's writer, every step of its opening, every change of the engine's adapters."""
    for work in (*_OFTEN, *_RARELY):
        getattr(Ledger, work)  # a fate that names no operation would never be met
    writer = ledger_writer.Writer
    commit, attempt, settle = writer._commit, ledger_writer._attempt, writer._settle
    left: list[str] = []  # works of the group at hand that are not done; the writer's thread alone has it

    def hooked_commit(self: Any, db: Any, group: Any) -> Any:
        works = [_work(job) for job in group]
        left[:] = works
        death("taken", *works)
        outcomes = commit(self, db, group)
        death("committed", *works)
        return outcomes

    def hooked_attempt(db: Any, job: Any) -> Any:
        outcome = attempt(db, job)
        work = left.pop(0)
        death("mid_group" if left else "before_commit", work)
        return outcome

    def hooked_settle(self: Any, group: Any, outcomes: Any) -> None:
        settle(self, group, outcomes)
        death("answered", *map(_work, group))

    writer._commit, ledger_writer._attempt, writer._settle = hooked_commit, hooked_attempt, hooked_settle
    death.around(ledger_syncer.Syncer, "sync", "sync")
    for module in (ledger_syncer, ledger_writer):  # either thread may move the log into the file
        death.around(module, "checkpoint", "checkpoint")
    for name in ("migrate", "_claim"):
        death.around(ledger_open, name, name)
    death.around(ledger_open.turns, "abandon_interrupted", "abandon_interrupted")
    death.around(ledger_open.leases, "expire", "expire")
    death.around(version_folders.checkpoint, "discard", "discard")
    death.after(HttpEngine, "load_adapter", "adapter_loaded")
    death.after(HttpEngine, "unload_adapter", "adapter_unloaded")
    death.around(VersionAdmission, "switch", "switched")


def _work(job: Any) -> str:
    """Return the name of the ledger's method that handed the job in; `write` has its body in a closure."""
    found = (
        inspect.getclosurevars(job.work).nonlocals.get("body", job.work) if inspect.isfunction(job.work) else job.work
    )
    return str(getattr(found, "__name__", found))


def hook_trainer(death: Death) -> None:
    """Every call of the trainer API, and every step from the lease to the commit. (The learner calls `death` too.)"""
    post, fsync, write = TrainerClient._post, checkpoint._fsync, checkpoint.write

    def hooked_post(self: Any, verb: str, *args: Any, **kwargs: Any) -> bytes:
        death("asked", verb)
        if death.is_due("in_flight", verb):
            delay_s = random.uniform(0, 0.01)
            threading.Timer(delay_s, death.die, ("in_flight", verb)).start()
        answer = post(self, verb, *args, **kwargs)
        death("got_answer", verb)
        return answer

    def hooked_fsync(path: Path) -> None:
        death("renamed" if path.name == "versions" else "fsync")
        fsync(path)

    def hooked_write(*args: Any) -> Path:
        folder = write(*args)
        death("written")
        return folder

    TrainerClient._post, checkpoint._fsync, checkpoint.write = hooked_post, hooked_fsync, hooked_write
    death.around(TrainerLoop, "_remember", "remember")
    death.around(TrainerLoop, "_forget", "forget")
    death.around(checkpoint, "discard", "discard")
    death.around(checkpoint, "prune", "prune")


def hook_engine(death: Death) -> None:
    """Every token, and every adapter that comes or leaves."""
    event = fake_engine._event

    def hooked_event(*args: Any) -> Any:
        made = event(*args)
        death("sampled")
        return made

    fake_engine._event = hooked_event
    death.after(FakeEngine, "load_adapter", "loaded")
    death.after(FakeEngine, "unload_adapter", "unloaded")


def policies_fate(chance: random.Random) -> Fate:
    """Of a server with many policies: a third where one is opened, or an adapter comes, leaves or is switched to."""
    kind = chance.random()
    if kind < 0.1:
        return Fate(1, chance.choice(GROUP_POINTS), "open_policy")
    if kind < 0.35:
        return Fate(chance.randint(1, 4), chance.choice(_ADAPTERS))
    return server_fate(chance)


def engine_fate(chance: random.Random) -> Fate:
    """Half of them in the middle of replies, the rest where an adapter came or left."""
    if chance.random() < 0.5:
        return Fate(chance.randint(20, 400), "sampled")
    return Fate(chance.randint(1, 8), chance.choice(("loaded", "unloaded")))


def server_fate(chance: random.Random) -> Fate:
    """Half of them anywhere; the rest aimed, so that rare transitions are met too."""
    kind = chance.random()
    if kind < 0.5:
        return Fate(chance.randint(1, 80))
    if kind < 0.8:
        works = _OFTEN if chance.random() < 0.8 else _RARELY
        return Fate(chance.randint(1, 3), chance.choice(GROUP_POINTS), chance.choice(works))
    if kind < 0.9:
        return Fate(1, chance.choice(_ADAPTERS))
    return Fate(chance.randint(1, 2), chance.choice((*_OPENING, "discard", "checkpoint")))


def trainer_fate(chance: random.Random) -> Fate:
    """A third anywhere; the rest aimed at what only a trainer with a batch meets."""
    kind = chance.random()
    if kind < 0.3:
        return Fate(chance.randint(1, 40))
    if kind < 0.6:
        verb = chance.choice(("commit", "commit", "commit", "lease", "lease", "tip", "release"))
        return Fate(chance.randint(1, 2), chance.choice(_CALLS), verb)
    return Fate(chance.randint(1, 3), chance.choice(_STEPS))
