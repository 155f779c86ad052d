"""Journal of a run: one line of JSON per event, on disk before the event counts. A killed run goes on from it.

An episode is `opened`, then `scored` (before the outcome is sent), then `ended` (the server has it), or `aborted`. A
scored episode's outcome is sent again after a restart, and the server takes the same outcome once. An episode that was
only opened is aborted, and another one takes its place.
"""

import asyncio
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import orjson

from openclaw_rl.agents.environment import Outcome, Split
from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import SettingsError

_FIRST_PAUSE_S = 1.0
Stage = Literal["opened", "scored", "ended", "aborted"]


@dataclass(slots=True)
class Attempt:
    """One episode of the server; a member of a group may need several."""

    episode_id: str
    stage: Stage
    outcome: Outcome | None = None
    truncated: bool = False
    reason: str = ""
    """Of an abort."""


@dataclass(slots=True)
class GroupRecord:
    """A group as the journal has it."""

    id: str
    task: str
    kind: str
    size: int
    split: Split
    version: int | None
    members: dict[int, list[Attempt]] = field(default_factory=dict)
    is_whole: bool = False

    def attempt(self, episode_id: str) -> Attempt:
        return next(a for attempts in self.members.values() for a in attempts if a.episode_id == episode_id)

    def outcomes(self) -> Iterator[tuple[Outcome, bool]]:
        """Yield the outcomes that the server has or will get, and whether each was truncated."""
        for attempts in self.members.values():
            for attempt in attempts:
                if attempt.outcome is not None and attempt.stage in ("scored", "ended"):
                    yield attempt.outcome, attempt.truncated


class Records:
    """A journal as it is read: the run's id, its groups, its evaluations."""

    def __init__(self, path: Path, environment: str) -> None:
        self.path, self._environment = path, environment
        self.run = ""
        self.groups: dict[str, GroupRecord] = {}
        self.evaluations: list[dict[str, Any]] = []

    @classmethod
    def of_folder(cls, folder: Path, environment: str) -> Self:
        """Read the journal of a folder, which another process may be writing. Raises SettingsError."""
        records = cls(folder / "journal.jsonl", environment)
        try:
            records._read()
        except OSError as error:
            raise SettingsError(f"folder: no run in {folder}: {error.strerror}") from error
        return records

    def of_split(self, split: Split) -> list[GroupRecord]:
        return [group for group in self.groups.values() if group.split == split]

    def _read(self) -> int:
        """Take the whole lines in, and return their length; a kill may have left half a line behind them."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                self._take(orjson.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise SettingsError(f"{self.path}: line {number} is no event of a run ({error!r})") from error
        return whole

    def _take(self, event: dict[str, Any]) -> None:
        what = event["what"]
        if what == "run":
            self.run = event["run"]
            if (found := event["environment"]) != self._environment:
                raise SettingsError(f"folder: {self.path} is of a run of {found}; name another folder")
            return
        if what == "evaluated":
            self.evaluations.append(event["result"])
            return
        if what == "group":
            known = {name: event[name] for name in ("task", "kind", "size", "split", "version")}
            self.groups[event["group"]] = GroupRecord(event["group"], **known)
            return
        group = self.groups[event["group"]]
        if what == "whole":
            group.is_whole = True
        elif what == "opened":
            group.members.setdefault(event["member"], []).append(Attempt(event["episode"], "opened"))
        else:
            attempt = group.attempt(event["episode"])
            attempt.stage, attempt.reason = what, event.get("reason", "")
            if what == "scored":
                attempt.outcome = Outcome(event["reward"], event["metrics"])
                attempt.truncated = event["truncated"]


class Journal(Records):
    """The journal of one folder, written by one runner at a time."""

    def __init__(self, folder: Path, environment: str, tell: Callable[[str], None] = lambda _: None) -> None:
        """Open or begin the journal, and read it. Raises SettingsError.

        tell: gets one line when the disk takes no more, and one when it does again.
        """
        super().__init__(folder / "journal.jsonl", environment)
        self._tell, self._lock = tell, asyncio.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise SettingsError(f"folder: {error.filename}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._length = self._read()
            os.ftruncate(self._file, self._length)
            if not self.run:
                self.run = uuid.uuid4().hex[:10]
                self._write(orjson.dumps({"what": "run", "run": self.run, "environment": environment}) + b"\n")
        except (OSError, SettingsError) as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise SettingsError(f"folder: another run writes {self.path}") from error
            if isinstance(error, OSError):
                raise SettingsError(f"folder: {self.path}: {error.strerror}") from error
            raise

    def close(self) -> None:
        os.close(self._file)

    async def begin(self, group: GroupRecord) -> None:
        self.groups[group.id] = group
        await self._add(
            {
                "what": "group",
                "group": group.id,
                "task": group.task,
                "kind": group.kind,
                "size": group.size,
                "split": group.split,
                "version": group.version,
            }
        )

    async def opened(self, group: GroupRecord, member: int, episode_id: str) -> Attempt:
        attempt = Attempt(episode_id, "opened")
        group.members.setdefault(member, []).append(attempt)
        await self._add({"what": "opened", "group": group.id, "member": member, "episode": episode_id})
        return attempt

    async def scored(self, group: GroupRecord, attempt: Attempt, outcome: Outcome, *, truncated: bool) -> None:
        attempt.outcome, attempt.truncated, attempt.stage = outcome, truncated, "scored"
        await self._add(
            {
                "what": "scored",
                "group": group.id,
                "episode": attempt.episode_id,
                "reward": outcome.reward,
                "truncated": truncated,
                "metrics": dict(outcome.metrics),
            }
        )

    async def ended(self, group: GroupRecord, attempt: Attempt) -> None:
        attempt.stage = "ended"
        await self._add({"what": "ended", "group": group.id, "episode": attempt.episode_id})

    async def aborted(self, group: GroupRecord, attempt: Attempt, reason: str) -> None:
        attempt.stage, attempt.reason = "aborted", reason
        await self._add({"what": "aborted", "group": group.id, "episode": attempt.episode_id, "reason": reason[:500]})

    async def whole(self, group: GroupRecord) -> None:
        """No more episodes of this group will come."""
        group.is_whole = True
        await self._add({"what": "whole", "group": group.id})

    async def evaluated(self, result: dict[str, Any]) -> None:
        self.evaluations.append(result)
        await self._add({"what": "evaluated", "result": result})

    async def _add(self, record: dict[str, object]) -> None:
        """Write the line; while the disk takes none, wait: an event that is not on disk must not count."""
        line, pauses = orjson.dumps(record) + b"\n", Backoff(_FIRST_PAUSE_S, 30.0)
        was_full = False
        async with self._lock:
            while True:
                try:
                    await asyncio.shield(asyncio.to_thread(self._write, line))
                except OSError as error:
                    if not was_full:
                        self._tell(f"! the journal {self.path} cannot be written ({error.strerror}); the run waits")
                    was_full = True
                    await asyncio.sleep(pauses.next_s())
                else:
                    break
        if was_full:
            self._tell("the journal can be written again")

    def _write(self, line: bytes) -> None:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._length)  # half a line
            raise
        self._length += len(line)
