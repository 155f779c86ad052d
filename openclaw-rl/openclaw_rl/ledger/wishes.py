"""Wishes of users: made with the samples that hold a hint, grouped by their words, ended by newer ones.

A sample with a hint makes its turn a source of a wish. Equal wishes of one user (`wish_text.key_of`) are one wish with
several sources. The newer wish wins in two cases: it corrects the very prompt that the older one corrected, or both
name opposite ends of one axis (`wish_text.opposed`). A wish whose every source lost its prompt to newer wishes is
superseded, and so is an opposed one. A judge model may find more contradictions (`supersede_wish`). The oldest active
wish of a user who has very many is superseded too. Feedback that is taken back ends its wish
(`take_back`), and the wish before it holds again.

A wish that was superseded or removed stays in the list with its words, until its turns are forgotten.
"""

import sqlite3
from collections.abc import Collection, Iterable

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import wish_text
from openclaw_rl.ledger.schema import in_list
from openclaw_rl.ledger.states import DEAD, move
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import DropReason, Sample, TurnState, Wish, WishMeasure, WishSource, WishState

_MOST_ACTIVE = 64
"""Active wishes of a user. All are rehearsed together: with more of them each would be heard of too rarely."""


class Wishes(LedgerPart):
    """Lists and changes of wishes."""

    @read
    def wishes(self, db: sqlite3.Connection, *, user: str | None = None, only_active: bool = False) -> list[Wish]:
        """Return the wishes of a user (None: of all users), oldest first."""
        where = [*(["user = ?"] if user is not None else []), *(["state = 'active'"] if only_active else [])]
        rows = db.execute(
            f"SELECT * FROM wish WHERE {' AND '.join(where) or '1'} ORDER BY id", (() if user is None else (user,))
        )
        return [_read(db, row) for row in rows.fetchall()]

    @write
    def remove_wish(self, db: sqlite3.Connection, wish_id: int, *, user: str | None = None) -> Wish:
        """Withdraw a wish: nothing rehearses it any more, and its waiting practice is dropped. Idempotent.

        user: the owner that the wish must have. Raises LedgerError if there is no such wish.
        """
        found = _find(db, wish_id, user)
        if found["state"] != WishState.REMOVED:
            _end(db, wish_id, WishState.REMOVED, "its user withdrew it", at=self._clock())
        return _read(db, _find(db, wish_id, user))

    @write
    def set_wish_general(
        self, db: sqlite3.Connection, wish_id: int, is_general: bool, *, user: str | None = None
    ) -> Wish:
        """Say that a wish holds for every prompt of its user, or only where it was asked. As `remove_wish`."""
        _find(db, wish_id, user)
        db.execute("UPDATE wish SET is_general = ? WHERE id = ?", (is_general, wish_id))
        return _read(db, _find(db, wish_id, user))

    @write
    def practise_wish(self, db: sqlite3.Connection, wish_id: int, *, user: str | None = None) -> Wish:
        """Practise a wish again that was removed, stopped or rests. Raises LedgerError for a superseded one."""
        found = _find(db, wish_id, user)
        if found["state"] == WishState.SUPERSEDED:
            raise LedgerError(f"wish {wish_id} was superseded: {found['reason']}")
        _activate(db, wish_id)
        return _read(db, _find(db, wish_id, user))

    @write
    def supersede_wish(self, db: sqlite3.Connection, wish_id: int, *, by: int, reason: str) -> None:
        """Let a newer wish take the place of an older one, if both are still active."""
        active = {
            row["id"]
            for row in db.execute("SELECT id FROM wish WHERE state = 'active' AND id IN (?, ?)", (wish_id, by))
        }
        if {wish_id, by} <= active:
            _end(db, wish_id, WishState.SUPERSEDED, self._redactor.text(reason), by=by, at=self._clock())

    @write
    def record_measures(self, db: sqlite3.Connection, measures: Collection[WishMeasure]) -> None:
        """Store the figures of wishes. A wish may come to rest by them, need practice again, or be stopped."""
        at = self._clock()
        for one in measures:
            if db.execute("SELECT 1 FROM wish WHERE id = ? AND state = 'active'", (one.wish_id,)).fetchone() is None:
                continue  # removed, superseded or forgotten meanwhile
            db.execute(
                "UPDATE wish SET learned_share = ?, kl = ?, measured_in = ?, rests = ? WHERE id = ?",
                (one.learned_share, one.kl, one.weight_version, one.rests, one.wish_id),
            )
            if one.stopped is not None:
                _end(db, one.wish_id, WishState.STOPPED, one.stopped, at=at)


# For other transactions


def note(db: sqlite3.Connection, turn: int, sample: Sample, *, at: float) -> None:
    """Make the turn of a new sample a source of the wish that its hint holds, if it has one."""
    hint = sample.hint
    if hint is None or hint.text is None or hint.absent is not None or not (key := wish_text.key_of(hint.text)):
        return
    policy, user, prompt = db.execute("SELECT policy, user, prompt FROM request WHERE id = ?", (turn,)).fetchone()
    known = db.execute(
        "SELECT id FROM wish WHERE user = ? AND policy = ? AND state IN ('active', 'stopped') AND key = ?"
        " ORDER BY id DESC LIMIT 1",
        (user, policy, key),
    ).fetchone()
    if known is not None:
        wish = int(known["id"])
        _activate(db, wish)  # it was asked for again: what was learned of it did not do
    else:
        wish = (
            db.execute(
                "INSERT INTO wish (policy, user, key, created_at, state) VALUES (?, ?, ?, ?, 'active')",
                (policy, user, key, at),
            ).lastrowid
            or 0
        )
    # The newest correction of a prompt stands last, also where the turn is scored once more.
    db.execute("DELETE FROM wish_source WHERE wish = ? AND turn = ?", (wish, turn))
    db.execute(
        "INSERT INTO wish_source (wish, turn, text, source) VALUES (?, ?, ?, ?)",
        (wish, turn, hint.text, hint.source or "judge"),
    )
    _let_newer_win(db, wish, hint.text, user=user, policy=policy, prompt=prompt, at=at)


def take_back(db: sqlite3.Connection, turn: int, *, at: float) -> None:
    """Undo `note` for a turn whose correction was taken back.

    A wish that no other turn asked for is deleted; one that was practised is removed, and keeps its words. The wishes
    that it superseded hold again, or pass to the wish that superseded it.
    """
    _renew_prompt(db, turn)
    for (wish,) in db.execute("SELECT wish FROM wish_source WHERE turn = ? ORDER BY id", (turn,)).fetchall():
        others = db.execute("SELECT 1 FROM wish_source WHERE wish = ? AND turn <> ?", (wish, turn)).fetchone()
        practised = db.execute("SELECT 1 FROM turn WHERE wish = ?", (wish,)).fetchone()
        if practised and not others:  # its practice replies name it
            db.execute("UPDATE wish_source SET is_over = 1 WHERE wish = ? AND turn = ?", (wish, turn))
        else:
            db.execute("DELETE FROM wish_source WHERE wish = ? AND turn = ?", (wish, turn))
        _give_back_place(db, wish, is_over=not others)
        if not others:
            _end(db, wish, WishState.REMOVED, "its correction was taken back", at=at)
    delete_orphans(db)


def stop_practised_in(db: sqlite3.Connection, versions: Iterable[int], reason: str, *, at: float) -> None:
    """Stop the wishes that these versions practised."""
    for number in versions:
        rows = db.execute(
            "SELECT DISTINCT wish FROM turn JOIN wish AS asked ON asked.id = wish"
            " WHERE trained_in = ? AND wish IS NOT NULL AND asked.state = 'active'",
            (number,),
        )
        for (wish,) in rows.fetchall():
            _end(db, wish, WishState.STOPPED, reason, at=at)


def delete_orphans(db: sqlite3.Connection) -> None:
    """Delete the wishes whose turns are all gone."""
    gone = "SELECT id FROM wish WHERE NOT EXISTS (SELECT 1 FROM wish_source WHERE wish_source.wish = wish.id)"
    for (wish,) in db.execute(gone).fetchall():
        db.execute("UPDATE wish SET superseded_by = NULL WHERE superseded_by = ?", (wish,))
        db.execute("DELETE FROM wish WHERE id = ?", (wish,))


def _let_newer_win(
    db: sqlite3.Connection, wish: int, text: str, *, user: str, policy: str, prompt: bytes, at: float
) -> None:
    others = db.execute(
        "SELECT id FROM wish WHERE user = ? AND policy = ? AND state IN ('active', 'stopped') AND id <> ?",
        (user, policy, wish),
    )
    for (other,) in others.fetchall():
        sources = db.execute(
            "SELECT wish_source.id, text, prompt FROM wish_source JOIN request ON request.id = turn"
            " WHERE wish = ? AND NOT is_over ORDER BY wish_source.id",
            (other,),
        ).fetchall()
        axis = next((axis for _, said, _ in sources[-1:] if (axis := wish_text.opposed(text, said))), None)
        if axis is not None:
            _end(db, other, WishState.SUPERSEDED, f"wish {wish} asks for the opposite: {axis}", by=wish, at=at)
            continue
        lost = [source for source, _, asked in sources if asked == prompt]
        for source in lost:
            db.execute("UPDATE wish_source SET is_over = 1 WHERE id = ?", (source,))
        if lost and len(lost) == len(sources):
            _end(db, other, WishState.SUPERSEDED, _same_prompt(wish), by=wish, at=at)
    excess = db.execute(
        "SELECT id FROM wish WHERE user = ? AND policy = ? AND state = 'active' ORDER BY id DESC LIMIT -1 OFFSET ?",
        (user, policy, _MOST_ACTIVE),
    )
    for (other,) in excess.fetchall():
        _end(db, other, WishState.SUPERSEDED, f"{_MOST_ACTIVE} newer wishes are practised", by=wish, at=at)


def _renew_prompt(db: sqlite3.Connection, turn: int) -> None:
    """Let the newest wish of other turns hold on this turn's prompt again."""
    db.execute(
        "UPDATE wish_source SET is_over = 0 WHERE id = (SELECT wish_source.id FROM request AS taken"
        " JOIN wish ON wish.user = taken.user AND wish.policy = taken.policy JOIN wish_source ON wish = wish.id"
        " JOIN request ON request.id = turn WHERE taken.id = ? AND turn <> taken.id AND request.prompt = taken.prompt"
        " AND wish.state <> 'removed' ORDER BY wish_source.id DESC LIMIT 1)",
        (turn,),
    )


def _give_back_place(db: sqlite3.Connection, wish: int, *, is_over: bool) -> None:
    """Activate the wishes that this one superseded; if it is not over, those that lost their prompts to it alone."""
    found = db.execute("SELECT state, reason, superseded_by FROM wish WHERE id = ?", (wish,)).fetchone()
    if found["state"] == WishState.SUPERSEDED:
        if is_over:
            db.execute(
                "UPDATE wish SET superseded_by = ?, reason = ? WHERE superseded_by = ?",
                (found["superseded_by"], found["reason"], wish),
            )
        return
    older = db.execute(
        "SELECT id, reason FROM wish WHERE superseded_by = ?"
        " AND EXISTS (SELECT 1 FROM wish_source WHERE wish = wish.id AND NOT is_over)",
        (wish,),
    )
    for other, reason in older.fetchall():
        if is_over or reason == _same_prompt(wish):
            _activate(db, other)


def _same_prompt(wish: int) -> str:
    return f"wish {wish} corrects the same prompt"


def _activate(db: sqlite3.Connection, wish: int) -> None:
    db.execute(
        "UPDATE wish SET state = 'active', reason = NULL, superseded_by = NULL, rests = NULL WHERE id = ?", (wish,)
    )


def _end(db: sqlite3.Connection, wish: int, state: WishState, reason: str, *, at: float, by: int | None = None) -> None:
    """End a wish, and drop the practice of it that waits."""
    db.execute(
        "UPDATE wish SET state = ?, reason = ?, superseded_by = ?, rests = NULL WHERE id = ?",
        (str(state), reason, by, wish),
    )
    waiting = db.execute("SELECT id FROM turn WHERE wish = ? AND state = 'sampled'", (wish,)).fetchall()
    for (turn,) in waiting:
        move(db, turn, TurnState.DROPPED, at=at, reason=DropReason.WISH_OVER, detail=f"wish {wish} is {state}")


def _find(db: sqlite3.Connection, wish_id: int, user: str | None) -> sqlite3.Row:
    found: sqlite3.Row | None = db.execute("SELECT * FROM wish WHERE id = ?", (wish_id,)).fetchone()
    if found is None or user not in (None, found["user"]):
        raise LedgerError(f"no wish {wish_id}")
    return found


def _read(db: sqlite3.Connection, row: sqlite3.Row) -> Wish:
    sources = db.execute(
        "SELECT turn.turn_id, text, source, is_over, (SELECT count(*) FROM turn AS again WHERE again.practice_of ="
        " turn.id AND again.wish = wish_source.wish) FROM wish_source JOIN turn ON turn.id = wish_source.turn"
        " WHERE wish_source.wish = ? ORDER BY wish_source.id",
        (row["id"],),
    )
    marks, dead = in_list(sorted(map(str, DEAD)))
    practised, updates, since = db.execute(
        "SELECT count(*), count(DISTINCT trained_in), min(trained_in) FROM turn JOIN version ON weight_version ="
        f" trained_in WHERE wish = ? AND turn.state = 'trained' AND version.state NOT IN ({marks})",
        (row["id"], *dead),
    ).fetchone()
    return Wish(
        wish_id=row["id"],
        user=row["user"],
        policy=row["policy"],
        created_at=row["created_at"],
        state=WishState(row["state"]),
        sources=tuple(WishSource(turn_id, text, kind, n, bool(is_over)) for turn_id, text, kind, is_over, n in sources),
        reason=row["reason"],
        superseded_by=row["superseded_by"],
        is_general=bool(row["is_general"]),
        rests=row["rests"],
        learned_share=row["learned_share"],
        kl=row["kl"],
        measured_in=row["measured_in"],
        practised=practised,
        updates=updates,
        since=since,
    )
