"""Our server in a check: its flags, what is kept of its logs, and what its ledger says afterwards."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SERVER_LOG_BYTES = 2_000_000


def set_flags(settings: Iterable[str]) -> list[str]:
    """`--set` for each."""
    return [word for setting in settings for word in ("--set", setting)]


def keep_logs(data_dir: Path, out: Path, prefix: str) -> None:
    """The ends of its logs, and of its children's, as OUT/<prefix>-<name>."""
    for log in (data_dir / "server.log", *(data_dir / "logs").glob("*.log")):
        if log.is_file():
            (out / f"{prefix}-{log.name}").write_bytes(log.read_bytes()[-SERVER_LOG_BYTES:])


def events(server_log: Path, name: str) -> list[dict[str, Any]]:
    """Log lines of this name, of a server that logs JSON."""
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


def audit(data_dir: Path) -> Sequence[str]:
    """What the ledger's audit finds wrong."""
    from kill.audit import audit as look

    return list(look(data_dir / "ledger.sqlite3", [], is_deep=True))
