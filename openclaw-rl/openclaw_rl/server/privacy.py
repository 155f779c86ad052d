"""Deletion of personal data: `Forgetting` on request, `Retention` by age and size.

Forgetting means a session, the conversation of a turn, or a user. `Ledger.forget*` deletes the rows, and at last
`Sessions` drops its digests of their words. A version's folder holds the commit that published it, with prompts and
replies of its batch: they are taken out of it. A checkpoint that can never be committed is deleted.

With `rebuild` each policy goes back to the newest version before the forgotten turns. What it learned since then is
abandoned, the samples of other users wait for training again, and the folders of abandoned versions are deleted.
Backups and exports are their owner's to delete.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from openclaw_rl.data_dir import write_private
from openclaw_rl.errors import EngineError, LedgerError
from openclaw_rl.ledger import Forgotten, Ledger
from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import RetentionSettings
from openclaw_rl.trainers import checkpoint
from openclaw_rl.types import own_policy

log = structlog.get_logger()

Clock = Callable[[], float]
_DAY_S, _GB = 86400.0, 10**9
_FIRST_S = 60.0  # after a start, which has enough to do
_NEXT_S = 1.0  # while a round deleted rows: more may be due


@dataclass(frozen=True, slots=True)
class Rebuilt:
    serving: dict[str, int]
    """Version that each policy went back to."""
    waiting: int
    """Samples that wait for training, for the first time or again."""
    folders: int
    """Deleted folders of abandoned versions."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Deletes a session, a conversation or a user. Every method raises LedgerError."""

    ledger: Ledger
    sessions: Sessions
    publisher: Publisher
    root: Path
    """The data directory."""

    async def session(self, session_id: str, user: str | None) -> Forgotten:
        return await self._everywhere(self.ledger.forget(session_id, user))

    async def conversation(self, turn_id: str) -> Forgotten:
        return await self._everywhere(self.ledger.forget_turn(turn_id))

    async def user(self, name: str) -> Forgotten:
        """Delete a user, and the policy that learned from this user alone with all of its weights."""
        removed: tuple[int, ...] = ()

        async def deleted() -> Forgotten:
            nonlocal removed
            forgotten = await self.ledger.forget_user(name)
            removed = forgotten.removed
            return forgotten

        try:
            return await self._everywhere(deleted())
        finally:
            # Always: the rows may be gone before a failure, and the policy with them.
            policy = own_policy(name)
            if removed or policy not in await self.ledger.policies():
                await self.publisher.remove(policy, removed)

    async def _everywhere(self, deletion: Awaitable[Forgotten]) -> Forgotten:
        try:
            return await self._folders(await deletion)
        finally:
            # Last, and always: a deletion may have committed its rows before it failed.
            await self.sessions.forget_deleted()

    async def _folders(self, forgotten: Forgotten) -> Forgotten:
        for number in forgotten.trained_in:
            folder = (await self.ledger.version(number)).folder
            if folder is not None:
                await asyncio.to_thread(without_probes, self.root / folder)
        await version_folders.remove_ended(self.ledger, self.root / "versions")
        log.info("session_forgotten", turns=forgotten.turns, trained_in=forgotten.trained_in)
        return forgotten

    async def rebuild(self, forgotten: Forgotten) -> Rebuilt | None:
        """Roll back to before the forgotten turns; None when no live version was trained on them.

        Raises LedgerError when there is no version to go back to.
        """
        before = await self.ledger.version_folders()
        to = await self.ledger.rollback_from(forgotten.trained_in)
        folders = await self.ledger.drop_weights(min(forgotten.trained_in) - 1) if forgotten.trained_in else []
        for folder in folders:
            await asyncio.to_thread(checkpoint.discard, self.root / folder)
        if not to:
            return None
        # The publisher may have pruned one of them since the rollback.
        gone = len(before.keys() - (await self.ledger.version_folders()).keys())
        try:
            await self.publisher.follow()
        except (EngineError, TimeoutError) as error:  # the publisher retries when the engine is back
            log.debug("rebuild_delayed", error=repr(error))
            self.publisher.wake()
        return Rebuilt(to, (await self.ledger.counts())["sampled"], gone)


def without_probes(folder: Path) -> None:
    """Take prompts and replies out of a checkpoint's commit."""
    # The manifest stops naming the file before the file changes, so the folder is whole at every moment.
    file, manifest_file = folder / checkpoint.COMMIT_FILE, folder / checkpoint.MANIFEST_FILE
    try:
        commit, manifest = json.loads(file.read_text()), json.loads(manifest_file.read_text())
    except FileNotFoundError:
        return
    if not commit["report"].get("probes"):
        return
    if manifest["files"].pop(file.name, None) is not None:
        write_private(manifest_file, json.dumps(manifest, indent=1, sort_keys=True).encode())
    commit["report"]["probes"] = []
    write_private(file, json.dumps(commit).encode())


class Retention:
    """Task that deletes turns that are over and old, in small rounds, while the server runs.

    `is_full`: the ledger is over `retention.max_gb`, and every turn that is left in it still waits.
    """

    def __init__(
        self, ledger: Ledger, sessions: Sessions, settings: RetentionSettings, *, clock: Clock = time.time
    ) -> None:
        """clock: the clock of `received_at`. A wall clock that is set ahead would make every turn old."""
        self._ledger, self._sessions, self._settings, self._clock = ledger, sessions, settings, clock
        self.is_full = False

    async def run(self) -> None:
        if self._settings.max_age_days is None and self._settings.max_gb is None:
            return
        pause_s = min(_FIRST_S, self._settings.every_s)
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _NEXT_S if await self.round() else self._settings.every_s

    async def round(self) -> bool:
        """Delete one round of turns. Return True when a turn was deleted: more may be due."""
        age, size = self._settings.max_age_days, self._settings.max_gb
        try:
            try:
                done = await self._ledger.retain(
                    older_than=None if age is None else self._clock() - age * _DAY_S,
                    most_bytes=None if size is None else int(size * _GB),
                )
            finally:  # it deletes in batches: some rows may be gone when a later batch fails
                await self._sessions.forget_deleted()
        except LedgerError as error:
            log.warning("retention_failed", error=str(error))
            return False
        if done.turns:
            log.info("turns_let_go", turns=done.turns, pieces=done.pieces, used_mb=round(done.used_bytes / 1e6, 1))
        is_full = done.is_full and not done.turns
        if is_full and not self.is_full:
            log.warning("ledger_full", used_mb=round(done.used_bytes / 1e6, 1), max_gb=size)
        self.is_full = is_full
        return bool(done.turns)
