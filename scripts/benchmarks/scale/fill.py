"""Fast filling of a ledger: the public calls of `Ledger`, with a commit every thousand turns and without fsync.

The rows are those that a server writes; `same_rows` proves it on a small ledger.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.scale.drive import Clock, Drive
from benchmarks.scale.talk import FIRST, Talk
from openclaw_rl.ledger import Identity, Ledger, open
from openclaw_rl.ledger.open import InstanceLock
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.settings import RedactionSettings, TrainingSettings

T = TypeVar("T")
IDENTITY = Identity(base_hash="base", tokenizer_hash="tokenizer", model_name="made up")
TRAINING = TrainingSettings(batch_size=16, max_staleness=1_000_000, max_waiting=1_000_000, max_tool_share=1.0)
"""No sample is too old: all that wait stay, a quarter of a large ledger."""
START = 1_700_000_000.0
_GROUP = 1000
_TABLES = (
    "request turn reply open_turn next_state verdict sample event feedback lease_sample side piece counter version"
)


class _Inline:
    """Writer and reader in one: it does the work at once, inside a transaction that is already open."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    async def write(self, work: Callable[[sqlite3.Connection], T], **_: object) -> T:
        return work(self._db)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return work(self._db)


@contextmanager
def in_bulk(path: Path, clock: Clock) -> Iterator[tuple[Ledger, sqlite3.Connection]]:
    lock = InstanceLock.beside(path)
    try:
        open.prepare(path, IDENTITY, now=clock(), lease_s=TRAINING.lease_s)
        db = open.connect(path)
        try:
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA cache_size = -1000000")
            inline: Any = _Inline(db)
            # The texts hold no secrets, and a scan costs time.
            redactor = NounRedactor(RedactionSettings(secrets=False))
            yield Ledger(inline, inline, lock, TRAINING, redactor, clock), db
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            db.close()
    finally:
        lock.release()


def fill(path: Path, turns: int, *, seed: int, say: Callable[[str], None]) -> None:
    """Write `turns` turns and leave none of them open."""
    clock, start = Clock(START), time.perf_counter()
    with in_bulk(path, clock) as (ledger, db):
        drive = Drive(ledger, Talk(seed, prefix=FIRST), clock)

        async def walk(n: int) -> None:
            for _ in range(n):
                await drive.step()

        for done in range(0, turns, _GROUP):
            db.execute("BEGIN IMMEDIATE")
            asyncio.run(walk(min(_GROUP, turns - done)))
            if done + _GROUP >= turns:
                asyncio.run(drive.hang_up())
            db.execute("COMMIT")
            say(f"{done:,} turns, {done / (time.perf_counter() - start):,.0f} a second")


async def by_api(path: Path, turns: int, *, seed: int) -> list[str]:
    """Write the same turns as a server does, call for call; return the findings of the deep audit."""
    clock = Clock(START)
    ledger = await Ledger.open(path, identity=IDENTITY, training=TRAINING, clock=clock)
    try:
        drive = Drive(ledger, Talk(seed, prefix=FIRST), clock)
        for _ in range(turns):
            await drive.step()
        await drive.hang_up()
        return await ledger.audit(is_deep=True)
    finally:
        await ledger.aclose()


def same_rows(one: Path, other: Path) -> dict[str, int]:
    """Return the number of rows of each table; assert that they are equal but for the random part of lease ids."""
    counted = {}
    for table in _TABLES.split():
        rows = [_rows(path, table) for path in (one, other)]
        assert rows[0] == rows[1], f"{table} differs"
        counted[table] = len(rows[0])
    return counted


def _rows(path: Path, table: str) -> list[str]:
    db = sqlite3.connect(path)
    try:
        return [re.sub(r"(lease-\d+)-[0-9a-f]{8}", r"\1", repr(row)) for row in db.execute(f"SELECT * FROM {table}")]
    finally:
        db.close()
