"""Policies: lineages of versions, each from a root of its own to its tip.

The shared policy's root is the base, version 0. Another policy is opened at a version: its root is a new number for
those weights, so that nothing of one lineage touches another from then on. Each has its own tip, pin, serving
version and count of rejections; `versions`, `lineage` and `leases` keep them. Numbers of versions stay global.

A removed policy leaves rows without a name, so that numbers are used once: its versions are dead and have no weights.
"""

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import leases, schema, versions
from openclaw_rl.ledger.states import DEAD
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import SHARED_POLICY, Version, VersionState, WeightKind


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy in numbers, without a word of a chat."""

    policy: str
    serving: int
    """Version that new requests should get, also while another one is pinned."""
    pinned: int | None
    tip: int
    """Version that training continues from."""
    learning: bool
    """Its trainer gets batches: neither its own switch nor everyone's is off."""
    waiting: int
    """Users' samples that wait for a batch, without practice."""
    practice_waiting: int


class Policies(LedgerPart):
    """The policies of a ledger."""

    @read
    def policies(self, db: sqlite3.Connection) -> list[str]:
        """Return the policies by name, the shared one among them."""
        return versions.names(db)

    @read
    def root(self, db: sqlite3.Connection, policy: str) -> Version:
        """Return the version that a policy starts from. Raises LedgerError for a policy that was not opened."""
        found = _root(db, policy)
        if found is None:
            raise LedgerError(f"there is no policy {policy!r}")
        return versions.read_version(db, found)

    @read
    def target(self, db: sqlite3.Connection, policy: str) -> Version:
        """Return the version that should serve a policy: the pinned one, else the one that serves."""
        pinned = versions.read_pin(db, policy)
        return versions.read_version(db, versions.serving(db, policy) if pinned is None else pinned)

    @read
    def targets(self, db: sqlite3.Connection, policies: Collection[str]) -> dict[str, int]:
        """Return the version that should serve each of these policies; one that is not open is left out."""
        opened = set(versions.names(db))
        pins = {policy: versions.read_pin(db, policy) for policy in policies if policy in opened}
        return {policy: versions.serving(db, policy) if pin is None else pin for policy, pin in pins.items()}

    @read
    def policy_figures(self, db: sqlite3.Connection, policy: str) -> PolicyFigures:
        """Return the numbers of a policy. Raises LedgerError for one that was not opened."""
        return _figures(db, policy)

    @read
    def all_policy_figures(self, db: sqlite3.Connection) -> list[PolicyFigures]:
        """Return the numbers of each policy, by name: a few rows for each."""
        return [_figures(db, policy) for policy in versions.names(db)]

    @read
    def tips_and_targets(self, db: sqlite3.Connection) -> set[int]:
        """Return the tip of each policy, and the version that should serve it."""
        found = set[int]()
        for policy in versions.names(db):
            pinned = versions.read_pin(db, policy)
            found |= {versions.tip_of(db, policy), versions.serving(db, policy) if pinned is None else pinned}
        return found

    @read
    def passed_tips(self, db: sqlite3.Connection) -> list[Version]:
        """Return the tips that passed the gate and do not serve, of policies without a pin."""
        found = []
        for policy in versions.names(db):
            tip = versions.tip_of(db, policy)
            state = VersionState(versions.row(db, tip)["state"])
            if state in (VersionState.RETIRED, VersionState.SUPERSEDED) and versions.read_pin(db, policy) is None:
                found.append(versions.read_version(db, tip))
        return found

    @write
    def open_policy(self, db: sqlite3.Connection, policy: str, *, start: int = 0) -> Version:
        """Open a policy at the weights of version `start`, and return its root, which serves. Idempotent.

        A policy that is open stays as it is, whatever `start` says. Raises LedgerError for full weights, which have one
        policy, and for a start whose weights are gone or were found bad.
        """
        if not policy or policy == SHARED_POLICY:
            raise LedgerError(f"policy {policy!r}: another name than the shared policy's is needed")
        known = _root(db, policy)
        if known is not None:
            return versions.read_version(db, known)
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


def _figures(db: sqlite3.Connection, policy: str) -> PolicyFigures:
    real, practice = waiting(db, policy)
    return PolicyFigures(
        policy,
        serving=versions.serving(db, policy),
        pinned=versions.read_pin(db, policy),
        tip=versions.tip_of(db, policy),
        learning=leases.learns(db, policy),
        waiting=real,
        practice_waiting=practice,
    )


def _root(db: sqlite3.Connection, policy: str) -> int | None:
    found = db.execute("SELECT weight_version FROM version WHERE policy = ? AND parent IS NULL", (policy,)).fetchone()
    return None if found is None else int(found[0])


# For other transactions


def began_with(db: sqlite3.Connection, numbers: Collection[int]) -> list[int]:
    """Return the roots of the policies that began with the weights of one of these versions, or of a later one."""
    found = []
    for policy in versions.names(db) if numbers else ():
        root = _root(db, policy)
        at = None if root is None else versions.row(db, root)["same_weights_as"]
        while at is not None and at not in numbers and at > min(numbers):
            at = versions.row(db, at)["parent"]
        if root is not None and at in numbers:
            found.append(root)
    return found


def waiting(db: sqlite3.Connection, policy: str) -> tuple[int, int]:
    """Return the number of users' samples and of practice samples of a policy that wait for a trainer."""
    query = "SELECT count(*) FROM turn WHERE policy = ? AND state = 'sampled'"
    (real,) = db.execute(f"{query} AND practice IS NULL AND of_episode IS NULL", (policy,)).fetchone()
    (practice,) = db.execute(f"{query} AND practice IS NOT NULL", (policy,)).fetchone()
    return real, practice


def remove(db: sqlite3.Connection, policy: str, *, at: float) -> list[int]:
    """Remove a policy; return its versions, which are dead and without folders from now on. Nothing to remove: [].

    The caller has deleted its turns. A request of the same user opens a policy anew.
    """
    root = _root(db, policy)
    if root is None:
        return []
    query = "SELECT weight_version FROM version WHERE policy = ? ORDER BY 1"
    numbers = [number for (number,) in db.execute(query, (policy,))]
    leases.revoke_built_on(db, numbers, reason="its policy was removed", at=at)
    nameless = f"removed:{root}"
    db.execute(
        "UPDATE version SET policy = ?, state = ?, reason = 'its policy was removed', folder = NULL, probes = NULL,"
        " has_optimizer = 0, metrics = '{}' WHERE policy = ?",
        (nameless, str(VersionState.ROLLED_BACK), policy),
    )
    db.execute("UPDATE lease SET policy = ? WHERE policy = ?", (nameless, policy))
    for name in ("tip", "pinned", "rejections_in_a_row", "learning"):
        db.execute("DELETE FROM meta WHERE key = ?", (schema.of_policy(name, policy),))
    return numbers
