"""Search of turns, for people: filters, words, and pages of any length; and the make-up of training steps.

A search reads the newest turns first and looks at a bounded number of them, however old the ledger is. Its answer holds
the place where the next call goes on. Words are looked for in the newest message of the request and in the reply.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openclaw_rl.ledger import blobs
from openclaw_rl.ledger.blobs import unpack_ids
from openclaw_rl.ledger.records import TurnSummary, read_summary
from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.ledger.store import LedgerPart, read
from openclaw_rl.types import TurnState

_WAITING = frozenset(TurnState) - {TurnState.TRAINED, TurnState.DROPPED}
_LOOKED_AT, _READ = 4000, 1000
"""Turns that one search looks at, and those whose words it reads: about 0.1 s of one core."""
_SNIPPET = 200
"""Characters of a message in a list."""

_SUMMARY = (
    "SELECT turn.id, turn_id, request.user, session_id, state, turn.reason, finished_at, prompt_tokens,"
    " response_tokens, oldest_version, is_tool, verdict.value, verdict.source, trained_in, (SELECT of.turn_id FROM"
    " turn AS of WHERE of.id = turn.demonstration_of) AS demonstration_of, practice, (SELECT of.turn_id FROM turn AS of"
    " WHERE of.id = turn.practice_of) AS practice_of, wish, (SELECT feedback.value FROM feedback"
    " WHERE feedback.turn = turn.id AND feedback.value IS NOT NULL ORDER BY feedback.id DESC LIMIT 1)"
    " AS feedback, request.messages, reply.message FROM turn JOIN request USING (id) JOIN reply USING (id)"
    " LEFT JOIN verdict USING (id)"
)


@dataclass(frozen=True, slots=True)
class TurnFilter:
    """Conditions on turns; None: any."""

    state: TurnState | None = None
    session_id: str | None = None
    user: str | None = None
    weight_version: int | None = None
    """Oldest version that sampled the reply."""
    trained_in: int | None = None
    verdict: int | None = None
    source: str | None = None
    """Source of the verdict: `rules`, `llm` or `feedback`."""
    is_practice: bool | None = None
    words: str | None = None
    """Text that the newest message of the request, or the reply, contains in any case of letters."""

    def columns(self) -> dict[str, str | int]:
        """Return the conditions that an index answers, by column."""
        found = {
            "turn.trained_in": self.trained_in,
            "request.session_id": self.session_id,
            "request.user": self.user,
            "turn.oldest_version": self.weight_version,
            "turn.state": None if self.state is None else str(self.state),
        }
        return {column: value for column, value in found.items() if value is not None}

    @property
    def is_indexed(self) -> bool:
        """True if SQLite reads no row that is not wanted."""
        return (self.verdict, self.source, self.is_practice, self.words or None) == (None,) * 4

    def has_words(self, *texts: str) -> bool:
        words = (self.words or "").casefold()
        return not words or any(words in text.casefold() for text in texts)

    def takes(self, row: sqlite3.Row) -> bool:
        """Return True if the other conditions hold, but for the words."""
        return (
            self.verdict in (None, row["value"])
            and self.source in (None, row["source"])
            and self.is_practice in (None, row["practice"] is not None)
        )


@dataclass(frozen=True, slots=True)
class TurnPage:
    """A part of a list of turns, newest first."""

    turns: tuple[TurnSummary, ...]
    next: int | None
    """Place where the list goes on; None: it ends here."""


@dataclass(frozen=True, slots=True)
class StepMakeup:
    """Samples that one version was trained on."""

    weight_version: int
    samples: int
    practice: int
    """Practice replies among them."""
    lag: float
    """Mean number of versions between the one that sampled the reply and the one that the step began from."""


class Searching(LedgerPart):
    """Lists of turns by their properties, and of steps by their samples."""

    @read
    def turns(
        self,
        db: sqlite3.Connection,
        *,
        limit: int = 50,
        state: TurnState | None = None,
        session_id: str | None = None,
        user: str | None = None,
    ) -> list[TurnSummary]:
        """Return one line for each turn, newest first."""
        return [read_summary(row) for row in _rows(db, TurnFilter(state, session_id, user), None, limit)]

    @read
    def search(self, db: sqlite3.Connection, wanted: TurnFilter, *, limit: int, before: int | None = None) -> TurnPage:
        """Return turns with the starts of their texts, newest first, from the place `before` on."""
        looked_at = limit if wanted.is_indexed else _READ if wanted.words else _LOOKED_AT
        rows = _rows(db, wanted, before, looked_at)
        kept = [row for row in rows if wanted.takes(row)]
        if not wanted.words:
            kept = kept[: limit + 1]
        found: list[tuple[int, TurnSummary]] = []
        for some in cut(kept, 100):
            for row, (asked, said) in zip(some, _texts(db, some), strict=True):
                if wanted.has_words(asked, said):
                    found.append((row["id"], replace(read_summary(row), asked=_short(asked), said=_short(said))))
            if len(found) > limit:
                break
        if len(found) > limit:
            place: int | None = found[limit - 1][0]
        else:
            place = rows[-1]["id"] if len(rows) == looked_at else None
        return TurnPage(tuple(summary for _, summary in found[:limit]), place)

    @read
    def step_makeup(self, db: sqlite3.Connection, versions: Sequence[int]) -> list[StepMakeup]:
        """Return the make-up of the steps that made these versions; none for a version without samples."""
        found = []
        for some in cut(versions):
            marks, values = in_list(some)
            rows = db.execute(
                "SELECT trained_in, count(*), count(practice), avg(parent - oldest_version) FROM turn"
                f" JOIN version ON weight_version = trained_in WHERE trained_in IN ({marks}) GROUP BY trained_in",
                values,
            )
            found += [StepMakeup(number, n, practice, lag or 0.0) for number, n, practice, lag in rows]
        return found


def _rows(db: sqlite3.Connection, wanted: TurnFilter, before: int | None, limit: int) -> list[sqlite3.Row]:
    """Return the newest rows that fulfil the conditions which an index answers."""
    asked = wanted.columns()
    # One index gives the rows in the order asked for (`+` keeps SQLite off the others), without a sort: a user may have
    # a million turns. Few turns wait, so the state comes first for those; most turns of a user are over.
    first = next(iter(asked), "")
    if wanted.state in _WAITING and "turn.trained_in" not in asked:
        first = "turn.state"
    newest = "request.id" if first.startswith("request") else "turn.id"
    where = [f"{'' if column == first else '+'}{column} = ?" for column in asked]
    where += [] if before is None else [f"{newest} < ?"]
    return db.execute(
        f"{_SUMMARY} WHERE {' AND '.join(where) or '1'} ORDER BY {newest} DESC LIMIT ?",
        (*asked.values(), *([] if before is None else [before]), limit),
    ).fetchall()


def _texts(db: sqlite3.Connection, rows: Sequence[sqlite3.Row]) -> list[tuple[str, str]]:
    """Return the newest message of each request and the reply, as text."""
    asked = [ids[-1:] for row in rows for ids in [unpack_ids(row["messages"])]]
    wanted = [piece for ids in asked for piece in ids] + [row["message"] for row in rows]
    texts = iter(message.text() for message in blobs.get_messages(db, wanted))
    said = [next(texts) if ids else "" for ids in asked]
    return list(zip(said, texts, strict=True))


def _short(text: str) -> str:
    return text if len(text) <= _SNIPPET else f"{text[:_SNIPPET]}…"
