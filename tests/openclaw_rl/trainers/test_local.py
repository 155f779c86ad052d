"""The trainer's process against the real routes and the real ledger: it trains, stops, survives kills, refuses."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import uvicorn
from close import approx
from fastapi import FastAPI
from ledger import judge_turn
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from turns import make_request, make_turn, serve_turn

from openclaw_rl.errors import TrainerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.models import resolve
from openclaw_rl.server.api.trainer import LeaseWait, build_trainer_router
from openclaw_rl.settings import ModelSettings, TrainerSettings, TrainingSettings
from openclaw_rl.trainers.local import TrainerConfig, _only_trainer, run
from openclaw_rl.types import Sample, SamplingParams, Version

T = TypeVar("T")


class Server:
    """The trainer API on a free port, its event loop in a thread of its own."""

    def __init__(self, data_dir: Path, base_hash: str) -> None:
        self.data_dir, self.base_hash = data_dir, base_hash
        self.wait, self.committed = LeaseWait(), []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ledger = await Ledger.open(
            self.data_dir / "ledger.sqlite3",
            identity=Identity(self.base_hash, "tokenizer", "tiny"),
            training=TrainingSettings(batch_size=3, min_batch=3, lease_s=60),
        )
        app = FastAPI()
        app.include_router(
            build_trainer_router(self.ledger, token="t", lease_wait=self.wait, on_commit=self.committed.append)
        )
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:  # uvicorn has no event to wait for
            await asyncio.sleep(0.01)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self._started.set()
        await serving
        await self.ledger.aclose()

    def do(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(30)

    def close(self) -> None:
        self.wait.close()
        self._uvicorn.should_exit = True
        self._thread.join(30)

    def sampled(self, sample: Sample) -> None:
        self.do(self._sampled(sample))

    async def _sampled(self, sample: Sample) -> None:
        name = sample.sample_id
        sampling = SamplingParams(8, temperature=sample.temperature)
        request = make_request(name, text=name, session=None, prompt=sample.prompt_ids, sampling=sampling)
        turn = make_turn(
            name,
            ids=sample.response_ids,
            log_probs=sample.rollout_log_probs,
            mask=sample.loss_mask,
            runs=sample.versions,
        )
        await serve_turn(self.ledger, request, turn)
        await judge_turn(self.ledger, name)
        await self.ledger.record_sample(sample)
        self.wait.samples_came()

    def version(self, number: int, *, timeout_s: float = 120.0) -> Version:
        """Wait until it is committed."""
        return until(
            lambda: next((v for v in self.do(self.ledger.versions()) if v.weight_version == number), None), timeout_s
        )

    def states(self) -> dict[str, int]:
        return {name: count for name, count in self.do(self.ledger.counts()).items() if count}


def until(look: Callable[[], T | None], timeout_s: float = 120.0) -> T:
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.02)
    return found


@pytest.fixture
def model_folder(make_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    return folder


@pytest.fixture
def config(model_folder: Path, settings: TrainerSettings, tmp_path: Path) -> dict[str, object]:
    (tmp_path / "data").mkdir()
    return {
        "url": "http://127.0.0.1:9",
        "token": "t",
        "data_dir": str(tmp_path / "data"),
        "cache_dir": str(tmp_path / "cache"),
        "model": {"path": str(model_folder)},
        "trainer": settings.model_dump(mode="json") | {"nice": 0},
        "method": {"name": "binary_rl"},
        "log_level": "info",
        "parent_pid": os.getpid(),
    }


@pytest.fixture
def server(config: dict[str, object], tmp_path: Path) -> Iterator[Server]:
    resolved = resolve.resolve(ModelSettings.model_validate(config["model"]), tmp_path / "cache")
    config["base_hash"] = resolve.base_hash(resolved)
    server = Server(tmp_path / "data", str(config["base_hash"]))
    config["url"] = f"http://127.0.0.1:{server.port}"
    yield server
    assert server.do(server.ledger.audit()) == []
    server.close()


@contextmanager
def trainer(config: dict[str, object], tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps(config))
    with (tmp_path / "trainer.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "openclaw_rl.trainers.local", "--config", str(file)], stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(120)


def test_the_process_trains_commits_and_stops(
    server: Server, config: dict[str, object], batch: list[Sample], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    for sample in batch[:3]:
        server.sampled(sample)
    with trainer(config, tmp_path) as process:
        first = server.version(1)
        for index in range(3):
            server.sampled(make_sample(f"later-{index}"))
        second = server.version(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert (first.parent, second.parent) == (0, 1)
    assert server.committed == [1, 2]
    assert server.states()["trained"] == 6

    report = second.report
    assert report.metrics["samples"] == 3
    # The probe is what another program reads from the published folder: the self-test of the publisher.
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert second.folder is not None
    model = PeftModel.from_pretrained(base, tmp_path / "data" / second.folder).eval()
    for probe in report.probes:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([probe.prompt_ids + probe.response_ids])).logits[0]
        log_probs = torch.log_softmax(logits[len(probe.prompt_ids) - 1 : -1], -1)
        expected = log_probs.gather(-1, torch.tensor(probe.response_ids)[:, None]).squeeze(-1)
        assert probe.log_probs == approx(expected.tolist())


def test_killed_in_a_step_and_started_again_it_trains_each_sample_once(
    server: Server, config: dict[str, object], batch: list[Sample], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    """Cases CR-1 and CR-2 on the real process; how far the step was at the kill is left to chance."""
    for sample in batch[:3]:
        server.sampled(sample)
    with trainer(config, tmp_path) as process:
        until(lambda: True if (tmp_path / "data" / "trainer.lease.json").exists() else None)
        process.kill()
        process.wait(120)
    for index in range(3):
        server.sampled(make_sample(f"later-{index}"))
    with trainer(config, tmp_path) as process:
        server.version(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert server.states()["trained"] == 6
    assert len(server.do(server.ledger.versions())) == 3


def test_another_base_than_the_engine_serves_is_refused_in_one_line(config: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="the engine serves base 0123"):
        run(TrainerConfig.model_validate(config | {"base_hash": "0123"}), threading.Event())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"url": None}, "url"), ({"no_such_key": 1}, "no_such_key"), ({"method": {"name": "nope"}}, "no method 'nope'")],
)
def test_a_wrong_config_is_said_and_exits_2(
    config: dict[str, object], tmp_path: Path, change: dict[str, object], says: str
) -> None:
    with trainer(config | change, tmp_path) as process:
        assert process.wait(120) == 2
    assert says in (tmp_path / "trainer.log").read_text()
    assert "Traceback" not in (tmp_path / "trainer.log").read_text()


def test_one_trainer_for_a_data_directory(tmp_path: Path) -> None:
    stop = threading.Event()
    with (tmp_path / "trainer.lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.2, stop.set).start()
        with _only_trainer(tmp_path, stop) as ours:
            assert not ours  # it waited until it was stopped
    with _only_trainer(tmp_path, threading.Event()) as ours:
        assert ours


@pytest.mark.parametrize("is_own_session", [True, False])
def test_it_steps_back_with_its_session_and_with_no_other(is_own_session: bool) -> None:
    """If the kernel groups processes by session, niceness counts only within a group.

    Only the child knows its group. A new session may get a group where ours has an empty file, and a kernel may have no
    groups at all.
    """
    code = """
import json, os, pathlib
from openclaw_rl.trainers.local import step_back
group = pathlib.Path("/proc/self/autogroup")
read = lambda: group.read_text().split() if group.exists() else []
before = read()
step_back(3)
print(json.dumps({"niceness": os.nice(0), "before": before, "after": read()}))
"""
    said = json.loads(
        subprocess.run(
            [sys.executable, "-c", code],
            start_new_session=is_own_session,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
    )
    assert said["niceness"] == os.nice(0) + 3
    changed = [*said["before"][:-1], str(said["niceness"])]
    assert said["after"] == (changed if is_own_session and said["before"] else said["before"])
