"""Large ledger made of a small one: the small one's history over and over, under other names and numbers.

The public calls wrote every row of the small ledger. Copy k has the same rows k histories later: ids, numbers, fences,
times and the references packed in blobs move on, and names get the copy's own suffix. The copies share all that
sessions share (system prompts, tools, sampling). Two things differ from a ledger that grew by the calls. A copied piece
has a random digest: its content came before, and its digest must be new. The turns that wait for a trainer are spread
over the whole history. The audit must find no fault.
"""

import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.scale.drive import KEPT
from benchmarks.scale.talk import FIRST
from openclaw_rl.ledger import open
from openclaw_rl.ledger.blobs import pack_ids, pack_runs, unpack_ids, unpack_runs
from openclaw_rl.types import VersionRun

_TURN = {"id": "id + :turns"}
_TABLES: dict[str, dict[str, str]] = {
    "piece": {"id": "piece(id)", "digest": "randomblob(16)"},
    "request": {
        **_TURN,
        "request_id": "name(request_id)",
        "session_id": "name(session_id)",
        "received_at": "received_at + :time",
        "sampling": "piece(sampling)",
        "tools": "piece(tools)",
        "prompt": "pieces(prompt)",
        "messages": "pieces(messages)",
    },
    "lease": {
        "lease_id": "story(lease_id)",
        "fence": "fence + :fences",
        "parent": "parent + :versions",
        "granted_at": "granted_at + :time",
        "expires_at": "expires_at + :time",
        "ended_at": "ended_at + :time",
    },
    "version": {
        "weight_version": "weight_version + :versions",
        "parent": "parent + :versions",
        "depth": "depth + :versions",
        "folder": "NULL",
        "state": "'retired'",
        "lease_id": "story(lease_id)",
        "committed_at": "committed_at + :time",
    },
    "turn": {
        **_TURN,
        "turn_id": "name(turn_id)",
        "oldest_version": "oldest_version + :versions",
        "sampled_at": "sampled_at + :time",
        "trained_in": "trained_in + :versions",
    },
    "reply": {
        **_TURN,
        "finished_at": "finished_at + :time",
        "message": "piece(message)",
        "versions": "runs(versions)",
    },
    "next_state": {**_TURN, "by_request": "name(by_request)", "messages": "pieces(messages)"},
    "verdict": _TURN,
    "sample": {**_TURN, "scored_version": "scored_version + :versions"},
    "event": {"turn": "turn + :turns", "at": "at + :time", "detail": "story(detail)"},
    "feedback": {
        "id": "id + :feedback",
        "turn": "turn + :turns",
        "feedback_id": "name(feedback_id)",
        "at": "at + :time",
    },
    "lease_sample": {"fence": "fence + :fences", "turn": "turn + :turns"},
    "side": {"id": "id + :sides", "at": "at + :time", "session_id": "name(session_id)"},
}


def copies(small: Path, large: Path, times: int, *, stop_at: float, say: Callable[[str], None]) -> int:
    """Write copies until they are done or the time is up; return the number of histories in `large`.

    `small` is closed, and no turn in it is open, running or leased."""
    shutil.copy(small, large)
    db = open.connect(large)
    try:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -1000000")
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute("ATTACH ? AS small", (f"{small.absolute().as_uri()}?mode=ro",))
        spans = {
            name: db.execute(f"SELECT coalesce(max({column}), 0) FROM small.{table}").fetchone()[0]
            for name, table, column in (
                ("turns", "request", "id"),
                ("versions", "version", "weight_version"),
                ("fences", "lease", "fence"),
                ("feedback", "feedback", "id"),
                ("sides", "side", "id"),
                ("pieces", "piece", "id"),
            )
        }
        first, last = db.execute("SELECT min(received_at), max(received_at) FROM small.request").fetchone()
        shared, start, done = _shared(db), time.perf_counter(), 1
        columns = {table: [row["name"] for row in db.execute(f"PRAGMA table_info({table})")] for table in _TABLES}
        while done < times and time.monotonic() < stop_at:
            moved = {name: done * span for name, span in spans.items()} | {"time": done * (last - first + 20)}
            _functions(db, moved, shared, f"c{done:05}")
            db.execute("BEGIN IMMEDIATE")
            for table, changed in _TABLES.items():
                values = ", ".join(changed.get(column, column) for column in columns[table])
                # the base is there already, and so is what is shared
                new = {"piece": "WHERE piece(id) <> id", "version": "WHERE weight_version > 0"}.get(table, "")
                db.execute(f"INSERT INTO {table} SELECT {values} FROM small.{table} {new}", moved)
            db.execute("COMMIT")
            done += 1
            if done % 10 == 0:
                rate = done * spans["turns"] / (time.perf_counter() - start)
                say(f"{done * spans['turns']:,} requests, {rate:,.0f} a second, {large.stat().st_size / 2**20:,.0f} MB")
        _finish(db, done, spans)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
    return done


def _shared(db: sqlite3.Connection) -> frozenset[int]:
    """Return the pieces that sessions share."""
    seen: dict[int, str] = {}
    shared: set[int] = set()
    for session, prompt, messages, sampling, tools in db.execute(
        "SELECT session_id, prompt, messages, sampling, tools FROM small.request"
    ):
        for piece in (*unpack_ids(prompt), *unpack_ids(messages), sampling, tools):
            if seen.setdefault(piece, session) != session:
                shared.add(piece)
    return frozenset(shared)


def _functions(db: sqlite3.Connection, moved: dict[str, float], shared: frozenset[int], copy: str) -> None:
    by, versions, fences = int(moved["pieces"]), int(moved["versions"]), int(moved["fences"])

    def piece(number: int | None) -> int | None:
        return number if number is None or number in shared else number + by

    def pieces(blob: bytes) -> bytes:
        return pack_ids([number if number in shared else number + by for number in unpack_ids(blob)])

    def runs(blob: bytes) -> bytes:
        return pack_runs(tuple(VersionRun(run.weight_version + versions, run.length) for run in unpack_runs(blob)))

    def story(text: str | None) -> str | None:
        if text is None:
            return None
        text = re.sub(r"lease-(\d+)", lambda found: f"lease-{int(found[1]) + fences}", text)
        return re.sub(r"version (\d+)", lambda found: f"version {int(found[1]) + versions}", text)

    def name(text: str | None) -> str | None:
        return None if text is None else text.replace(FIRST, copy)

    for function in (piece, pieces, runs, story, name):
        db.create_function(function.__name__, 1, function, deterministic=True)


def _finish(db: sqlite3.Connection, times: int, spans: dict[str, int]) -> None:
    """Write the parts that a ledger has once: counts, tip, serving version, folders of the newest."""
    tip = times * spans["versions"]
    db.execute("BEGIN IMMEDIATE")
    db.execute("DELETE FROM counter")
    db.execute("INSERT INTO counter SELECT name, n * ? FROM small.counter", (times,))
    db.execute("UPDATE meta SET value = ? WHERE key = 'tip'", (str(tip),))
    db.execute("UPDATE meta SET value = ? WHERE key = 'fence'", (str(times * spans["fences"]),))
    db.execute("UPDATE version SET state = 'retired' WHERE state = 'serving'")
    db.execute("UPDATE version SET state = 'serving' WHERE weight_version = ?", (tip,))
    db.execute("UPDATE version SET folder = NULL WHERE weight_version <= ?", (tip - KEPT,))
    db.execute(
        "UPDATE version SET folder = 'versions/v-' || weight_version WHERE weight_version > ?", (max(tip - KEPT, 0),)
    )
    db.execute("COMMIT")
