"""Versions as rows: the tip, what serves, what is pinned.

The versions that are not dead (rejected, rolled back, lost) are one chain from the base to the tip: being an ancestor
of the tip, or the tip, is the same as not being dead. `chain` keeps it so, the audit proves it, and no call walks it.

Numbers only grow and are never used again; rows are never deleted. At most one version is `serving`. It is what new
requests *should* get: after a rollback the ledger says so first, and the publisher makes the engine follow (also after
a crash in between).
"""

import sqlite3
from collections.abc import Collection

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import schema
from openclaw_rl.ledger.blobs import unpack_bytes
from openclaw_rl.ledger.states import DEAD, PASSED, move_version
from openclaw_rl.step_report import StepReport
from openclaw_rl.trainer_protocol import Tip
from openclaw_rl.types import Version, VersionState, WeightKind


def tip(db: sqlite3.Connection) -> Tip:
    found = row(db, schema.get_int(db, "tip"))
    return Tip(
        weight_version=found["weight_version"],
        kind=found["kind"],
        base_hash=found["base_hash"],
        folder=found["folder"],
        needs_fresh_moments=not found["has_optimizer"],
        needed=_folders(db, needed(db, newest=0)),
    )


def needed(db: sqlite3.Connection, newest: int) -> frozenset[int]:
    """Versions whose files must stay: what serves, is pinned or is trained from; what a rejection falls back to, or a
    trainer that lost what it had not checkpointed; and for a rollback the `newest` that passed the gate.
    """
    query = "SELECT weight_version, state, durable, folder, weights_file FROM version ORDER BY weight_version DESC"
    chain: list[int] = []
    passed: list[int] = []
    is_durable = False
    for row in db.execute(query):  # newest first, and no further than asked: the base alone is at the end of it
        if is_durable and len(passed) >= max(newest, 1):
            break
        if row["state"] in DEAD:
            continue
        if not (is_durable and passed):
            chain.append(row["weight_version"])
        if row["state"] in PASSED and has_weights(row):
            passed.append(row["weight_version"])
        is_durable = is_durable or bool(row["durable"])
    pin = pinned(db)
    always = {serving(db), schema.get_int(db, "tip"), *([] if pin is None else [pin])}
    return frozenset({*always, *chain, *passed[:newest]})


def has_weights(row: sqlite3.Row) -> bool:
    """Not once they were pruned; the base needs none."""
    return row["folder"] is not None or row["weights_file"] is None


def check_has_weights(row: sqlite3.Row) -> None:
    if not has_weights(row):
        raise LedgerError(f"the weights of version {row['weight_version']} were deleted (publisher.keep_versions)")


def prune_weights(db: sqlite3.Connection, n: int, newest: int) -> str | None:
    folder = row(db, n)["folder"]
    if folder is None:
        return None
    if n in needed(db, newest):
        raise LedgerError(f"version {n} is needed")
    db.execute("UPDATE version SET folder = NULL, has_optimizer = 0 WHERE weight_version = ?", (n,))
    still = db.execute("SELECT 1 FROM version WHERE folder = ?", (folder,)).fetchone()
    return None if still else str(folder)


def depth(db: sqlite3.Connection, n: int) -> int | None:
    """Commits between the base and a version on the chain; None for any other. (To serve old weights again is no
    commit.)"""
    marks = ",".join("?" * len(DEAD))
    query = f"SELECT depth FROM version WHERE weight_version = ? AND state NOT IN ({marks})"
    found = db.execute(query, (n, *map(str, DEAD))).fetchone()
    return None if found is None else int(found[0])


def after(db: sqlite3.Connection, n: int) -> list[int]:
    """The versions on the chain behind `n`, newest first."""
    marks = ",".join("?" * len(DEAD))
    query = f"SELECT weight_version FROM version WHERE weight_version > ? AND state NOT IN ({marks}) ORDER BY 1 DESC"
    return [number for (number,) in db.execute(query, (n, *map(str, DEAD)))]


def serving(db: sqlite3.Connection) -> int:
    (number,) = db.execute("SELECT weight_version FROM version WHERE state = 'serving'").fetchone()
    return int(number)


def pinned(db: sqlite3.Connection) -> int | None:
    found = schema.get_text(db, "pinned")
    return None if found is None else int(found)


def check_pinnable(db: sqlite3.Connection, n: int) -> None:
    found = row(db, n)
    if found["state"] in DEAD:
        raise LedgerError(f"version {n} is {found['state']} and cannot be pinned")
    check_has_weights(found)


def set_pin(db: sqlite3.Connection, n: int | None) -> None:
    if n is not None:
        check_pinnable(db, n)
    schema.put(db, "pinned", n)


def set_state(db: sqlite3.Connection, n: int, state: VersionState, reason: str | None) -> None:
    """The publisher's moves. What cuts the chain has calls of its own, which look after the samples."""
    if state in DEAD:
        raise LedgerError(f"a version becomes {state} by reject, rollback or lose_undurable alone")
    if row(db, n)["state"] == state:
        return
    if state is VersionState.SERVING:
        db.execute("UPDATE version SET state = 'retired' WHERE state = 'serving'")
    if state is VersionState.GATED:
        schema.put(db, "rejections_in_a_row", 0)
    move_version(db, n, state, reason=reason)


def optimizer_pruned(db: sqlite3.Connection, n: int) -> None:
    """Its optimizer state was deleted: who goes on from it starts with fresh moments."""
    row(db, n)
    db.execute("UPDATE version SET has_optimizer = 0 WHERE weight_version = ?", (n,))


def read(db: sqlite3.Connection, n: int) -> Version:
    """With its whole report."""
    return _version(row(db, n), with_probes=True)


def read_all(db: sqlite3.Connection, *, since: int = 0, newest: int | None = None) -> list[Version]:
    """Without the probes of the reports, which are large. `since` a number, and at most the `newest`."""
    rows = db.execute(
        "SELECT * FROM version WHERE weight_version >= ? ORDER BY weight_version DESC LIMIT ?",
        (since, -1 if newest is None else newest),
    ).fetchall()
    return [_version(found, with_probes=False) for found in reversed(rows)]


def unfinished(db: sqlite3.Connection) -> list[Version]:
    """Committed, and neither served nor passed over nor dead yet; by number."""
    rows = db.execute(
        "SELECT * FROM version WHERE state IN ('candidate', 'gated', 'loading') ORDER BY weight_version"
    ).fetchall()
    return [_version(found, with_probes=False) for found in rows]


def folders(db: sqlite3.Connection) -> dict[int, str]:
    """Where the weights of the versions lie that have some, by number."""
    rows = db.execute("SELECT weight_version, folder FROM version WHERE folder IS NOT NULL").fetchall()
    return {number: str(folder) for number, folder in sorted(tuple(row) for row in rows)}


def _folders(db: sqlite3.Connection, numbers: Collection[int]) -> list[str]:
    return [folder for number, folder in folders(db).items() if number in numbers]


def row(db: sqlite3.Connection, n: int) -> sqlite3.Row:
    found: sqlite3.Row | None = db.execute("SELECT * FROM version WHERE weight_version = ?", (n,)).fetchone()
    if found is None:
        raise LedgerError(f"no version {n}")
    return found


def insert(
    db: sqlite3.Connection,
    number: int,
    parent: sqlite3.Row,
    *,
    depth: int,
    folder: str | None,
    sha256: str | None,
    weights_file: str | None,
    state: VersionState,
    durable: bool,
    metrics: str,
    probes: bytes | None,
    at: float,
    lease_id: str | None = None,
    same_weights_as: int | None = None,
    has_optimizer: bool = True,
) -> None:
    db.execute(
        "INSERT INTO version (weight_version, parent, depth, same_weights_as, kind, base_hash, folder, sha256,"
        " weights_file, state, lease_id, durable, has_optimizer, committed_at, metrics, probes)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            number,
            parent["weight_version"],
            depth,
            same_weights_as,
            parent["kind"],
            parent["base_hash"],
            folder,
            sha256,
            weights_file,
            str(state),
            lease_id,
            durable,
            has_optimizer,
            at,
            metrics,
            probes,
        ),
    )


def next_number(db: sqlite3.Connection) -> int:
    """Rows are never deleted, so no number comes twice."""
    (number,) = db.execute("SELECT max(weight_version) + 1 FROM version").fetchone()
    return int(number)


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
    )
