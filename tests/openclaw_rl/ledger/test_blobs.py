"""Pieces are found by any number of ids, with few different SQL statements."""

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from openclaw_rl.ledger import blobs
from openclaw_rl.ledger.schema import in_list, migrate
from openclaw_rl.messages import Message


class Recording(blobs.Connection):
    """Notes the texts that it is asked to prepare."""

    texts: set[str]

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        self.texts.add(sql)
        return super().execute(sql, *args)


@pytest.fixture
def db() -> Iterator[Recording]:
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=Recording)
    connection.texts = set()
    migrate(connection)
    connection.texts.clear()
    yield connection
    connection.close()


def test_conversations_of_all_lengths_need_few_statements(db: Recording) -> None:
    """SQLite keeps each one it prepared: one for each length would be a leak of days."""
    for length in range(1, 700):
        contents = [b"%d" % number for number in range(length)]
        ids = blobs.put(db, [(b"text", content) for content in contents])
        assert blobs.get(db, ids) == contents
    assert len(db.texts) <= 2 * 10 + 1


def test_a_list_is_filled_up_with_what_is_in_it() -> None:
    for size in range(1, 600):
        marks, values = in_list(range(size))
        assert marks.count("?") == len(values) < 2 * size or size == len(values) == 1
        assert set(values) == set(range(size))
    assert len({in_list(range(size))[0] for size in range(1, 513)}) == 10


def test_a_message_as_deep_as_its_writer_takes_is_read_again(db: Recording) -> None:
    """Ledgers hold such messages of the time when requests had no limit of depth."""
    arguments: dict[str, Any] = {"a": 1}
    for _ in range(230):
        arguments = {"a": arguments}
    call = {"function": {"name": "f", "arguments": arguments}}
    deep = Message.model_validate({"role": "assistant", "content": "x", "tool_calls": [call]})
    plain = Message(role="user", content="hi")
    assert blobs.get_messages(db, blobs.put_messages(db, [plain, deep])) == (plain, deep)
