"""States of turns and of versions: the legal changes, and the functions that make them.

    served ──▶ paired ──▶ judged ──▶ sampled ⇄ leased ──▶ trained
       ╰─────────┴──────────┴──────────┴─────────┴──────────┴──▶ dropped(reason)

`leased → sampled`: the lease ended without a version. `trained → sampled | dropped`: the version was rejected, rolled
back or lost. A user's feedback moves three kinds of turns to `judged`: a `served` one, a `sampled` one (it is scored
again), and one that was `dropped` for a reason in `REVIVABLE`. Feedback that its user takes back moves such a turn to
where it would be without it: `judged → served | paired`. `move` makes every change, inside the caller's
transaction; an illegal change raises a `LedgerError` that names it.
"""

import sqlite3

from openclaw_rl.errors import LedgerError
from openclaw_rl.types import DropReason, TurnState, VersionState

_T, _V = TurnState, VersionState

TURN_MOVES: dict[TurnState, frozenset[TurnState]] = {
    _T.SERVED: frozenset({_T.PAIRED, _T.JUDGED, _T.DROPPED}),
    _T.PAIRED: frozenset({_T.JUDGED, _T.DROPPED}),
    _T.JUDGED: frozenset({_T.SAMPLED, _T.DROPPED, _T.SERVED, _T.PAIRED}),
    _T.SAMPLED: frozenset({_T.LEASED, _T.JUDGED, _T.DROPPED, _T.SERVED, _T.PAIRED}),
    _T.LEASED: frozenset({_T.SAMPLED, _T.TRAINED, _T.DROPPED}),
    _T.TRAINED: frozenset({_T.SAMPLED, _T.DROPPED}),
    _T.DROPPED: frozenset({_T.JUDGED, _T.SERVED, _T.PAIRED}),
}

REVIVABLE = frozenset(
    {
        DropReason.NO_NEXT_STATE,
        DropReason.SUPERSEDED,
        DropReason.BRANCH,
        DropReason.NEUTRAL,
        DropReason.UNJUDGED,
        DropReason.METHOD,
    }
)
"""Drop reasons of turns with sound tokens that lacked a usable answer. Feedback on such a turn supplies it."""

ABANDONED = frozenset({_V.REJECTED, _V.ROLLED_BACK})
"""States of versions that were found bad. A sample with one token of such a version is never trained on."""

DEAD = ABANDONED | {_V.LOST}
"""States of versions that are no ancestor of the tip. A lost version was good: only its file is gone."""

PASSED = frozenset({_V.SERVING, _V.RETIRED, _V.SUPERSEDED})
"""States of versions that passed the gate and were decided on: a rollback may go to them."""

VERSION_MOVES: dict[VersionState, frozenset[VersionState]] = {
    _V.CANDIDATE: DEAD | {_V.GATED},
    _V.GATED: DEAD | {_V.LOADING, _V.SUPERSEDED},
    _V.LOADING: DEAD | {_V.SERVING, _V.SUPERSEDED, _V.GATED},  # gated: the load was interrupted, and is tried again
    _V.SERVING: frozenset({_V.RETIRED, _V.ROLLED_BACK, _V.LOST}),
    # Served before, or passed over for a newer one: may serve (again) after a rollback, or when pinned.
    _V.RETIRED: DEAD | {_V.LOADING, _V.SERVING},
    _V.SUPERSEDED: DEAD | {_V.LOADING, _V.SERVING},
    _V.REJECTED: frozenset(),
    _V.ROLLED_BACK: frozenset(),
    _V.LOST: ABANDONED,  # the version under it was rejected, or a rollback went back to before it
}


def move_version(db: sqlite3.Connection, n: int, to: VersionState, *, reason: str | None = None) -> None:
    """Change a version's state. The caller takes care of its samples, of the tip and of the leases."""
    row = db.execute("SELECT state FROM version WHERE weight_version = ?", (n,)).fetchone()
    if row is None:
        raise LedgerError(f"no version {n}")
    before = VersionState(row[0])
    if to not in VERSION_MOVES[before]:
        raise LedgerError(f"version {n} is {before} and cannot become {to}")
    db.execute(
        "UPDATE version SET state = ?, reason = coalesce(?, reason) WHERE weight_version = ?", (str(to), reason, n)
    )


def find_turn(db: sqlite3.Connection, turn_id: str) -> int:
    """Return the row of a turn. Raises LedgerError when there is no such turn."""
    row = db.execute("SELECT id FROM turn WHERE turn_id = ?", (turn_id,)).fetchone()
    if row is None:
        raise LedgerError(f"no turn {turn_id}")
    return int(row[0])


def move(
    db: sqlite3.Connection,
    turn: int,
    to: TurnState,
    *,
    at: float,
    reason: DropReason | None = None,
    detail: str = "",
    trained_in: int | None = None,
) -> TurnState:
    """Change a turn's state and write the event; return the state before."""
    turn_id, state, why = db.execute("SELECT turn_id, state, reason FROM turn WHERE id = ?", (turn,)).fetchone()
    before = TurnState(state)
    if to not in TURN_MOVES[before] or (before is TurnState.DROPPED and why not in REVIVABLE):
        raise LedgerError(f"turn {turn_id} is {before} and cannot become {to}" + (f" ({reason})" if reason else ""))
    db.execute(
        "UPDATE turn SET state = ?, reason = ?, trained_in = ? WHERE id = ?",
        (str(to), None if reason is None else str(reason), trained_in, turn),
    )
    if before is TurnState.SERVED:
        db.execute("DELETE FROM open_turn WHERE id = ?", (turn,))
    append_event(db, turn, to, at=at, detail=": ".join(filter(None, (reason, detail))))
    return before


def append_event(db: sqlite3.Connection, turn: int, state: TurnState, *, at: float, detail: str = "") -> None:
    """Append an event to a turn."""
    db.execute(
        "INSERT INTO event SELECT ?1, coalesce(max(n), -1) + 1, ?2, ?3, ?4 FROM event WHERE turn = ?1",
        (turn, at, str(state), detail or None),
    )
