"""Outcome of replies: the state of each, its verdict, and the versions that learned from it. No content."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.ledger.records import BY_OPERATOR
from openclaw_rl.ledger.schema import in_list
from openclaw_rl.ledger.states import DEAD
from openclaw_rl.ledger.store import LedgerPart, read
from openclaw_rl.types import DropReason, TurnState, is_held_back


@dataclass(frozen=True, slots=True)
class Outcome:
    """Fate of one reply, without its content."""

    turn_id: str
    state: TurnState
    reason: DropReason | None
    detail: str
    """More about the reason of a drop."""
    verdict: int | None
    source: str | None
    """Source of the verdict: `rules`, `llm` or `feedback`."""
    feedback: float | None
    """Newest value from the user."""
    trained_in: int | None
    version_state: str | None
    """State of the version that trained on it."""
    demonstration: "Outcome | None" = None
    """Outcome of the newest reply that the user wrote instead."""
    is_operators: bool = False
    """The operator gave the newest value, in the user's place."""
    wish_id: int | None = None
    """Wish whose source this turn is."""
    practised: int = 0
    """Practice replies to its prompt that a living version trained on."""
    practised_in: int | None = None
    """Newest of these versions."""
    is_held_back: bool = False
    """No practice answers its prompt: what is learned of the wish is measured on it."""


@dataclass(frozen=True, slots=True)
class TurnMark:
    """State of a turn, and counts that grow with each change: a reader of the turn sees when to read it again."""

    state: TurnState
    events: int
    feedback: int
    demonstration_of: str | None
    """Id of the turn that this one corrects; None: a reply of the policy."""


class Outcomes(LedgerPart):
    """Reads of outcomes, for the users of the replies."""

    @read
    def outcomes(self, db: sqlite3.Connection, turn_ids: Sequence[str], *, user: str) -> list[Outcome]:
        """Return the outcomes of this user's replies among these, in their order."""
        found = (_outcome(db, turn_id, user) for turn_id in turn_ids)
        return [outcome for outcome in found if outcome is not None]

    @read
    def owner(self, db: sqlite3.Connection, turn_id: str) -> str | None:
        """Return the user of a turn; None if there is no such turn."""
        found = db.execute("SELECT user FROM turn JOIN request USING (id) WHERE turn_id = ?", (turn_id,)).fetchone()
        return None if found is None else str(found[0])

    @read
    def turn_mark(self, db: sqlite3.Connection, turn_id: str) -> TurnMark | None:
        """Return the mark of a turn, without its content; None if there is no such turn."""
        found = db.execute(
            "SELECT state, (SELECT count(*) FROM event WHERE event.turn = turn.id), (SELECT count(*) FROM feedback"
            " WHERE feedback.turn = turn.id), (SELECT of.turn_id FROM turn AS of WHERE of.id = turn.demonstration_of)"
            " FROM turn WHERE turn_id = ?",
            (turn_id,),
        ).fetchone()
        return None if found is None else TurnMark(TurnState(found[0]), *found[1:])


def _outcome(db: sqlite3.Connection, turn_id: str, user: str) -> Outcome | None:
    row = db.execute(
        "SELECT turn.id, turn_id, turn.state, turn.reason, verdict.value, verdict.source, trained_in,"
        " version.state AS version_state, feedback.value AS feedback, feedback_id FROM turn JOIN request USING (id)"
        " LEFT JOIN verdict USING (id) LEFT JOIN version ON weight_version = trained_in"
        " LEFT JOIN feedback ON feedback.id = (SELECT said.id FROM feedback AS said"
        " WHERE said.turn = turn.id AND said.value IS NOT NULL ORDER BY said.id DESC LIMIT 1)"
        " WHERE turn_id = ? AND +request.user = ?",
        (turn_id, user),
    ).fetchone()
    if row is None:
        return None
    number, state = row["id"], TurnState(row["state"])
    detail = None
    if state is TurnState.DROPPED:
        (detail,) = db.execute("SELECT detail FROM event WHERE turn = ? ORDER BY n DESC LIMIT 1", (number,)).fetchone()
    wish = db.execute("SELECT max(wish) FROM wish_source WHERE turn = ?", (number,)).fetchone()
    marks, dead = in_list(sorted(map(str, DEAD)))
    practised, newest = db.execute(
        "SELECT count(*), max(trained_in) FROM turn JOIN version ON weight_version = trained_in"
        f" WHERE practice_of = ? AND turn.state = 'trained' AND version.state NOT IN ({marks})",
        (number, *dead),
    ).fetchone()
    written = db.execute(
        "SELECT turn_id FROM turn WHERE demonstration_of = ? ORDER BY id DESC LIMIT 1", (number,)
    ).fetchone()
    return Outcome(
        turn_id=row["turn_id"],
        state=state,
        reason=None if row["reason"] is None else DropReason(row["reason"]),
        detail=str(detail or "").removeprefix(str(row["reason"] or "")).removeprefix(": "),
        verdict=row["value"],
        source=row["source"],
        feedback=row["feedback"],
        trained_in=row["trained_in"],
        version_state=row["version_state"],
        demonstration=None if written is None else _outcome(db, written[0], user),
        is_operators=str(row["feedback_id"]).startswith(BY_OPERATOR),
        wish_id=wish[0],
        practised=practised,
        practised_in=newest,
        is_held_back=wish[0] is not None and _is_held_back(db, number, wish[0]),
    )


def _is_held_back(db: sqlite3.Connection, turn: int, wish: int) -> bool:
    holds = db.execute("SELECT turn FROM wish_source WHERE wish = ? AND NOT is_over ORDER BY id", (wish,)).fetchall()
    places = [row["turn"] for row in holds]
    return turn in places and is_held_back(places.index(turn), len(places))
