"""What becomes of versions: states, rejections, rollbacks, pins, and the weights they leave."""

import sqlite3

from openclaw_rl.ledger import chain, meta, versions
from openclaw_rl.ledger.face import Face
from openclaw_rl.types import Version, VersionState


class VersionsFace(Face):
    """Which version serves, and which may again."""

    async def versions(self, *, since: int = 0, newest: int | None = None) -> list[Version]:
        """By number, their reports without the probes: all `since` one, or the `newest` of them. All of a ledger that
        has been at it for long are very many."""
        return await self._reader.read(lambda db: versions.read_all(db, since=since, newest=newest))

    async def unfinished_versions(self) -> list[Version]:
        """CANDIDATE, GATED or LOADING: on the way to be served, or to be passed over. By number."""
        return await self._reader.read(versions.unfinished)

    async def version_folders(self) -> dict[int, str]:
        """Of the versions that still have their weights, by number."""
        return await self._reader.read(versions.folders)

    async def version(self, n: int) -> Version:
        """One, with its whole report."""
        return await self._reader.read(lambda db: versions.read(db, n))

    async def set_version_state(self, n: int, state: VersionState, reason: str | None = None) -> None:
        """Legal changes only; the state it has already is no change. SERVING retires the one that served."""
        await self._writer.write(lambda db: versions.set_state(db, n, state, reason))

    async def reject(self, n: int, reason: str) -> list[int]:
        """The gate's no: n and all built on it are REJECTED, the tip is its parent. The batch of n ends
        `gate_rejected`, those of later versions wait again. Returns the rejected versions, newest first."""
        return await self._writer.write(lambda db: chain.reject(db, n, reason, at=self._clock()))

    async def rejections_in_a_row(self) -> int:
        """Since a version last passed the gate."""
        return await self._reader.read(lambda db: meta.get_int(db, "rejections_in_a_row"))

    async def rollback(self, to: int, *, requeue: bool) -> Version:
        """Versions after `to` are ROLLED_BACK; their samples are dropped, or wait again with `requeue`. `to` is
        SERVING."""

        def roll_back(db: sqlite3.Connection) -> Version:
            chain.rollback(db, to, requeue=requeue, at=self._clock())
            return versions.read(db, to)

        return await self._writer.write(roll_back)

    async def roll_back_behind(self, good: int) -> int:
        """To the newest version up to `good` that can be gone back to, which serves from here on. The samples of what
        was abandoned are dropped."""
        return await self._writer.write(lambda db: chain.rollback_behind(db, good, at=self._clock()))

    async def pinned(self) -> int | None:
        """The version that is to be served whatever the tip is."""
        return await self._reader.read(versions.pinned)

    async def check_pinnable(self, n: int) -> None:
        """Raises LedgerError when `set_pin` would: before anything is loaded for it."""
        await self._reader.read(lambda db: versions.check_pinnable(db, n))

    async def set_pin(self, n: int | None) -> None:
        """For the publisher alone: training goes on from the tip."""
        await self._writer.write(lambda db: versions.set_pin(db, n))

    async def serving_version(self) -> int:
        """What new requests are to get."""
        return await self._reader.read(versions.serving)

    async def optimizer_pruned(self, weight_version: int) -> None:
        """Its optimizer state was deleted: `tip` says so when it is rolled back to."""
        await self._writer.write(lambda db: versions.optimizer_pruned(db, weight_version))

    async def needed_versions(self, newest: int) -> frozenset[int]:
        """Those whose files must stay; the `newest` that passed the gate are among them."""
        return await self._reader.read(lambda db: versions.needed(db, newest))

    async def prune_weights(self, n: int, newest: int) -> str | None:
        """Forget where the weights of `n` are: it is never served again. The folder, when no other version names it.
        Raises LedgerError when it is one of `needed_versions(newest)`."""
        return await self._writer.write(lambda db: versions.prune_weights(db, n, newest))
