"""Old turns that are over go, in small steps, with their contents; turns that wait stay; the audit stays clean."""

import asyncio

import pytest

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.ledger import deletion, forget
from openclaw_rl.server.privacy import Retention
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import RetentionSettings, SessionSettings
from openclaw_rl.types import DropReason, Feedback, SideCount


@pytest.fixture(autouse=True)
async def audited(ledger):
    yield
    assert await ledger.audit(is_deep=True) == []


async def every_state(driver, ledger) -> dict[str, str]:
    """One turn in each state."""
    trained, (old,) = await driver.step()
    await driver.serve(trained)
    turns = {
        "trained": old,
        "dropped": await driver.served(drop=DropReason.OPTED_OUT),
        "served": await driver.served(),
        "paired": await driver.paired(),
        "judged": await driver.judged(),
        "sampled": await driver.sampled(version=trained),
    }
    turns["leased"] = await driver.sampled(version=trained)
    await ledger.lease(trainer="a", now=True)
    return turns


def retention(ledger, settings, clock):
    return Retention(ledger, Sessions(ledger, SessionSettings()), settings, clock=clock)


async def test_old_turns_that_are_over_go_and_those_that_wait_stay(ledger, driver):
    turns = await every_state(driver, ledger)
    await ledger.count_side(SideCount("ann", "s", "title", 1, 1, 200, 1.0))
    done = await ledger.retain(older_than=1e9, most_bytes=None)
    assert done.turns == 2
    assert done.pieces > 0
    left = {row.turn_id for row in await ledger.turns(limit=100)}
    assert left == {turn for state, turn in turns.items() if state not in ("trained", "dropped")}
    counts = await ledger.counts()
    assert (counts["trained"], counts["dropped"], counts["side"]) == (0, 0, 0)
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 0


async def test_young_turns_stay(ledger, driver):
    await driver.served(drop=DropReason.OPTED_OUT)  # received at 1001
    await driver.served(drop=DropReason.OPTED_OUT)
    assert (await ledger.retain(older_than=1002, most_bytes=None)).turns == 1
    assert [row.turn_id for row in await ledger.turns()] == ["turn-2"]


async def test_age_goes_by_the_clock_that_requests_are_received_by(ledger, driver):
    """Not by the wall clock, by which these requests are half a century old."""
    at = 1001.0  # the driver's
    await driver.served(drop=DropReason.OPTED_OUT)
    day = RetentionSettings(max_age_days=1)
    assert not await retention(ledger, day, clock=lambda: at + 86_399).round()
    assert await retention(ledger, day, clock=lambda: at + 86_401).round()


async def test_what_is_shared_stays_and_what_nobody_has_goes(ledger, driver, ledger_path):
    shared = tuple(range(512))
    await driver.served(drop=DropReason.OPTED_OUT, prompt=(*shared, 1))
    kept = await driver.served(prompt=(*shared, 2))
    await ledger.retain(older_than=1e9, most_bytes=None)
    assert (await ledger.turn(kept)).request.prompt_ids == (*shared, 2)
    pieces = await ledger._reader.read(lambda db: deletion.orphans(db, ()))
    assert pieces == []


async def test_a_turn_that_comes_back_before_it_goes_stays_whole(ledger, driver, monkeypatch):
    """Its user rates it between the plan and the deed."""
    turn_id = await driver.served(session="s")
    await ledger.drop(turn_id, DropReason.NO_NEXT_STATE)
    orphans = deletion.orphans

    def slow(db, doomed):
        found = orphans(db, doomed)
        asyncio.run_coroutine_threadsafe(
            ledger.record_feedback(Feedback("f", turn_id, 1.0, 1.0), user="ann"), loop
        ).result(10)
        return found

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(deletion, "orphans", slow)
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 0
    assert (await ledger.turn(turn_id)).request.messages[0].content == "question 1"


async def test_what_a_crash_would_bring_back_stays_until_a_checkpoint_has_it(ledger, driver):
    _, (first,) = await driver.step(durable=False)
    await driver.serve(1)
    _, (second,) = await driver.step(durable=False)
    await driver.serve(2)
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 0
    await ledger.durable(1)
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 1
    await ledger.lose_undurable("crash")
    assert (await ledger.turn(first), await driver.state(second)) == (None, "sampled")
    lease = await ledger.lease(trainer="a", now=True)
    assert [sample.sample_id for sample in lease.samples] == [second]
    await driver.serve(await driver.commit(lease, durable=False))
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 0
    await ledger.durable(4)  # of a later version also counts for those before it
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 1


async def test_a_deletion_that_ends_while_the_ledger_is_away_notes_no_more_pieces(ledger, driver, monkeypatch):
    """Else the note grows with every turn until the next deletion."""
    await driver.served(drop=DropReason.OPTED_OUT)

    def away(db, doomed):
        monkeypatch.setattr(ledger._writer, "_max_waiting", 0)
        raise LedgerUnavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(deletion, "orphans", away)
        with pytest.raises(LedgerUnavailable, match="the disk is full"):
            await ledger.retain(older_than=1e9, most_bytes=None)
    monkeypatch.setattr(ledger._writer, "_max_waiting", 100)
    await driver.served()
    assert await ledger._writer.write(lambda db: db.watch) is None
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 1


async def test_a_turn_with_a_demonstration_that_waits_stays(ledger, driver):
    turn_id = await driver.served(drop=DropReason.CANCELLED)
    said = Feedback("f", turn_id, 1.0, None, None, "better")
    await ledger.record_feedback(said, user="ann", demonstration=(1, 2))
    assert (await ledger.retain(older_than=1e9, most_bytes=None)).turns == 0
    assert len(await ledger.turns()) == 2


async def test_a_full_ledger_lets_the_oldest_go_until_it_fits_again(ledger, driver):
    empty = await ledger._reader.read(forget.used_bytes)
    for n in range(200):
        await driver.served(drop=DropReason.OPTED_OUT, prompt=tuple(range(n, n + 400)))
    used = await ledger._reader.read(forget.used_bytes)
    target = empty + int((used - empty) * 0.6)  # tables and indexes take their pages without a row, too
    for _ in range(10):
        done = await ledger.retain(older_than=None, most_bytes=target)
        if not done.is_full:
            break
    assert done.used_bytes <= target
    left = [row.turn_id for row in await ledger.turns(limit=1000)]
    assert 20 < len(left) < 150
    assert left[0] == "turn-200"  # the newest stay


async def test_a_ledger_full_of_turns_that_wait_says_so_and_loses_none(ledger, driver, clock):
    for _ in range(5):
        await driver.served()
    job = retention(ledger, RetentionSettings(max_gb=1e-6), clock=clock)
    assert not await job.round()
    assert job.is_full
    assert (await ledger.counts())["served"] == 5


async def test_a_ledger_that_cannot_be_written_is_tried_again_later(ledger, monkeypatch, clock):
    async def broken(**_: object) -> None:
        raise LedgerUnavailable("disk full")

    monkeypatch.setattr(ledger, "retain", broken)
    assert not await Retention(
        ledger, Sessions(ledger, SessionSettings()), RetentionSettings(max_age_days=1), clock=clock
    ).round()


async def test_chats_go_on_while_rows_are_let_go(ledger, driver, make_driver):
    for _ in range(120):
        await driver.served(drop=DropReason.OPTED_OUT)
    other = make_driver(ledger, count=1000)

    async def chat() -> None:
        for _ in range(30):
            await other.paired(session="now")

    done, _ = await asyncio.gather(ledger.retain(older_than=1500, most_bytes=None), chat())
    assert done.turns == 120
    assert (await ledger.counts())["paired"] == 30


async def test_without_limits_the_job_does_nothing(ledger, clock):
    await asyncio.wait_for(retention(ledger, RetentionSettings(), clock=clock).run(), 120)
