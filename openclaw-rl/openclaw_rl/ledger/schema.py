"""Tables of the ledger, the migration of older files, and access to the table of single values.

A change of schema is a new entry at the end of `MIGRATIONS`; released entries never change. `PRAGMA user_version`
counts the entries that a file has had. The tables:

* `turn` is small and hot (its state changes six times). Large data that is written once is in `request`, `reply`,
  `next_state` and `sample`. All five share one integer id, the request's.
* `piece` holds contents once, by digest: messages, tools, sampling parameters, 512-token parts of prompts. Other tables
  refer to a piece by its id.
* `open_turn` holds only the keys of turns that wait for a next state. It stays small in a ledger of any size.
* `event` has every change of a turn's state. Triggers keep `counter` in the same transaction, so that a count reads one
  row.
* `feedback` has the feedback of users and its effect. A demonstration is a turn of its own (`demonstration_of`): it is
  leased, trained and counted like any other.
* `wish` has what users asked for in words, and `wish_source` the turns that they corrected with it. A practice reply is
  a turn of its own too (`practice`, its kind): it is leased and trained like any other, and counted apart.
* `episode` has the registered runs of agents, `episode_group` those that are compared with each other, and `eval_task`
  the tasks that evaluate. `turn.of_episode` and `request.in_episode` name the episode; `credit` has the reward and the
  advantage that a closed group gave to a step.
* `picture` names the pictures of prompts, whose files are beside the ledger (`ledger.pictures`), and `request_picture`
  those of each request.
* `lease_sample` keeps for ever which lease trained which turn. The audit reads from it that no turn was trained twice
  in any ancestry.
* `meta` has the single values: the owner's identity, the tip, the newest fence, the pin, the switches.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import TypeVar

from openclaw_rl.errors import LedgerMismatch
from openclaw_rl.types import SHARED_POLICY

_V1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE counter (name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE piece (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, data BLOB NOT NULL);

CREATE TABLE request (
    id INTEGER PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    policy TEXT NOT NULL, user TEXT NOT NULL, session_id TEXT,
    received_at REAL NOT NULL,
    outcome TEXT NOT NULL DEFAULT 'running' CHECK (outcome IN ('running', 'served', 'abandoned')),
    reason TEXT, detail TEXT,
    episode TEXT, task TEXT, step INTEGER,
    sampling INTEGER NOT NULL REFERENCES piece, tools INTEGER REFERENCES piece,
    template_kwargs INTEGER REFERENCES piece,
    prompt_tokens INTEGER NOT NULL, prompt BLOB NOT NULL, messages BLOB NOT NULL
);
CREATE INDEX request_running ON request (id) WHERE outcome = 'running';
CREATE INDEX request_session ON request (session_id, id) WHERE session_id IS NOT NULL;
CREATE INDEX request_user ON request (user, id);

CREATE TABLE turn (
    id INTEGER PRIMARY KEY REFERENCES request,
    turn_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL, reason TEXT,
    oldest_version INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL,
    is_tool INTEGER NOT NULL DEFAULT 0, sampled_at REAL,
    trained_in INTEGER REFERENCES version,
    CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    CHECK ((state = 'trained') = (trained_in IS NOT NULL))
);
CREATE INDEX turn_state ON turn (state, id);
CREATE INDEX turn_waiting ON turn (is_tool, sampled_at, id) WHERE state = 'sampled';
CREATE INDEX turn_version ON turn (oldest_version, id);
CREATE INDEX turn_trained ON turn (trained_in) WHERE trained_in IS NOT NULL;

CREATE TABLE reply (
    id INTEGER PRIMARY KEY REFERENCES turn,
    finished_at REAL NOT NULL, finish_reason TEXT NOT NULL, cached_tokens INTEGER NOT NULL,
    message INTEGER NOT NULL REFERENCES piece,
    ids BLOB NOT NULL, log_probs BLOB NOT NULL, mask BLOB, versions BLOB NOT NULL
);
CREATE TABLE open_turn (
    id INTEGER PRIMARY KEY REFERENCES turn,
    finished_at REAL NOT NULL, reply_hash TEXT NOT NULL, before_hash TEXT NOT NULL, history_hash TEXT NOT NULL
);
CREATE INDEX open_turn_age ON open_turn (finished_at);
CREATE TABLE next_state (
    id INTEGER PRIMARY KEY REFERENCES turn,
    by_request TEXT NOT NULL, messages BLOB NOT NULL, reactions TEXT
);
CREATE TABLE verdict (
    id INTEGER PRIMARY KEY REFERENCES turn,
    value INTEGER NOT NULL CHECK (value IN (-1, 0, 1)), votes TEXT NOT NULL,
    source TEXT NOT NULL, rationale TEXT NOT NULL
);
CREATE TABLE sample (
    id INTEGER PRIMARY KEY REFERENCES turn,
    temperature REAL NOT NULL, reward REAL, scored_version INTEGER, extra TEXT,
    teacher_log_probs BLOB, student_log_probs BLOB,
    -- NULL where the sample has what the turn has
    prompt BLOB, ids BLOB, log_probs BLOB, mask BLOB, versions BLOB
);
CREATE TABLE event (
    turn INTEGER NOT NULL REFERENCES turn, n INTEGER NOT NULL, at REAL NOT NULL, state TEXT NOT NULL, detail TEXT,
    PRIMARY KEY (turn, n)
) WITHOUT ROWID;

CREATE TABLE version (
    weight_version INTEGER PRIMARY KEY,
    policy TEXT NOT NULL DEFAULT 'policy',
    parent INTEGER REFERENCES version, depth INTEGER NOT NULL, same_weights_as INTEGER REFERENCES version,
    kind TEXT NOT NULL, base_hash TEXT NOT NULL, folder TEXT, sha256 TEXT, weights_file TEXT,
    state TEXT NOT NULL, lease_id TEXT UNIQUE REFERENCES lease,
    durable INTEGER NOT NULL, has_optimizer INTEGER NOT NULL DEFAULT 1,
    committed_at REAL NOT NULL, reason TEXT, metrics TEXT NOT NULL DEFAULT '{}', probes BLOB
);
CREATE UNIQUE INDEX version_serving ON version (policy) WHERE state = 'serving';
CREATE TABLE lease (
    lease_id TEXT PRIMARY KEY,
    policy TEXT NOT NULL DEFAULT 'policy',
    fence INTEGER NOT NULL UNIQUE, trainer TEXT NOT NULL, parent INTEGER NOT NULL REFERENCES version,
    state TEXT NOT NULL CHECK (state IN ('live', 'committed', 'released', 'expired', 'revoked')), reason TEXT,
    granted_at REAL NOT NULL, expires_at REAL NOT NULL, ended_at REAL
) WITHOUT ROWID;
CREATE UNIQUE INDEX lease_live ON lease (policy) WHERE state = 'live';
CREATE TABLE lease_sample (
    fence INTEGER NOT NULL, turn INTEGER NOT NULL REFERENCES turn,
    outcome TEXT NOT NULL DEFAULT 'leased' CHECK (outcome IN ('leased', 'trained', 'returned', 'dropped')),
    PRIMARY KEY (fence, turn)
) WITHOUT ROWID;
CREATE INDEX lease_sample_turn ON lease_sample (turn);

CREATE TABLE side (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, user TEXT NOT NULL, session_id TEXT, kind TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, status INTEGER NOT NULL
);

CREATE TRIGGER turn_counted AFTER INSERT ON turn BEGIN
    INSERT INTO counter VALUES (CASE WHEN NEW.reason IS NULL THEN NEW.state ELSE 'dropped.' || NEW.reason END, 1)
        ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER turn_recounted AFTER UPDATE OF state ON turn BEGIN
    UPDATE counter SET n = n - 1
        WHERE name = CASE WHEN OLD.reason IS NULL THEN OLD.state ELSE 'dropped.' || OLD.reason END;
    INSERT INTO counter VALUES (CASE WHEN NEW.reason IS NULL THEN NEW.state ELSE 'dropped.' || NEW.reason END, 1)
        ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER request_counted AFTER INSERT ON request BEGIN
    INSERT INTO counter VALUES ('requests', 1) ON CONFLICT DO UPDATE SET n = n + 1;
    INSERT INTO counter VALUES ('running', 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER request_recounted AFTER UPDATE OF outcome ON request BEGIN
    UPDATE counter SET n = n - 1 WHERE name = 'running';
    INSERT INTO counter SELECT 'abandoned.' || NEW.reason, 1 WHERE NEW.outcome = 'abandoned'
        ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER side_counted AFTER INSERT ON side BEGIN
    INSERT INTO counter VALUES ('side.' || NEW.kind, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
"""

_V2 = """
CREATE TABLE feedback (
    id INTEGER PRIMARY KEY,
    turn INTEGER NOT NULL REFERENCES turn,
    user TEXT NOT NULL, feedback_id TEXT NOT NULL, at REAL NOT NULL,
    value REAL CHECK (value BETWEEN -1 AND 1), comment TEXT, demonstration TEXT,
    effect TEXT NOT NULL CHECK (effect IN ('judged', 'rescored', 'late', 'recorded')),
    UNIQUE (user, feedback_id)
);
CREATE INDEX feedback_turn ON feedback (turn);
CREATE TRIGGER feedback_counted AFTER INSERT ON feedback BEGIN
    INSERT INTO counter VALUES ('feedback.' || NEW.effect, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER feedback_recounted AFTER UPDATE OF effect ON feedback BEGIN
    UPDATE counter SET n = n - 1 WHERE name = 'feedback.' || OLD.effect;
    INSERT INTO counter VALUES ('feedback.' || NEW.effect, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;

ALTER TABLE turn ADD COLUMN demonstration_of INTEGER REFERENCES turn;
CREATE INDEX turn_demonstration ON turn (demonstration_of) WHERE demonstration_of IS NOT NULL;
ALTER TABLE sample ADD COLUMN is_demonstration INTEGER NOT NULL DEFAULT 0;
-- A demonstration brings a request row that nobody asked: it is not counted.
DROP TRIGGER request_counted;
CREATE TRIGGER request_counted AFTER INSERT ON request WHEN NEW.outcome = 'running' BEGIN
    INSERT INTO counter VALUES ('requests', 1) ON CONFLICT DO UPDATE SET n = n + 1;
    INSERT INTO counter VALUES ('running', 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
"""

_V3 = """
-- Versions grow with the turns. The few that are asked for all the time are found without reading the others.
CREATE INDEX version_unfinished ON version (weight_version) WHERE state IN ('candidate', 'gated', 'loading');
CREATE INDEX version_folder ON version (folder, weight_version) WHERE folder IS NOT NULL;
"""

_V4 = """
CREATE TABLE wish (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- a number never comes again: people name wishes by it
    policy TEXT NOT NULL, user TEXT NOT NULL, key TEXT NOT NULL, created_at REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'superseded', 'removed', 'stopped')), reason TEXT,
    superseded_by INTEGER REFERENCES wish,
    is_general INTEGER NOT NULL DEFAULT 0,
    rests TEXT, learned_share REAL, kl REAL, measured_in INTEGER REFERENCES version,
    CHECK ((state = 'active') = (reason IS NULL)),
    CHECK (superseded_by IS NULL OR state = 'superseded')
);
CREATE INDEX wish_user ON wish (user, id);
CREATE INDEX wish_key ON wish (user, key, id);
CREATE INDEX wish_active ON wish (id) WHERE state = 'active';
CREATE TABLE wish_source (
    id INTEGER PRIMARY KEY,
    wish INTEGER NOT NULL REFERENCES wish, turn INTEGER NOT NULL REFERENCES turn,
    text TEXT NOT NULL, source TEXT NOT NULL, is_over INTEGER NOT NULL DEFAULT 0,
    UNIQUE (wish, turn)
);
CREATE INDEX wish_source_turn ON wish_source (turn);
CREATE INDEX wish_source_wish ON wish_source (wish, id);

ALTER TABLE turn ADD COLUMN practice TEXT CHECK (practice IN ('wish', 'anchor'));
ALTER TABLE turn ADD COLUMN practice_of INTEGER REFERENCES turn;
ALTER TABLE turn ADD COLUMN practice_batch INTEGER;
ALTER TABLE turn ADD COLUMN wish INTEGER REFERENCES wish;
CREATE INDEX turn_practice_of ON turn (practice_of) WHERE practice_of IS NOT NULL;
CREATE INDEX turn_wish ON turn (wish) WHERE wish IS NOT NULL;
-- Practice waits in a line of its own, behind the users' samples.
DROP INDEX turn_waiting;
CREATE INDEX turn_waiting ON turn (is_tool, sampled_at, id) WHERE state = 'sampled' AND practice IS NULL;
CREATE INDEX turn_practice_waiting ON turn (practice_batch, id) WHERE state = 'sampled' AND practice IS NOT NULL;

DROP TRIGGER turn_counted;
CREATE TRIGGER turn_counted AFTER INSERT ON turn BEGIN
    INSERT INTO counter VALUES (iif(NEW.practice IS NULL, '', 'practice.') || CASE WHEN NEW.reason IS NULL THEN
        NEW.state ELSE 'dropped.' || NEW.reason END, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
DROP TRIGGER turn_recounted;
CREATE TRIGGER turn_recounted AFTER UPDATE OF state ON turn BEGIN
    UPDATE counter SET n = n - 1 WHERE name = iif(OLD.practice IS NULL, '', 'practice.') || CASE WHEN OLD.reason IS NULL
        THEN OLD.state ELSE 'dropped.' || OLD.reason END;
    INSERT INTO counter VALUES (iif(NEW.practice IS NULL, '', 'practice.') || CASE WHEN NEW.reason IS NULL THEN
        NEW.state ELSE 'dropped.' || NEW.reason END, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
"""

_V5 = """
-- What else is known of the messages before the reply, as JSON: digests for clients that change these messages.
ALTER TABLE open_turn ADD COLUMN place TEXT NOT NULL DEFAULT '{}';
"""

_V6 = """
CREATE TABLE episode_group (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    policy TEXT NOT NULL, user TEXT NOT NULL, name TEXT NOT NULL, is_named INTEGER NOT NULL,
    task TEXT NOT NULL, split TEXT NOT NULL CHECK (split IN ('train', 'eval')),
    size INTEGER NOT NULL CHECK (size >= 1),
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closed', 'scored')),
    opened_at REAL NOT NULL,
    UNIQUE (user, name)
);
CREATE INDEX episode_group_unscored ON episode_group (id) WHERE state <> 'scored';
CREATE INDEX episode_group_of_one ON episode_group (id) WHERE size = 1 AND split = 'train' AND state = 'scored';
CREATE TABLE episode (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    grp INTEGER NOT NULL REFERENCES episode_group, user TEXT NOT NULL, episode_id TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'ended', 'aborted', 'expired')),
    opened_at REAL NOT NULL, ended_at REAL,
    reward REAL CHECK (reward BETWEEN -1 AND 1), truncated INTEGER, metrics TEXT, reason TEXT,
    has_successor INTEGER NOT NULL DEFAULT 0,
    UNIQUE (user, episode_id),
    CHECK ((state = 'ended') = (reward IS NOT NULL))
);
CREATE INDEX episode_running ON episode (id) WHERE state = 'running';
CREATE INDEX episode_by_id ON episode (episode_id, id);
CREATE INDEX episode_user ON episode (user, id);
CREATE INDEX episode_of_group ON episode (grp, id);
CREATE TABLE eval_task (
    policy TEXT NOT NULL, task TEXT NOT NULL, user TEXT NOT NULL, PRIMARY KEY (policy, task, user)
) WITHOUT ROWID;
CREATE TABLE credit (id INTEGER PRIMARY KEY REFERENCES turn, reward REAL NOT NULL, advantage REAL);

ALTER TABLE request ADD COLUMN in_episode INTEGER REFERENCES episode;
CREATE INDEX request_in_episode ON request (in_episode, id) WHERE in_episode IS NOT NULL;
ALTER TABLE turn ADD COLUMN of_episode INTEGER REFERENCES episode;
CREATE INDEX turn_of_episode ON turn (of_episode, id) WHERE of_episode IS NOT NULL;
CREATE INDEX turn_episode_waiting ON turn (of_episode, id) WHERE state = 'sampled' AND of_episode IS NOT NULL;
-- Steps wait in lines of their own: for the credit of their group, and in whole groups for the trainer.
CREATE INDEX turn_to_score ON turn (id) WHERE state = 'judged' AND of_episode IS NULL;
DROP INDEX turn_waiting;
CREATE INDEX turn_waiting ON turn (is_tool, sampled_at, id)
    WHERE state = 'sampled' AND practice IS NULL AND of_episode IS NULL;

CREATE TRIGGER episode_counted AFTER INSERT ON episode BEGIN
    INSERT INTO counter VALUES ('episodes.' || NEW.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER episode_recounted AFTER UPDATE OF state ON episode BEGIN
    UPDATE counter SET n = n - 1 WHERE name = 'episodes.' || OLD.state;
    INSERT INTO counter VALUES ('episodes.' || NEW.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER episode_uncounted AFTER DELETE ON episode BEGIN
    UPDATE counter SET n = n - 1 WHERE name = 'episodes.' || OLD.state;
END;
CREATE TRIGGER group_counted AFTER INSERT ON episode_group BEGIN
    INSERT INTO counter VALUES ('groups.' || NEW.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER group_recounted AFTER UPDATE OF state ON episode_group BEGIN
    UPDATE counter SET n = n - 1 WHERE name = 'groups.' || OLD.state;
    INSERT INTO counter VALUES ('groups.' || NEW.state, 1) ON CONFLICT DO UPDATE SET n = n + 1;
END;
CREATE TRIGGER group_uncounted AFTER DELETE ON episode_group BEGIN
    UPDATE counter SET n = n - 1 WHERE name = 'groups.' || OLD.state;
END;
"""

_V7 = """
-- A policy is a lineage of versions, from a root of its own to its tip. Batches are of one policy.
ALTER TABLE turn ADD COLUMN policy TEXT NOT NULL DEFAULT 'policy';
-- A user's own turns, newest first. The shared policy's are found by their number alone.
CREATE INDEX turn_policy ON turn (policy, id) WHERE policy <> 'policy';
CREATE INDEX version_policy ON version (policy, weight_version);
CREATE INDEX version_root ON version (policy) WHERE parent IS NULL;
DROP INDEX turn_waiting;
CREATE INDEX turn_waiting ON turn (policy, is_tool, sampled_at, id)
    WHERE state = 'sampled' AND practice IS NULL AND of_episode IS NULL;
DROP INDEX turn_practice_waiting;
CREATE INDEX turn_practice_waiting ON turn (policy, practice_batch, id)
    WHERE state = 'sampled' AND practice IS NOT NULL;
"""

_V8 = """
CREATE TABLE picture (
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, width INTEGER NOT NULL, height INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE TABLE request_picture (
    request INTEGER NOT NULL REFERENCES request, n INTEGER NOT NULL, picture INTEGER NOT NULL REFERENCES picture,
    PRIMARY KEY (request, n)
) WITHOUT ROWID;
CREATE INDEX request_picture_of ON request_picture (picture);
"""

MIGRATIONS: tuple[str, ...] = (_V1, _V2, _V3, _V4, _V5, _V6, _V7, _V8)
"""Scripts; entry i takes a file from `user_version` i to i + 1."""


def migrate(db: sqlite3.Connection, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Migrate the file, one transaction a step. Raises LedgerMismatch for a file that a newer program wrote."""
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found > len(migrations):
        raise LedgerMismatch(
            f"this ledger has schema {found}, and this program knows schemas up to {len(migrations)}:"
            " a newer openclaw-rl wrote it"
        )
    for version, script in enumerate(migrations[found:], start=found + 1):
        try:
            db.executescript(f"BEGIN IMMEDIATE;\n{script};\nPRAGMA user_version = {version};\nCOMMIT;")
        except sqlite3.Error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def get_text(db: sqlite3.Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None or row[0] is None else str(row[0])


def get_int(db: sqlite3.Connection, key: str, default: int = 0) -> int:
    found = get_text(db, key)
    return default if found is None else int(found)


def of_policy(name: str, policy: str) -> str:
    """Return the key of a policy's own single value: its tip, its pin, its rejections in a row."""
    return name if policy == SHARED_POLICY else f"{name} of {policy}"


def put(db: sqlite3.Connection, key: str, value: str | int | None) -> None:
    db.execute("REPLACE INTO meta VALUES (?, ?)", (key, value))


T = TypeVar("T")


def in_list(values: Sequence[T]) -> tuple[str, list[T]]:
    """Return the marks between the brackets of `IN (?, ?, …)`, and the values to bind. There is at least one value."""
    # Each connection keeps the 256 statements that it prepared last, by their text, and one with 500 marks takes 60 kB.
    # With a wording for each number of values they would fill, over days, 18 MB a connection. So the values are filled
    # up with the last of them to a power of two, which changes no result.
    size = 1 << (len(values) - 1).bit_length()
    return ",".join("?" * size), [*values, *[values[-1]] * (size - len(values))]


def cut(values: Sequence[T], size: int = 500) -> Iterator[Sequence[T]]:
    """Yield the values in parts that one statement takes (SQLite's own bound is 999 in old versions)."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
