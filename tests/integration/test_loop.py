"""The whole loop on real parts: chat, judged correction, LoRA step, and a next reply of version 1."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


def stream(
    server: RunningServer, messages: list[Any], session: str, **fields: Any
) -> tuple[str, httpx.Headers, list[Any]]:
    body = {"model": "policy", "messages": messages, "stream": True, "max_tokens": 16, **fields}
    headers = {"Authorization": "Bearer sk-test", "X-Session-Id": session}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200, reply.read()
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, reply.headers, events


def command(server: RunningServer, *args: str) -> str:
    argv = [sys.executable, "-m", "openclaw_rl", *args, "--data-dir", str(server.data_dir)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chats_become_a_new_version_that_serves(server: RunningServer, tmp_path: Path) -> None:
    turn_ids = []
    for number, answer in enumerate(("No, that is wrong. Shorter please.", "Thanks, that is perfect!")):
        question = {"role": "user", "content": f"Give me one tip to sleep better, number {number}."}
        text, headers, events = stream(server, [question], f"s{number}")
        assert headers["x-weight-version"] == "0"
        assert headers["x-session-id"] == f"s{number}"
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        turn_ids.append(events[0]["id"])
        stream(
            server,
            [question, {"role": "assistant", "content": text}, {"role": "user", "content": answer}],
            f"s{number}",
        )
    status = server.wait_for("version 1 serves", lambda now: now["serving"] == 1, 300)
    assert status["counts"]["trained"] == 2
    given = json.loads((server.data_dir / "run" / "trainer.json").read_text())  # what taught this model, unasked for
    assert (given["method"]["baseline"], given["trainer"]["learning_rate"]) == ("others", 1e-3)
    turns = [server.admin("GET", f"/v1/turns/{turn_id}") for turn_id in turn_ids]
    assert [turn["verdict"]["value"] for turn in turns] == [-1, 1]
    assert [turn["trained_in"] for turn in turns] == [1, 1]
    assert [turn["sample"]["reward"] for turn in turns] == [-1.0, 1.0]

    _, headers, _ = stream(server, [{"role": "user", "content": "And now?"}], "later")
    assert headers["x-weight-version"] == "1"

    assert "version 1 serves" in command(server, "status")
    assert f"{turn_ids[0]}  " in command(server, "turns")
    assert "it is trained in version 1" in command(server, "turns", turn_ids[0])
    assert json.loads(command(server, "turns", turn_ids[0], "--json"))["state"] == "trained"
    command(server, "export-adapter", str(tmp_path / "out"))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    command(server, "learning", "pause")
    assert not server.status()["learning"]
    command(server, "learning", "resume")
    assert "version 0 serves" in command(server, "rollback")
    _, headers, _ = stream(server, [{"role": "user", "content": "And back?"}], "later")
    assert headers["x-weight-version"] == "0"
    assert [row["state"] for row in server.status()["versions"]] == ["serving", "rolled_back"]
    tracked = server.data_dir / "tracking" / "metrics.jsonl"
    server.wait_for("the mark of the rollback", lambda now: "version/rolled_back" in tracked.read_text(), 60)
    step, mark = (json.loads(line) for line in tracked.read_text().splitlines())
    assert (step["version"], mark["version"], step["turns/samples"], step["gate/refused"]) == (1, 1, 2, 0)
    assert {"train/loss", "train/lr-pg_0", "rollout/raw_reward", "gate/kl_parent", "train/learner_s"} <= step.keys()
    key = {"Authorization": f"Bearer {(server.data_dir / 'keys' / 'admin.key').read_text().strip()}"}
    scraped = httpx.get(f"{server.url}/metrics", headers=key, timeout=60).text
    assert 'openclaw_rl_step{figure="reward_mean"} 0.0\n' in scraped
    assert 'openclaw_rl_tracked_version{tracker="jsonl"} 1.0\n' in scraped
    command(server, "pin", "0")
    assert server.status()["pinned"] == 0
    command(server, "pin", "--off")
    assert server.status()["pinned"] is None


def test_the_users_own_word_trains_and_the_ledger_can_be_taken_away(server: RunningServer, tmp_path: Path) -> None:
    trained = server.status()["counts"]["trained"]
    _, _, events = stream(server, [{"role": "user", "content": "One tip to sleep better?"}], "rated")
    turn_id = events[0]["id"]
    said = ("--bad", "--comment", "too long", "--demonstration", "Go to bed early.", "--feedback-id", "f1")
    words = command(server, "feedback", turn_id, *said, "--key", "sk-test")
    assert words == f"{turn_id}: effect judged, state judged; {turn_id}-demo waits for the trainer\n"
    server.wait_for("both samples are trained on", lambda now: now["counts"]["trained"] >= trained + 2, 300)
    demonstration = server.admin("GET", f"/v1/turns/{turn_id}-demo")
    assert (demonstration["state"], demonstration["sample"]["is_demonstration"]) == ("trained", True)
    body = {"session_id": "rated", "value": True}
    assert httpx.post(f"{server.url}/v1/feedback", json=body, timeout=120).status_code == 401
    key = {"Authorization": "Bearer sk-test"}
    late = httpx.post(f"{server.url}/v1/feedback", json=body, headers=key, timeout=120).json()
    assert (late["turn_id"], late["effect"]) == (turn_id, "late")

    out = tmp_path / "replayed"
    assert "1 steps on 2 samples" in command(server, "replay", str(out), "--session", "rated", "--batch-size", "2")
    assert {"adapter_config.json", "adapter_model.safetensors", "metrics.jsonl"} <= {
        file.name for file in out.iterdir()
    }
    command(server, "export", str(tmp_path / "turns.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert turn_id in [row["turn_id"] for row in rows]
    assert "the ledger is in" in command(server, "backup", str(tmp_path / "copy.sqlite3"))
    words = command(server, "forget", "rated")
    assert words.startswith("2 turns of session rated are gone")
    assert f"versions trained on it: {demonstration['trained_in']}" in words
    assert httpx.post(f"{server.url}/v1/feedback", json=body, headers=key, timeout=120).status_code == 404
