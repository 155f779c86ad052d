"""Files of our server in a check: its log events, the ends of its logs, and the audit of its ledger."""

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from openclaw_rl.testing import ledger_audit

LOG_BYTES = 2_000_000


def set_flags(settings: Iterable[str]) -> list[str]:
    """Return a `--set` flag for each setting."""
    return [word for setting in settings for word in ("--set", setting)]


def keep_logs(data_dir: Path, out: Path, prefix: str) -> None:
    """Copy the ends of the logs of the server and its children to OUT/<prefix>-<name>."""
    for log in (data_dir / "server.log", *(data_dir / "logs").glob("*.log")):
        if log.is_file():
            (out / f"{prefix}-{log.name}").write_bytes(log.read_bytes()[-LOG_BYTES:])


def events(server_log: Path, name: str) -> list[dict[str, Any]]:
    """Return the log events of this name, of a server that logs JSON."""
    found = []
    for line in server_log.read_text(errors="replace").splitlines():
        if f'"{name}"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == name:
                found.append(event)
    return found


def held(server_log: Path) -> list[tuple[float, float]]:
    """Return the wall-clock intervals in which the server held chats for new weights; a roll holds nobody."""
    pushes = [*events(server_log, "weights_received"), *events(server_log, "weights_swapped")]
    ends = [datetime.fromisoformat(event["timestamp"]).timestamp() for event in pushes]
    return [(end - event["held_s"], end) for event, end in zip(pushes, ends, strict=True) if event["held_s"] > 0]


def audit(data_dir: Path) -> list[str]:
    """Return the findings of the deep audit of the ledger."""
    return list(ledger_audit.audit(data_dir / "ledger.sqlite3", [], is_deep=True))
