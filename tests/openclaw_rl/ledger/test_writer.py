"""The writer: group commit, isolation of jobs, and a file that cannot be written for a while."""

import asyncio
import os
import sqlite3
import threading
from contextlib import closing
from functools import partial

import pytest
from structlog.testing import capture_logs

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger import syncer
from openclaw_rl.ledger.open import connect
from openclaw_rl.ledger.syncer import Syncer
from openclaw_rl.ledger.writer import Writer


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "writer.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
        db.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b)")
    return path


class Commits(list[str]):
    """Statements that the writer's connection ran."""

    def connect(self, path):
        db = connect(path)
        db.set_trace_callback(self.append)
        return db


@pytest.fixture
def statements():
    return Commits()


@pytest.fixture
async def writer(path, statements):
    writer = Writer(partial(statements.connect, path), max_waiting=100, probe_s=0.01)
    writer.start()
    yield writer
    await writer.close()


def insert(a, b=None):
    return lambda db: db.execute("INSERT INTO t VALUES (?, ?)", (a, b)).lastrowid


def rows(path):
    with sqlite3.connect(path) as db:
        return [a for (a,) in db.execute("SELECT a FROM t ORDER BY a")]


class Blocked:
    """A job that holds the writer until told."""

    def __init__(self):
        self.started, self.go_on = threading.Event(), threading.Event()

    def __call__(self, db):
        self.started.set()
        assert self.go_on.wait(120)


async def hold(writer):
    blocked = Blocked()
    task = asyncio.create_task(writer.write(blocked))
    await asyncio.to_thread(blocked.started.wait, 30)
    return blocked, task


async def test_what_waits_together_is_committed_together_in_order(writer, path, statements):
    blocked, first = await hold(writer)
    writes = [asyncio.create_task(writer.write(insert(a))) for a in range(1, 51)]
    await asyncio.sleep(0)
    before = statements.count("COMMIT")
    blocked.go_on.set()
    assert await asyncio.gather(*writes) == list(range(1, 51))
    await first
    assert statements.count("COMMIT") - before == 2  # the one that held the writer, and all that waited behind it
    assert rows(path) == list(range(1, 51))


async def test_a_job_that_fails_leaves_no_trace_and_hurts_no_neighbour(writer, path):
    def half_done(db):
        db.execute("INSERT INTO t VALUES (100, 'half')")
        raise KeyError("a bug")

    blocked, first = await hold(writer)
    jobs = [insert(1), half_done, insert(1), lambda db: db.execute("INSERT INTO t VALUES (?, ?)", (1,)), insert(2)]
    writes = asyncio.gather(*(writer.write(job) for job in jobs), return_exceptions=True)
    await asyncio.sleep(0)
    blocked.go_on.set()
    outcomes = await writes
    await first
    assert [type(outcome) for outcome in outcomes] == [int, KeyError, LedgerError, LedgerError, int]
    assert "UNIQUE" in str(outcomes[2])
    assert rows(path) == [1, 2]
    assert writer.failure is None


async def test_a_full_disk_fails_the_writes_and_says_so_until_there_is_room(writer, path):
    def limit(pages):
        return lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone()

    await writer.write(insert(1))
    (used,) = await writer.write(lambda db: db.execute("PRAGMA page_count").fetchone())
    await writer.write(limit(used + 1))
    for a in (2, 3):
        with pytest.raises(LedgerUnavailable, match="full"):
            await writer.write(insert(a, b"x" * 100_000))
        assert "full" in writer.failure
    await writer.write(limit(1_000_000))
    await writer.write(insert(4, b"x" * 100_000))
    await until_well(writer)
    assert rows(path) == [1, 4]


async def until_well(writer):
    async with asyncio.timeout(120):
        while writer.failure is not None:  # the thread tries by itself, and tells nobody
            await asyncio.sleep(0.005)


async def test_a_job_that_still_fits_ends_no_failure_and_no_line_is_said_twice(writer, path):
    """Nearly full: small turns come through and large ones do not."""

    def limit(pages):
        return lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone()

    await writer.write(insert(1))
    (used,) = await writer.write(lambda db: db.execute("PRAGMA page_count").fetchone())
    await writer.write(limit(used + 1))
    with capture_logs() as lines:
        for a in (2, 3, 4):
            with pytest.raises(LedgerUnavailable, match="full"):
                await writer.write(insert(-a, b"x" * 100_000))
            await writer.write(insert(a))
            assert "full" in writer.failure
        assert rows(path) == [1, 2, 3, 4]
        await writer.write(limit(1_000_000))
        while writer.failure is not None:  # jobs come all the time, and it is found out all the same
            await writer.write(insert(5 + len(rows(path))))
    said = [line["event"] for line in lines if line["event"].startswith("ledger_")]
    assert said == ["ledger_cannot_write", "ledger_writes_again"]


async def test_a_torn_file_is_a_failure_for_good(writer, path):
    await writer.write(insert(1))

    def tears(db):
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    with pytest.raises(LedgerUnavailable, match="malformed"):
        await writer.write(tears)
    await asyncio.sleep(0.05)  # more than one try of the thread's own would need
    await writer.write(insert(2))
    assert "malformed" in writer.failure


async def test_a_group_that_hits_the_full_disk_fails_whole(writer, path):
    (used,) = await writer.write(lambda db: db.execute("PRAGMA page_count").fetchone())
    await writer.write(lambda db: db.execute(f"PRAGMA max_page_count = {used + 1}").fetchone())
    blocked, first = await hold(writer)
    jobs = [insert(1), insert(2, b"x" * 100_000), insert(3)]
    writes = asyncio.gather(*(writer.write(job) for job in jobs), return_exceptions=True)
    await asyncio.sleep(0)
    blocked.go_on.set()
    assert [type(outcome) for outcome in await writes] == [LedgerUnavailable] * 3
    await first
    assert rows(path) == []


async def test_a_file_locked_by_another_program_is_a_failure_that_passes_by_itself(writer, path):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked"):
        await writer.write(insert(1))
    assert "locked" in writer.failure
    other.execute("ROLLBACK")
    other.close()
    await until_well(writer)  # nobody writes
    assert rows(path) == []


async def test_a_queue_that_is_full_refuses_at_once(writer):
    blocked, first = await hold(writer)
    writes = [asyncio.create_task(writer.write(insert(a))) for a in range(99)]
    await asyncio.sleep(0)
    with pytest.raises(LedgerUnavailable, match="100 writes behind"):
        await writer.write(insert(1000))
    blocked.go_on.set()
    await asyncio.gather(first, *writes)
    await writer.write(insert(1000))


async def test_who_gives_up_before_its_turn_is_not_written(writer, path):
    blocked, first = await hold(writer)
    with pytest.raises(LedgerUnavailable, match="within"):
        await writer.write(insert(1), timeout_s=0.01)
    blocked.go_on.set()
    await first
    await writer.write(insert(2))
    assert rows(path) == [2]


async def test_a_caller_that_is_cancelled_still_gets_written_and_breaks_nothing(writer, path):
    blocked, first = await hold(writer)
    write = asyncio.create_task(writer.write(insert(1)))
    await asyncio.sleep(0)
    write.cancel()
    blocked.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await write
    await first
    await writer.write(insert(2))
    assert rows(path) == [1, 2]


async def test_closing_writes_what_was_handed_in(writer, path):
    blocked, first = await hold(writer)
    writes = [asyncio.create_task(writer.write(insert(a))) for a in range(10)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    blocked.go_on.set()
    await asyncio.gather(first, closing, *writes)
    assert rows(path) == list(range(10))
    with pytest.raises(LedgerUnavailable, match="closed"):
        await writer.write(insert(11))


async def test_whoever_waits_is_told_when_the_writer_breaks(writer):
    class Broken(BaseException):
        """An exception that no job should raise."""

    def break_down(db):
        raise Broken

    threading.excepthook, hook = (lambda args: None), threading.excepthook
    try:
        blocked, first = await hold(writer)
        broken = asyncio.create_task(writer.write(break_down, timeout_s=5))
        await asyncio.sleep(0)
        blocked.go_on.set()
        await first
        with pytest.raises(LedgerUnavailable):
            await broken
        await asyncio.to_thread(writer._thread.join)
        with pytest.raises(LedgerUnavailable, match="closed"):
            await writer.write(insert(1))
    finally:
        threading.excepthook = hook


class HeldSync:
    """An fsync that takes its time, and then works or not."""

    def __init__(self):
        self.started, self.go_on, self.error = threading.Event(), threading.Event(), None

    def __call__(self, fd):
        self.started.set()
        assert self.go_on.wait(120)
        if self.error is not None:
            raise self.error


@pytest.fixture
def held_sync(monkeypatch):
    held = HeldSync()
    monkeypatch.setattr(syncer, "_sync", held)
    yield held
    held.go_on.set()


async def test_a_write_without_an_fsync_does_not_wait_for_one(writer, path, held_sync):
    synced = asyncio.create_task(writer.write(insert(1)))
    await asyncio.to_thread(held_sync.started.wait, 30)
    async with asyncio.timeout(120):
        await writer.write(insert(2), is_synced=False)
    assert (rows(path), synced.done()) == ([1, 2], False)
    held_sync.go_on.set()
    await synced


async def test_an_fsync_that_fails_is_told_and_shown_until_one_works(writer, held_sync):
    held_sync.error = OSError(5, "Input/output error")
    held_sync.go_on.set()
    with pytest.raises(LedgerUnavailable, match="synced"):
        await writer.write(insert(1))
    assert "Input/output error" in writer.failure
    await writer.write(insert(2), is_synced=False)
    assert "Input/output error" in writer.failure
    held_sync.error = None
    await until_well(writer)


async def test_the_log_is_synced_before_the_answer(writer, path, monkeypatch):
    synced = []
    monkeypatch.setattr(syncer, "_sync", lambda fd: synced.append((os.readlink(f"/proc/self/fd/{fd}"), rows(path))))
    await writer.write(insert(1))
    assert synced == [(f"{path}-wal", [1])]


async def test_a_log_under_constant_writing_is_begun_anew(writer, path, monkeypatch):
    monkeypatch.setattr(syncer, "_CHECKPOINT_GROUPS", 5)
    log = path.with_name(f"{path.name}-wal")
    # How soon the syncing thread comes to it is the machine's affair. A log that grew past 64 MiB keeps that size.
    for a in range(60_000):
        await writer.write(insert(a, b"x" * 5000), is_synced=False)
        # Never begun anew, it would hold every byte once at least.
        if a > 200 and log.stat().st_size < a * 5000 / 2:
            return
    pytest.fail(f"{log.stat().st_size} bytes")


async def test_a_write_without_an_fsync_is_in_the_file_soon_though_no_other_comes(writer, path):
    def in_file():
        with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:  # reads no log
            return [a for (a,) in db.execute("SELECT a FROM t")]

    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint")  # the table
    for a in (1, 2):  # in the log that a checkpoint left, too
        await writer.write(insert(a), is_synced=False)
        async with asyncio.timeout(120):
            while a not in in_file():
                await asyncio.sleep(0.02)


async def test_writes_without_an_fsync_make_no_long_log(writer, path, monkeypatch):
    """The syncing thread is told of them all at once, after as many as begin a new log."""
    monkeypatch.setattr(syncer, "_CHECKPOINT_GROUPS", 5)
    monkeypatch.setattr(syncer, "_IDLE_S", 3600)
    told, wake = [], Syncer._wake

    def watched(self, reply):
        told.append(self._untold)
        wake(self, reply)

    monkeypatch.setattr(Syncer, "_wake", watched)
    for a in range(12):
        await writer.write(insert(a), is_synced=False)
    assert told == [5, 5]
    await writer.write(insert(12))
    assert told == [5, 5, 3]
