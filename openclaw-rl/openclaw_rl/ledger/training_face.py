"""A trainer's way through the ledger: tip, lease, commit, durable."""

import sqlite3
from collections.abc import Mapping

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.ledger import chain, leases, versions
from openclaw_rl.ledger.face import Face
from openclaw_rl.trainers.api import Commit, Tip
from openclaw_rl.types import DropReason, Lease, Version


class TrainingFace(Face):
    """From samples to a version."""

    async def tip(self) -> Tip:
        """What to train from."""
        return await self._reader.read(versions.tip)

    async def lease(self, *, trainer: str, n: int | None = None, now: bool = False) -> Lease | None:
        """A batch: `n` (else `batch_size`) samples, or after `max_wait_s` at least `min_batch`; with `now` whatever
        waits. User turns first, tool turns up to `max_tool_share` of the batch. None while too few wait, another
        trainer's lease is live, or learning is paused; the same trainer's is over, since who asks holds none. Waiting
        samples that are too old, or that no ancestor of the tip sampled, are dropped on the way."""
        while True:
            granted = await self._writer.write(
                lambda db: leases.grant(db, self._training, trainer=trainer, n=n, now=now, at=self._clock())
            )
            if granted is None:
                return None
            if isinstance(granted, leases.Grant):
                return await self._read_lease(granted)

    async def _read_lease(self, grant: leases.Grant) -> Lease:
        try:
            return await self._reader.read(lambda db: leases.read(db, grant, lease_s=self._training.lease_s))
        except LedgerUnavailable:
            await self.release(grant.lease_id, grant.fence, reason="its samples could not be read")
            raise

    async def leased(self, fence: int) -> Lease:
        """A live lease once more. Raises CommitRefused when it is over."""
        lease_s = self._training.lease_s
        return await self._reader.read(lambda db: leases.read(db, leases.held(db, fence), lease_s=lease_s))

    async def renew(self, lease_id: str, fence: int) -> float:
        """The new deadline. Raises CommitRefused when the lease is over."""
        lease_s = self._training.lease_s
        return await self._writer.write(lambda db: leases.renew(db, lease_id, fence, at=self._clock(), lease_s=lease_s))

    async def release(
        self, lease_id: str, fence: int, *, reason: str, drop: Mapping[str, DropReason] | None = None
    ) -> None:
        """The samples wait again, but for those in `drop`. Raises CommitRefused when the lease is over otherwise."""
        dropped = drop or {}
        await self._writer.write(
            lambda db: leases.release(db, lease_id, fence, reason=reason, drop=dropped, at=self._clock())
        )

    async def live_lease(self) -> str | None:
        """The id of the lease that may yet be committed."""
        return await self._reader.read(leases.live_id)

    async def overdue(self) -> str | None:
        """The name of the trainer that has let its lease run out without a word: it hangs, or is gone."""
        return await self._reader.read(lambda db: leases.overdue(db, at=self._clock()))

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool:
        """End the live lease of a trainer known to be dead (None: whosever it is); its samples wait again. False when
        there is none."""
        return await self._writer.write(
            lambda db: leases.revoke(db, trainer=trainer, parents=None, reason=reason, at=self._clock())
        )

    async def commit(self, commit: Commit) -> int:
        """One transaction: the fence is the newest, the parent is the tip; the samples are TRAINED in a new version, a
        candidate. The same lease_id again gives the same version. Raises CommitRefused."""
        return await self._writer.write(lambda db: chain.commit(db, commit, at=self._clock()))

    async def durable(self, weight_version: int) -> None:
        """The trainer can go on from it after a crash."""
        await self._writer.write(lambda db: chain.durable(db, weight_version))

    async def lose_undurable(self, reason: str) -> Version | None:
        """The trainer crashed: versions behind the last durable one are LOST, their samples wait again, and the durable
        weights go on (and serve) under a new number. None when nothing was lost."""

        def lose(db: sqlite3.Connection) -> Version | None:
            number = chain.lose_undurable(db, reason, at=self._clock())
            return None if number is None else versions.read(db, number)

        return await self._writer.write(lose)
