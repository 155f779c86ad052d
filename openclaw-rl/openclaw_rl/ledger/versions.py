"""Versions of the weights as rows: the tip, the serving version, the pin, the folders.

The versions that are not dead (rejected, rolled back, lost) are one chain from the base to the tip. So "the tip or an
ancestor of it" is the same as "not dead"; no call walks the chain. `lineage` keeps this true, and the audit proves it.

Numbers only grow and are never reused; rows are never deleted. At most one version is `serving`: the one that new
requests *should* get. A rollback changes the ledger first; the publisher then makes the engine follow, also after a
crash in between.
"""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import schema
from openclaw_rl.ledger.blobs import unpack_bytes
from openclaw_rl.ledger.states import ABANDONED, DEAD, PASSED, move_version
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.trainer_protocol import Tip
from openclaw_rl.types import SHARED_POLICY, StepReport, Version, VersionState, WeightKind


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A version to insert. Its kind of weights and its base are its parent's."""

    number: int
    depth: int
    """Commits between the base and this version."""
    folder: str | None
    sha256: str | None
    weights_file: str | None
    state: VersionState
    is_durable: bool
    metrics: str
    """The step's metrics as JSON."""
    probes: bytes | None
    """The step's probes as packed JSON."""
    committed_at: float
    lease_id: str | None = None
    same_weights_as: int | None = None
    has_optimizer: bool = True


class Versions(LedgerPart):
    """Reads of versions, and the publisher's changes of their states, pins and weights."""

    @read
    def tip(self, db: sqlite3.Connection, policy: str = SHARED_POLICY) -> Tip:
        """Return the version to train from."""
        found = row(db, tip_of(db, policy))
        still_needed = frozenset[int]().union(*(fallbacks(db, one) for one in names(db)))
        return Tip(
            weight_version=found["weight_version"],
            kind=found["kind"],
            base_hash=found["base_hash"],
            folder=found["folder"],
            needs_fresh_moments=not found["has_optimizer"],
            needed=[folder for number, folder in _folders(db).items() if number in still_needed],
        )

    @read
    def versions(
        self, db: sqlite3.Connection, *, since: int = 0, newest: int | None = None, policy: str | None = None
    ) -> list[Version]:
        """Return versions of one policy or of all by number, without the probes of their reports, which are large.

        All from number `since` on, or the `newest` of them: an old ledger has very many.
        """
        where, of = ("", ()) if policy is None else (" AND policy = ?", (policy,))
        query = f"SELECT * FROM version WHERE weight_version >= ?{where} ORDER BY weight_version DESC LIMIT ?"
        rows = db.execute(query, (since, *of, -1 if newest is None else newest)).fetchall()
        return [_version(found, with_probes=False) for found in reversed(rows)]

    @read
    def versions_after(self, db: sqlite3.Connection, n: int, *, limit: int) -> list[Version]:
        """Return the oldest versions with a number above `n`, by number, without the probes of their reports."""
        query = "SELECT * FROM version WHERE weight_version > ? ORDER BY weight_version LIMIT ?"
        return [_version(found, with_probes=False) for found in db.execute(query, (n, limit)).fetchall()]

    @read
    def unfinished_versions(self, db: sqlite3.Connection) -> list[Version]:
        """Return the CANDIDATE, GATED and LOADING versions by number: the publisher still has to decide on them."""
        rows = db.execute(
            "SELECT * FROM version WHERE state IN ('candidate', 'gated', 'loading') ORDER BY weight_version"
        ).fetchall()
        return [_version(found, with_probes=False) for found in rows]

    @read
    def version_folders(self, db: sqlite3.Connection) -> dict[int, str]:
        """Return the folders of the versions that still have weights, by number."""
        return _folders(db)

    @read
    def version(self, db: sqlite3.Connection, n: int) -> Version:
        """Return one version with its whole report."""
        return read_version(db, n)

    @write
    def set_version_state(self, db: sqlite3.Connection, n: int, state: VersionState, reason: str | None = None) -> None:
        """Change the state of a version, if the change is legal; its present state again is no change.

        SERVING retires the version that served. Changes that cut the chain have their own calls (`lineage`).
        """
        if state in DEAD:
            raise LedgerError(f"a version becomes {state} by reject, rollback or lose_undurable alone")
        found = row(db, n)
        if found["state"] == state:
            return
        if state is VersionState.SERVING:
            _retire(db, found["policy"])
        if state is VersionState.GATED:
            schema.put(db, schema.of_policy("rejections_in_a_row", found["policy"]), 0)
        move_version(db, n, state, reason=reason)

    @write
    def record_gate(self, db: sqlite3.Connection, n: int, figures: Mapping[str, float]) -> None:
        """Add the gate's measurements to the metrics of a version's report."""
        metrics = json.loads(row(db, n)["metrics"]) | dict(figures)
        db.execute("UPDATE version SET metrics = ? WHERE weight_version = ?", (json.dumps(metrics, sort_keys=True), n))

    @read
    def pinned(self, db: sqlite3.Connection, policy: str = SHARED_POLICY) -> int | None:
        """Return the version that the publisher serves instead of the tip."""
        return read_pin(db, policy)

    @read
    def check_can_serve(self, db: sqlite3.Connection, n: int) -> None:
        """Raise LedgerError if the publisher cannot serve `n` again: it is dead, has no weights, or passed no gate."""
        _check_pinnable(db, n)
        if (state := row(db, n)["state"]) not in PASSED:
            raise LedgerError(f"version {n} is {state}: only a version that passed the gate can be pinned")

    @write
    def set_pin(
        self, db: sqlite3.Connection, n: int | None, *, serves: bool = False, policy: str = SHARED_POLICY
    ) -> None:
        """Pin a version for the publisher, or remove the pin; training continues from the tip.

        serves: the engine serves `n` already, and the ledger names it as the serving version in the same transaction.
        """
        if n is not None:
            _check_pinnable(db, n)
            if row(db, n)["policy"] != policy:
                raise LedgerError(f"version {n} is of another policy")
            if serves:
                serve(db, n)
        schema.put(db, schema.of_policy("pinned", policy), n)

    @read
    def serving_version(self, db: sqlite3.Connection, policy: str = SHARED_POLICY) -> int:
        """Return the version that new requests should get."""
        return serving(db, policy)

    @write
    def optimizer_pruned(self, db: sqlite3.Connection, weight_version: int) -> None:
        """Record that the optimizer state was deleted: a trainer that continues from here starts with fresh moments."""
        row(db, weight_version)
        db.execute("UPDATE version SET has_optimizer = 0 WHERE weight_version = ?", (weight_version,))

    @read
    def needed_versions(self, db: sqlite3.Connection, newest: int) -> frozenset[int]:
        """Return the versions whose files must stay, among them those of the `newest` weights that passed the gate."""
        return needed(db, newest)

    @write
    def prune_weights(self, db: sqlite3.Connection, n: int, newest: int) -> str | None:
        """Remove the folder of `n`, which never serves again; return the folder if no other version has it.

        Raises LedgerError when `n` is one of `needed_versions(newest)`.
        """
        folder = row(db, n)["folder"]
        if folder is None:
            return None
        if n in needed(db, newest):
            raise LedgerError(f"version {n} is needed")
        db.execute("UPDATE version SET folder = NULL, has_optimizer = 0 WHERE weight_version = ?", (n,))
        still = db.execute("SELECT 1 FROM version WHERE folder = ?", (folder,)).fetchone()
        return None if still else str(folder)


# For other transactions


def row(db: sqlite3.Connection, n: int) -> sqlite3.Row:
    found: sqlite3.Row | None = db.execute("SELECT * FROM version WHERE weight_version = ?", (n,)).fetchone()
    if found is None:
        raise LedgerError(f"no version {n}")
    return found


def read_version(db: sqlite3.Connection, n: int) -> Version:
    return _version(row(db, n), with_probes=True)


def next_number(db: sqlite3.Connection) -> int:
    (number,) = db.execute("SELECT max(weight_version) + 1 FROM version").fetchone()  # no row is ever deleted
    return int(number)


def insert(db: sqlite3.Connection, new: NewVersion, *, parent: sqlite3.Row) -> None:
    db.execute(
        "INSERT INTO version (weight_version, policy, parent, depth, same_weights_as, kind, base_hash, folder, sha256,"
        " weights_file, state, lease_id, durable, has_optimizer, committed_at, metrics, probes)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            new.number,
            parent["policy"],
            parent["weight_version"],
            new.depth,
            new.same_weights_as,
            parent["kind"],
            parent["base_hash"],
            new.folder,
            new.sha256,
            new.weights_file,
            str(new.state),
            new.lease_id,
            new.is_durable,
            new.has_optimizer,
            new.committed_at,
            new.metrics,
            new.probes,
        ),
    )


def names(db: sqlite3.Connection) -> list[str]:
    """Return the policies, the shared one among them, by name."""
    # The root of a policy is never rejected and never rolled back behind: it is dead only where the policy was removed.
    query = "SELECT policy FROM version WHERE parent IS NULL AND state <> 'rolled_back' ORDER BY policy"
    return [name for (name,) in db.execute(query)]


def tip_of(db: sqlite3.Connection, policy: str = SHARED_POLICY) -> int:
    """Return the newest version of a policy that is not dead. Raises LedgerError for a policy that was not opened."""
    found = schema.get_text(db, schema.of_policy("tip", policy))
    if found is None and policy != SHARED_POLICY:
        raise LedgerError(f"there is no policy {policy!r}")
    return int(found or 0)


def serving(db: sqlite3.Connection, policy: str = SHARED_POLICY) -> int:
    query = "SELECT weight_version FROM version WHERE policy = ? AND state = 'serving'"
    found = db.execute(query, (policy,)).fetchone()
    if found is None:
        raise LedgerError(f"there is no policy {policy!r}")
    return int(found[0])


def serve(db: sqlite3.Connection, n: int) -> None:
    """Make `n` the serving version and retire the one before."""
    found = row(db, n)
    if found["state"] != VersionState.SERVING:
        _retire(db, found["policy"])
        move_version(db, n, VersionState.SERVING)


def _retire(db: sqlite3.Connection, policy: str) -> None:
    """Retire the version of a policy that serves."""
    db.execute("UPDATE version SET state = 'retired' WHERE policy = ? AND state = 'serving'", (policy,))


def read_pin(db: sqlite3.Connection, policy: str = SHARED_POLICY) -> int | None:
    found = schema.get_text(db, schema.of_policy("pinned", policy))
    return None if found is None else int(found)


def sound_depth(db: sqlite3.Connection, n: int) -> int | None:
    """Return the commits between the base and a version, also a lost one; None for an abandoned version.

    A version that serves old weights under a new number is no commit.
    """
    marks = ",".join("?" * len(ABANDONED))
    query = f"SELECT depth FROM version WHERE weight_version = ? AND state NOT IN ({marks})"
    found = db.execute(query, (n, *map(str, ABANDONED))).fetchone()
    return None if found is None else int(found[0])


def after(db: sqlite3.Connection, n: int) -> list[int]:
    """Return the versions on the chain of its policy after `n`, newest first."""
    marks = ",".join("?" * len(DEAD))
    query = (
        "SELECT weight_version FROM version WHERE policy = ? AND weight_version > ?"
        f" AND state NOT IN ({marks}) ORDER BY 1 DESC"
    )
    return [number for (number,) in db.execute(query, (row(db, n)["policy"], n, *map(str, DEAD)))]


def lost_after(db: sqlite3.Connection, n: int) -> list[tuple[int, int]]:
    """Return the lost versions of its policy after `n` with their parents, oldest first."""
    query = (
        "SELECT weight_version, parent FROM version WHERE policy = ? AND weight_version > ? AND state = 'lost'"
        " ORDER BY 1"
    )
    return [(number, parent) for number, parent in db.execute(query, (row(db, n)["policy"], n))]


def has_weights(row: sqlite3.Row) -> bool:
    """Return True if the weights of a version are on disk. The base has no file and needs none.

    Full weights that are not durable have the name of a folder that may never be written: only their trainer has them.
    """
    is_written = row["durable"] or row["kind"] == WeightKind.LORA
    return row["weights_file"] is None or (row["folder"] is not None and bool(is_written))


def check_has_weights(row: sqlite3.Row) -> None:
    if has_weights(row):
        return
    if row["folder"] is not None:
        raise LedgerError(f"version {row['weight_version']} was never checkpointed: only its trainer has the weights")
    raise LedgerError(f"the weights of version {row['weight_version']} were deleted (publisher.keep_versions)")


def needed(db: sqlite3.Connection, newest: int) -> frozenset[int]:
    """Return the versions whose files must stay: those of `fallbacks`, and for a rollback those of `_ways_back`."""
    return frozenset[int]().union(*(fallbacks(db, one) | _ways_back(db, newest, one) for one in names(db)))


def fallbacks(db: sqlite3.Connection, policy: str) -> frozenset[int]:
    """Return the serving, pinned and tip version of a policy, and those that may become its tip without a rollback.

    A rejection, or a trainer that lost its uncheckpointed versions, falls back to them.
    """
    query = (
        "SELECT weight_version, state, durable, kind, folder, weights_file FROM version WHERE policy = ?"
        " ORDER BY weight_version DESC"
    )
    pin = read_pin(db, policy)
    found = {serving(db, policy), tip_of(db, policy), *([] if pin is None else [pin])}
    is_durable = has_passed = False
    for row in db.execute(query, (policy,)):  # newest first, and no further than needed
        if row["state"] in DEAD:
            continue
        found.add(row["weight_version"])
        is_durable = is_durable or bool(row["durable"])
        has_passed = has_passed or (row["state"] in PASSED and has_weights(row))
        if is_durable and has_passed:
            break
    return frozenset(found)


def _ways_back(db: sqlite3.Connection, newest: int, policy: str) -> frozenset[int]:
    """Return the versions of a policy that stay for a rollback. All of them passed the gate and have weights.

    They are the versions of the `newest` weights, and for each k of the first weights of 2^k or more commits: so a
    rollback that reaches behind the newest ones still finds learned weights. `newest` = 0: none.
    """
    columns = "SELECT weight_version, depth, state, durable, kind, folder, weights_file FROM version"
    root = db.execute(f"{columns} WHERE policy = ? AND parent IS NULL", (policy,)).fetchall()
    rows = [*root, *db.execute(f"{columns} WHERE policy = ? AND folder IS NOT NULL", (policy,)).fetchall()]
    # Sorted here: with ORDER BY, SQLite reads the table from end to end.
    found = sorted(
        (r for r in rows if r["state"] in PASSED and has_weights(r)), key=lambda version: int(version["weight_version"])
    )
    # After a loss one checkpoint serves under a new number too. Such numbers are one way back, and share one folder.
    depths: dict[str | None, int] = {r["folder"]: r["depth"] for r in found}
    first: dict[int, str | None] = {}
    for folder, depth in depths.items():
        first.setdefault(depth.bit_length(), folder)
    kept = {*list(depths)[-newest:], *first.values()} if newest else set()
    return frozenset(r["weight_version"] for r in found if r["folder"] in kept)


def _check_pinnable(db: sqlite3.Connection, n: int) -> None:
    found = row(db, n)
    if found["state"] in DEAD:
        raise LedgerError(f"version {n} is {found['state']} and cannot be pinned")
    if found["state"] != VersionState.SERVING:  # the engine has the weights of that one
        check_has_weights(found)


def _folders(db: sqlite3.Connection) -> dict[int, str]:
    rows = db.execute("SELECT weight_version, folder FROM version WHERE folder IS NOT NULL").fetchall()
    return {number: str(folder) for number, folder in sorted(tuple(row) for row in rows)}


def _version(found: sqlite3.Row, *, with_probes: bool) -> Version:
    probes = unpack_bytes(found["probes"]) if with_probes and found["probes"] else "[]"
    return Version(
        weight_version=found["weight_version"],
        parent=found["parent"],
        kind=WeightKind(found["kind"]),
        base_hash=found["base_hash"],
        folder=found["folder"],
        sha256=found["sha256"],
        state=VersionState(found["state"]),
        lease_id=found["lease_id"],
        durable=bool(found["durable"]),
        committed_at=found["committed_at"],
        report=StepReport.of_json(found["metrics"], probes),
        reason=found["reason"],
        weights_file=found["weights_file"],
        same_weights_as=found["same_weights_as"],
        policy=found["policy"],
    )
