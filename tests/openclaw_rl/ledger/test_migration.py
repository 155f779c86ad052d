"""Files of an older release migrate to today's schema without a loss."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from openclaw_rl.errors import LedgerMismatch
from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger.schema import MIGRATIONS, migrate
from openclaw_rl.types import DropReason, Feedback, SideCount

OLDER = range(1, len(MIGRATIONS))


def write_older(new: Path, old: Path, schema: int) -> None:
    """Copy the rows of `new` into a file of an older schema."""
    old.parent.mkdir(exist_ok=True)
    with sqlite3.connect(old, isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = WAL")
        migrate(db, MIGRATIONS[:schema])
        db.execute("ATTACH ? AS new", (str(new),))
        tables = [name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
        for table in sorted(tables, key=lambda name: name == "counter"):  # triggers count what is copied
            columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
            db.execute(f"DELETE FROM main.{table}")
            db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        assert db.execute("PRAGMA main.user_version").fetchone() == (schema,)


def shape(path: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(path) as db:
        return sorted(db.execute("SELECT name, coalesce(sql, '') FROM sqlite_master").fetchall())


@pytest.fixture
async def turn_ids(ledger, driver):
    """A turn of every kind that all schemas know; the ledger is closed."""
    version, trained = await driver.step(size=2)
    await driver.serve(version)
    ids = [
        *trained,
        await driver.sampled(version=version),
        await driver.judged(),
        await driver.paired(is_tool=True),
        await driver.served(session=None),
        await driver.served(drop=DropReason.CANCELLED, mask=(True, False, True, True)),
    ]
    await ledger.count_side(SideCount("ann", "s", "title", 3, 1, 200, 1000.0))
    return ids


@pytest.mark.parametrize("schema", OLDER)
async def test_an_older_file_keeps_every_row_and_goes_on(
    ledger, turn_ids, make_driver, ledger_path, tmp_path, identity, training, clock, schema
):
    kept = [await ledger.turn(turn_id) for turn_id in turn_ids], await ledger.counts(), await ledger.versions()
    await ledger.aclose()
    path = tmp_path / "old" / "ledger.sqlite"
    write_older(ledger_path, path, schema)
    migrated = await Ledger.open(path, identity=identity, training=training, clock=clock)
    try:
        found = [await migrated.turn(turn_id) for turn_id in turn_ids]
        assert (found, await migrated.counts(), await migrated.versions()) == kept
        assert await migrated.audit(is_deep=True) == []
        assert shape(path) == shape(ledger_path)
        judged = await migrated.record_feedback(
            Feedback("f", turn_ids[3], 1.0, value=-1.0, demonstration="better"), user="ann", demonstration=(5, 6)
        )
        assert judged.demonstration_id is not None
        driver = make_driver(migrated, count=100)
        await migrated.lease(trainer="test", now=True)
        assert await migrated.revoke(reason="test")
        assert await driver.served() == "turn-101"
        assert await migrated.audit(is_deep=True) == []
    finally:
        await migrated.aclose()


@pytest.mark.parametrize("schema", OLDER)
async def test_an_older_file_of_another_tokenizer_is_refused_and_stays_what_it_was(
    ledger, turn_ids, ledger_path, tmp_path, identity, training, schema
):
    await ledger.aclose()
    path = tmp_path / "old" / "ledger.sqlite"
    write_older(ledger_path, path, schema)
    with pytest.raises(LedgerMismatch, match="tokenizer tokenizer-1, and this server has tokenizer-2"):
        await Ledger.open(path, identity=replace(identity, tokenizer_hash="tokenizer-2"), training=training)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema,)
