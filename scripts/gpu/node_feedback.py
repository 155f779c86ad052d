"""People of the kill check, who give feedback all the time, and what the ledger has of it.

The ledger's file is read directly, and only read: the server may be dead.
"""

import asyncio
import itertools
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat_load import Reply, chat
from gpu.node_load import ANSWERS, TOPICS, Load
from gpu.stages import Figures
from openclaw_rl.ledger.states import DEAD, PASSED

PAUSE_S = 2.0
"""Between two sessions of one person."""
AWAY_S = 2.0
"""Between two tries of a person whose chat was refused or cut."""
COMMENT = "Answer in one short sentence."
WAITS = ("paired", "judged", "sampled", "leased")

_DEAD = ", ".join(f"'{state}'" for state in DEAD)
_PASSED = ", ".join(f"'{state}'" for state in PASSED)
_NEWEST_DURABLE = f"""
    WITH RECURSIVE found(n) AS (
        SELECT max(weight_version) FROM version WHERE durable AND state NOT IN ({_DEAD})
        UNION ALL SELECT same_weights_as FROM version, found WHERE weight_version = n AND same_weights_as IS NOT NULL)
    SELECT (SELECT max(n) FROM found), committed_at FROM version WHERE weight_version = (SELECT min(n) FROM found)"""
_AT_STAKE = f"""
    SELECT weight_version FROM version WHERE state NOT IN ({_DEAD}) AND weight_version > (
        SELECT max(weight_version) FROM version WHERE durable AND state NOT IN ({_DEAD}))"""
_SINCE = f"""
    SELECT id FROM turn WHERE trained_in IN ({_AT_STAKE})
    UNION SELECT id FROM turn WHERE state = 'leased'
    UNION SELECT turn FROM event WHERE state = 'paired' AND at > ?1
    UNION SELECT turn FROM feedback WHERE at > ?1 AND effect <> 'recorded'"""
_STATES = f"""
    SELECT CASE WHEN turn.state = 'dropped' THEN 'dropped.' || turn.reason
                WHEN version.state IN ({_DEAD}) THEN 'trained in a dead version' ELSE turn.state END, count(*)
    FROM turn LEFT JOIN version ON weight_version = trained_in
    WHERE turn.id IN (SELECT value FROM json_each(?)) GROUP BY 1"""


@dataclass(frozen=True, slots=True)
class Given:
    """Feedback that no checkpoint holds, by the rows of its turns."""

    durable: int
    """Newest version on disk."""
    turns: frozenset[int]
    dropped: frozenset[int]
    """Those of them that had ended without a sample before."""


@contextmanager
def reading(ledger: Path) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    try:
        yield db
    finally:
        db.close()


def given_since_checkpoint(ledger: Path) -> Given:
    """Return the turns whose feedback came after the newest durable version, or that a later one was trained on."""
    with reading(ledger) as db:
        durable, at = db.execute(_NEWEST_DURABLE).fetchone()
        turns = frozenset(row for (row,) in db.execute(_SINCE, (at,)))
        query = "SELECT id FROM turn WHERE state = 'dropped' AND id IN (SELECT value FROM json_each(?))"
        dropped = frozenset(row for (row,) in db.execute(query, (json.dumps(sorted(turns)),)))
    return Given(int(durable), turns, dropped)


def kept(ledger: Path, given: Given) -> Figures:
    """Return where these turns are now, and the share of them that is trained or waits."""
    with reading(ledger) as db:
        states = dict(db.execute(_STATES, (json.dumps(sorted(given.turns)),)).fetchall())
    live = len(given.turns) - len(given.dropped)
    good = sum(states.get(state, 0) for state in ("trained", *WAITS))
    return {
        "given": len(given.turns),
        "dropped before": len(given.dropped),
        "now": states,
        "deleted": len(given.turns) - sum(states.values()),
        "trained or waits": round(good / live, 4) if live else None,
    }


def trained_since(ledger: Path, at: float) -> int | None:
    """Return the newest version that a step made after this time and that was decided to serve; None without one."""
    query = (
        f"SELECT max(weight_version) FROM version WHERE lease_id NOT NULL AND committed_at > ? AND state IN ({_PASSED})"
    )
    with reading(ledger) as db:
        (found,) = db.execute(query, (at,)).fetchone()
    return None if found is None else int(found)


def undurable(ledger: Path) -> int:
    """Return the number of versions that a crash of the trainer would lose."""
    with reading(ledger) as db:
        return len(db.execute(_AT_STAKE).fetchall())


def has_checkpoint(ledger: Path) -> bool:
    with reading(ledger) as db:
        return db.execute("SELECT 1 FROM version WHERE durable AND lease_id NOT NULL").fetchone() is not None


def judged_since(ledger: Path, at: float) -> int:
    with reading(ledger) as db:
        query = (
            "SELECT count(*) FROM event JOIN verdict ON id = turn WHERE state = 'judged' AND at > ? AND source = 'llm'"
        )
        return int(db.execute(query, (at,)).fetchone()[0])


def samples_with(ledger: Path, text: str) -> Figures:
    """Return the states of the turns whose sample holds this text, its hint's for example."""
    with reading(ledger) as db:
        query = "SELECT state, count(*) FROM turn JOIN sample USING (id) WHERE extra LIKE ? GROUP BY 1"
        return dict(db.execute(query, (f"%{text}%",)).fetchall())


@dataclass
class People(Load):
    """Two-turn sessions; the person's second message judges the first reply, and `/v1/feedback` the second."""

    ends: list[tuple[float, Reply]] = field(default_factory=list)
    """Wall-clock time of each reply's end."""
    acknowledged: list[str] = field(default_factory=list)
    """Names of the feedback that the server answered with 200."""
    feedback_failed: Counter[str] = field(default_factory=Counter)

    async def _talk(self, client: httpx.AsyncClient, number: int) -> None:
        for session in itertools.count():
            if self._stop.is_set():
                return
            name = f"person-{number}-{session}-{time.time():.0f}"
            ask = f"Tell me about {TOPICS[number % 8]}, story {session}. " * (1 + number % 5)
            messages: list[dict[str, Any]] = [{"role": "user", "content": ask}]
            first = await self._chat(client, messages, name, 64 + 16 * (number % 12))
            if first.error:
                continue
            messages += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": ANSWERS[(session + number) % 2]},
            ]
            second = await self._chat(client, messages, name, 32)
            if not second.error:
                await self._complain(client, second.turn_id, f"{name}-said")
                await asyncio.sleep(PAUSE_S)

    async def _chat(
        self, client: httpx.AsyncClient, messages: list[dict[str, Any]], session: str, max_tokens: int
    ) -> Reply:
        reply = await chat(client, messages, session=session, max_tokens=max_tokens)
        self.replies.append(reply)
        self.ends.append((time.time(), reply))
        if reply.error:
            await asyncio.sleep(AWAY_S)
        return reply

    async def _complain(self, client: httpx.AsyncClient, turn_id: str | None, feedback_id: str) -> None:
        body = {"id": turn_id, "value": False, "comment": COMMENT, "feedback_id": feedback_id}
        try:
            answer = await client.post("/v1/feedback", json=body)
        except httpx.HTTPError as error:
            self.feedback_failed[type(error).__name__] += 1
            return
        if answer.is_success:
            self.acknowledged.append(feedback_id)
        else:
            self.feedback_failed[f"{answer.status_code}: {answer.text[:100]}"] += 1

    def between(self, begin: float, end: float) -> Figures:
        """Return what happened to the chats that ended between two wall-clock times."""
        ended = [(at, reply) for at, reply in list(self.ends) if begin <= at < end]
        bad = [reply for _, reply in ended if reply.error]
        running = [reply for _, reply in ended if reply.started + self.offset < begin]
        went_on = [reply for reply in running if not reply.error]
        return {
            "answered": len(ended) - len(bad),
            "cut": sum(bool(reply.token_times) for reply in bad),
            "refused": sum(not reply.token_times for reply in bad),
            "errors": dict(Counter(str(reply.error)[:100] for reply in bad).most_common(4)),
            "running at the kill": len(running),
            "of them went on": len(went_on),
            "longest of these s": round(max((at - reply.started - self.offset for at, reply in ended), default=0.0), 1),
        }

    def lost(self, ledger: Path) -> Figures:
        """Return how many answered replies and how much acknowledged feedback the ledger lacks."""
        answered = [reply.turn_id for reply in list(self.replies) if not reply.error]
        with reading(ledger) as db:
            query = "SELECT count(*) FROM json_each(?) WHERE value NOT IN (SELECT turn_id FROM turn)"
            (turns,) = db.execute(query, (json.dumps(answered),)).fetchone()
            query = "SELECT count(*) FROM json_each(?) WHERE value NOT IN (SELECT feedback_id FROM feedback)"
            (said,) = db.execute(query, (json.dumps(self.acknowledged),)).fetchone()
        return {
            "answered replies": len(answered),
            "of them not in the ledger": turns,
            "acknowledged feedback": len(self.acknowledged),
            "of it not in the ledger": said,
            "feedback not taken": dict(self.feedback_failed),
        }
