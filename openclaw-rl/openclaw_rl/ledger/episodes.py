"""Episodes: registered, continued by chat requests, ended by their runner, aborted or expired.

    running ──▶ ended (outcome) | aborted (the environment failed) | expired (no outcome in time)

Each change is one transaction together with the turns that it moves, so a kill between two calls loses nothing and
doubles nothing; every call of a runner may come again.

Leaves to others: the steps of an episode, in order (`steps`); closed groups and their credit (`groups`).
"""

import sqlite3
from dataclasses import replace
from statistics import fmean

import orjson

from openclaw_rl.errors import EpisodeRefused, LedgerError
from openclaw_rl.ledger import groups, steps
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import (
    DropReason,
    Episode,
    EpisodeOutcome,
    EpisodeState,
    EpisodeTally,
    NewEpisode,
    Split,
    TurnState,
)

RETRY_AFTER_S, BUSY_RETRY_S = 5, 1
"""Seconds after which a refused new group, and an outcome behind a reply that streams, may be sent again."""
_OPEN_STATES = (TurnState.SERVED, TurnState.PAIRED, TurnState.JUDGED)


class Episodes(LedgerPart):
    """An episode from its registration to its end."""

    @write
    def open_episode(self, db: sqlite3.Connection, new: NewEpisode) -> Episode:
        """Register an episode, and its group with the first one of it. The same one again changes nothing.

        Raises EpisodeRefused.
        """
        for name, text in (("episode_id", new.episode_id), ("task", new.task), ("group", new.group)):
            if text is not None and self._redactor.text(text) != text:
                raise EpisodeRefused(
                    f"{name} looks like a secret: choose another", status=422, code="secret", param=name
                )
        known = _find(db, new.user, new.episode_id)
        if known is not None:
            before = _read(db, known)
            if (before.task, before.group, before.group_size, before.split) != (
                new.task,
                new.group,
                new.group_size,
                new.split,
            ):
                raise EpisodeRefused(
                    f"episode {new.episode_id!r} was opened with another task, group, group_size or split",
                    code="episode_id_reused",
                    param="episode_id",
                )
            return before
        at = self._clock()
        evals = db.execute(
            "SELECT 1 FROM eval_task WHERE policy = 'policy' AND task = ? LIMIT 1", (new.task,)
        ).fetchone()
        if new.split is Split.TRAIN and evals:
            raise EpisodeRefused(
                f"task {new.task!r} evaluates, and is not trained on: an episode of it was opened with split eval",
                code="task_is_eval",
                param="task",
            )
        group = self._join(db, new, at=at)
        if new.split is Split.EVAL:
            db.execute("INSERT OR IGNORE INTO eval_task VALUES ('policy', ?, ?)", (new.task, new.user))
        row = db.execute(
            "INSERT INTO episode (grp, user, episode_id, opened_at) VALUES (?, ?, ?, ?)",
            (group, new.user, new.episode_id, at),
        ).lastrowid
        return _read(db, int(row or 0))

    def _join(self, db: sqlite3.Connection, new: NewEpisode, *, at: float) -> int:
        """Return the group of a new episode, which is made with its first one. Raises EpisodeRefused."""
        name = new.episode_id if new.group is None else new.group
        found = db.execute("SELECT * FROM episode_group WHERE user = ? AND name = ?", (new.user, name)).fetchone()
        if found is None:
            ahead, most = groups.count_ahead(db), self._episodes.max_groups_ahead
            if new.split is Split.TRAIN and self._training.enabled and ahead >= most:
                raise EpisodeRefused(
                    f"{ahead} groups are ahead of the trainer (episodes.max_groups_ahead {most}): try again later",
                    status=429,
                    code="too_many_groups",
                    param="group",
                    retry_after_s=RETRY_AFTER_S,
                )
            row = db.execute(
                "INSERT INTO episode_group (policy, user, name, is_named, task, split, size, opened_at)"
                " VALUES ('policy', ?, ?, ?, ?, ?, ?, ?)",
                (new.user, name, new.group is not None, new.task, str(new.split), new.group_size, at),
            ).lastrowid
            return int(row or 0)
        for field, ours in (("size", new.group_size), ("task", new.task), ("split", str(new.split))):
            if found[field] != ours:
                param = "group_size" if field == "size" else field
                raise EpisodeRefused(
                    f"group {name!r} has {param} {found[field]!r}, not {ours!r}", code="group_conflict", param=param
                )
        if found["state"] != "open":
            raise EpisodeRefused(f"group {name!r} is closed", code="group_closed", param="group")
        if groups.count_members(db, found["id"]) >= found["size"]:
            raise EpisodeRefused(
                f"group {name!r} has its {found['size']} episodes already", code="group_full", param="group"
            )
        return int(found["id"])

    @write
    def end_episode(self, db: sqlite3.Connection, user: str, episode_id: str, outcome: EpisodeOutcome) -> Episode:
        """End an episode by its outcome. The same outcome again changes nothing. Raises EpisodeRefused."""
        row = _known(db, user, episode_id)
        before = _read(db, row)
        if before.outcome == outcome:
            return before
        if before.outcome is not None:
            raise EpisodeRefused(f"episode {episode_id!r} has another outcome already", code="outcome_conflict")
        if before.state is not EpisodeState.RUNNING:
            raise EpisodeRefused(f"episode {episode_id!r} is {before.state}: it takes no outcome", code="episode_over")
        if db.execute("SELECT 1 FROM request WHERE in_episode = ? AND outcome = 'running'", (row,)).fetchone():
            raise EpisodeRefused(
                f"a reply of episode {episode_id!r} streams still: send the outcome after its end",
                code="episode_busy",
                retry_after_s=BUSY_RETRY_S,
            )
        if not db.execute("SELECT 1 FROM turn WHERE of_episode = ? LIMIT 1", (row,)).fetchone():
            raise EpisodeRefused(
                f"episode {episode_id!r} has no recorded turn to give its outcome to: abort it",
                code="episode_without_turns",
            )
        at = self._clock()
        metrics = orjson.dumps(dict(outcome.metrics), option=orjson.OPT_SORT_KEYS).decode()
        db.execute(
            "UPDATE episode SET state = 'ended', ended_at = ?, reward = ?, truncated = ?, metrics = ? WHERE id = ?",
            (at, outcome.reward, outcome.truncated, metrics, row),
        )
        for (turn,) in db.execute("SELECT id FROM turn WHERE of_episode = ? AND state = 'served'", (row,)).fetchall():
            # The outcome is the reward of a last turn, which has no next state.
            move(db, turn, TurnState.JUDGED, at=at, detail=f"its episode ended with {outcome.reward:+g}")
        steps.number(db, row)
        groups.close_if_over(db, _group_of(db, row))
        return _read(db, row)

    @write
    def abort_episode(
        self, db: sqlite3.Connection, user: str, episode_id: str, reason: str, *, has_successor: bool = False
    ) -> Episode:
        """End an episode whose environment failed: its turns are dropped. An abort again changes nothing.

        has_successor: another episode takes its place, so its group stays open for one more. Raises EpisodeRefused.
        """
        row = _known(db, user, episode_id)
        before = _read(db, row)
        if before.state is EpisodeState.ENDED:
            raise EpisodeRefused(f"episode {episode_id!r} has ended with its outcome", code="episode_over")
        if before.state is EpisodeState.RUNNING:
            reason = self._redactor.text(reason)
            db.execute("UPDATE episode SET has_successor = ? WHERE id = ?", (has_successor, row))
            _give_up(db, row, EpisodeState.ABORTED, reason, at=self._clock())
        return _read(db, row)

    async def expire_episodes(self) -> int:
        """Expire what got no outcome in time, and close groups that are too old; return the number of episodes."""
        late = await self._late()
        return await self._expire(late) if any(late) else 0

    @read
    def _late(self, db: sqlite3.Connection) -> tuple[list[int], list[int]]:
        return self._overdue(db)

    @write
    def _expire(self, db: sqlite3.Connection, late: tuple[list[int], list[int]]) -> int:
        at, (idle, old) = self._clock(), self._overdue(db)
        for row in idle:
            _give_up(db, row, EpisodeState.EXPIRED, "no outcome in time", at=at)
        for group in old:
            running = db.execute("SELECT id FROM episode WHERE grp = ? AND state = 'running'", (group,)).fetchall()
            for (row,) in running:
                idle.append(row)
                _give_up(db, row, EpisodeState.EXPIRED, "its group was too old", at=at)
            groups.close(db, group)
        return len(idle)

    def _overdue(self, db: sqlite3.Connection) -> tuple[list[int], list[int]]:
        """Return the episodes without a request for `ttl_s`, and the open groups older than `group_ttl_s`."""
        now, settings = self._clock(), self._episodes
        since = now - settings.ttl_s
        idle = [
            row
            for (row,) in db.execute(
                "SELECT id FROM episode WHERE state = 'running' AND opened_at < ?", (since,)
            ).fetchall()
            if not _is_active(db, row, since)
        ]
        # The first condition is that of the index `episode_group_unscored`.
        query = "SELECT id FROM episode_group WHERE state <> 'scored' AND state = 'open' AND opened_at < ?"
        return idle, [group for (group,) in db.execute(query, (now - settings.group_ttl_s,)).fetchall()]

    # Chats

    @read
    def find_episode(self, db: sqlite3.Connection, user: str, episode_id: str) -> Episode | None:
        """Return a registered episode, without its turns."""
        row = _find(db, user, episode_id)
        return None if row is None else _read(db, row)

    # Reads for runners and people

    @read
    def episode(self, db: sqlite3.Connection, episode_id: str, *, user: str | None = None) -> Episode | None:
        """Return an episode with its turns; without a user the newest one of that id."""
        found = db.execute(
            "SELECT id FROM episode WHERE episode_id = ? AND (?2 IS NULL OR user = ?2) ORDER BY id DESC LIMIT 1",
            (episode_id, user),
        ).fetchone()
        return None if found is None else replace(_read(db, found[0]), turns=steps.of_episode(db, found[0]))

    @read
    def episodes(
        self,
        db: sqlite3.Connection,
        *,
        user: str | None = None,
        state: EpisodeState | None = None,
        group: str | None = None,
        task: str | None = None,
        limit: int = 100,
    ) -> list[Episode]:
        """Return episodes without their turns, newest first."""
        wanted: dict[str, object] = {"episode.user": user, "episode.state": state, "task": task, "name": group}
        if user is not None and group is not None:  # its few rows, and not all that are newer
            found = db.execute("SELECT id FROM episode_group WHERE user = ? AND name = ?", (user, group)).fetchone()
            wanted = {"grp": -1 if found is None else found[0], "+episode.state": state, "task": task}
        named = {name: value for name, value in wanted.items() if value is not None}
        where = [f"{name} = ?" for name in named] + ([] if group is None else ["is_named"])
        rows = db.execute(  # CROSS: newest first, and left when there are enough
            "SELECT episode.id FROM episode CROSS JOIN episode_group ON episode_group.id = grp"
            + (f" WHERE {' AND '.join(where)}" if where else "")
            + " ORDER BY episode.id DESC LIMIT ?",
            (*(value if isinstance(value, int) else str(value) for value in named.values()), limit),
        ).fetchall()
        return [_read(db, row) for (row,) in rows]

    @read
    def tally(self, db: sqlite3.Connection, *, newest: int) -> list[EpisodeTally]:
        """Return the outcomes of the newest episodes, by version, split and set of tasks; oldest version first.

        An episode counts for the version that sampled its first reply.
        """
        found: dict[tuple[int, str, str], list[float]] = {}
        for version, split, task, reward in db.execute(  # CROSS: newest first, and left when there are enough
            "SELECT (SELECT oldest_version FROM turn WHERE of_episode = episode.id ORDER BY id LIMIT 1), split, task,"
            " reward FROM episode CROSS JOIN episode_group ON episode_group.id = grp WHERE episode.state = 'ended'"
            " ORDER BY episode.id DESC LIMIT ?",
            (newest,),
        ):
            if version is not None:  # its turns were deleted
                found.setdefault((version, split, task.partition("/")[0]), []).append(reward)
        return [
            EpisodeTally(version, Split(split), tasks, len(rewards), sum(r >= 1 for r in rewards), fmean(rewards))
            for (version, split, tasks), rewards in sorted(found.items())
        ]


# For other transactions


def delete_empty(db: sqlite3.Connection, rows: set[int]) -> None:
    """Delete those of the episodes that are over and have no request any more, and groups that are then empty."""
    for row in rows:
        found = db.execute(
            "SELECT grp FROM episode WHERE id = ?1 AND state <> 'running'"
            " AND NOT EXISTS (SELECT 1 FROM request WHERE in_episode = ?1)",
            (row,),
        ).fetchone()
        if found is not None:
            db.execute("DELETE FROM episode WHERE id = ?", (row,))
            db.execute(
                "DELETE FROM episode_group WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM episode WHERE grp = ?1)",
                (found[0],),
            )


def delete_user(db: sqlite3.Connection, user: str) -> None:
    """Delete all episodes of a user whose requests are gone."""
    for table in ("episode", "episode_group", "eval_task"):
        db.execute(f"DELETE FROM {table} WHERE user = ?", (user,))


def _find(db: sqlite3.Connection, user: str, episode_id: str) -> int | None:
    found = db.execute("SELECT id FROM episode WHERE user = ? AND episode_id = ?", (user, episode_id)).fetchone()
    return None if found is None else int(found[0])


def _known(db: sqlite3.Connection, user: str, episode_id: str) -> int:
    """Return the row of an episode. Raises EpisodeRefused for one of another user as for none."""
    row = _find(db, user, episode_id)
    if row is None:
        raise EpisodeRefused(f"you have no episode {episode_id!r}", status=404, code="episode_not_found")
    return row


def _group_of(db: sqlite3.Connection, row: int) -> int:
    return int(db.execute("SELECT grp FROM episode WHERE id = ?", (row,)).fetchone()[0])


def _read(db: sqlite3.Connection, row: int) -> Episode:
    found = db.execute(
        "SELECT episode.*, name, is_named, task, split, size FROM episode"
        " JOIN episode_group ON episode_group.id = grp WHERE episode.id = ?",
        (row,),
    ).fetchone()
    if found is None:
        raise LedgerError(f"no episode {row}")
    outcome = None
    if found["reward"] is not None:
        outcome = EpisodeOutcome(found["reward"], bool(found["truncated"]), orjson.loads(found["metrics"]))
    return Episode(
        number=row,
        user=found["user"],
        episode_id=found["episode_id"],
        task=found["task"],
        group=found["name"] if found["is_named"] else None,
        group_size=found["size"],
        split=Split(found["split"]),
        state=EpisodeState(found["state"]),
        opened_at=found["opened_at"],
        ended_at=found["ended_at"],
        outcome=outcome,
        reason=found["reason"],
    )


def _is_active(db: sqlite3.Connection, row: int, since: float) -> bool:
    """Return True if the newest request of an episode came after `since`, or runs."""
    found = db.execute(
        "SELECT received_at, outcome FROM request WHERE in_episode = ? ORDER BY id DESC LIMIT 1", (row,)
    ).fetchone()
    return found is not None and (found["received_at"] >= since or found["outcome"] == "running")


def _give_up(db: sqlite3.Connection, row: int, state: EpisodeState, reason: str, *, at: float) -> None:
    """End an episode without an outcome, drop its turns, and close its group if it was the last."""
    db.execute("UPDATE episode SET state = ?, ended_at = ?, reason = ? WHERE id = ?", (str(state), at, reason, row))
    drop = DropReason.EPISODE_ABORTED if state is EpisodeState.ABORTED else DropReason.EPISODE_EXPIRED
    for turn, before in db.execute("SELECT id, state FROM turn WHERE of_episode = ?", (row,)).fetchall():
        if before in _OPEN_STATES:
            move(db, turn, TurnState.DROPPED, at=at, reason=drop, detail=reason)
    groups.close_if_over(db, _group_of(db, row))
