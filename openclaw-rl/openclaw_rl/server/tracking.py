"""Trackers follow the ledger: each committed version is sent to each tracker once, in order.

Rule: the ledger is the source. A version is sent when its fate is decided, with the figures of its step and of its
gate. A version that is rolled back later is marked, not deleted. A restart goes on at the version that the tracker's
own file names.

A tracker that fails, hangs or cannot be loaded is a problem of its own in `/healthz`. It holds up neither the server
nor another tracker (`telemetry.trackers.thread`).
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import orjson
import structlog

from openclaw_rl.data_dir import DataDir, write_json
from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger.search import TurnFilter
from openclaw_rl.settings import Settings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.telemetry.trackers.base import TrackedRun, TrackedSample, Tracker, load_tracker
from openclaw_rl.telemetry.trackers.names import public
from openclaw_rl.telemetry.trackers.thread import TrackerThread, Work
from openclaw_rl.types import Version, VersionState

log = structlog.get_logger()

POLL_S = 5.0
DECIDED_AFTER_S = 600.0
"""Age at which an undecided version is sent without the gate's figures: a pin may hold it back for days."""
READ_AT_ONCE = 32
"""Versions that one round reads, and with that the pieces of work it makes."""
MARKED_AMONG = 200
"""Newest versions among which one that was rolled back is marked."""
HANGS_AFTER_S = 60.0
CLOSE_S = 5.0
"""Time that the stop of the server leaves to all trackers together."""
_UNDECIDED = (VersionState.CANDIDATE, VersionState.GATED, VersionState.LOADING)
_GONE = (VersionState.ROLLED_BACK, VersionState.LOST)


class Tracking:
    def __init__(
        self,
        ledger: Ledger,
        health: Health,
        data: DataDir,
        settings: Settings,
        *,
        model_name: str,
        clock: Callable[[], float],
        poll_s: float = POLL_S,
    ) -> None:
        self._ledger, self._health, self._clock, self._poll_s = ledger, health, clock, poll_s
        self._settings, self._folder = settings.tracking, data.tracking
        self._config = facts(settings, model_name)
        self._threads: list[TrackerThread] = []
        self._offered: dict[str, int] = {}
        """The newest version in each tracker's line."""
        self._marks: dict[str, set[int]] = {}

    async def run(self) -> None:
        """Follow the ledger, forever. The server's task group owns this task."""
        try:
            while True:
                try:
                    if not self._threads:
                        await asyncio.to_thread(self._start)
                    await self._round()
                except (LedgerError, OSError) as error:
                    self._health.failed("tracking", f"{type(error).__name__}: {error}")
                else:
                    self._health.ok("tracking")
                self._report()
                await asyncio.sleep(self._poll_s)
        finally:
            await self._close()

    @property
    def sent(self) -> dict[str, int]:
        """The newest version that each tracker has taken."""
        return {thread.name: thread.progress.sent for thread in self._threads}

    def _start(self) -> None:
        """Start a thread for each tracker. Blocks, for the files; the trackers are imported in their threads."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        run = TrackedRun(run_id(self._folder / "run.json"), self._folder, self._settings, self._config)
        started = [TrackerThread(name, partial(_made, name), run) for name in self._settings.all_names]
        self._offered = {thread.name: thread.progress.sent for thread in started}
        self._marks = {thread.name: set(thread.progress.marked) for thread in started}
        self._threads = started

    async def _round(self) -> None:
        newest = await self._ledger.versions(newest=MARKED_AMONG)
        tip = newest[-1].weight_version if newest else 0
        for thread in self._threads:
            if self._offered[thread.name] > tip:  # an older copy of the ledger was put in place
                log.warning("tracker_goes_back", tracker=thread.name, sent=self._offered[thread.name], tip=tip)
                self._offered[thread.name] = tip
        await self._send_steps()
        for thread in self._threads:
            self._send_marks(thread, newest)

    async def _send_steps(self) -> None:
        made: dict[int, Work] = {}
        for thread in self._threads:
            for version in await self._ledger.versions_after(self._offered[thread.name], limit=READ_AT_ONCE):
                number = version.weight_version
                if not self._is_decided(version):
                    break
                if number not in made:
                    made[number] = await self._work(version)
                if not thread.offer(made[number]):
                    break
                self._offered[thread.name] = number
                if version.state in _GONE:
                    self._marks[thread.name].add(number)

    def _is_decided(self, version: Version) -> bool:
        return version.state not in _UNDECIDED or self._clock() - version.committed_at > DECIDED_AFTER_S

    async def _work(self, version: Version) -> Work:
        number, figures = version.weight_version, dict(version.report.metrics)
        for made in await self._ledger.step_makeup([number]):
            figures |= {"batch_samples": made.samples, "practice_samples": made.practice, "version_lag": made.lag}
        figures["gate_refused"] = float(version.state is VersionState.REJECTED)
        if version.state in _GONE:
            figures["rolled_back"] = 1.0
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        return Work(number, version.committed_at, public(finite), await self._samples(number))

    async def _samples(self, number: int) -> tuple[TrackedSample, ...]:
        if not self._settings.samples:
            return ()
        page = await self._ledger.search(TurnFilter(trained_in=number), limit=self._settings.samples)
        return tuple(
            TrackedSample(
                turn.turn_id,
                turn.verdict,
                turn.prompt_tokens,
                turn.response_tokens,
                turn.oldest_version,
                turn.practice is not None,
            )
            for turn in page.turns
        )

    def _send_marks(self, thread: TrackerThread, newest: list[Version]) -> None:
        """Mark the versions that were rolled back after they were sent."""
        marked = self._marks[thread.name]
        for version in newest:
            number = version.weight_version
            if version.state not in _GONE or number in marked or number > self._offered[thread.name]:
                continue
            mark = Work(number, self._clock(), public({"rolled_back": 1.0}), is_mark=True)
            if not thread.offer(mark):
                break
            marked.add(number)
        if newest:
            marked -= {number for number in marked if number < newest[0].weight_version}

    def _report(self) -> None:
        for thread in self._threads:
            part, busy_s = _part(thread.name), thread.busy_s
            fault = thread.fault
            if not thread.is_alive:
                fault = f"its thread ended; {fault or 'no error was raised'}"
            elif busy_s > HANGS_AFTER_S:
                fault = f"its library has not answered for {busy_s:.0f} s"
            if fault is None:
                self._health.ok(part)
            elif not self._health.is_failing(part):
                self._health.failed(part, fault, at_once=True)

    async def _close(self) -> None:
        for thread in self._threads:
            thread.stop()
        if self._threads:
            await asyncio.to_thread(self._join)

    def _join(self) -> None:
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if not thread.join(end - time.monotonic()):
                log.warning("tracker_left_behind", tracker=thread.name, after_s=CLOSE_S)


def _made(name: str) -> Tracker:
    return load_tracker(name)()


def _part(name: str) -> str:
    return f"tracker {name}"


def run_id(path: Path) -> str:
    """Return the id of this data directory's run; the first call makes it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(orjson.loads(path.read_bytes())["id"])
    made = f"openclaw-rl-{secrets.token_hex(4)}"
    write_json(path, {"id": made})
    return made


def facts(settings: Settings, model_name: str) -> dict[str, str | int | float | bool]:
    """Return the facts that describe a run: named one by one, so that no secret and no address is among them."""
    return {
        "model": model_name,
        "method": settings.method.name,
        "engine": settings.engine.kind,
        "judge": settings.judge.kind,
        "trainer": settings.trainer.kind,
        "weights": settings.training.weights,
        "batch_size": settings.training.batch_size,
        "learning_rate": settings.trainer.learning_rate,
        "kl_coef": settings.trainer.kl_coef,
        "temperature": settings.sampling.temperature,
    }
