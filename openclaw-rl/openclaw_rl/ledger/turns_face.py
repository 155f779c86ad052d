"""A turn's way through the ledger: begun, finished, paired, judged, scored, rated."""

import sqlite3
from collections.abc import Collection

from openclaw_rl.ledger import feedback, judging, reports, serving
from openclaw_rl.ledger.face import CHAT_TIMEOUT_S, Face
from openclaw_rl.ledger.records import FeedbackOutcome, FeedbackTarget
from openclaw_rl.types import (
    DropReason,
    Feedback,
    Ids,
    JudgedTurn,
    NextState,
    OpenTurn,
    Request,
    Sample,
    SideCount,
    Turn,
    TurnKey,
    TurnState,
    Verdict,
)


class TurnsFace(Face):
    """From a request to a sample."""

    # Serving

    async def begin(self, request: Request) -> None:
        """Committed, without an fsync: the first token waits for it, and a power cut that takes it takes the unfinished
        reply as well. (`kill -9` takes nothing.)"""
        await self._writer.write(
            lambda db: serving.begin(db, self._masks.request(request), prompt_tokens=len(request.prompt_ids)),
            timeout_s=CHAT_TIMEOUT_S,
            is_synced=False,
        )

    async def finish(self, turn: Turn, key: TurnKey) -> DropReason | None:
        """On disk before the finish chunk is sent: SERVED, or DROPPED with `turn.drop`, or as `redacted`. Returns the
        reason."""
        return await self._chat(lambda db: serving.finish(db, self._masks.turn(turn), key, at=self._clock()))

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None:
        """No turn came of this request."""
        await self._chat(lambda db: serving.abandon(db, request_id, reason, self._masks.text(detail)))

    async def count_side(self, side: SideCount) -> None:
        await self._chat(lambda db: serving.count_side(db, side))

    # Pairing

    async def open_turns(self, limit: int) -> list[OpenTurn]:
        """Turns that wait for a next state: the newest `limit`, newest last."""
        return await self._reader.read(lambda db: serving.open_turns(db, limit))

    async def pair(
        self, turn_id: str, next_state: NextState, *, by_request_id: str, superseded: Collection[str] = ()
    ) -> None:
        """SERVED → PAIRED, and its `superseded` retries → DROPPED, in one. A turn that was dropped stays so; its next
        state is kept for the record. Without an fsync, as `begin`: a power cut leaves the turns open."""
        await self._writer.write(
            lambda db: serving.pair(
                db, turn_id, self._masks.next_state(next_state), by_request_id, superseded, at=self._clock()
            ),
            timeout_s=CHAT_TIMEOUT_S,
            is_synced=False,
        )

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: int | None = None
    ) -> None:
        """From any state before LEASED. Not done when the user said more of the turn than the `seen_feedback` pieces
        that the caller knew, nor for want of an answer when the user said something instead."""
        await self._chat(
            lambda db: serving.drop(db, turn_id, reason, detail, at=self._clock(), seen_feedback=seen_feedback)
        )

    async def expire(self, older_than: float) -> list[str]:
        """SERVED turns that finished before → NO_NEXT_STATE; their ids."""
        expired: list[str] = []
        while some := await self._writer.write(lambda db: serving.expire(db, older_than, at=self._clock())):
            expired += some
        return expired

    # Judging and scoring

    async def to_judge(self, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """PAIRED turns, oldest first, less those somebody works on."""
        return await self._reader.read(lambda db: judging.in_state(db, TurnState.PAIRED, limit, skip))

    async def record_verdict(self, turn_id: str, verdict: Verdict | None) -> None:
        """PAIRED → JUDGED, whatever the verdict; None: the judge was asked, and could not say. Nothing when the user
        rated the turn meanwhile."""
        await self._writer.write(
            lambda db: judging.record_verdict(db, turn_id, self._masks.verdict(verdict), at=self._clock())
        )

    async def to_score(self, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """JUDGED turns, oldest first, less those somebody works on."""
        return await self._reader.read(lambda db: judging.in_state(db, TurnState.JUDGED, limit, skip))

    async def record_sample(self, sample: Sample, *, seen_feedback: int | None = None) -> None:
        """JUDGED → SAMPLED: it waits for a trainer. Not done when the user said more of the turn than the
        `seen_feedback` pieces it was scored with: it stays JUDGED, to be scored again."""
        await self._writer.write(
            lambda db: judging.record_sample(
                db, self._masks.sample(sample), seen_feedback=seen_feedback, at=self._clock()
            )
        )

    async def shed(self, state: TurnState, keep: int) -> int:
        """End the oldest turns of `state` beyond `keep` as BACKLOG; how many."""
        if (await self._reader.read(reports.counts)).get(state, 0) <= keep:
            return 0
        total = 0
        while some := await self._writer.write(lambda db: judging.shed(db, state, keep, at=self._clock())):
            total += some
        return total

    # Feedback

    async def feedback_target(
        self, *, user: str, turn_id: str | None = None, session_id: str | None = None
    ) -> FeedbackTarget | None:
        """The turn of that id, or the newest of that session: None when this user has none."""
        return await self._reader.read(
            lambda db: feedback.target(db, user=user, turn_id=turn_id, session_id=session_id)
        )

    async def record_feedback(self, said: Feedback, *, user: str, demonstration: Ids | None = None) -> FeedbackOutcome:
        """What the user says of a turn; it wins over the judge. `demonstration`: the tokens of `said.demonstration` as
        a reply, its end included; without them nothing is trained on it. The same feedback_id again changes nothing.
        Raises FeedbackReused."""

        def record(db: sqlite3.Connection) -> FeedbackOutcome:
            kept = self._masks.feedback(said)
            ids = demonstration if kept.demonstration == said.demonstration else None
            return feedback.record(db, kept, user=user, demonstration=ids, at=self._clock())

        return await self._writer.write(record)
