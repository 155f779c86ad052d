"""A forgotten session is gone from the file, and nothing else is; a backup is the ledger as it was at one moment."""

import asyncio
import sqlite3
import stat

import pytest

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.ledger import Forgotten, Ledger, forget
from openclaw_rl.ledger.backup import backup
from openclaw_rl.messages import Message
from openclaw_rl.types import Feedback, Request, SamplingParams, Scope, SideCount


@pytest.fixture(autouse=True)
async def audited(ledger):
    yield
    if not ledger.is_closed:
        assert await ledger.audit(is_deep=True) == []


def bytes_of(ledger_path) -> bytes:
    return b"".join(file.read_bytes() for file in ledger_path.parent.glob("ledger.sqlite*"))


async def test_a_session_is_forgotten_and_what_others_share_stays(ledger, driver, ledger_path):
    shared = tuple(range(512))
    mine = [await driver.sampled(session="mine", prompt=(*shared, n)) for n in (600, 601)]
    await driver.served(session="mine", prompt=shared)
    theirs = await driver.sampled(session="theirs", prompt=shared)
    await ledger.record_feedback(
        Feedback("f", mine[0], 1.0, -1.0, "too long", "SECRET DEMONSTRATION"), user="ann", demonstration=(1, 2)
    )
    await ledger.count_side(SideCount("ann", "mine", "title", 1, 1, 200, 1.0))
    forgotten = await ledger.forget("mine")
    assert (forgotten.user, forgotten.turns, forgotten.trained_in) == ("ann", 4, ())
    assert [row.turn_id for row in await ledger.turns()] == [theirs]
    assert await ledger.turn(mine[0]) is None
    counts = await ledger.counts()
    assert (counts["requests"], counts["sampled"], counts["served"], counts["judged"]) == (1, 1, 0, 0)
    assert (counts["side"], counts["feedback"]) == (0, 0)
    record = await ledger.turn(theirs)
    assert record.request.prompt_ids == shared  # a piece that both had
    assert record.request.messages[0].content == "question 4"
    with pytest.raises(LedgerError, match="no session 'mine'"):
        await ledger.forget("mine")


async def test_its_words_are_in_no_page_of_the_file(ledger, driver, ledger_path):
    turn_id = await driver.paired(session="mine")
    await ledger.record_feedback(Feedback("f", turn_id, 1.0, None, "XYZZY-COMMENT"), user="ann")
    await driver.paired(session="theirs")
    assert b"XYZZY-COMMENT" in bytes_of(ledger_path)
    assert b"question 1" in bytes_of(ledger_path)
    await ledger.forget("mine")
    await ledger.aclose()
    with sqlite3.connect(ledger_path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    left = bytes_of(ledger_path)
    assert b"XYZZY-COMMENT" not in left
    assert b"question 1" not in left
    assert b"question 2" in left


async def test_versions_that_trained_on_it_are_named_and_a_lease_that_holds_it_is_over(ledger, driver):
    await driver.sampled(session="mine")
    other = await driver.sampled(session="theirs")
    version = await driver.commit(await ledger.lease(trainer="a", now=True))
    await driver.serve(version)
    await driver.sampled(session="mine", version=version)
    waiting = await driver.sampled(session="theirs", version=version)
    lease = await ledger.lease(trainer="a", now=True)
    forgotten = await ledger.forget("mine")
    assert (forgotten.turns, forgotten.trained_in) == (2, (version,))
    with pytest.raises(CommitRefused, match="is revoked: a session was forgotten"):
        await driver.commit(lease)
    assert [await driver.state(turn) for turn in (other, waiting)] == ["trained", "sampled"]
    assert '"probes":[]' in (await ledger.version(version)).report_json
    assert [sample.sample_id for sample in (await ledger.lease(trainer="a", now=True)).samples] == [waiting]


async def test_a_session_of_another_user_is_not_meant(ledger, driver):
    await driver.served(user="ann", session="s")
    await driver.served(user="bob", session="s")
    with pytest.raises(LedgerError, match="several users have a session 's': ann, bob"):
        await ledger.forget("s")
    with pytest.raises(LedgerError, match="no session 's' of user 'eve'"):
        await ledger.forget("s", "eve")
    assert await ledger.forget("s", "bob") == Forgotten("bob", "s", 1, 2, ())
    assert [row.user for row in await ledger.turns()] == ["ann"]


async def test_a_session_that_is_being_answered_is_not_forgotten_under_the_reply(ledger, driver):
    await driver.served(session="s")
    message = Message(role="user", content="more")
    await ledger.begin(Request("now", Scope("ann", "s"), 1.0, (message,), None, None, (1,), SamplingParams(8)))
    with pytest.raises(LedgerError, match="is being answered right now"):
        await ledger.forget("s")
    assert len(await ledger.turns()) == 1


async def test_what_is_written_between_the_plan_and_the_deed_is_looked_at(ledger, driver, monkeypatch):
    """A piece that only the session had when it was planned, and that somebody has written since, stays."""
    await driver.served(session="mine", prompt=(1, 2, 3))
    carry_out = forget.carry_out

    def later(db, plan, *, at):
        db.execute(
            "INSERT INTO request (request_id, policy, user, session_id, received_at, outcome, reason, sampling,"
            " prompt_tokens, prompt, messages) SELECT 'late', policy, user, 'theirs', 1, 'abandoned', 'interrupted',"
            " sampling, prompt_tokens, prompt, messages FROM request"
        )
        db.execute("INSERT INTO counter VALUES ('requests', 1) ON CONFLICT DO UPDATE SET n = n + 1")
        db.execute("INSERT INTO counter VALUES ('abandoned.interrupted', 1) ON CONFLICT DO UPDATE SET n = n + 1")
        return carry_out(db, plan, at=at)

    monkeypatch.setattr(forget, "carry_out", later)
    assert (await ledger.forget("mine")).pieces == 1  # its reply
    assert await ledger.audit(is_deep=True) == []


async def test_a_backup_taken_while_turns_are_written_is_whole(
    ledger, driver, ledger_path, tmp_path, identity, training, make_driver
):
    copy = tmp_path / "copy" / "ledger.sqlite3"
    copy.parent.mkdir()
    for _ in range(5):
        await driver.sampled()

    async def write() -> None:
        for _ in range(40):
            await driver.sampled()

    _, size = await asyncio.gather(write(), asyncio.to_thread(backup, ledger_path, copy))
    assert size == copy.stat().st_size
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [file.name for file in copy.parent.iterdir()] == ["ledger.sqlite3"]
    opened = await Ledger.open(copy, identity=identity, training=training)
    assert await opened.audit(is_deep=True) == []
    assert 5 <= (await opened.counts())["requests"] <= 45
    assert (await make_driver(opened, count=100).served()) == "turn-101"
    await opened.aclose()


async def test_a_backup_overwrites_nothing_and_names_what_is_missing(ledger, ledger_path, tmp_path):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(LedgerError, match="there: File exists"):
        backup(ledger_path, tmp_path / "there")
    with pytest.raises(LedgerError, match="no ledger at"):
        backup(tmp_path / "none", tmp_path / "copy")
    (tmp_path / "junk").write_bytes(b"no database, but long enough to be one" * 100)
    with pytest.raises(LedgerError, match="cannot copy"):
        backup(tmp_path / "junk", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
