"""Practice on real parts: the embedded engine, the trainer's process, the server. One correction, then nobody chats."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.ledger import audit
from openclaw_rl.ledger import open as ledger_open
from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

ARGUMENTS = (
    *("--method", "opd", "--batch-size", "4", "--set", "trainer.nice=0"),
    *("--set", "practice.idle_s=0.5", "--set", "practice.replies=3", "--set", "practice.max_tokens=6"),
    # Random steps of a cut model: no figure of theirs may end the practice.
    *("--set", "practice.stop_share=1000", "--set", "practice.max_kl=1000", "--set", "practice.patience=1000"),
    *("--set", "publisher.max_step_kl=1000", "--set", "publisher.max_base_kl=1000"),
    *("--set", "server.api_keys=[{key='sk-uma',user='uma'},{key='sk-bob',user='bob'}]"),
)


def say(server: RunningServer, messages: list[Any], session: str) -> str:
    body = {"model": "policy", "messages": messages, "max_tokens": 8}
    headers = {"Authorization": "Bearer sk-uma", "X-Session-Id": session}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def correct(server: RunningServer, session: str, wish: str) -> None:
    question = {"role": "user", "content": f"How do I boil an egg, says {session}?"}
    reply = {"role": "assistant", "content": say(server, [question], session)}
    say(server, [question, reply, {"role": "user", "content": wish}], session)


def wishes(server: RunningServer, key: str = "sk-uma") -> list[Any]:
    answer = httpx.get(f"{server.url}/v1/wishes", headers={"Authorization": f"Bearer {key}"}, timeout=60)
    return list(answer.json()["wishes"])


def findings(server: RunningServer) -> list[str]:
    db = ledger_open.connect(server.data_dir / "ledger.sqlite3", read_only=True)
    try:
        return audit.audit(db, is_deep=True)
    finally:
        db.close()


def test_a_correction_is_practised_through_a_kill_shown_and_forgotten(short_model: Path, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "--set", f"model.path={short_model}"]
    with RunningServer(tmp_path / "data", arguments) as server:
        correct(server, "s1", "No, that is wrong. Shorter please.")
        server.wait_for("a version that practised serves", lambda now: now["serving"] >= 1, 300)
        server.wait_for("practice goes on", lambda now: now["counts"].get("practice.trained", 0) >= 3, 300)
        server.kill()
        assert findings(server) == []
        server.start()
        status = server.wait_for("it goes on after the kill", lambda now: now["serving"] >= 3, 300)
        assert "practi" in status["practice"]["line"]

        (wish,) = wishes(server)
        assert (wish["text"], wish["state"]) == ("No, that is wrong. Shorter please.", "active")
        assert wish["practised"] >= 3
        assert wish["learned_share"] is not None
        assert wishes(server, "sk-bob") == []
        shown = [row for row in server.turns() if row["practice"] is not None]
        assert {row["practice"] for row in shown} == {"wish", "anchor"}
        assert all(row["verdict"] is None and row["next_state"] is None for row in shown)
        practised = [row for row in shown if row["practice"] == "wish"]
        assert all(row["sample"]["teacher_log_probs"] for row in practised)
        argv = [sys.executable, "-m", "openclaw_rl", "wishes", "--data-dir", str(server.data_dir), "--key", "sk-uma"]
        listed = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
        assert "No, that is wrong. Shorter please." in listed

        server.admin("POST", "/v1/admin/learning", {"on": False})
        gone = server.admin("POST", "/v1/admin/forget", {"session_id": "s1", "rebuild": True})
        assert gone["trained_in"]
        assert wishes(server) == []
        left = [row for row in server.turns() if row["practice"] == "wish"]
        assert left == []
        assert server.status()["serving"] == 0
    assert findings(server) == []
    log = (tmp_path / "data" / "server.log").read_text()
    assert "part_fails" not in log, json.dumps(log[-2000:])
