"""Opening of the ledger file: private, locked, of today's schema, and of the right model.

One server per ledger holds `InstanceLock`, an advisory `flock` on a file beside the ledger. The file has the owner's
pid in it for people to read. The kernel frees the lock when the process ends, also after `kill -9`.
"""

import fcntl
import json
import os
import sqlite3
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from openclaw_rl.errors import LedgerError, LedgerLocked, LedgerMismatch
from openclaw_rl.ledger import leases, pictures, schema, turns
from openclaw_rl.ledger.blobs import Connection
from openclaw_rl.ledger.records import Identity
from openclaw_rl.ledger.schema import migrate
from openclaw_rl.types import VersionState

_BUSY_S = 1.0
"""Longest wait of a statement for another program that locks the file (a backup, a person with `sqlite3`)."""


def connect(path: Path, *, read_only: bool = False, cache_mb: float = 8.0) -> sqlite3.Connection:
    """Connect to the file.

    cache_mb: size of SQLite's page cache; the system's own cache has the rest of the file, microseconds away.
    """
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    db = sqlite3.connect(
        uri,
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=Connection,
    )
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA synchronous = FULL")
    db.execute(f"PRAGMA cache_size = -{max(64, round(1024 * cache_mb))}")
    db.execute("PRAGMA wal_autocheckpoint = 16000")  # the writer does it when idle, long before that
    db.execute("PRAGMA journal_size_limit = 67108864")
    return db


def prepare(path: Path, identity: Identity, *, now: float, lease_s: float) -> None:
    """Make or migrate the file, check its owner, and end the work that the last process left. The caller has the lock.

    lease_s: longest remaining time of a live lease, for the last process may have had another wall clock.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)  # SQLite gives its -wal and -shm files the same mode
        db = connect(path)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                _check_owner(db, path, identity)  # before migrate: a refused file keeps its schema
            migrate(db)
            db.execute("BEGIN IMMEDIATE")
            _claim(db, identity, now=now)
            turns.abandon_interrupted(db)
            leases.expire(db, at=now)
            leases.bound(db, until=now + lease_s)
            db.execute("COMMIT")
            pictures.sweep(db)
        finally:
            db.close()
    except OSError as error:
        raise LedgerError(f"cannot open the ledger {path}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise LedgerError(f"cannot open the ledger {path}: {error}") from error


def _claim(db: sqlite3.Connection, identity: Identity, *, now: float) -> None:
    """Make a file without an owner this model's, with the base as version 0."""
    if schema.get_text(db, "identity") is None:
        schema.put(db, "identity", json.dumps(asdict(identity)))
        schema.put(db, "tip", 0)
        db.execute(
            "INSERT INTO version (weight_version, depth, kind, base_hash, state, durable, has_optimizer, committed_at)"
            " VALUES (0, 0, ?, ?, ?, 1, 1, ?)",
            (str(identity.kind), identity.base_hash, str(VersionState.SERVING), now),
        )


def _check_owner(db: sqlite3.Connection, path: Path, identity: Identity) -> None:
    """Check that the file is this model's or has no owner. Raises LedgerMismatch."""
    found = schema.get_text(db, "identity")
    if found is None:
        return
    owner = Identity(**json.loads(found))
    wrong = [
        f"{what} {getattr(owner, field)}, and this server has {getattr(identity, field)}"
        for field, what in (("base_hash", "base weights"), ("tokenizer_hash", "tokenizer"), ("kind", "weights of kind"))
        if getattr(owner, field) != getattr(identity, field)
    ]
    if wrong:
        raise LedgerMismatch(
            f"the ledger {path} belongs to the model {owner.model_name!r}, not to {identity.model_name!r}"
            f" ({'; '.join(wrong)}): name that model again, or start with another data_dir"
        )


class InstanceLock:
    """Lock of one ledger, held from construction to `release`.

    The lock file stays on disk: after a deletion two processes could lock two files of one name.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(f"cannot open the lock file {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise LedgerLocked(
                f"another server (process {owner or 'unknown'}) holds {path.name.removesuffix('.lock')}; stop it first"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @classmethod
    def beside(cls, ledger: Path) -> "InstanceLock":
        """Lock this ledger. Raises LedgerLocked, which names the process that holds it."""
        return cls(ledger.with_name(ledger.name + ".lock"))

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "InstanceLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
