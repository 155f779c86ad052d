"""Audit of the ledger's file after a kill, by SQL of its own beside the ledger's audit.

- The ledger has every reply that a client saw finish, with the same text.
- No version has a sample twice in its ancestry.
- The weights file of the serving version, and of each other live version, has the hash of its row.
"""

import hashlib
import json
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from openclaw_rl.ledger import audit as ledger_audit

DEAD = ("rejected", "rolled_back", "lost")


class Acknowledged(Protocol):
    """A reply whose finish a client saw."""

    @property
    def turn_id(self) -> str: ...
    @property
    def text(self) -> str: ...


def open_read_only(ledger: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=10, isolation_level=None)
    db.row_factory = sqlite3.Row
    db.execute("BEGIN")  # one snapshot: a server may be writing
    return db


def audit(ledger: Path, seen: Sequence[Acknowledged], *, is_deep: bool = False) -> list[str]:
    """Findings; [] is good. `seen`: the replies to look for."""
    if not ledger.exists():
        return [f"{len(seen)} replies were acknowledged, and there is no ledger"] if seen else []
    with closing(open_read_only(ledger)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'version'").fetchone():
            return [f"{len(seen)} replies were acknowledged, and the ledger is empty"] if seen else []
        return [
            *ledger_audit.audit(db, is_deep=is_deep),
            *_replies(db, seen),
            *_trained_once(db),
            *_weights(db, ledger.parent),
            *_balance(db),
        ]


def text_of(piece: bytes) -> str:
    """The content of a message as the ledger stores it: a byte says whether the JSON that follows is compressed."""
    content = json.loads(zlib.decompress(piece[1:]) if piece[0] == 1 else piece[1:]).get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _replies(db: sqlite3.Connection, seen: Sequence[Acknowledged]) -> Iterator[str]:
    query = (
        "SELECT data, turn.reason, outcome FROM turn JOIN reply USING (id) JOIN request USING (id)"
        " JOIN piece ON piece.id = reply.message WHERE turn_id = ?"
    )
    for reply in seen:
        found = db.execute(query, (reply.turn_id,)).fetchone()
        if found is None:
            yield f"LOST: {reply.turn_id} was acknowledged and is not in the ledger: {reply.text!r}"
        elif text_of(found["data"]) != reply.text:
            yield f"{reply.turn_id}: the client saw {reply.text!r}, the ledger has {text_of(found['data'])!r}"
        elif found["outcome"] != "served" or found["reason"] in ("interrupted", "cancelled", "engine_failed"):
            yield f"{reply.turn_id} was acknowledged and is {found['outcome']}, {found['reason']}"


def _trained_once(db: sqlite3.Connection) -> Iterator[str]:
    """Walk every version down to the base, dead ones too, and count its samples."""
    parents = dict(db.execute("SELECT weight_version, parent FROM version").fetchall())
    trained: dict[int, set[int]] = defaultdict(set)
    query = (
        "SELECT weight_version, turn FROM version JOIN lease USING (lease_id) JOIN lease_sample USING (fence)"
        " WHERE outcome = 'trained'"
    )
    for version, turn in db.execute(query):
        trained[version].add(turn)
    below: dict[int, frozenset[int]] = {}  # all that a version and its ancestors were trained on
    for version in sorted(parents):
        parent = parents[version]
        before = frozenset() if parent is None else below[parent]
        if twice := before & trained[version]:
            yield f"version {version} was trained on {len(twice)} samples of its own ancestors"
        below[version] = before | trained[version]


def _is_named_still(db: sqlite3.Connection, number: int) -> bool:
    """Return True if the ledger names the version's folder *now*: a server may have pruned it after the snapshot."""
    with closing(open_read_only(Path(db.execute("PRAGMA database_list").fetchone()["file"]))) as today:
        query = "SELECT folder FROM version WHERE weight_version = ?"
        return today.execute(query, (number,)).fetchone()["folder"] is not None


def _weights(db: sqlite3.Connection, data_dir: Path) -> Iterator[str]:
    rows = db.execute(
        # No hash: weights that a trainer sends to the engine itself, and writes down at times or never.
        "SELECT weight_version, state, folder, sha256, weights_file FROM version"
        " WHERE folder IS NOT NULL AND sha256 != ''"
    )
    for number, state, folder, sha256, weights_file in rows:
        if state in DEAD:
            continue
        try:
            found = hashlib.sha256((data_dir / folder / weights_file).read_bytes()).hexdigest()
        except OSError as error:
            if _is_named_still(db, number):
                yield f"version {number} is {state}, and its weights cannot be read: {error}"
        else:
            if found != sha256:
                yield f"version {number} is {state}: its row says {sha256[:12]}, its file is {found[:12]}"
    query = "SELECT policy FROM version WHERE state = 'serving' GROUP BY policy HAVING count(*) > 1"
    for (policy,) in db.execute(query):
        yield f"more than one version serves {policy}"


def _balance(db: sqlite3.Connection) -> Iterator[str]:
    """Every request is served, abandoned or running; every served one is a turn in one state."""
    requests, served = db.execute("SELECT count(*), sum(outcome = 'served') FROM request").fetchone()
    ended = db.execute("SELECT count(*) FROM request WHERE outcome = 'abandoned' OR outcome = 'running'").fetchone()[0]
    (turns,) = db.execute("SELECT count(*) FROM turn").fetchone()
    (counted,) = db.execute(
        "SELECT coalesce(sum(n), 0) FROM counter WHERE name NOT IN ('requests', 'running')"
        " AND name NOT LIKE 'side.%' AND name NOT LIKE 'abandoned.%' AND name NOT LIKE 'feedback.%'"
        " AND name NOT LIKE 'episodes.%' AND name NOT LIKE 'groups.%'"
    ).fetchone()
    if not (turns == (served or 0) == counted and requests == turns + ended):
        yield f"{requests} requests, {served} served, {ended} ended otherwise, {turns} turns, {counted} counted"
