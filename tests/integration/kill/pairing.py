"""Whether each reply of which people saw anything has its request, and whether each that they saw end ended as it must:
served by the version its header named, answered by what its
user said next, and judged as that says.

The stub engine says the same to the same prompt, so a request that was sent again after a kill may have left a twin of
the reply the client saw, and either of them may be the one that is paired.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from kill.chats import Seen
from openclaw_rl.ledger.blobs import unpack_ids
from openclaw_rl.testing.ledger_audit import open_read_only, text_of
from openclaw_rl.types import DropReason

_TWINS = """
SELECT twin.id, turn.reason, turn.state, next_state.messages, verdict.value
FROM request AS mine JOIN reply AS seen USING (id)
    JOIN asked AS twin ON twin.messages = mine.messages AND twin.user = mine.user
        AND twin.session_id IS mine.session_id
    JOIN reply ON reply.id = twin.id AND reply.message = seen.message
    JOIN turn ON turn.id = twin.id LEFT JOIN next_state ON next_state.id = twin.id
    LEFT JOIN verdict ON verdict.id = twin.id
WHERE mine.id = (SELECT id FROM turn WHERE turn_id = ?)
"""

_NEVER_OPEN = (DropReason.MISALIGNED, DropReason.NON_FINITE)
"""Turns that nothing can be learned from: a restarted server does not know that they wait for an answer."""


def mispaired(ledger: Path, seen: Sequence[Seen], *, engines_die: bool) -> list[str]:
    """engines_die: the head of a slow stream goes out before its first token. If the engine is killed between the two,
    the reply begins anew under the version of then, and the head names the one before."""
    with closing(open_read_only(ledger)) as db:
        return list(_check(db, seen, engines_die))


def unrecorded(ledger: Path, heard: Mapping[tuple[str | None, str], int]) -> list[str]:
    """A client got something of a reply whose request is not in the ledger. (`heard`: how many, by session and message;
    the same may have been asked often.)"""
    with closing(open_read_only(ledger)) as db:
        asked = Counter(
            (session_id, _last(db, messages))
            for session_id, messages in db.execute("SELECT session_id, messages FROM request")
        )
    return [
        f"{said!r} in {session_id}: {n} replies began, the ledger has {asked[session_id, said]} requests"
        for (session_id, said), n in heard.items()
        if n > asked[session_id, said]
    ]


def _check(db: sqlite3.Connection, seen: Sequence[Seen], engines_die: bool) -> Iterator[str]:
    # The ledger has no index by content: with thousands of replies each would read all requests.
    db.execute("CREATE TEMP TABLE asked AS SELECT id, messages, user, session_id FROM request")
    db.execute("CREATE INDEX temp.asked_by ON asked (messages)")
    for reply in seen:
        (version,) = db.execute("SELECT oldest_version FROM turn WHERE turn_id = ?", (reply.turn_id,)).fetchone()
        named = reply.weight_version
        if named not in (version, None) and not (engines_die and named < version):
            yield f"{reply.turn_id}: the header said version {named}, the ledger says {version}"
        if reply.said_next is None:
            continue
        twins = db.execute(_TWINS, (reply.turn_id,)).fetchall()
        paired = [twin for twin in twins if twin["messages"] is not None]
        answers = {_last(db, twin["messages"]) for twin in paired}
        if not paired and all(twin["reason"] in _NEVER_OPEN for twin in twins):
            continue  # the server was killed before the answer came, and does not wait for it any more
        if answers != {reply.said_next}:
            yield f"{reply.turn_id} ({len(twins)} twins) was answered {reply.said_next!r}, the ledger says {answers}"
        for twin in paired:
            if twin["value"] not in (None, reply.verdict) or (twin["value"] is None and twin["reason"] is None):
                yield f"{reply.turn_id}: {reply.said_next!r} was judged {twin['value']}, the turn is {twin['state']}"


def _last(db: sqlite3.Connection, messages: bytes) -> str:
    ids = unpack_ids(messages)
    (data,) = db.execute("SELECT data FROM piece WHERE id = ?", (ids[-1],)).fetchone()
    return text_of(data)
