"""Search of turns, for people: filters, words, and pages of any length; and the make-up of training steps.

A search reads the newest turns first and looks at a bounded number of them, however old the ledger is. An index answers
one condition, and the rows that it gives are looked at for the others. The answer holds the place where the next call
goes on. Words are looked for in the newest message of the request and in the reply.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openclaw_rl.ledger import blobs
from openclaw_rl.ledger.blobs import unpack_ids
from openclaw_rl.ledger.records import TurnSummary, read_summary
from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.ledger.store import LedgerPart, read
from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import own_words
from openclaw_rl.sessions.openclaw import is_ephemeral
from openclaw_rl.types import TurnState

_WAITING = frozenset(TurnState) - {TurnState.TRAINED, TurnState.DROPPED}
_LOOKED_AT, _READ = 4000, 1000
"""Turns that one search looks at, and those whose words it reads: about 0.1 s of one core."""
_SPARE = 100
"""Requests that became no turn, for which a page of one condition has room."""
_NEWEST = 3
"""Messages of a request that are looked at for what it asks: OpenClaw puts context of its own behind a user's."""
_SNIPPET = 200
"""Characters of a message in a list."""

_SUMMARY = (
    "SELECT turn.id, turn_id, request.user, session_id, state, turn.reason, finished_at, prompt_tokens,"
    " response_tokens, oldest_version, is_tool, verdict.value, verdict.source, trained_in, (SELECT of.turn_id FROM"
    " turn AS of WHERE of.id = turn.demonstration_of) AS demonstration_of, practice, (SELECT of.turn_id FROM turn AS of"
    " WHERE of.id = turn.practice_of) AS practice_of, wish, (SELECT feedback.value FROM feedback"
    " WHERE feedback.turn = turn.id AND feedback.value IS NOT NULL ORDER BY feedback.id DESC LIMIT 1)"
    " AS feedback, request.messages, reply.message, near.id AS place FROM ({near}) AS near"
    " LEFT JOIN turn ON turn.id = near.id LEFT JOIN request ON request.id = turn.id"
    " LEFT JOIN reply ON reply.id = turn.id LEFT JOIN verdict ON verdict.id = turn.id"
)


@dataclass(frozen=True, slots=True)
class TurnFilter:
    """Conditions on turns; None: any."""

    state: TurnState | None = None
    session_id: str | None = None
    user: str | None = None
    is_own: bool = False
    """The search goes through no other user's turns: neither its count nor its time tells of them."""
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
        """Return the conditions that an index can answer, by column: the one that finds the fewest turns first."""
        found: dict[str, str | int | None] = {} if not self.is_own else {"request.user": self.user}
        found |= {
            "turn.trained_in": self.trained_in,
            "request.session_id": self.session_id,
            "turn.oldest_version": self.weight_version,
            "request.user": self.user,
            "turn.state": None if self.state is None else str(self.state),
        }
        return {column: value for column, value in found.items() if value is not None}

    @property
    def is_indexed(self) -> bool:
        """True if one index answers all: SQLite reads no turn that is not wanted."""
        others = (self.verdict, self.source, self.is_practice, self.words or None)
        return others == (None,) * 4 and len(self.columns()) <= 1

    def has_words(self, *texts: str) -> bool:
        words = (self.words or "").casefold()
        return not words or any(words in text.casefold() for text in texts)

    def takes(self, row: sqlite3.Row) -> bool:
        """Return True if the conditions hold, but for the words."""
        return (
            row["turn_id"] is not None  # a request that became no turn
            and all(row[column.partition(".")[2]] == value for column, value in self.columns().items())
            and self.verdict in (None, row["value"])
            and self.source in (None, row["source"])
            and self.is_practice in (None, row["practice"] is not None)
        )


@dataclass(frozen=True, slots=True)
class TurnPage:
    """A part of a list of turns, newest first."""

    turns: tuple[TurnSummary, ...]
    next: int | None
    """Place where the list goes on; None: it ends here."""
    looked_at: int
    """Turns that the search went through."""


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
        """Return one line for each turn, newest first. Of two conditions only the newest few thousand are looked at."""
        wanted = TurnFilter(state, session_id, user)
        rows = _rows(db, wanted, None, limit + _LOOKED_AT)
        return [read_summary(row) for row in rows if wanted.takes(row)][:limit]

    @read
    def search(self, db: sqlite3.Connection, wanted: TurnFilter, *, limit: int, before: int | None = None) -> TurnPage:
        """Return turns with the starts of their texts, newest first, from the place `before` on."""
        looked_at = limit + _SPARE if wanted.is_indexed else _READ if wanted.words else _LOOKED_AT
        rows = _rows(db, wanted, before, looked_at)
        kept = [row for row in rows if wanted.takes(row)]
        if not wanted.words:
            kept = kept[: limit + 1]
        found: list[tuple[int, TurnSummary]] = []
        for some in cut(kept, 100):
            for row, (asked, said) in zip(some, _texts(db, some), strict=True):
                if wanted.has_words(asked, said):
                    found.append((row["place"], replace(read_summary(row), asked=_short(asked), said=_short(said))))
            if len(found) > limit:
                break
        if len(found) > limit:
            place: int | None = found[limit - 1][0]
        else:
            place = rows[-1]["place"] if len(rows) == looked_at else None
        passed = sum(place is None or row["place"] >= place for row in rows)
        return TurnPage(tuple(summary for _, summary in found[:limit]), place, passed)

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


def _rows(db: sqlite3.Connection, wanted: TurnFilter, before: int | None, most: int) -> list[sqlite3.Row]:
    """Return the newest rows that fulfil the condition which an index answers, `most` of them."""
    asked = wanted.columns()
    # One index gives the rows in the order asked for, and the limit counts what it gives: a user may have a million
    # turns. Few turns wait, so the state comes first for those; most turns of a user are over.
    first = next(iter(asked), "turn.id")
    if wanted.state in _WAITING and "turn.trained_in" not in asked and not wanted.is_own:
        first = "turn.state"
    table, _, column = first.partition(".")
    where = [f"{column} = ?"] if first in asked else []
    where += [] if before is None else ["id < ?"]
    near = f"SELECT id FROM {table} WHERE {' AND '.join(where) or '1'} ORDER BY id DESC LIMIT ?"
    values = (*([asked[first]] if first in asked else []), *([] if before is None else [before]), most)
    rows = db.execute(_SUMMARY.format(near=near), values).fetchall()
    return sorted(rows, key=lambda row: -int(row["place"]))  # SQLite promises no order of a join


def _texts(db: sqlite3.Connection, rows: Sequence[sqlite3.Row]) -> list[tuple[str, str]]:
    """Return what each request asks, and the reply, as text."""
    newest = [ids[-_NEWEST:] for row in rows for ids in [unpack_ids(row["messages"])]]
    wanted = [piece for ids in newest for piece in ids] + [row["message"] for row in rows]
    messages = iter(blobs.get_messages(db, wanted))
    asked = [_asked([next(messages) for _ in ids]) for ids in newest]
    return list(zip(asked, (message.text() for message in messages), strict=True))


def _asked(newest: Sequence[Message]) -> str:
    """Return the newest message without a client's own context: a user's in the user's own words."""
    shown = [message for message in newest if not is_ephemeral(message)] or newest
    if not shown:
        return ""
    own = own_words(shown[-1]) if shown[-1].role == "user" else ""
    return own or shown[-1].text()


def _short(text: str) -> str:
    return text if len(text) <= _SNIPPET else f"{text[:_SNIPPET]}…"
