"""Groups of episodes: their closing, the credit of their steps, and the batches that are made of whole groups.

    open ──▶ closed (no episode of it runs) ──▶ scored (every step has its credit, in one transaction)

A group of evaluations goes from `open` to `scored`: its turns were recorded, no more. A closed group waits until the
judge has answered, or given up, for each of its steps.
"""

import sqlite3
from collections.abc import Sequence

import orjson

from openclaw_rl.ledger import blobs
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import ClosedGroup, DropReason, GroupStep, Split, StepCredit, Trajectory, TurnState

EARLIER = 256
"""Outcomes of earlier groups of one that a new one is compared with, at most."""
_AT_ONCE = 16


class Groups(LedgerPart):
    """Credit for the steps of closed groups."""

    @read
    def groups_to_credit(self, db: sqlite3.Connection) -> list[ClosedGroup]:
        """Return closed groups whose steps all have what the judge will give them, oldest first."""
        rows = db.execute(  # the first condition is that of the index `episode_group_unscored`
            "SELECT id FROM episode_group WHERE state <> 'scored' AND state = 'closed' ORDER BY id"
        ).fetchall()
        ready = [row for (row,) in rows if not _is_judging(db, row)]
        return [_read(db, row) for row in ready[:_AT_ONCE]]

    @write
    def record_credit(self, db: sqlite3.Connection, group: ClosedGroup, credits: Sequence[StepCredit]) -> bool:
        """Record the credit of a group: its steps wait for a trainer, or are dropped. All in one transaction.

        False: the group is not what the method read, because feedback came or a turn was deleted. It is read again.
        """
        state = db.execute("SELECT state FROM episode_group WHERE id = ?", (group.number,)).fetchone()
        if state is None or state[0] != "closed" or _read(db, group.number) != group:
            return False
        at, by_turn = self._clock(), {found.turn_id: found for found in credits}
        for episode in group.trajectories:
            for step in episode.steps:
                if step.is_waiting:
                    _record(db, step.turn_id, by_turn.get(step.turn_id), at=at)
        db.execute("UPDATE episode_group SET state = 'scored' WHERE id = ?", (group.number,))
        return True


# For other transactions


def count_members(db: sqlite3.Connection, group: int) -> int:
    """Return the number of a group's episodes; one that another replaced does not count."""
    query = "SELECT count(*) FROM episode WHERE grp = ? AND NOT has_successor"
    return int(db.execute(query, (group,)).fetchone()[0])


def close_if_over(db: sqlite3.Connection, group: int) -> None:
    """Close an open group that has all its episodes, none of which runs."""
    (size,) = db.execute("SELECT size FROM episode_group WHERE id = ?", (group,)).fetchone()
    runs = db.execute("SELECT 1 FROM episode WHERE grp = ? AND state = 'running'", (group,)).fetchone()
    if runs is None and count_members(db, group) >= size:
        close(db, group)


def close(db: sqlite3.Connection, group: int) -> None:
    """Close an open group; one of evaluations is over with that."""
    db.execute(
        "UPDATE episode_group SET state = iif(split = 'eval', 'scored', 'closed') WHERE id = ? AND state = 'open'",
        (group,),
    )


def count_ahead(db: sqlite3.Connection) -> int:
    """Return the number of training groups that are open, wait for their credit or wait for the trainer."""
    (unscored,) = db.execute(
        "SELECT count(*) FROM episode_group WHERE state <> 'scored' AND split = ?", (str(Split.TRAIN),)
    ).fetchone()
    return int(unscored) + len(_waiting(db))


def is_unscored(db: sqlite3.Connection, episode: int) -> bool:
    """Return True if the steps of this episode still wait for the credit of their group."""
    found = db.execute(
        "SELECT 1 FROM episode JOIN episode_group ON episode_group.id = grp WHERE episode.id = ?"
        " AND episode_group.state <> 'scored'",
        (episode,),
    ).fetchone()
    return found is not None


def whole(db: sqlite3.Connection, *, least: int, most: int, most_samples: int | None) -> list[tuple[float, int]]:
    """Return (time since which it waits, turn) of all samples of the groups that wait longest; [] below `least` groups.

    most_samples: bound of a trainer's step. A group larger than that alone is cut, and its rest comes next.
    """
    waiting = sorted(_waiting(db).values(), key=min)
    chosen: list[tuple[float, int]] = []
    for group in waiting[:most] if len(waiting) >= least else ():
        if most_samples is not None and len(chosen) + len(group) > most_samples:
            return chosen or sorted(group)[:most_samples]
        chosen += group
    return chosen


def waiting_since(db: sqlite3.Connection) -> float | None:
    """Return the time since which the oldest sample of a group waits; None: none waits."""
    return min((min(group)[0] for group in _waiting(db).values()), default=None)


def _waiting(db: sqlite3.Connection) -> dict[int, list[tuple[float, int]]]:
    """Return the samples that wait for a trainer, by group."""
    found: dict[int, list[tuple[float, int]]] = {}
    for group, sampled_at, row in db.execute(
        "SELECT grp, sampled_at, turn.id FROM turn INDEXED BY turn_episode_waiting JOIN episode"
        " ON episode.id = of_episode WHERE turn.state = 'sampled' AND of_episode IS NOT NULL"
    ):
        found.setdefault(group, []).append((sampled_at, row))
    return found


def _is_judging(db: sqlite3.Connection, group: int) -> bool:
    found = db.execute(
        "SELECT 1 FROM episode JOIN turn ON of_episode = episode.id WHERE grp = ?"
        " AND turn.state IN ('served', 'paired') LIMIT 1",
        (group,),
    ).fetchone()
    return found is not None


def _read(db: sqlite3.Connection, row: int) -> ClosedGroup:
    (size,) = db.execute("SELECT size FROM episode_group WHERE id = ?", (row,)).fetchone()
    ended = db.execute(
        "SELECT id, reward FROM episode WHERE grp = ? AND state = 'ended' ORDER BY id", (row,)
    ).fetchall()
    earlier: list[tuple[float]] = []
    if size == 1:
        earlier = db.execute(
            "SELECT reward FROM episode_group CROSS JOIN episode ON grp = episode_group.id WHERE episode_group.id < ?"
            " AND size = 1 AND split = 'train' AND episode_group.state = 'scored' AND episode.state = 'ended'"
            " ORDER BY episode_group.id DESC LIMIT ?",
            (row, EARLIER),
        ).fetchall()
    return ClosedGroup(
        number=row,
        size=size,
        trajectories=tuple(Trajectory(reward, _steps(db, episode)) for episode, reward in ended),
        earlier=tuple(reward for (reward,) in earlier),
    )


def _steps(db: sqlite3.Connection, episode: int) -> tuple[GroupStep, ...]:
    rows = db.execute(
        "SELECT turn.id, turn_id, turn.state, value, votes FROM turn LEFT JOIN verdict USING (id) WHERE of_episode = ?"
        " AND (turn.reason IS NULL OR turn.reason <> 'cancelled') ORDER BY turn.id",
        (episode,),
    ).fetchall()
    return tuple(
        GroupStep(found["turn_id"], _process(db, found), is_waiting=found["state"] == TurnState.JUDGED)
        for found in rows
    )


def _process(db: sqlite3.Connection, found: sqlite3.Row) -> float | None:
    """Return p of a step: the newest value by feedback, else the mean of the valid votes; None: unjudged."""
    said = db.execute(
        "SELECT value FROM feedback WHERE turn = ? AND value IS NOT NULL ORDER BY id DESC LIMIT 1", (found["id"],)
    ).fetchone()
    if said is not None:
        return float(said[0])
    if found["value"] is None:
        return None
    votes = [vote for vote in orjson.loads(found["votes"]) if vote is not None]
    return sum(votes) / len(votes) if votes else float(found["value"])


def _record(db: sqlite3.Connection, turn_id: str, credit: StepCredit | None, *, at: float) -> None:
    (row,) = db.execute("SELECT id FROM turn WHERE turn_id = ?", (turn_id,)).fetchone()
    if credit is None:
        move(db, row, TurnState.DROPPED, at=at, reason=DropReason.METHOD, detail="the method gave it no credit")
        return
    db.execute("INSERT INTO credit VALUES (?, ?, ?)", (row, credit.reward, credit.advantage))
    if credit.drop is not None:
        move(db, row, TurnState.DROPPED, at=at, reason=credit.drop, detail=credit.detail)
        return
    (sampling,) = db.execute("SELECT sampling FROM request WHERE id = ?", (row,)).fetchone()
    temperature = orjson.loads(blobs.get_text(db, sampling) or "{}")["temperature"]
    # The columns of a step's sample stay NULL: it is the turn exactly as it was sampled.
    db.execute("INSERT INTO sample (id, temperature) VALUES (?, ?)", (row, temperature))
    move(db, row, TurnState.SAMPLED, at=at, detail=f"advantage {credit.advantage:+.3f}")
    db.execute("UPDATE turn SET sampled_at = ? WHERE id = ?", (at, row))
