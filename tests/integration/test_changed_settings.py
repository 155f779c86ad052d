"""A whole server, started again on settings that give its stored adapters another meaning: it refuses, by their names.

With the settings of before it serves its version and trains on.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

MADE_WITH = {"trainer.rank": 4, "trainer.alpha": 8, "trainer.target_modules": ["q_proj", "v_proj"]}
CHANGED = {"trainer.rank": 8, "trainer.alpha": 16, "trainer.target_modules": ["q_proj", "k_proj"]}


def arguments(model: Path, trainer: dict[str, Any]) -> list[str]:
    values = {"model.path": str(model), "trainer.nice": 0, **trainer}
    return [
        *("--batch-size", "2"),
        *(word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")),
    ]


def chat(server: RunningServer, session: str, *messages: tuple[str, str]) -> httpx.Response:
    body = {"messages": [{"role": role, "content": text} for role, text in messages], "max_tokens": 8}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Session-Id": session}, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply


def trained_turn(server: RunningServer, session: str) -> None:
    """Chat, and correct the reply."""
    asked = ("user", f"One tip to sleep better, {session}?")
    said = chat(server, session, asked).json()["choices"][0]["message"]["content"]
    chat(server, session, asked, ("assistant", said), ("user", "No, that is wrong. Shorter please."))


def test_a_start_on_changed_settings_is_refused_by_name_and_the_old_ones_serve(
    short_model: Path, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    with RunningServer(data_dir, arguments(short_model, MADE_WITH)) as server:
        for session in ("a", "b"):
            trained_turn(server, session)
        server.wait_for("version 1 serves", lambda now: now["serving"] == 1, 300)

    argv = [sys.executable, "-m", "openclaw_rl", "serve", "--data-dir", str(data_dir), "--port", "0"]
    done = subprocess.run(
        [*argv, *arguments(short_model, CHANGED)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "would mean something else" in line]
    assert "version 1" in line
    for told in ("rank is 8, and it was made with 4", "alpha is 16, and it was made with 8"):
        assert f"trainer.{told}" in line
    assert "trainer.target_modules are k_proj, q_proj, and it was made with q_proj, v_proj" in line

    with RunningServer(data_dir, arguments(short_model, MADE_WITH)) as server:
        assert chat(server, "later", ("user", "And now?")).headers["x-weight-version"] == "1"
        for session in ("c", "d"):
            trained_turn(server, session)
        server.wait_for("version 2 serves", lambda now: now["serving"] == 2, 300)
