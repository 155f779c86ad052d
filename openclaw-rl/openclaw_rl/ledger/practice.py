"""Practice: the prompts that can be answered anew, and the replies that come back as samples.

A practice reply is a turn of its own, with a request that nobody made. A whole update's replies come into the ledger in
one transaction, already `sampled`. From there each is leased, trained, returned and dropped like any sample. It has no
next state, no verdict and no feedback, so nothing of it is ever taken for a user's turn; the audit proves it.

A reply is refused if its prompt, its wish or its version went away while it was sampled.
"""

import sqlite3
from collections.abc import Sequence

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import leases, pictures, policies, schema, versions
from openclaw_rl.ledger.judging import insert_sample
from openclaw_rl.ledger.records import read_request
from openclaw_rl.ledger.schema import in_list
from openclaw_rl.ledger.states import append_event
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.ledger.turns import insert_reply, insert_request
from openclaw_rl.types import (
    SHARED_POLICY,
    DropReason,
    PracticeKind,
    PracticeReply,
    PracticeRoom,
    Request,
    TurnState,
)

_UNANSWERED_PROMPTS = (
    DropReason.NO_NEXT_STATE,
    DropReason.NEUTRAL,
    DropReason.UNJUDGED,
    DropReason.METHOD,
    DropReason.STALE,
    DropReason.ROLLED_BACK,
    DropReason.BACKLOG,
    DropReason.TOO_LONG,
)
"""Reasons of dropped turns whose prompt may be an anchor. Others are no plain turns, or their owner forbids it."""
_TURNS_LOOKED_AT = 400


class Practising(LedgerPart):
    """Reads and writes of the practice loop."""

    @read
    def practice_policies(self, db: sqlite3.Connection) -> list[str]:
        """Return the policies with active wishes, by name."""
        wished = {policy for (policy,) in db.execute("SELECT policy FROM wish WHERE state = 'active'")}
        return [name for name in versions.names(db) if name in wished]

    @read
    def practice_room(self, db: sqlite3.Connection, policy: str = SHARED_POLICY) -> PracticeRoom:
        """Return the state that decides whether practice may go on. It reads a few rows."""
        counted = dict(db.execute("SELECT name, n FROM counter").fetchall())
        (live,) = db.execute("SELECT count(*) FROM lease WHERE state = 'live' AND policy = ?", (policy,)).fetchone()
        (undecided,) = db.execute(
            "SELECT count(*) FROM version WHERE state IN ('candidate', 'gated', 'loading') AND policy = ?", (policy,)
        ).fetchone()
        (wishes,) = db.execute(
            "SELECT count(*) FROM wish WHERE state = 'active' AND rests IS NULL AND policy = ?", (policy,)
        ).fetchone()
        waiting, real = counted.get("practice.sampled", 0), counted.get("sampled", 0)
        if len(versions.names(db)) > 1:
            real, waiting = policies.waiting(db, policy)
        return PracticeRoom(
            tip=versions.tip_of(db, policy),
            serving=versions.serving(db, policy),
            learning=leases.learns(db, policy),
            is_pinned=versions.read_pin(db, policy) is not None,
            running=counted.get("running", 0),
            in_flight=live + undecided,
            waiting=waiting,
            real=real,
            open_wishes=wishes,
        )

    @read
    def practice_request(self, db: sqlite3.Connection, turn_id: str) -> Request | None:
        """Return the request of a turn; None when the turn was forgotten, or no engine can get its pictures."""
        found = db.execute("SELECT id FROM turn WHERE turn_id = ?", (turn_id,)).fetchone()
        request = None if found is None else read_request(db, found["id"])
        if request is None or (request.pictures and not self._shows_pictures):
            return None
        return request if pictures.are_here(db, request.pictures) else None

    @read
    def anchor_turns(self, db: sqlite3.Connection, *, user: str, policy: str, limit: int) -> list[str]:
        """Return turns of a user that nobody corrected, the newest of each session first, then the next newest.

        A turn that answers a correction is none: its prompt holds the wish. Nor is one whose prompt was corrected at
        another time.
        """
        marks, reasons = in_list(sorted(map(str, _UNANSWERED_PROMPTS)))
        rows = db.execute(
            "SELECT turn_id, session_id, prompt, coalesce(value, 0) AS value, state,"
            f" turn.reason IS NULL OR turn.reason IN ({marks}) AS is_plain,"
            " EXISTS (SELECT 1 FROM wish_source WHERE wish_source.turn = turn.id)"
            " OR EXISTS (SELECT 1 FROM wish_source JOIN next_state ON next_state.id = wish_source.turn"
            " WHERE by_request = request.request_id) AS is_corrected,"
            " EXISTS (SELECT 1 FROM feedback WHERE feedback.turn = turn.id AND feedback.value < 0) AS is_blamed"
            " FROM request JOIN turn USING (id) LEFT JOIN verdict USING (id)"
            " WHERE user = ? AND request.policy = ? AND practice IS NULL AND demonstration_of IS NULL"
            " AND (? OR NOT EXISTS (SELECT 1 FROM request_picture WHERE request_picture.request = request.id))"
            " ORDER BY request.id DESC LIMIT ?",
            (*reasons, user, policy, self._shows_pictures, _TURNS_LOOKED_AT),
        ).fetchall()
        asked = "SELECT prompt FROM wish JOIN wish_source ON wish = wish.id JOIN request ON request.id = turn"
        corrected = {prompt for (prompt,) in db.execute(f"{asked} WHERE wish.user = ?", (user,))}
        by_session: dict[str | None, list[str]] = {}
        for row in rows:
            waits = row["state"] in (TurnState.SERVED, TurnState.PAIRED, TurnState.JUDGED)  # it may be corrected yet
            is_fit = row["is_plain"] and not (row["is_corrected"] or row["is_blamed"] or not row["prompt"] or waits)
            if is_fit and row["value"] >= 0 and row["prompt"] not in corrected:
                by_session.setdefault(row["session_id"], []).append(row["turn_id"])
        found: list[str] = []
        for place in range(max(map(len, by_session.values()), default=0)):
            found += [turns[place] for turns in by_session.values() if place < len(turns)]
        return found[:limit]

    @write
    def record_practice(self, db: sqlite3.Connection, replies: Sequence[PracticeReply]) -> int:
        """Write the replies of one update; return the number of replies written, 0 for none.

        None is written while learning is paused, when a version that sampled one is no longer the tip, or without one
        reply that practises a wish. Raises LedgerError for replies of several policies: a batch is of one.
        """
        policies = {reply.request.scope.policy for reply in replies}
        if len(policies) > 1:
            raise LedgerError(f"an update of several policies: {', '.join(sorted(policies))}")
        if not policies or not leases.learns(db, *policies):
            return 0
        at, tip = self._clock(), versions.tip_of(db, *policies)
        clean = [one for reply in replies if (one := self._clean(reply)) is not None and _is_fit(db, one, tip)]
        if not any(reply.kind is PracticeKind.WISH for reply in clean):
            return 0
        batch = schema.get_int(db, "practice_batch") + 1
        schema.put(db, "practice_batch", batch)
        for reply in clean:
            _insert(db, reply, batch, at=at)
        return len(clean)

    def _clean(self, reply: PracticeReply) -> PracticeReply | None:
        """Return the reply if it holds no secret: such a reply is never trained on."""
        turn, request = self._redactor.turn(reply.turn), self._redactor.request(reply.request)
        return reply if turn.drop is None and request.prompt_ids else None


def _is_fit(db: sqlite3.Connection, reply: PracticeReply, tip: int) -> bool:
    if any(run.weight_version != tip for run in reply.turn.versions):
        return False
    if not pictures.are_here(db, reply.request.pictures):
        return False
    if reply.of is not None and not db.execute("SELECT 1 FROM turn WHERE turn_id = ?", (reply.of,)).fetchone():
        return False
    if reply.kind is PracticeKind.ANCHOR:
        return True
    return db.execute("SELECT 1 FROM wish WHERE id = ? AND state = 'active'", (reply.wish_id,)).fetchone() is not None


def _insert(db: sqlite3.Connection, reply: PracticeReply, batch: int, *, at: float) -> None:
    row = insert_request(db, reply.request, prompt_tokens=len(reply.request.prompt_ids), outcome="served")
    turn = reply.turn
    db.execute(
        "INSERT INTO turn (id, turn_id, state, oldest_version, response_tokens, sampled_at, practice, practice_of,"
        " practice_batch, wish, policy)"
        " VALUES (?, ?, 'sampled', ?, ?, ?, ?, (SELECT id FROM turn WHERE turn_id = ?), ?, ?, ?)",
        (
            row,
            turn.turn_id,
            turn.oldest_version,
            len(turn.response_ids),
            at,
            str(reply.kind),
            reply.of,
            batch,
            reply.wish_id,
            reply.request.scope.policy,
        ),
    )
    insert_reply(db, row, turn)
    insert_sample(db, row, reply.sample)
    what = f"practice of wish {reply.wish_id}" if reply.kind is PracticeKind.WISH else "anchor of practice"
    on = "" if reply.of is None else f", on {'a variant of ' * reply.is_variant}{reply.of}"
    append_event(db, row, TurnState.SAMPLED, at=at, detail=what + on)
