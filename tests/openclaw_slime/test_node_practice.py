"""Guided practice on the node's arrangement: full weights, and the base in an engine of its own.

The server, both embedded engines, the plugin's driver with its loop, leases and checkpoints are real processes. The
driver's step is the stand-in's of `scripts/gpu/rehearse.sh`: it moves the weights a little, which suffices to tell the
policy from the base. The teacher's log-probs are compared with plain forward passes.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ports import free_port

from gpu import guided_teacher, practice_load
from gpu.engine_process import EngineProcess, embedded_command
from gpu.host import ROOT
from gpu.server_files import audit, set_flags
from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

UPDATES, TOKENS, BATCH, TOP_K = 2, 8, 8, 4
STAND_INS = ROOT / "scripts" / "gpu" / "stand_ins"
ARGUMENTS = (
    *("--method", "combine", "--judge", "rules", "--engine", "embedded", "--batch-size", str(BATCH)),
    *("--set", "training.weights=full", "--set", "trainer.kind=external", "--set", f"method.top_k={TOP_K}"),
    *("--set", f"practice.max_tokens={TOKENS}", "--set", "practice.replies=6", "--set", "practice.least_relevance=0"),
    *("--set", "publisher.max_step_kl=1000", "--set", "publisher.max_base_kl=1000"),
    *("--set", "publisher.self_test_tolerance=1000"),
)


@contextmanager
def base_engine(work: Path, model: Path) -> Iterator[EngineProcess]:
    work.mkdir()
    port = free_port()
    command = embedded_command(sys.executable, work, folder=model, port=port)
    engine = EngineProcess.start(work, command, os.environ, log=work / "engine.log", port=port)
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def driver(data_dir: Path, model: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The plugin's driver over the stand-in for slime."""
    argv = [sys.executable, str(STAND_INS / "toy_driver.py"), "--data-dir", str(data_dir), "--push", "disk"]
    argv += ["--checkpoint-every", "1", "--", "--hf-checkpoint", str(model), "--global-batch-size", str(BATCH)]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_practice_is_taught_by_the_judges_engine_and_trained_by_the_driver(short_model: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with base_engine(tmp_path / "prm", short_model) as prm:
        options = [f"method.teacher_url={prm.url}", f"publisher.base_url={prm.url}", *practice_load.SETTINGS]
        arguments = [*ARGUMENTS, "--set", f"model.path={short_model}", *set_flags(options)]
        server = RunningServer(data_dir, arguments, must_be_ok=False)
        with server, driver(data_dir, short_model, tmp_path / "driver.log"):
            server.wait_for("the engine serves", lambda now: now["engine"]["is_open"], 300)
            practice_load.correct(server, max_tokens=TOKENS)
            progress = practice_load.practised(server, updates=UPDATES, timeout_s=400)
            server.admin("POST", "/v1/admin/learning", {"on": False})
            records = server.turns()
            steps = server.admin("GET", "/v1/admin/history?versions=50&verdicts=1")["versions"]
            status = server.status()
            info = httpx.get(f"{prm.url}/model_info", timeout=60).json()
    assert len(progress.served) >= UPDATES, (progress, (tmp_path / "driver.log").read_text()[-3000:])
    assert status["problems"] == []
    assert progress.wish["kl"] is not None
    assert all(share is not None for share in progress.shares.values())
    # Each practised sample had its term where slime's side reads it.
    hinted = [row["metrics"]["hint_share"] for row in steps if row["weight_version"] in progress.served]
    assert hinted
    assert all(share == pytest.approx(1.0) for share in hinted)
    assert str(info["weight_version"]) in ("0", "default"), "the base's engine was given weights"
    weights = {row["weight_version"]: data_dir / row["folder"] for row in status["versions"] if row["folder"]}
    scored = {row["sample"]["scored_version"] for row in records if row["practice"] == "wish" and row["sample"]}
    rows = practice_load.chosen(records, sorted(scored & {0, *weights}), of_each=3)
    samples = [guided_teacher.taught(row, short_model, practice_load.READING) for row in rows]
    compared = guided_teacher.compare(
        [one for one in samples if one is not None], short_model, weights, practice_load.READING, "cpu"
    )
    assert compared["findings"] == []
    assert compared["kinds"]["wish"] >= guided_teacher.LEAST_SAMPLES
    for level in ("token level", "table"):
        assert compared[level]["engine against fp32"]["max_abs"] < 5e-3
    assert audit(data_dir) == []
