"""Reads of turns, counts, replies and verdicts: for people, for the gate and for the publisher."""

import sqlite3

from openclaw_rl.ledger import blobs, pictures, schema
from openclaw_rl.ledger.blobs import unpack_ids
from openclaw_rl.ledger.records import (
    Event,
    TurnRecord,
    read_feedback,
    read_next_state,
    read_request,
    read_sample,
    read_turn,
    read_verdict,
)
from openclaw_rl.ledger.states import DEAD
from openclaw_rl.ledger.store import LedgerPart, read
from openclaw_rl.types import SHARED_POLICY, DropReason, Ids, PracticeKind, TurnState
from openclaw_rl.types.pictures import with_pictures

_NOT_A_REPLY_OF_THE_POLICY = (
    DropReason.NOT_TRAINABLE_SAMPLING,
    DropReason.TRUNCATED_SAMPLING,
    DropReason.MISALIGNED,
    DropReason.NON_FINITE,
    DropReason.EMPTY,
    DropReason.UNSUPPORTED_CONTENT,
    DropReason.OPTED_OUT,
    DropReason.REDACTED,
)
"""Reasons of turns that are no plain samples of π_v, or that their owner keeps out of it."""
_PROMPTS_LOOKED_AT = 200
_EPISODES_LOOKED_AT = 5000


_SHOWS = "EXISTS (SELECT 1 FROM request_picture WHERE request_picture.request = request.id)"
"""True for a request that shows pictures."""


class Reports(LedgerPart):
    """Reads for people, for the gate and for the publisher."""

    @read
    def turn(self, db: sqlite3.Connection, turn_id: str) -> TurnRecord | None:
        """Return the record of a turn: its content, its state and every change of it."""
        return read_record(db, turn_id)

    @read
    def counts(self, db: sqlite3.Connection) -> dict[str, int]:
        """Return the number of turns by state (always all states), and of requests.

        Also `dropped.<reason>`, `abandoned.<reason>`, `side.<kind>`, `feedback.<effect>`, `episodes.<state>` and
        `groups.<state>`, each family with its sum.
        `sampled` is the number that waits for a trainer. A demonstration counts as a turn and not as a request.
        Practice replies count apart, as `practice.<state>` and `practice.dropped.<reason>`. The call reads a few rows,
        whatever the size of the file.
        """
        counted = {name: n for name, n in db.execute("SELECT name, n FROM counter") if n}
        answer = {str(state): counted.pop(str(state), 0) for state in TurnState}
        answer["requests"], answer["running"] = counted.pop("requests", 0), counted.pop("running", 0)
        for group in ("dropped", "abandoned", "side", "feedback", "practice", "episodes", "groups"):
            answer[group] = sum(n for name, n in counted.items() if name.startswith(f"{group}."))
        answer["rejections_in_a_row"] = schema.get_int(db, "rejections_in_a_row")
        return answer | dict(sorted(counted.items()))

    @read
    def recent_replies(
        self, db: sqlite3.Connection, *, sampled_by: int | None, limit: int, policy: str = SHARED_POLICY
    ) -> list[tuple[Ids, Ids]]:
        """Return (prompt, response) of the newest replies that one version sampled alone, newest first.

        sampled_by: None for any version of the policy.

        Only replies that are plain samples of the policy, and whose owner allows their use. Those of prompts with
        pictures only where engines get them.
        """
        marks = ",".join("?" * len(_NOT_A_REPLY_OF_THE_POLICY))
        rows = db.execute(
            f"SELECT id, prompt, ids, {_SHOWS} AS shows FROM turn JOIN request USING (id) JOIN reply USING (id)"
            f" WHERE (turn.reason IS NULL OR turn.reason NOT IN ({marks})) AND length(versions) = 8"
            " AND demonstration_of IS NULL AND practice IS NULL"
            + ("" if self._shows_pictures else f" AND NOT {_SHOWS}")
            + (f" AND {_of(policy)}" if sampled_by is None else " AND oldest_version = ?")
            + " ORDER BY turn.id DESC LIMIT ?",
            (*map(str, _NOT_A_REPLY_OF_THE_POLICY), policy if sampled_by is None else sampled_by, limit),
        ).fetchall()
        return [
            (prompt, unpack_ids(row["ids"]))
            for row in rows
            if (prompt := _prompt(db, row["id"], row["prompt"], shows=row["shows"])) is not None
        ]

    @read
    def user_verdicts(
        self, db: sqlite3.Connection, *, limit: int, before_waiting: bool = False, policy: str = SHARED_POLICY
    ) -> list[tuple[int, int]]:
        """Return (version that sampled the turn, verdict) of the newest turns that a user answered, oldest first.

        All are of one policy.

        Turns of dead versions are left out. before_waiting: so are the turns from the first on that waits for the
        judge. Behind it only users' own feedback has verdicts, which is no fair part of all.
        """
        marks = ",".join("?" * len(DEAD))
        waiting = f"(SELECT min(id) FROM turn WHERE state = 'paired' AND is_tool = 0 AND {_of(policy)})"
        end = waiting if before_waiting else "NULL"
        rows = db.execute(  # CROSS fixes the order of the joins: any other reads and sorts every turn
            "SELECT oldest_version, value FROM verdict CROSS JOIN turn USING (id)"
            " CROSS JOIN version ON weight_version = oldest_version"
            f" WHERE is_tool = 0 AND {_of(policy)} AND version.state NOT IN ({marks})"
            f" AND verdict.id < ifnull({end}, {2**63 - 1})"
            " ORDER BY verdict.id DESC LIMIT ?",
            (policy, *map(str, DEAD), *((policy,) if before_waiting else ()), limit),
        ).fetchall()
        return [(version, value) for version, value in reversed(rows)]

    @read
    def evaluated(self, db: sqlite3.Connection, *, policy: str = SHARED_POLICY) -> list[tuple[str, int, float]]:
        """Return (task, version that played its end, reward) of newest ended evaluations, oldest first.

        All are of one policy. Dead versions are left out. Only the last `_EPISODES_LOOKED_AT` episodes are read.
        """
        marks = ",".join("?" * len(DEAD))
        last = "(SELECT max(id) FROM turn WHERE of_episode = episode.id)"
        rows = db.execute(
            "SELECT task, weight_version, reward FROM episode JOIN episode_group ON episode_group.id = grp"
            f" JOIN turn ON turn.id = {last} JOIN version ON weight_version = oldest_version"
            " WHERE episode.id > (SELECT ifnull(max(id), 0) FROM episode) - ? AND split = 'eval'"
            f" AND episode.state = 'ended' AND episode_group.policy = ? AND version.state NOT IN ({marks})"
            " ORDER BY episode.id",
            (_EPISODES_LOOKED_AT, policy, *map(str, DEAD)),
        )
        return [(task, version, reward) for task, version, reward in rows]

    @read
    def recent_prompts(self, db: sqlite3.Connection, limit: int, policy: str = SHARED_POLICY) -> list[tuple[str, Ids]]:
        """Return (user, newest prompt) of each of the `limit` sessions of a policy that were active last, newest first.

        A caller warms the engine's cache with them. Only the last `_PROMPTS_LOOKED_AT` requests are read.
        """
        table = "request" if policy == SHARED_POLICY else "turn"
        rows = db.execute(
            f"SELECT id, user, session_id, prompt, {_SHOWS} AS shows FROM request LEFT JOIN turn USING (id)"
            f" WHERE demonstration_of IS NULL AND practice IS NULL AND prompt <> x'' AND {_of(policy, table)}"
            + ("" if self._shows_pictures else f" AND NOT {_SHOWS}")
            + f" ORDER BY {table}.id DESC LIMIT ?",
            (policy, _PROMPTS_LOOKED_AT),
        ).fetchall()
        newest: dict[tuple[str, str | None], sqlite3.Row] = {}
        for row in rows:
            newest.setdefault((row["user"], row["session_id"]), row)
        return [
            (user, prompt)
            for (user, _), row in list(newest.items())[:limit]
            if (prompt := _prompt(db, row["id"], row["prompt"], shows=row["shows"])) is not None
        ]


def _prompt(db: sqlite3.Connection, row: int, blob: bytes, *, shows: bool) -> Ids | None:
    """Return the prompt of a request, with its pictures; None if the file of one is missing: no engine can score it."""
    prompt = blobs.get_prompt(db, blob)
    if not shows:
        return prompt
    shown = pictures.of_request(db, row)
    return with_pictures(prompt, shown) if pictures.are_here(db, shown) else None


def _of(policy: str, table: str = "turn") -> str:
    """Return the condition on a row's policy, with one value to bind."""
    # The index of turns leaves the shared policy out, and SQLite uses it only where the statement says so itself.
    own = f" AND {table}.policy <> '{SHARED_POLICY}'" if policy != SHARED_POLICY else ""
    return f"{table}.policy = ?{own}"


def read_record(db: sqlite3.Connection, turn_id: str) -> TurnRecord | None:
    found = db.execute("SELECT * FROM turn WHERE turn_id = ?", (turn_id,)).fetchone()
    if found is None:
        return None
    row = found["id"]
    answered = db.execute("SELECT by_request FROM next_state WHERE id = ?", (row,)).fetchone()
    lease = db.execute(
        "SELECT lease_id FROM lease_sample JOIN lease USING (fence) WHERE turn = ? ORDER BY fence DESC LIMIT 1", (row,)
    ).fetchone()
    practised = None
    if found["practice_of"] is not None:
        (practised,) = db.execute("SELECT turn_id FROM turn WHERE id = ?", (found["practice_of"],)).fetchone()
    episode = db.execute("SELECT reward FROM episode WHERE id = ?", (found["of_episode"],)).fetchone()
    credit = db.execute("SELECT reward FROM credit WHERE id = ?", (row,)).fetchone()
    events = db.execute("SELECT at, state, detail FROM event WHERE turn = ? ORDER BY n", (row,))
    return TurnRecord(
        request=read_request(db, row),
        turn=read_turn(db, row),
        state=TurnState(found["state"]),
        reason=None if found["reason"] is None else DropReason(found["reason"]),
        next_state=read_next_state(db, row),
        answered_by=None if answered is None else answered[0],
        verdict=read_verdict(db, row),
        feedback=read_feedback(db, row),
        sample=read_sample(db, row),
        lease_id=None if lease is None else lease[0],
        trained_in=found["trained_in"],
        events=tuple(Event(at, TurnState(state), detail or "") for at, state, detail in events),
        practice=None if found["practice"] is None else PracticeKind(found["practice"]),
        practice_of=practised,
        wish_id=found["wish"],
        outcome=None if episode is None else episode["reward"],
        step_reward=None if credit is None else credit["reward"],
    )
