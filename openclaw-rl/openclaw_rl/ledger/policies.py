"""Policies: lineages of versions, each from a root of its own to its tip.

The shared policy's root is the base, version 0. Another policy is opened at a version: its root is a new number for
those weights, so that nothing of one lineage touches another from then on. Each has its own tip, pin, serving
version and count of rejections; `versions`, `lineage` and `leases` keep them. Numbers of versions stay global.
"""

import sqlite3

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import schema, versions
from openclaw_rl.ledger.states import DEAD
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import SHARED_POLICY, Version, VersionState, WeightKind


class Policies(LedgerPart):
    """The policies of a ledger."""

    @read
    def policies(self, db: sqlite3.Connection) -> list[str]:
        """Return the policies by name, the shared one among them."""
        return versions.names(db)

    @write
    def open_policy(self, db: sqlite3.Connection, policy: str, *, start: int = 0) -> Version:
        """Open a policy at the weights of version `start`, and return its root, which serves. Idempotent.

        A policy that is open stays as it is, whatever `start` says. Raises LedgerError for full weights, which have one
        policy, and for a start whose weights are gone or were found bad.
        """
        if not policy or policy == SHARED_POLICY:
            raise LedgerError(f"policy {policy!r}: another name than the shared policy's is needed")
        query = "SELECT weight_version FROM version WHERE policy = ? AND parent IS NULL"
        known = db.execute(query, (policy,)).fetchone()
        if known is not None:
            return versions.read_version(db, known["weight_version"])
        source = versions.row(db, start)
        if source["kind"] == WeightKind.FULL:
            raise LedgerError("full weights have one policy")
        if source["state"] in DEAD:
            raise LedgerError(f"version {start} is {source['state']}: no policy can start from it")
        versions.check_has_weights(source)
        number = versions.next_number(db)
        db.execute(
            "INSERT INTO version (weight_version, policy, parent, depth, same_weights_as, kind, base_hash, folder,"
            " sha256, weights_file, state, durable, has_optimizer, committed_at)"
            " SELECT ?, ?, NULL, 0, weight_version, kind, base_hash, folder, sha256, weights_file, ?, 1,"
            " folder IS NULL, ? FROM version WHERE weight_version = ?",
            (number, policy, str(VersionState.SERVING), self._clock(), start),
        )
        schema.put(db, schema.of_policy("tip", policy), number)
        return versions.read_version(db, number)
