"""The few single values of a ledger: whose it is, the tip, the newest fence, the pin, the switches."""

import sqlite3


def get_text(db: sqlite3.Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None or row[0] is None else str(row[0])


def get_int(db: sqlite3.Connection, key: str, default: int = 0) -> int:
    found = get_text(db, key)
    return default if found is None else int(found)


def put(db: sqlite3.Connection, key: str, value: str | int | None) -> None:
    db.execute("REPLACE INTO meta VALUES (?, ?)", (key, value))
