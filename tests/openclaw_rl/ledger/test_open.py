"""Opening: one server at a time, the right model, the right schema, and recovery after a crash."""

import os
import sqlite3
from dataclasses import replace

import pytest

from openclaw_rl.errors import LedgerError, LedgerLocked, LedgerMismatch, LedgerUnavailable
from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger.schema import MIGRATIONS, migrate
from openclaw_rl.messages import Message
from openclaw_rl.settings import MemorySettings
from openclaw_rl.types import Request, SamplingParams, Scope, WeightKind


async def test_a_second_server_is_told_who_has_the_ledger(ledger, ledger_path, identity, training):
    with pytest.raises(LedgerLocked, match=f"process {os.getpid()}"):
        await Ledger.open(ledger_path, identity=identity, training=training)


async def test_a_closed_ledger_can_be_opened_again_and_takes_no_calls(ledger, driver, ledger_path, identity, training):
    await driver.served()
    await ledger.aclose()
    for call in (ledger.counts(), ledger.set_learning(True), driver.served()):
        with pytest.raises(LedgerUnavailable, match="closed"):
            await call
    reopened = await Ledger.open(ledger_path, identity=identity, training=training)
    assert (await reopened.counts())["served"] == 1
    await reopened.aclose()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_hash": "base-2"}, "base weights base-1, and this server has base-2"),
        ({"tokenizer_hash": "tokenizer-2"}, "tokenizer tokenizer-1, and this server has tokenizer-2"),
        ({"kind": WeightKind.FULL}, "weights of kind lora, and this server has full"),
    ],
)
async def test_a_ledger_of_another_model_is_refused_in_plain_words(
    ledger, ledger_path, identity, training, change, words
):
    await ledger.aclose()
    with pytest.raises(LedgerMismatch) as caught:
        await Ledger.open(ledger_path, identity=replace(identity, model_name="other", **change), training=training)
    assert words in str(caught.value)
    assert "belongs to the model 'tiny', not to 'other'" in str(caught.value)
    again = await Ledger.open(ledger_path, identity=identity, training=training)  # the lock was let go
    await again.aclose()


async def test_a_model_may_be_renamed(ledger, ledger_path, identity, training):
    await ledger.aclose()
    await (await Ledger.open(ledger_path, identity=replace(identity, model_name="moved"), training=training)).aclose()


async def test_a_ledger_from_the_future_is_refused(ledger, ledger_path, identity, training):
    await ledger.aclose()
    with sqlite3.connect(ledger_path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(LedgerMismatch, match="has schema 99"):
        await Ledger.open(ledger_path, identity=identity, training=training)


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is long enough to be one" * 100, b"SQLite format 3\0junk"]
)
async def test_a_file_that_is_no_ledger_is_refused_and_kept(tmp_path, identity, training, content):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        await Ledger.open(path, identity=identity, training=training)
    assert path.read_bytes() == content


async def test_a_folder_that_cannot_be_made_is_named(tmp_path, identity, training):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot make the folder"):
        await Ledger.open(tmp_path / "file" / "ledger.sqlite", identity=identity, training=training)


async def test_what_was_being_generated_when_the_server_stopped_is_counted(
    ledger, ledger_path, identity, training, clock
):
    request = Request(
        "r", Scope("u", "s"), 1.0, (Message(role="user", content="q"),), None, None, (1,), SamplingParams(1)
    )
    await ledger.begin(request)
    assert (await ledger.counts())["running"] == 1
    await ledger.aclose()
    reopened = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    counts = await reopened.counts()
    assert (counts["running"], counts["abandoned.interrupted"], counts["requests"]) == (0, 1, 1)
    assert await reopened.audit() == []
    await reopened.aclose()


def test_an_older_file_is_migrated_step_by_step_and_a_failed_step_leaves_it_as_it_was(tmp_path):
    with sqlite3.connect(tmp_path / "old.sqlite", isolation_level=None) as db:
        migrate(db, MIGRATIONS)
        newer = (*MIGRATIONS, "ALTER TABLE side ADD COLUMN more TEXT", "CREATE TABLE broken (a); SELECT * FROM nowhere")
        with pytest.raises(sqlite3.OperationalError):
            migrate(db, newer)
        assert db.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS) + 1
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'broken'").fetchone()[0] == 0
        db.execute("SELECT more FROM side")
        migrate(db, newer[:-1])


async def test_a_ledger_others_could_read_is_made_private(ledger, ledger_path, identity, training):
    await ledger.aclose()
    ledger_path.chmod(0o644)
    reopened = await Ledger.open(ledger_path, identity=identity, training=training)
    assert ledger_path.stat().st_mode & 0o777 == 0o600
    await reopened.aclose()


async def test_the_connections_share_the_memory_they_are_given(ledger_path, identity, training):
    memory = MemorySettings(ledger_mb=2)
    ledger = await Ledger.open(ledger_path, identity=identity, training=training, memory=memory)

    def cache_kib(db: sqlite3.Connection) -> int:
        return -db.execute("PRAGMA cache_size").fetchone()[0]

    try:
        assert await ledger._reader.read(cache_kib) == await ledger._writer.write(cache_kib) == 512
    finally:
        await ledger.aclose()
