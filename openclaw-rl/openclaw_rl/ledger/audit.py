"""Audit of the ledger's promises from the file alone, as queries that find the rows that break them.

`audit` reads all rows once. It is for tests, for `doctor` and for people, not for the chat's path. Each finding is one
sentence.
"""

import sqlite3
from collections.abc import Iterator

from openclaw_rl.ledger import pictures, schema, versions
from openclaw_rl.ledger.states import DEAD, REVIVABLE, TURN_MOVES
from openclaw_rl.ledger.store import LedgerPart, read
from openclaw_rl.types import SHARED_POLICY, TurnState

_DEAD = ", ".join(f"'{state}'" for state in sorted(DEAD))

_NEVER = {
    "turn {} has a state that is none": f"""
        SELECT turn_id FROM turn WHERE state NOT IN ({", ".join(f"'{state}'" for state in TurnState)})""",
    "turn {} is recorded, but its request is not served": """
        SELECT turn_id FROM turn LEFT JOIN request USING (id) WHERE outcome IS NOT 'served'""",
    "request {} was served, but left no turn": """
        SELECT request_id FROM request LEFT JOIN turn USING (id) WHERE outcome = 'served' AND turn_id IS NULL""",
    "turn {} has no reply": "SELECT turn_id FROM turn LEFT JOIN reply USING (id) WHERE reply.id IS NULL",
    "turn {} is open, but its key is gone": """
        SELECT turn_id FROM turn LEFT JOIN open_turn USING (id) WHERE state = 'served' AND open_turn.id IS NULL""",
    "turn {} is over, but its key is still open": """
        SELECT coalesce(turn_id, id) FROM open_turn LEFT JOIN turn USING (id) WHERE state IS NOT 'served'""",
    "turn {} is past pairing without a next state": """
        SELECT turn_id FROM turn LEFT JOIN next_state USING (id)
        WHERE state NOT IN ('served', 'dropped') AND next_state.id IS NULL AND demonstration_of IS NULL AND practice IS
            NULL AND of_episode IS NULL
            AND NOT EXISTS (SELECT 1 FROM feedback WHERE turn = turn.id)""",
    "turn {} began as a sample, and is neither a demonstration nor practice": """
        SELECT turn_id FROM turn JOIN event ON turn = turn.id
        WHERE n = 0 AND event.state = 'sampled' AND demonstration_of IS NULL AND practice IS NULL""",
    "practice reply {} did not begin as a sample": """
        SELECT turn_id FROM turn JOIN event ON turn = turn.id
        WHERE n = 0 AND event.state <> 'sampled' AND practice IS NOT NULL""",
    "practice reply {} was taken for a turn of its user": """
        SELECT turn_id FROM turn WHERE practice IS NOT NULL AND (
            EXISTS (SELECT 1 FROM verdict WHERE verdict.id = turn.id)
            OR EXISTS (SELECT 1 FROM next_state WHERE next_state.id = turn.id)
            OR EXISTS (SELECT 1 FROM open_turn WHERE open_turn.id = turn.id)
            OR EXISTS (SELECT 1 FROM feedback WHERE feedback.turn = turn.id))""",
    "practice reply {} is not of its user's own turn and wish": """
        SELECT turn_id FROM turn JOIN request USING (id) LEFT JOIN request AS of ON of.id = practice_of
            LEFT JOIN wish AS asked ON asked.id = turn.wish
        WHERE (practice IS NULL AND (practice_of IS NOT NULL OR turn.wish IS NOT NULL))
            OR (practice = 'wish' AND (of.user IS NOT request.user OR asked.user IS NOT request.user))
            OR (practice = 'anchor' AND (turn.wish IS NOT NULL
                OR (practice_of IS NOT NULL AND of.user IS NOT request.user)))""",
    "wish {} has no turn that asked for it": """
        SELECT wish.id FROM wish LEFT JOIN wish_source ON wish = wish.id WHERE wish_source.id IS NULL""",
    "wish {} was asked for by somebody else": """
        SELECT wish.id FROM wish JOIN wish_source ON wish = wish.id JOIN request ON request.id = turn
        WHERE wish.user <> request.user""",
    "turn {} and its sample do not agree on who wrote it": """
        SELECT turn_id FROM turn JOIN sample USING (id) WHERE is_demonstration <> (demonstration_of IS NOT NULL)""",
    "turn {} came back from an end that is final": f"""
        SELECT turn_id FROM turn JOIN (SELECT turn, state, lag(state) OVER story AS before, lag(detail) OVER story
            AS why FROM event WINDOW story AS (PARTITION BY turn ORDER BY n)) AS step ON turn = turn.id
        WHERE before = 'dropped' AND iif(instr(why, ':'), substr(why, 1, instr(why, ':') - 1), why) NOT IN
            ({", ".join(f"'{reason}'" for reason in sorted(REVIVABLE))})""",
    "the feedback {} belongs to somebody else's turn": """
        SELECT feedback_id FROM feedback JOIN request ON request.id = turn WHERE feedback.user <> request.user""",
    "turn {} waits, and feedback of it waits as if a trainer had it": """
        SELECT turn_id FROM feedback JOIN turn ON turn.id = turn
        WHERE effect = 'late' AND state NOT IN ('leased', 'trained', 'dropped')""",
    "turn {} has a reward, and no verdict of ±1": """
        SELECT turn_id FROM turn JOIN sample USING (id) LEFT JOIN verdict USING (id)
        WHERE reward IS NOT NULL AND coalesce(value, 0) = 0 AND practice IS NULL""",
    "turn {} is of an episode that was given up, or evaluates, and became a sample": """
        SELECT turn_id FROM turn JOIN episode ON episode.id = of_episode JOIN episode_group ON episode_group.id = grp
        WHERE (episode.state <> 'ended' OR split = 'eval') AND turn.state IN ('sampled', 'leased', 'trained')""",
    "turn {} waits in a group that has its credit": """
        SELECT turn_id FROM turn JOIN episode ON episode.id = of_episode JOIN episode_group ON episode_group.id = grp
        WHERE episode_group.state = 'scored' AND turn.state IN ('served', 'paired', 'judged')""",
    "turn {} is a step and a sample, and has no advantage": """
        SELECT turn_id FROM turn LEFT JOIN credit USING (id)
        WHERE of_episode IS NOT NULL AND turn.state IN ('sampled', 'leased', 'trained') AND advantage IS NULL""",
    "turn {} and its request are of two episodes": """
        SELECT turn_id FROM turn JOIN request USING (id) WHERE of_episode IS NOT in_episode AND demonstration_of IS NULL
            AND practice IS NULL""",
    "group {} is not open, and an episode of it runs": """
        SELECT grp FROM episode JOIN episode_group ON episode_group.id = grp
        WHERE episode.state = 'running' AND episode_group.state <> 'open'""",
    "group {} has more episodes than it was announced with": """
        SELECT episode_group.id FROM episode_group JOIN episode ON grp = episode_group.id WHERE NOT has_successor
        GROUP BY episode_group.id HAVING count(*) > size""",
    "the group of episode {} is of another user": """
        SELECT episode_id FROM episode JOIN episode_group ON episode_group.id = grp
        WHERE episode.user <> episode_group.user""",
    "turn {} waits or trained without a sample": """
        SELECT turn_id FROM turn LEFT JOIN sample USING (id)
        WHERE state IN ('sampled', 'leased', 'trained') AND (sample.id IS NULL OR sampled_at IS NULL)""",
    "the story of turn {} does not end in its state": """
        SELECT turn_id FROM turn WHERE state IS NOT (SELECT state FROM event WHERE turn = turn.id ORDER BY n DESC LIMIT
        1)""",
    "turn {} is leased, but no live lease has it": """
        SELECT turn_id FROM turn WHERE state = 'leased' AND (
            SELECT count(*) FROM lease_sample JOIN lease USING (fence)
            WHERE turn = turn.id AND outcome = 'leased' AND lease.state = 'live') <> 1""",
    "a lease has turn {}, which is not leased": """
        SELECT turn_id FROM lease_sample JOIN turn ON turn.id = turn WHERE outcome = 'leased' AND turn.state <>
        'leased'""",
    "lease {} is over and still has samples": """
        SELECT DISTINCT lease_id FROM lease JOIN lease_sample USING (fence) WHERE state <> 'live' AND outcome =
        'leased'""",
    "lease {} is live, but not the newest": """
        SELECT lease_id FROM lease WHERE state = 'live' AND fence <> (SELECT max(fence) FROM lease)""",
    "lease {} is live, but does not build on the tip": """
        SELECT lease_id FROM lease WHERE state = 'live' AND parent IS NOT (SELECT CAST(value AS INTEGER) FROM meta
            WHERE key = iif(policy = 'policy', 'tip', 'tip of ' || policy))""",
    "lease {} has a parent or a turn of another policy": """
        SELECT lease.lease_id FROM lease JOIN version ON weight_version = lease.parent
        WHERE lease.policy <> version.policy
        UNION SELECT lease.lease_id FROM lease JOIN lease_sample USING (fence) JOIN turn ON turn.id = turn
        WHERE lease.policy <> turn.policy""",
    "turn {} and its request are of two policies": """
        SELECT turn_id FROM turn JOIN request USING (id) WHERE turn.policy <> request.policy""",
    "version {} and its parent are of two policies": """
        SELECT child.weight_version FROM version AS child JOIN version AS parent ON child.parent = parent.weight_version
        WHERE child.policy <> parent.policy""",
    "version {} is a second root of its policy": """
        SELECT max(weight_version) FROM version WHERE parent IS NULL GROUP BY policy HAVING count(*) > 1""",
    "lease {} is committed, but made no version": """
        SELECT lease.lease_id FROM lease LEFT JOIN version USING (lease_id)
        WHERE lease.state = 'committed' AND weight_version IS NULL""",
    "lease {} is not committed, but trained samples": """
        SELECT DISTINCT lease_id FROM lease JOIN lease_sample USING (fence)
        WHERE state <> 'committed' AND outcome = 'trained'""",
    "version {} has no lease, or one with another parent": """
        SELECT weight_version FROM version LEFT JOIN lease USING (lease_id)
        WHERE weight_version > 0 AND same_weights_as IS NULL AND (lease.state IS NOT 'committed' OR lease.parent <>
        version.parent)""",
    "version {} is not one commit deeper than its parent": """
        SELECT child.weight_version FROM version AS child LEFT JOIN version AS parent ON child.parent =
        parent.weight_version WHERE child.weight_version > 0 AND NOT (child.parent IS NULL AND child.depth = 0
            AND child.policy <> 'policy' AND child.same_weights_as IS NOT NULL)
            AND (parent.weight_version IS NULL OR parent.weight_version
        >= child.weight_version
            OR child.depth <> parent.depth + (child.same_weights_as IS NULL))""",
    "version {} is alive, and its parent is not": f"""
        SELECT child.weight_version FROM version AS child JOIN version AS parent ON child.parent = parent.weight_version
        WHERE child.state NOT IN ({_DEAD}) AND parent.state IN ({_DEAD})""",
    "version {} has two living children": f"""
        SELECT parent FROM version WHERE state NOT IN ({_DEAD}) AND parent IS NOT NULL
        GROUP BY parent HAVING count(*) > 1""",
    "picture {} is shown by no request": """
        SELECT hex(digest) FROM picture WHERE NOT EXISTS (SELECT 1 FROM request_picture WHERE picture = picture.id)""",
    "the pictures of request {} have gaps": """
        SELECT request_id FROM request_picture JOIN request ON request.id = request
        GROUP BY request HAVING max(n) <> count(*) - 1""",
    "turn {} is trained in a version that does not count it, or is dead": f"""
        SELECT turn_id FROM turn WHERE state = 'trained' AND NOT EXISTS (
            SELECT 1 FROM version JOIN lease USING (lease_id) JOIN lease_sample USING (fence)
            WHERE weight_version = trained_in AND turn = turn.id AND outcome = 'trained'
                AND version.state NOT IN ({_DEAD}))""",
    "turn {} was trained by a living version, and is not marked so": f"""
        SELECT turn_id FROM lease_sample JOIN lease USING (fence) JOIN version USING (lease_id)
            JOIN turn ON turn.id = turn
        WHERE outcome = 'trained' AND version.state NOT IN ({_DEAD}) AND trained_in IS NOT weight_version""",
}


class Auditing(LedgerPart):
    """The audit of a ledger that is open."""

    @read
    def audit(self, db: sqlite3.Connection, *, is_deep: bool = False) -> list[str]:
        """Return the violations of the ledger's promises, found from the file alone; [] is good."""
        return audit(db, is_deep=is_deep)


def audit(db: sqlite3.Connection, *, is_deep: bool) -> list[str]:
    """Return the violations; [] is good. `is_deep` also checks every page and every reference of the file."""
    findings = [
        sentence.format(found) for sentence, query in _NEVER.items() for (found,) in db.execute(query + " LIMIT 20")
    ]
    findings += [*_counters(db), *_stories(db), *_trained_twice(db), *pictures.faults(db)]
    # A file whose first start was killed has tables, no owner and no version: that is legal.
    if schema.get_text(db, "identity") is not None or db.execute("SELECT 1 FROM version").fetchone():
        findings += _versions(db)
    if is_deep:
        findings += [
            f"the file is damaged: {row[0]}" for row in db.execute("PRAGMA integrity_check(20)") if row[0] != "ok"
        ]
        findings += [
            f"{row[0]} row {row[1]} names a missing {row[2]}" for row in db.execute("PRAGMA foreign_key_check")
        ]
    return findings


def _counters(db: sqlite3.Connection) -> Iterator[str]:
    """Yield counters that differ from the rows: a turn that left the counts is lost in silence."""
    kept = {name: n for name, n in db.execute("SELECT name, n FROM counter") if n}
    counted: dict[str, int] = {}
    for query in (
        "SELECT iif(practice IS NULL, '', 'practice.') || iif(reason IS NULL, state, 'dropped.' || reason), count(*)"
        " FROM turn GROUP BY 1",
        "SELECT 'abandoned.' || reason, count(*) FROM request WHERE outcome = 'abandoned' GROUP BY 1",
        "SELECT 'requests', count(*) FROM request LEFT JOIN turn USING (id) WHERE demonstration_of IS NULL"
        " AND practice IS NULL",
        "SELECT 'running', count(*) FROM request WHERE outcome = 'running'",
        "SELECT 'side.' || kind, count(*) FROM side GROUP BY 1",
        "SELECT 'feedback.' || effect, count(*) FROM feedback GROUP BY 1",
        "SELECT 'episodes.' || state, count(*) FROM episode GROUP BY 1",
        "SELECT 'groups.' || state, count(*) FROM episode_group GROUP BY 1",
    ):
        counted |= {name: n for name, n in db.execute(query) if n}
    for name in sorted(kept.keys() | counted.keys()):
        if kept.get(name, 0) != counted.get(name, 0):
            yield f"the counter {name} says {kept.get(name, 0)}, and there are {counted.get(name, 0)}"


def _stories(db: sqlite3.Connection) -> Iterator[str]:
    steps = db.execute(
        "SELECT before, state, min(turn) FROM ("
        " SELECT turn, state, lag(state) OVER (PARTITION BY turn ORDER BY n) AS before FROM event)"
        " GROUP BY before, state"
    )
    for before, state, turn in steps:
        if before is None:
            is_legal = state in (TurnState.SERVED, TurnState.SAMPLED)
        else:
            is_legal = TurnState(state) in TURN_MOVES[TurnState(before)]
        if not is_legal:
            yield f"turn row {turn} went from {before or 'nothing'} to {state}"


def _versions(db: sqlite3.Connection) -> Iterator[str]:
    rows = {row["weight_version"]: row for row in db.execute("SELECT * FROM version")}
    if sorted(rows) != list(range(len(rows))):
        yield f"the version numbers have gaps: {len(rows)} rows up to {max(rows, default=None)}"
    for policy in {
        SHARED_POLICY,
        *(row["policy"] for row in rows.values() if not row["policy"].startswith("removed:")),
    }:
        of = "" if policy == SHARED_POLICY else f" of {policy}"
        own = {number: row["state"] for number, row in rows.items() if row["policy"] == policy}
        serving = [number for number, state in own.items() if state == "serving"]
        if len(serving) != 1:
            yield f"{len(serving)} versions{of} serve: {serving}"
        alive = {number for number, state in own.items() if state not in DEAD}
        if alive and (tip := schema.get_int(db, schema.of_policy("tip", policy))) != max(alive):
            yield f"the tip{of} is {tip}, and the newest living version is {max(alive)}"
        if (pinned := versions.read_pin(db, policy)) is not None and pinned not in alive:
            yield f"version {pinned} is pinned{of} and not alive"


def _trained_twice(db: sqlite3.Connection) -> Iterator[str]:
    """Yield turns that were trained twice in the ancestry of a version, dead versions included."""
    parents = dict(db.execute("SELECT weight_version, parent FROM version").fetchall())
    rows = db.execute(
        "SELECT turn_id, group_concat(weight_version) FROM lease_sample JOIN lease USING (fence)"
        " JOIN version USING (lease_id) JOIN turn ON turn.id = turn WHERE outcome = 'trained'"
        " GROUP BY turn HAVING count(*) > 1"
    )
    for turn_id, numbers in rows:
        trained_in = {int(number) for number in numbers.split(",")}
        for version in trained_in:
            above = parents[version]
            while above is not None:
                if above in trained_in:
                    yield f"turn {turn_id} trained version {version} and its ancestor {above}"
                above = parents[above]
