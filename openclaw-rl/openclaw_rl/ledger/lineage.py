"""Chain of versions: commits make it longer, rejections, rollbacks and losses cut it. Each is one transaction.

The live versions (not rejected, rolled back or lost) are one chain from the base to the tip. `commit` makes it longer
by one; `reject`, `rollback` and `lose_undurable` cut it and free the samples that the versions which they cut off
trained. A lease that builds on such a version is revoked: its samples wait again, and its trainer gets the refusal at
its next call.

A lost version was good: the samples that it sampled stay valid (`staleness`), until a rollback goes back to before it
or the version that it builds on is rejected. Then it is abandoned like the others.
"""

import json
import math
import sqlite3
from collections.abc import Collection
from pathlib import PurePosixPath

import orjson

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.ledger import feedback, leases, schema, versions, wishes
from openclaw_rl.ledger.blobs import pack_bytes
from openclaw_rl.ledger.states import DEAD, PASSED, move, move_version
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.ledger.versions import NewVersion
from openclaw_rl.trainer_protocol import Commit
from openclaw_rl.types import SHARED_POLICY, DropReason, TurnState, Version, VersionState


class Lineage(LedgerPart):
    """Commits, rejections, rollbacks and losses of versions."""

    @write
    def commit(self, db: sqlite3.Connection, commit: Commit) -> int:
        """Insert a step's version as a candidate, mark its samples TRAINED, end its lease; return the version's number.

        The lease must be the newest, and its parent the tip. The same lease_id again returns the same version. Raises
        CommitRefused.
        """
        at = self._clock()
        known = db.execute(
            "SELECT weight_version, state, reason FROM version WHERE lease_id = ?", (commit.lease_id,)
        ).fetchone()
        if known is not None:
            if known["state"] in DEAD:
                raise CommitRefused(f"version {known['weight_version']} is {known['state']}: {known['reason']}")
            return int(known["weight_version"])
        lease = leases.check_live(db, commit.lease_id, commit.fence)
        parent = versions.row(db, versions.tip_of(db, lease["policy"]))
        if not commit.parent == lease["parent"] == parent["weight_version"]:
            raise CommitRefused(
                f"the step builds on version {commit.parent}, its lease on {lease['parent']},"
                f" and the tip is {parent['weight_version']}"
            )
        _check_manifest(commit, parent)
        leases.drop_leased(db, commit.fence, _reasons(commit.drop), at=at)
        number = versions.next_number(db)
        query = "SELECT turn FROM lease_sample WHERE fence = ? AND outcome = 'leased'"
        held = db.execute(query, (commit.fence,)).fetchall()
        if not held:
            raise CommitRefused("the step trained on none of its samples: release the lease instead")
        for (turn,) in held:
            move(db, turn, TurnState.TRAINED, at=at, detail=f"version {number}", trained_in=number)
        db.execute(
            "UPDATE lease_sample SET outcome = 'trained' WHERE fence = ? AND outcome = 'leased'", (commit.fence,)
        )
        leases.end(db, commit.fence, "committed", reason=None, at=at)
        new = NewVersion(
            number=number,
            depth=parent["depth"] + 1,
            folder=commit.manifest.folder,
            sha256=commit.manifest.sha256,
            weights_file=commit.manifest.weights_file,
            state=VersionState.CANDIDATE,
            lease_id=commit.lease_id,
            is_durable=commit.durable,
            metrics=json.dumps(commit.report.metrics, sort_keys=True),
            probes=pack_bytes(orjson.dumps([probe.model_dump() for probe in commit.report.probes])),
            committed_at=at,
        )
        versions.insert(db, new, parent=parent)
        schema.put(db, schema.of_policy("tip", lease["policy"]), number)
        return number

    @write
    def durable(self, db: sqlite3.Connection, weight_version: int) -> None:
        """Mark a version whose checkpoint is on disk: a trainer can continue from it after a crash. Idempotent."""
        row = versions.row(db, weight_version)
        if row["state"] in DEAD:
            raise CommitRefused(f"version {weight_version} is {row['state']}: {row['reason']}")
        db.execute("UPDATE version SET durable = 1 WHERE weight_version = ?", (weight_version,))

    @write
    def lose_undurable(
        self, db: sqlite3.Connection, reason: str, *, whole_fences: Collection[int] = ()
    ) -> Version | None:
        """Mark the versions after the last durable one LOST: the trainer crashed before it checkpointed them.

        The samples that they trained wait again, and those that they sampled stay valid. The durable weights continue
        under a new number, because the lost numbers have been served, and caches and records know them. The new version
        serves if the durable or a lost version did; it is a candidate if the durable one never passed the gate. None:
        no version was lost. A pin moves from a lost version to the new one.

        whole_fences: leases whose versions the trainer holds whole on disk. Those on the chain become durable first.
        """
        _keep_whole(db, whole_fences)
        at, kept = self._clock(), versions.tip_of(db)  # only full weights can be lost, and they have one policy
        while not (row := versions.row(db, kept))["durable"]:
            kept = row["parent"]
        lost = versions.after(db, kept)
        if not lost:
            return None
        serves = versions.serving(db) in (kept, *lost)
        for number in lost:
            move_version(db, number, VersionState.LOST, reason=reason)
            _free_samples(db, number, None, f"version {number} is lost", at=at)
        new = NewVersion(
            number=versions.next_number(db),
            depth=row["depth"],
            folder=row["folder"],
            sha256=row["sha256"],
            weights_file=row["weights_file"],
            state=VersionState.RETIRED if serves or row["state"] in PASSED else VersionState.CANDIDATE,
            same_weights_as=kept,
            is_durable=True,
            has_optimizer=bool(row["has_optimizer"]),
            metrics=row["metrics"],
            probes=row["probes"],
            committed_at=at,
        )
        versions.insert(db, new, parent=row)
        if serves:  # else an older version serves, and continues to
            versions.serve(db, new.number)
        pin = versions.read_pin(db)
        _cut(db, lost, new.number, reason, at=at)
        if serves and pin in lost:  # the operator wants no version to be published, as before
            schema.put(db, "pinned", new.number)
        return versions.read_version(db, new.number)

    @write
    def reject(self, db: sqlite3.Connection, n: int, reason: str) -> list[int]:
        """Mark n, which the gate refused, and all versions built on it REJECTED; the tip becomes n's parent.

        The batch of n ends `gate_rejected`, and the wishes that n practised are stopped. The batches of later versions
        wait again (the next lease drops those that are stale by then). Return the rejected versions, newest first.
        """
        at, version = self._clock(), versions.row(db, n)
        parent = version["parent"]
        if version["state"] in DEAD or parent is None:
            raise LedgerError(f"version {n} is {version['state']} and cannot become rejected")
        rejected = versions.after(db, parent)
        wishes.stop_practised_in(db, [n], f"version {n}, which practised it, was rejected: {reason}", at=at)
        for number in rejected:
            above = f"built on version {n}, which was rejected: {reason}"
            move_version(db, number, VersionState.REJECTED, reason=reason if number == n else above)
            if number == n:
                _free_samples(db, number, DropReason.GATE_REJECTED, f"version {n}", at=at)
            else:
                _free_samples(db, number, None, f"version {n} was rejected", at=at)
        condemned = set(rejected)
        for number, below in versions.lost_after(db, parent):
            if below in condemned:
                condemned.add(number)
                above = f"built on version {n}, which was rejected: {reason}"
                move_version(db, number, VersionState.REJECTED, reason=above)
        in_a_row = schema.of_policy("rejections_in_a_row", version["policy"])
        schema.put(db, in_a_row, schema.get_int(db, in_a_row) + 1)
        _cut(db, rejected, parent, f"version {n} was rejected", at=at)
        return rejected

    @read
    def rejections_in_a_row(self, db: sqlite3.Connection, policy: str = SHARED_POLICY) -> int:
        """Return the number of rejections since a version of the policy last passed the gate."""
        return schema.get_int(db, schema.of_policy("rejections_in_a_row", policy))

    @write
    def rollback(self, db: sqlite3.Connection, to: int, *, requeue: bool) -> Version:
        """Make `to` serve and mark the versions after it ROLLED_BACK; return `to`.

        Their samples are dropped, or wait again with `requeue`.
        """
        roll_back(db, to, requeue=requeue, at=self._clock())
        return versions.read_version(db, to)

    @write
    def roll_back_behind(self, db: sqlite3.Connection, good: int) -> int:
        """Roll back to the newest possible version up to `good` and return it; samples of later ones are dropped.

        Raises LedgerError when only the base is left of what was learned up to `good`.
        """
        target = way_back(db, good)
        roll_back(db, target, requeue=False, at=self._clock())
        return target

    @read
    def way_back(self, db: sqlite3.Connection, good: int) -> int:
        """Return the version that `roll_back_behind(good)` goes to. Raises LedgerError like it."""
        return way_back(db, good)


# For other transactions


def way_back(db: sqlite3.Connection, good: int) -> int:
    """Return the newest version up to `good` that a rollback can go to.

    It passed the gate, its weights exist, and a trainer can continue from it. Raises LedgerError when that is the base
    although `good` had learned: only an operator who names the base gives up all that was learned.
    """
    query = "SELECT * FROM version WHERE policy = ? AND weight_version <= ? AND durable ORDER BY weight_version DESC"
    rows = db.execute(query, (versions.row(db, good)["policy"], good))
    target = next((row for row in rows if row["state"] in PASSED and versions.has_weights(row)), None)
    if target is None:
        raise LedgerError(f"no version up to {good} can be gone back to")
    if target["depth"] == 0 < versions.row(db, good)["depth"]:
        raise LedgerError(
            f"of the versions up to {good} only the base still has weights: name version {target['weight_version']} to"
            " give up all that was learned"
        )
    return int(target["weight_version"])


def roll_back(db: sqlite3.Connection, to: int, *, requeue: bool, at: float) -> None:
    """Make a version that passed the gate serve, and cut off the versions after it; a pin moves to it."""
    target = versions.row(db, to)
    if target["state"] not in PASSED:
        raise LedgerError(
            f"version {to} is {target['state']}: only a version that passed the gate can be rolled back to"
        )
    if not target["durable"]:
        raise LedgerError(f"version {to} was never checkpointed: no trainer could go on from it")
    versions.check_has_weights(target)
    abandoned = versions.after(db, to)
    if not requeue:
        wishes.stop_practised_in(db, abandoned, f"it was practised after version {to}, which serves again", at=at)
    for number in abandoned:
        move_version(db, number, VersionState.ROLLED_BACK, reason=f"rolled back to version {to}")
        _free_samples(db, number, None if requeue else DropReason.ROLLED_BACK, f"rolled back to version {to}", at=at)
    for number, _ in versions.lost_after(db, to):
        move_version(db, number, VersionState.ROLLED_BACK, reason=f"rolled back to version {to}")
    versions.serve(db, to)
    was_pinned = versions.read_pin(db, target["policy"]) is not None
    _cut(db, abandoned, to, f"rolled back to version {to}", at=at)
    if was_pinned:
        schema.put(db, schema.of_policy("pinned", target["policy"]), to)


def _keep_whole(db: sqlite3.Connection, fences: Collection[int]) -> None:
    """Mark the versions of these leases durable, if they are on the chain: their trainer could not report them."""
    for fence in fences:
        found = db.execute(
            "SELECT weight_version, version.state FROM lease JOIN version USING (lease_id) WHERE fence = ?"
            " AND folder IS NOT NULL AND NOT durable",
            (fence,),
        ).fetchone()
        if found is not None and found["state"] not in DEAD:
            db.execute("UPDATE version SET durable = 1 WHERE weight_version = ?", (found["weight_version"],))


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
        if not all(map(math.isfinite, figures)):  # JSON would hold null, and the report could not be read
            raise CommitRefused("report.probes not finite")
        if not probe.prompt_ids or {len(probe.log_probs), len(probe.parent_log_probs)} != {len(probe.response_ids)}:
            raise CommitRefused("report.probes: a prompt, and two log-probs for each token of the response, are needed")


def check_folder(folder: str) -> None:
    """Check that a folder is relative and below the data directory. Raises CommitRefused."""
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in folder:
        raise CommitRefused(f"manifest.folder {folder!r} is not a folder below the data directory")


def _reasons(drop: dict[str, str]) -> dict[str, DropReason]:
    try:
        return {sample_id: DropReason(reason) for sample_id, reason in drop.items()}
    except ValueError as error:
        raise CommitRefused(f"no such drop reason: {error}") from error


def _free_samples(db: sqlite3.Connection, version: int, reason: DropReason | None, detail: str, *, at: float) -> None:
    """Let the samples of a version wait again, or drop them for `reason`."""
    for (turn,) in db.execute("SELECT id FROM turn WHERE trained_in = ?", (version,)).fetchall():
        to = TurnState.SAMPLED if reason is None else TurnState.DROPPED
        move(db, turn, to, at=at, reason=reason, detail=detail)
        if reason is None:
            feedback.catch_up(db, turn, at=at)


def _cut(db: sqlite3.Connection, dead: list[int], new_tip: int, reason: str, *, at: float) -> None:
    """Move the tip, revoke a lease that builds on a dead version, and remove a pin to one."""
    policy = versions.row(db, new_tip)["policy"]
    leases.revoke_built_on(db, dead, reason=reason, at=at)
    schema.put(db, schema.of_policy("tip", policy), new_tip)
    if versions.read_pin(db, policy) in dead:
        schema.put(db, schema.of_policy("pinned", policy), None)
