"""The audit finds every kind of violation: each case breaks one promise by SQL that bypasses the ledger."""

import sqlite3

import pytest

BROKEN = [
    ("UPDATE turn SET state = 'floating' WHERE id = 3", "turn turn-3 has a state that is none"),
    ("UPDATE request SET outcome = 'running' WHERE id = 1", "turn turn-1 is recorded, but its request is not served"),
    ("DELETE FROM turn WHERE id = 1", "request request-1 was served, but left no turn"),
    ("DELETE FROM reply WHERE id = 1", "turn turn-1 has no reply"),
    ("DELETE FROM open_turn", "turn turn-5 is open, but its key is gone"),
    ("INSERT INTO open_turn VALUES (1, 0, '', '', '', '{}')", "turn turn-1 is over, but its key is still open"),
    ("DELETE FROM next_state WHERE id = 1", "turn turn-1 is past pairing without a next state"),
    ("UPDATE verdict SET value = 0 WHERE id = 1", "turn turn-1 has a reward, and no verdict of ±1"),
    ("DELETE FROM sample WHERE id = 1", "turn turn-1 waits or trained without a sample"),
    ("INSERT INTO event VALUES (1, 99, 0, 'paired', NULL)", "the story of turn turn-1 does not end in its state"),
    ("INSERT INTO event VALUES (1, 99, 0, 'judged', NULL)", "turn row 1 went from trained to judged"),
    ("UPDATE lease SET state = 'released' WHERE fence = 3", "turn turn-3 is leased, but no live lease has it"),
    ("UPDATE turn SET state = 'sampled' WHERE id = 3", "a lease has turn turn-3, which is not leased"),
    ("UPDATE lease SET state = 'released' WHERE fence = 3", "is over and still has samples"),
    ("UPDATE lease SET fence = 99 WHERE fence = 1", "is live, but not the newest"),
    ("UPDATE lease SET parent = 1 WHERE fence = 3", "is live, but does not build on the tip"),
    ("UPDATE version SET lease_id = NULL WHERE weight_version = 2", "is committed, but made no version"),
    ("UPDATE lease_sample SET outcome = 'trained' WHERE fence = 3", "is not committed, but trained samples"),
    ("UPDATE version SET parent = 0 WHERE weight_version = 2", "version 2 has no lease, or one with another parent"),
    ("UPDATE version SET depth = 5 WHERE weight_version = 1", "version 1 is not one commit deeper than its parent"),
    ("UPDATE version SET state = 'lost' WHERE weight_version = 1", "version 2 is alive, and its parent is not"),
    ("UPDATE version SET parent = 0 WHERE weight_version = 2", "version 0 has two living children"),
    ("UPDATE turn SET trained_in = 1 WHERE id = 2", "turn turn-2 is trained in a version that does not count it"),
    (
        "UPDATE turn SET trained_in = 1 WHERE id = 2",
        "turn turn-2 was trained by a living version, and is not marked so",
    ),
    ("INSERT INTO lease_sample VALUES (2, 1, 'trained')", "turn turn-1 trained version 2 and its ancestor 1"),
    ("UPDATE counter SET n = 7 WHERE name = 'trained'", "the counter trained says 7, and there are 2"),
    ("DELETE FROM counter WHERE name = 'requests'", "the counter requests says 0, and there are 5"),
    ("UPDATE version SET weight_version = 9 WHERE weight_version = 2", "the version numbers have gaps"),
    ("UPDATE version SET state = 'retired'", "0 versions serve"),
    ("UPDATE meta SET value = 1 WHERE key = 'tip'", "the tip is 1, and the newest living version is 2"),
    ("REPLACE INTO meta VALUES ('pinned', 7)", "version 7 is pinned and not alive"),
    ("DELETE FROM piece WHERE id = 1", "names a missing piece"),
]


@pytest.fixture
async def broken_ledger(ledger, driver):
    """Turns 1 and 2 trained in versions 1 and 2, turn 3 leased, turn 4 sampled, turn 5 open; not audited at the end."""
    await driver.step()
    await driver.step(version=1)
    await driver.sampled()
    await ledger.lease(trainer="a", n=1)
    await driver.sampled()
    await driver.served()
    assert await ledger.audit(is_deep=True) == []
    yield ledger
    await ledger.aclose()


@pytest.mark.parametrize(("damage", "finding"), BROKEN, ids=[finding for _, finding in BROKEN])
async def test_what_is_broken_is_found(broken_ledger, ledger_path, damage, finding):
    with sqlite3.connect(ledger_path) as db:
        assert db.execute(damage).rowcount > 0
    assert any(finding in found for found in await broken_ledger.audit(is_deep=True))
