"""The decorators of the ledger's operations: the thread, the transaction and the waiting time of each."""

import sqlite3
import threading
from typing import Any

import pytest

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger.store import CHAT_TIMEOUT_S, LedgerPart, chat_write, read, write


class Part(LedgerPart):
    """Operations that return the name of their thread."""

    @write
    def put(self, db: sqlite3.Connection, key: str, *, value: int, fails: bool = False) -> str:
        """Store a value."""
        db.execute("REPLACE INTO meta VALUES (?, ?)", (key, value))
        if fails:
            raise LedgerError("refused")
        return threading.current_thread().name

    @chat_write(is_synced=False)
    def begin(self, db: sqlite3.Connection) -> str:
        return threading.current_thread().name

    @chat_write(is_synced=True)
    def finish(self, db: sqlite3.Connection) -> str:
        return threading.current_thread().name

    @read
    def get(self, db: sqlite3.Connection, key: str) -> tuple[str, int | None]:
        found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return threading.current_thread().name, None if found is None else found[0]


@pytest.fixture
def part(ledger: Ledger) -> Part:
    return Part(ledger._writer, ledger._reader, ledger._training, ledger._redactor, ledger._clock)


async def test_a_write_runs_on_the_writers_thread_and_a_read_on_a_readers(part: Part) -> None:
    assert await part.put("a", value=1) == "ledger-writer"
    thread, value = await part.get("a")
    assert thread.startswith("ledger-reader")
    assert value == 1


async def test_a_body_that_raises_leaves_no_trace(part: Part) -> None:
    with pytest.raises(LedgerError, match="refused"):
        await part.put("b", value=1, fails=True)
    assert (await part.get("b"))[1] is None


async def test_only_a_chat_has_a_longest_wait_and_only_begin_skips_the_fsync(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    real = part._writer.write

    async def recorded(work: Any, **how: Any) -> Any:
        asked.append(how)
        return await real(work, **how)

    monkeypatch.setattr(part._writer, "write", recorded)
    await part.put("c", value=1)
    await part.begin()
    await part.finish()
    assert asked == [
        {"timeout_s": None, "is_synced": True},
        {"timeout_s": CHAT_TIMEOUT_S, "is_synced": False},
        {"timeout_s": CHAT_TIMEOUT_S, "is_synced": True},
    ]


async def test_after_the_close_every_operation_is_refused(part: Part, ledger: Ledger) -> None:
    await ledger.aclose()
    with pytest.raises(LedgerUnavailable, match="closed"):
        await part.put("d", value=1)
    with pytest.raises(LedgerUnavailable, match="closed"):
        await part.get("d")


def test_a_method_keeps_the_name_and_the_docstring_of_its_body() -> None:
    assert (Part.put.__name__, Part.put.__doc__) == ("put", "Store a value.")
