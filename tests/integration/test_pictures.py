"""Chats with pictures through the whole loop: real server, ledger and local trainer; the engine is transformers.

The engine stands in for SGLang: it takes ids with one placeholder for each picture and the pictures beside them, and
expands them itself.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pictures import picture_file, picture_part
from vision_engine import VisionEngine, running_vision_engine

from gpu.vision_model import vision_model
from openclaw_rl.testing.running_server import RunningServer

GOOD, BAD = picture_file(32, 24, shade=3), picture_file(40, 40, shade=200)
SETTINGS = {
    "engine.kind": "url",
    "pictures.enabled": "true",
    "sampling.temperature": "1.0",
    "judge.kind": "rules",
    "method.name": "combine",
    "method.baseline": "none",
    "training.batch_size": "4",
    "trainer.kind": "local",
    "trainer.nice": "0",
    "trainer.learning_rate": "0.02",
    "practice.enabled": "false",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[tuple[VisionEngine, str, Path]]:
    folder = vision_model(tmp_path_factory.mktemp("vision"))
    with running_vision_engine(folder) as (engine, url):
        yield engine, url, folder


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory) -> Iterator[RunningServer]:
    _, url, folder = engine
    flags = {**SETTINGS, "engine.url": url, "model.path": str(folder)}
    words = [word for name, value in flags.items() for word in ("--set", f"{name}={value}")]
    with RunningServer(tmp_path_factory.mktemp("seeing") / "data", words) as server:
        yield server


def ask(server: RunningServer, session: str, data: bytes) -> str:
    """Ask about a picture; return the turn's id."""
    said = [{"type": "text", "text": "what is it? "}, picture_part(data)]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "max_tokens": 4}
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"X-Session-Id": session}, timeout=60, trust_env=False
    )
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def rate(server: RunningServer, turn_id: str, value: int) -> None:
    said = {"turn_id": turn_id, "value": value} | ({"comment": "Say what you see."} if value < 0 else {})
    reply = httpx.post(f"{server.url}/v1/feedback", json=said, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text


def test_a_policy_learns_from_chats_about_pictures(engine, server) -> None:
    stand_in, _, _ = engine
    turns = {ask(server, f"s{number}", data): data for number, data in enumerate((GOOD, BAD, GOOD, BAD))}
    for turn_id, data in turns.items():
        rate(server, turn_id, 1 if data is GOOD else -1)
    server.wait_for("a version serves", lambda now: now["serving"] == 1, 120)
    for turn_id in turns:
        record = server.wait_for_turn(turn_id, "trained", 30)
        assert record["turn"]["drop"] is None
    rows = server.admin("GET", "/v1/admin/history")["versions"]
    (row,) = (row for row in rows if row["weight_version"] == 1)
    metrics = row["metrics"]
    assert metrics["samples"] == 4
    assert metrics["hint_share"] == 0.5, "the teacher read the hint and the picture"
    assert "gate_kl_parent" in metrics, "the gate compared replies about pictures"
    assert stand_in.scored
    assert all(request.image_data for request in stand_in.scored if stand_in.vision.placeholder in request.input_ids)
    assert sum(bool(request.image_data) for request in stand_in.scored) > 4
    assert metrics["fresh_abs_log_ratio"] < 1e-4, "engine and trainer read the same picture"
    assert any(request.image_data for request in stand_in.sent)
    stored = {file.name for file in (server.data_dir / "ledger.sqlite3.pictures").iterdir()}
    assert len(stored) == 2
    ask(server, "again", GOOD)
    assert stand_in.sent[-1].lora_path is not None
    words = [base64.b64encode(data)[20:60] for data in (GOOD, BAD)]
    for file in (server.data_dir / "logs").iterdir():
        assert not any(word in file.read_bytes() for word in words), file.name
    assert not any(word in (server.data_dir / "server.log").read_bytes() for word in words)
    shown = httpx.get(f"{server.url}/v1/turns/{next(iter(turns))}", timeout=60, trust_env=False)
    assert not any(word in shown.content for word in words)
    for session in ("s0", "s2", "again"):
        server.admin("POST", "/v1/admin/forget", {"session_id": session})
    assert len(list((server.data_dir / "ledger.sqlite3.pictures").iterdir())) == 1
