"""Steering of the kill check's run as an operator does it: `pin`, `rollback`, `forget --rebuild` on the command line.

Each command is checked through the replies: the version of their header is the one that the command named.
"""

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gpu.host import NodeHost
from gpu.node_feedback import reading
from gpu.node_script import Script
from gpu.stages import Figures
from openclaw_rl.ledger.states import DEAD

SEEN_S = 25.0
"""Longest time until a reply has the expected version."""
HELD_S = 4.0
"""Time in which each later reply must have it too."""

_DEAD = ", ".join(f"'{state}'" for state in DEAD)


@dataclass(frozen=True, slots=True)
class Operator:
    host: NodeHost
    script: Script

    @property
    def ledger(self) -> Path:
        return self.script.data_dir / "ledger.sqlite3"

    def says(self, *words: str) -> str:
        """Run `openclaw-rl` with these words; return the output."""
        command = [self.host.ours_python, "-m", "openclaw_rl", *words, "--data-dir", str(self.script.data_dir)]
        done = subprocess.run(command, env=self.host.environ, capture_output=True, text=True, timeout=60, check=False)
        return (done.stdout + done.stderr).strip()[-400:]

    def reply_version(self) -> int:
        body = {"model": "policy", "messages": [{"role": "user", "content": "Which one are you?"}], "max_tokens": 4}
        headers = {"X-Session-Id": f"operator-{time.time_ns()}"}
        answer = httpx.post(f"{self.script.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        answer.raise_for_status()
        return int(answer.headers["x-weight-version"])

    def watch(
        self, is_expected: Callable[[int], bool], *, newest: int | None = None, held_s: float = HELD_S
    ) -> Figures:
        """Chat until a reply has an expected version, then for `held_s` more.

        newest: versions after it may follow the expected one, because they were trained since.
        """
        began, versions, seen = time.monotonic(), [self.reply_version()], None
        while True:
            if seen is None and is_expected(versions[-1]):
                seen, versions = time.monotonic(), versions[-1:]
            if time.monotonic() > (began + SEEN_S if seen is None else seen + held_s):
                break
            time.sleep(0.2)
            versions.append(self.reply_version())
        changes = [version for at, version in enumerate(versions) if not at or version != versions[at - 1]]
        others = [version for version in changes if not is_expected(version)]
        return {
            "replies": len(versions),
            "versions from there": changes,
            "seen after s": None if seen is None else round(seen - began, 1),
            "held": seen is not None and all(newest is not None and version > newest for version in others),
        }

    def ask(self, query: str, *values: object) -> Any:
        with reading(self.ledger) as db:
            row = db.execute(query, values).fetchone()
        return None if row is None else row[0]


def steer(operator: Operator, figures: Figures) -> None:
    """Give the three commands. The figures of each go to `figures`."""
    for name, step in (("pin", _pin), ("rollback", _rollback), ("forget --rebuild", _forget)):
        began = time.monotonic()
        try:
            figures[name] = step(operator)
        except (httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
            figures[name] = {"failed": repr(error)[:300]}
        figures[name]["s"] = round(time.monotonic() - began, 1)
        print(f"-- kills, {name}: {figures[name]}", flush=True)


def findings(figures: Figures) -> list[str]:
    return [f"{name}: {row}" for name, row in figures.items() if not row.get("is as said")]


def _pin(operator: Operator) -> Figures:
    """Pin an older version that is on disk while the training goes on; then unpin."""
    serving = int(operator.script.status()["serving"])
    older = operator.ask(
        "SELECT max(weight_version) FROM version WHERE durable AND state = 'retired' AND folder NOT NULL"
        " AND weight_version < ?",
        serving,
    )
    if older is None:
        return {"failed": "no older version is on disk"}
    said = operator.says("pin", str(older))
    pinned, tip = operator.watch(older.__eq__), int(operator.script.status()["tip"])
    figures: Figures = {"serving": serving, "pinned": older, "said": said, "replies": pinned, "tip meanwhile": tip}
    figures["off said"] = operator.says("pin", "--off")
    figures["after --off"] = after = operator.watch(older.__lt__, held_s=0)
    figures["is as said"] = pinned["held"] and f"version {older} serves, pinned" in said
    figures["is as said"] = figures["is as said"] and after["seen after s"] is not None
    return figures


def _rollback(operator: Operator) -> Figures:
    status = operator.script.status()
    said = operator.says("rollback")
    found = re.search(r"version (\d+) serves", said)
    figures: Figures = {"serving": status["serving"], "tip": status["tip"], "said": said}
    if found is None:
        return figures
    to = int(found[1])
    figures["replies"] = replies = operator.watch(to.__eq__, newest=int(status["tip"]))
    abandoned = "SELECT count(*) FROM version WHERE state = 'rolled_back' AND weight_version > ?"
    figures["abandoned versions"] = operator.ask(abandoned, to)
    figures["is as said"] = replies["held"] and to < int(status["serving"]) and figures["abandoned versions"] > 0
    return figures


def _forget(operator: Operator) -> Figures:
    """Forget a session that the newest version on disk was trained on."""
    session = operator.ask(
        "SELECT session_id FROM request JOIN turn USING (id) JOIN version ON weight_version = trained_in"
        f" WHERE session_id NOT NULL AND version.state NOT IN ({_DEAD}) AND durable AND parent NOT NULL"
        " ORDER BY trained_in DESC LIMIT 1"
    )
    if session is None:
        return {"failed": "no version on disk was trained on a session"}
    trained = operator.ask("SELECT min(trained_in) FROM request JOIN turn USING (id) WHERE session_id = ?", session)
    said = operator.says("forget", session, "--rebuild")
    figures: Figures = {"session": session, "trained in": trained, "said": said}
    found = re.search(r"version (\d+) serves again", said)
    if found is None:
        return figures
    to = int(found[1])
    newest = operator.ask("SELECT max(weight_version) FROM version")
    figures["replies"] = replies = operator.watch(to.__eq__, newest=newest)
    left = operator.ask("SELECT count(*) FROM request WHERE session_id = ?", session)
    figures["rows of it left"] = left
    figures["is as said"] = replies["held"] and to < trained and not left
    return figures
