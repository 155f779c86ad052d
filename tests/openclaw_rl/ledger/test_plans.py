"""No frequent call reads a table that grows: SQLite's plan of each statement of each such call shows it."""

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from episode_runner import Runner
from practising import corrected, practice

from openclaw_rl.ledger import Identity, Ledger, search
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.ledger.blobs import Connection
from openclaw_rl.ledger.search import TurnFilter
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import DropReason, Feedback, SideCount, Split, TurnState, VersionState

_SMALL = ("meta", "counter", "open_turn")
"""Tables that do not grow with the turns."""
_NONE = ("CONSTANT", "(subquery-1)", "near")
"""Sources of a plan that are no tables: a row of constants, and the result of a limited subquery."""
_FEW = (
    "version_unfinished",
    "version_folder",
    "version_serving",
    "lease_live",
    "request_running",
    "wish_active",
    "episode_running",
    "episode_group_unscored",
    "turn_episode_waiting",
    "turn_practice_waiting",
    "turn_waiting",
    "version_root",
)
"""Partial indexes: of versions not decided yet or still with weights, of wishes and of samples that wait (bounded by
`training.max_waiting`), of episodes that run, of groups without their credit."""
_STATEMENTS = ("SELECT", "INSERT", "REPLACE", "UPDATE", "DELETE")


class Watched(Connection):
    """Notes what it is asked, as it is asked: with marks, which the planner cannot look behind."""

    asked: ClassVar[set[tuple[str, int]]] = set()

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql.lstrip().upper().startswith(_STATEMENTS):
            Watched.asked.add((sql, len(parameters)))
        return super().execute(sql, parameters)


@pytest.fixture
async def watched(
    monkeypatch: pytest.MonkeyPatch, ledger_path: Path, identity: Identity, training: TrainingSettings, clock: Any
) -> AsyncIterator[Ledger]:
    monkeypatch.setattr(ledger_open, "Connection", Watched)
    monkeypatch.setattr(Watched, "asked", set())
    opened = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    Watched.asked.clear()  # to open may cost what it does
    yield opened
    await opened.aclose()


def faults(path: Path) -> list[str]:
    """Statements that read a growing table from end to end, or sort what they found in one."""
    assert Watched.asked
    found = []
    with sqlite3.connect(path) as db:
        # A planner that sees how few are wanted may prefer another way (newer SQLite looks behind the mark).
        few = {(sql.replace("LIMIT ?", "LIMIT 5"), marks - sql.count("LIMIT ?")) for sql, marks in Watched.asked}
        for sql, marks in sorted(Watched.asked | few):
            plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", (None,) * marks)]
            if any("TEMP B-TREE FOR ORDER BY" in step for step in plan) and not _sorts_few(sql):
                found.append(f"sorts / {sql}")
            for step in plan:
                if not step.startswith("SCAN"):
                    continue
                table, _, how = step.removeprefix("SCAN ").partition(" ")
                # Newest first, and left when there is enough: no more than that is read (sorts are found above).
                is_left = re.search(r"(DESC LIMIT [?5]|weight_version DESC)$|DESC LIMIT [?5]\) AS near ", sql.rstrip())
                if not (table in _SMALL or table in _NONE or any(index in how for index in _FEW) or is_left):
                    found.append(f"{step} / {sql}")
    return found


def _sorts_few(sql: str) -> bool:
    """The samples of one lease, and what is open."""
    return "lease_sample" in sql or "open_turn" in sql


async def test_writes_of_turns_and_steps_read_no_table_from_end_to_end(watched, make_driver, ledger_path, clock):
    driver = make_driver(watched)
    await watched.count_side(SideCount("ann", "s", "title", 1, 1, 200, 1.0))
    await watched.drop(await driver.paired(), DropReason.NEUTRAL, seen_feedback=())
    await watched.leave_out(await driver.paired(), "by the user")
    first, _ = await driver.step(size=4)
    await driver.serve(first)
    second, _ = await driver.step()
    await watched.reject(second, "too far")
    await driver.serve((await driver.step())[0])
    await watched.rollback(first, requeue=True)
    lease = await watched.lease(trainer="test", now=True)
    assert lease is not None
    await watched.renew(lease.lease_id, lease.fence)
    await watched.leased(lease.fence)
    await watched.release(lease.lease_id, lease.fence, reason="test")
    await watched.drop_oldest(TurnState.SAMPLED, 0)
    await driver.serve((await driver.step())[0])
    assert await watched.prune_weights(first, 0)
    rated = await driver.paired()
    await watched.record_feedback(Feedback("f", rated, 1.0, value=1.0, comment="good"), user="ann")
    await driver.served()
    clock.advance(10_000)
    assert await watched.expire(clock())
    assert faults(ledger_path) == []


async def test_episodes_read_no_table_from_end_to_end(watched, ledger_path, clock):
    runner = Runner(watched)
    for name in ("a", "b"):
        await runner.open(name, group="g", size=2)
        await runner.step(name)
        await runner.step(name)
    await runner.open("c", task="held out", split=Split.EVAL)
    await runner.open("d")
    await runner.step("d")
    await runner.judge({})
    for name in ("a", "b"):
        await runner.end(name, 1.0 if name == "a" else -1.0)
    await runner.end("d", 0.5)
    await watched.abort_episode("ann", "c", "gone")
    await runner.credit()
    lease = await watched.lease(trainer="test", now=True)
    assert lease is not None
    await watched.release(lease.lease_id, lease.fence, reason="test")
    await runner.open("e")
    await runner.fates("a")
    await watched.episode("a")
    clock.advance(100_000)
    assert await watched.expire_episodes() == 1
    assert faults(ledger_path) == []


@pytest.mark.parametrize("wanted", [{}, {"user": "ann"}, {"state": "ended", "group": "g", "task": "t", "user": "ann"}])
async def test_lists_of_episodes_begin_at_the_newest(watched, ledger_path, wanted):
    await Runner(watched).open("a", group="g", size=2)
    Watched.asked.clear()
    assert await watched.episodes(limit=5, **wanted) is not None
    assert faults(ledger_path) == []


@pytest.mark.parametrize("state", [None, TurnState.TRAINED, TurnState.SAMPLED])
@pytest.mark.parametrize("user", [None, "ann"])
@pytest.mark.parametrize("session", [None, "s"])
async def test_lists_of_turns_read_no_more_than_they_show(watched, make_driver, ledger_path, state, user, session):
    await make_driver(watched).step(size=2)
    Watched.asked.clear()
    await watched.turns(limit=5, state=state, user=user, session_id=session)
    assert faults(ledger_path) == []


@pytest.mark.parametrize("before", [None, 9])
@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"words": "a", "verdict": 1},
        {"trained_in": 1, "state": TurnState.TRAINED},
        {"weight_version": 0},
        {"weight_version": 0, "user": "ann"},
        {"session_id": "s", "state": TurnState.SAMPLED},
    ],
)
async def test_searches_read_a_bounded_number_of_turns(watched, make_driver, ledger_path, wanted, before):
    await make_driver(watched).step(size=2)
    Watched.asked.clear()
    await watched.search(TurnFilter(**wanted), limit=5, before=before)
    assert faults(ledger_path) == []


@pytest.mark.parametrize(
    "wanted",
    [
        {"user": "ann", "state": TurnState.TRAINED},
        {"user": "ann", "weight_version": 0},
        {"user": "ann", "verdict": -1},
        {"session_id": "s", "user": "bob"},
        {"state": TurnState.SERVED, "weight_version": 9},
        {"is_practice": True, "words": "nowhere"},
    ],
)
async def test_a_search_that_finds_nothing_costs_the_same_in_a_ledger_four_times_as_long(
    watched, make_driver, ledger_path, wanted, monkeypatch
):
    """A limit of matches bounds no search without a match: the steps of SQLite's machine are counted."""
    monkeypatch.setattr(search, "_LOOKED_AT", 10)
    monkeypatch.setattr(search, "_READ", 10)
    monkeypatch.setattr(search, "_SPARE", 5)
    driver, costs = make_driver(watched), []
    for more in (20, 60):
        for _ in range(more):
            await driver.served()
        with closing(sqlite3.connect(ledger_path, factory=Connection)) as db:
            db.row_factory = sqlite3.Row
            steps: list[None] = []
            db.set_progress_handler(lambda steps=steps: steps.append(None), 1)
            page = search.Searching.search.__wrapped__(None, db, TurnFilter(**wanted), limit=5)
            costs.append(len(steps))
            assert page.looked_at <= 10
    assert costs[1] < 1.5 * costs[0]


async def test_what_status_watch_gate_and_publisher_ask_reads_no_table_from_end_to_end(
    watched, make_driver, ledger_path
):
    driver = make_driver(watched)
    number, _ = await driver.step(size=2)
    await driver.serve(number)
    turn_id = await driver.judged()
    await driver.judged(policy="user:ann", version=(await watched.open_policy("user:ann")).weight_version)
    Watched.asked.clear()
    for call in (
        watched.counts(),
        watched.versions(newest=20),
        watched.versions(since=number),
        watched.versions_after(0, limit=5),
        watched.version(number),
        watched.unfinished_versions(),
        watched.version_folders(),
        watched.needed_versions(20),
        watched.tip(),
        watched.pinned(),
        watched.serving_version(),
        watched.learning(),
        watched.live_lease(),
        watched.overdue(),
        watched.turn(turn_id),
        watched.open_turns(100),
        watched.to_judge(8, skip=("a",)),
        watched.to_score(8),
        watched.user_verdicts(limit=400),
        watched.user_verdicts(limit=400, before_waiting=True),
        watched.recent_replies(sampled_by=None, limit=8),
        watched.recent_replies(sampled_by=number, limit=8),
        watched.recent_prompts(8),
        watched.feedback_target(user="ann", session_id="s"),
        watched.feedback_target(user="ann", turn_id=turn_id),
        watched.rejections_in_a_row(),
        watched.step_makeup([number]),
        watched.tally(newest=2000),
        watched.outcomes([turn_id], user="ann"),
        watched.owner(turn_id),
        watched.turn_mark(turn_id),
        watched.samples_waiting("ann"),
        watched.tokens_since("ann", 0.0),
        watched.users(0.0),
        watched.policies(),
        watched.passed_tips(),
        watched.root("user:ann"),
        watched.target("user:ann"),
        watched.tip("user:ann"),
        watched.user_verdicts(limit=400, before_waiting=True, policy="user:ann"),
        watched.recent_replies(sampled_by=None, limit=8, policy="user:ann"),
        watched.recent_prompts(8, "user:ann"),
        watched.practice_room("user:ann"),
        watched.practice_policies(),
        watched.tips_and_targets(),
    ):
        await call
    assert faults(ledger_path) == []


async def test_what_practice_asks_and_writes_reads_no_table_from_end_to_end(watched, ledger_path):
    turn_id = await corrected(watched, "shorter")
    (wish,) = await watched.wishes(user="ann")
    await watched.practice_room()
    await watched.practice_request(turn_id)
    await watched.anchor_turns(user="ann", policy="policy", limit=8)
    await watched.record_practice([practice(turn_id, wish.wish_id), practice(None, None)])
    assert await watched.lease(trainer="test") is not None
    await watched.wishes(only_active=True)
    await watched.remove_wish(wish.wish_id, user="ann")
    assert faults(ledger_path) == []


async def test_the_check_sees_a_call_that_reads_everything(watched, make_driver, ledger_path):
    await make_driver(watched).served()
    Watched.asked.clear()
    await watched.audit()
    assert any("SCAN turn" in fault for fault in faults(ledger_path))


async def test_a_version_is_loading_no_longer_than_its_index_says(watched, make_driver):
    """The index names its states in words; these are the states."""
    driver = make_driver(watched)
    numbers = [(await driver.step())[0] for _ in range(3)]
    await watched.set_version_state(numbers[1], VersionState.GATED)
    await watched.set_version_state(numbers[2], VersionState.GATED)
    await watched.set_version_state(numbers[2], VersionState.LOADING)
    assert [row.weight_version for row in await watched.unfinished_versions()] == numbers
    await watched.set_version_state(numbers[2], VersionState.SERVING)
    assert [row.weight_version for row in await watched.unfinished_versions()] == numbers[:2]
