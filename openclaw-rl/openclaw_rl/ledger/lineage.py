"""How the chain of versions grows and is cut, each in one transaction.

The live versions (not rejected, rolled back or lost) are one chain from the base to the tip. `commit` makes it longer
by one; `reject`, `rollback` and `lose_undurable` cut it, and say what becomes of the samples of each version they cut
off. A lease that builds on a version cut off is revoked: its samples wait again, and its trainer learns it at the next
call.

What becomes of versions: states, rejections, rollbacks, pins, and the weights they leave.
"""

import json
import math
import sqlite3
from pathlib import PurePosixPath

import orjson

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.ledger import feedback, leases, schema, versions
from openclaw_rl.ledger.blobs import pack_bytes
from openclaw_rl.ledger.states import DEAD, PASSED, move, move_version
from openclaw_rl.ledger.store import LedgerPart
from openclaw_rl.trainer_protocol import Commit
from openclaw_rl.types import DropReason, TurnState, Version, VersionState


def commit(db: sqlite3.Connection, step: Commit, *, at: float) -> int:
    """The one transaction of a step. Idempotent by lease_id, unless the version was cut off since."""
    known = db.execute(
        "SELECT weight_version, state, reason FROM version WHERE lease_id = ?", (step.lease_id,)
    ).fetchone()
    if known is not None:
        if known["state"] in DEAD:
            raise CommitRefused(f"version {known['weight_version']} is {known['state']}: {known['reason']}")
        return int(known["weight_version"])
    lease = leases.live(db, step.lease_id, step.fence)
    parent = versions.row(db, schema.get_int(db, "tip"))
    if not step.parent == lease["parent"] == parent["weight_version"]:
        raise CommitRefused(
            f"the step builds on version {step.parent}, its lease on {lease['parent']},"
            f" and the tip is {parent['weight_version']}"
        )
    _check_manifest(step, parent)
    leases.drop_leased(db, step.fence, _reasons(step.drop), at=at)
    number = versions.next_number(db)
    held = db.execute("SELECT turn FROM lease_sample WHERE fence = ? AND outcome = 'leased'", (step.fence,)).fetchall()
    if not held:
        raise CommitRefused("the step trained on none of its samples: release the lease instead")
    for (turn,) in held:
        move(db, turn, TurnState.TRAINED, at=at, detail=f"version {number}", trained_in=number)
    db.execute("UPDATE lease_sample SET outcome = 'trained' WHERE fence = ? AND outcome = 'leased'", (step.fence,))
    leases.end(db, step.fence, "committed", reason=None, at=at)
    versions.insert(
        db,
        number,
        parent,
        depth=parent["depth"] + 1,
        folder=step.manifest.folder,
        sha256=step.manifest.sha256,
        weights_file=step.manifest.weights_file,
        state=VersionState.CANDIDATE,
        lease_id=step.lease_id,
        durable=step.durable,
        metrics=json.dumps(step.report.metrics, sort_keys=True),
        probes=pack_bytes(orjson.dumps([probe.model_dump() for probe in step.report.probes])),
        at=at,
    )
    schema.put(db, "tip", number)
    return number


def durable(db: sqlite3.Connection, n: int) -> None:
    """Idempotent."""
    row = versions.row(db, n)
    if row["state"] in DEAD:
        raise CommitRefused(f"version {n} is {row['state']}: {row['reason']}")
    db.execute("UPDATE version SET durable = 1 WHERE weight_version = ?", (n,))


def reject(db: sqlite3.Connection, n: int, reason: str, *, at: float) -> list[int]:
    """The gate refuses n, and with it all that was built on it. The batch of n ends `gate_rejected`; the batches on top
    of it did no wrong, and wait again (if they are stale by then, the next lease says so). Returns the rejected
    versions, n last."""
    version = versions.row(db, n)
    parent = version["parent"]
    if version["state"] in DEAD or parent is None:
        raise LedgerError(f"version {n} is {version['state']} and cannot become rejected")
    rejected = versions.after(db, parent)
    for number in rejected:
        above = f"built on version {n}, which was rejected: {reason}"
        move_version(db, number, VersionState.REJECTED, reason=reason if number == n else above)
        if number == n:
            _free_samples(db, number, DropReason.GATE_REJECTED, f"version {n}", at=at)
        else:
            _free_samples(db, number, None, f"version {n} was rejected", at=at)
    schema.put(db, "rejections_in_a_row", schema.get_int(db, "rejections_in_a_row") + 1)
    _cut(db, rejected, parent, f"version {n} was rejected", at=at)
    return rejected


def rollback(db: sqlite3.Connection, to: int, *, requeue: bool, at: float) -> None:
    """Back to a version that passed the gate. It is `serving` from here on; a pin moves to it."""
    target = versions.row(db, to)
    if target["state"] not in PASSED:
        raise LedgerError(
            f"version {to} is {target['state']}: only a version that passed the gate can be rolled back to"
        )
    if not target["durable"]:
        raise LedgerError(f"version {to} was never checkpointed: no trainer could go on from it")
    versions.check_has_weights(target)
    abandoned = versions.after(db, to)
    for number in abandoned:
        move_version(db, number, VersionState.ROLLED_BACK, reason=f"rolled back to version {to}")
        _free_samples(db, number, None if requeue else DropReason.ROLLED_BACK, f"rolled back to version {to}", at=at)
    _serve(db, to)
    was_pinned = versions.pinned(db) is not None
    _cut(db, abandoned, to, f"rolled back to version {to}", at=at)
    if was_pinned:
        schema.put(db, "pinned", to)


def rollback_target(db: sqlite3.Connection, at_most: int) -> int | None:
    """The newest version up to `at_most` that can be gone back to: it passed the gate, a trainer can go on from it, and
    its weights are there."""
    query = "SELECT * FROM version WHERE weight_version <= ? AND durable ORDER BY weight_version DESC"
    rows = db.execute(query, (at_most,))
    return next((r["weight_version"] for r in rows if r["state"] in PASSED and versions.has_weights(r)), None)


def rollback_behind(db: sqlite3.Connection, good: int, *, at: float) -> int:
    """Back to the newest version up to `good` that can be gone back to; the samples of what was abandoned are dropped.
    Returns it."""
    target = rollback_target(db, good)
    if target is None:
        raise LedgerError(f"no version up to {good} can be gone back to")
    rollback(db, target, requeue=False, at=at)
    return target


def lose_undurable(db: sqlite3.Connection, reason: str, *, at: float) -> int | None:
    """The trainer lost what it had not checkpointed: the versions behind the last durable one are `lost`, their samples
    wait again, and the durable one goes on under a new number (the lost numbers have been served; caches and records
    know them). If it or a lost one served, the new number serves; if it never passed the gate, it has to. Returns
    it."""
    kept = schema.get_int(db, "tip")
    while not (row := versions.row(db, kept))["durable"]:
        kept = row["parent"]
    lost = versions.after(db, kept)
    if not lost:
        return None
    serves = versions.serving(db) in (kept, *lost)
    for number in lost:
        move_version(db, number, VersionState.LOST, reason=reason)
        _free_samples(db, number, None, f"version {number} is lost", at=at)
    number = versions.next_number(db)
    versions.insert(
        db,
        number,
        row,
        depth=row["depth"],
        folder=row["folder"],
        sha256=row["sha256"],
        weights_file=row["weights_file"],
        state=VersionState.RETIRED if serves or row["state"] in PASSED else VersionState.CANDIDATE,
        same_weights_as=kept,
        durable=True,
        has_optimizer=bool(row["has_optimizer"]),
        metrics=row["metrics"],
        probes=row["probes"],
        at=at,
    )
    if serves:  # else an older version does, and goes on
        _serve(db, number)
    _cut(db, lost, number, reason, at=at)
    return number


def _check_manifest(step: Commit, parent: sqlite3.Row) -> None:
    manifest = step.manifest
    check_folder(manifest.folder)
    if PurePosixPath(manifest.weights_file).name != manifest.weights_file:
        raise CommitRefused(f"manifest.weights_file {manifest.weights_file!r} is no file's name")
    if (manifest.kind, manifest.base_hash) != (parent["kind"], parent["base_hash"]):
        raise CommitRefused(
            f"the step is {manifest.kind} weights for base {manifest.base_hash}, and this ledger has"
            f" {parent['kind']} weights for base {parent['base_hash']}"
        )
    if bad := [name for name, value in step.report.metrics.items() if not math.isfinite(value)]:
        raise CommitRefused(f"report.metrics not finite: {', '.join(sorted(bad))}")
    for probe in step.report.probes:
        figures = (*probe.log_probs, *probe.parent_log_probs)
        if not all(map(math.isfinite, figures)):  # the ledger would keep null, and nobody could read the report
            raise CommitRefused("report.probes not finite")
        if not probe.prompt_ids or {len(probe.log_probs), len(probe.parent_log_probs)} != {len(probe.response_ids)}:
            raise CommitRefused("report.probes: a prompt, and two log-probs for each token of the response, are needed")


def check_folder(folder: str) -> None:
    """Raises CommitRefused unless it is relative and stays below the data directory."""
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in folder:
        raise CommitRefused(f"manifest.folder {folder!r} is not a folder below the data directory")


def _reasons(drop: dict[str, str]) -> dict[str, DropReason]:
    try:
        return {sample_id: DropReason(reason) for sample_id, reason in drop.items()}
    except ValueError as error:
        raise CommitRefused(f"no such drop reason: {error}") from error


def _serve(db: sqlite3.Connection, n: int) -> None:
    """`n` serves; whoever did is retired."""
    if versions.row(db, n)["state"] != VersionState.SERVING:
        db.execute("UPDATE version SET state = 'retired' WHERE state = 'serving'")
        move_version(db, n, VersionState.SERVING)


def _free_samples(db: sqlite3.Connection, version: int, reason: DropReason | None, detail: str, *, at: float) -> None:
    """The samples a version was trained on wait again, or end with a reason."""
    for (turn,) in db.execute("SELECT id FROM turn WHERE trained_in = ?", (version,)).fetchall():
        to = TurnState.SAMPLED if reason is None else TurnState.DROPPED
        move(db, turn, to, at=at, reason=reason, detail=detail)
        if reason is None:
            feedback.catch_up(db, turn, at=at)


def _cut(db: sqlite3.Connection, dead: list[int], new_tip: int, reason: str, *, at: float) -> None:
    """What follows from versions having died: the tip moves, a lease that builds on one is over, a pin to one is
    gone."""
    leases.revoke(db, trainer=None, parents=frozenset(dead), reason=reason, at=at)
    schema.put(db, "tip", new_tip)
    if versions.pinned(db) in dead:
        schema.put(db, "pinned", None)


class Lineage(LedgerPart):
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
        return await self._writer.write(lambda db: reject(db, n, reason, at=self._clock()))

    async def rejections_in_a_row(self) -> int:
        """Since a version last passed the gate."""
        return await self._reader.read(lambda db: schema.get_int(db, "rejections_in_a_row"))

    async def rollback(self, to: int, *, requeue: bool) -> Version:
        """Versions after `to` are ROLLED_BACK; their samples are dropped, or wait again with `requeue`. `to` is
        SERVING."""

        def roll_back(db: sqlite3.Connection) -> Version:
            rollback(db, to, requeue=requeue, at=self._clock())
            return versions.read(db, to)

        return await self._writer.write(roll_back)

    async def roll_back_behind(self, good: int) -> int:
        """To the newest version up to `good` that can be gone back to, which serves from here on. The samples of what
        was abandoned are dropped."""
        return await self._writer.write(lambda db: rollback_behind(db, good, at=self._clock()))

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
