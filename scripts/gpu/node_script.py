"""Stage `script` of the node check: a launch script as a user starts it, Combined with a judge, ended by SIGTERM.

    openclaw-combine/run_qwen3_4b_openclaw_combine.sh

On four GPUs it trains a Qwen3 of the 4B's shape at tensor parallelism 2. On one card, which all parts share, and on
two, where policy and judge share one, it trains the check's 0.6B. The script's variables name the folders and the GPUs.
Its defaults decide the rest: batch, learning rate, parsers, context. Its flags are what this host and random weights
need: no Transformer Engine, slow kernels, a gate that accepts noise.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from gpu import models
from gpu.host import ROOT, NodeHost
from gpu.node_load import Load
from gpu.node_processes import PRM_ARGS, driver_figures, voting
from gpu.server_files import audit, events, held
from gpu.stages import output_of
from openclaw_rl.testing.running_server import RunningServer

SCRIPT = ROOT / "openclaw-combine" / "run_qwen3_4b_openclaw_combine.sh"
PORT, PRM_PORT = 30000, 30001
UPDATES = 3
"""Least number of updates; the stage waits for twice as many."""
GIVE_UP = 2
"""Exits of the driver after which the stage fails."""
ONE_EACH = {"ROLLOUT_GPUS": "1", "PRM_GPUS": "1"}
TWO_ENGINES = {"ACTOR_GPUS": "1", "ROLLOUT_GPUS": "2", "ROLLOUT_ENGINES": "2", "PRM_GPUS": "1"}
CARDS = {
    (1, 1): {"NUM_GPUS": "1", "ACTOR_GPUS": "1", **ONE_EACH, "PUSH": "disk", "MEM_FRACTION_STATIC": "0.2"},
    (2, 1): {"NUM_GPUS": "2", "ACTOR_GPUS": "1", **ONE_EACH, "PUSH": "nccl", "MEM_FRACTION_STATIC": "0.3"},
    (4, 1): {"NUM_GPUS": "4", "ACTOR_GPUS": "2", **ONE_EACH, "PUSH": "nccl"},
    (2, 2): {"NUM_GPUS": "2", **TWO_ENGINES, "PUSH": "disk", "MEM_FRACTION_STATIC": "0.2"},
    (4, 2): {"NUM_GPUS": "4", **TWO_ENGINES, "PUSH": "nccl"},
}
"""The script's variables by the numbers of GPUs and of policy engines.

All parts share a single card. On two, policy and judge share the second; two policy engines have one each, and trainer
and judge share the first, so that weights go by disk: NCCL takes no two ranks on one card.
"""
SHARING = {(1, 1): ["--share-gpus"], (2, 1): ["--prm-beside-engine"], (2, 2): ["--share-gpus"]}
END_S = {1: 60.0, 2: 60.0, 4: 200.0}
"""Time to stop all processes, by the number of GPUs: the running step and its checkpoint included."""
SETTINGS = (
    "log_format=json",
    "training.max_wait_s=10",
    "training.max_waiting=32",
    "training.max_staleness=200",
    "publisher.max_step_kl=1000",
    "publisher.max_base_kl=1000",
    "judge.workers=16",
)


@dataclass
class Cards:
    """Peak memory of each card in MiB, polled once a second."""

    most: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(1):
            now = [int(word) for word in output_of(query).split() if word.isdigit()]
            self.most = [max(pair) for pair in zip(now, self.most or now, strict=True)]


@dataclass(frozen=True, slots=True)
class Script:
    """The running script."""

    process: "subprocess.Popen[bytes]"
    data_dir: Path
    log: Path
    began: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{PORT}"

    @property
    def driver_log(self) -> Path:
        return self.data_dir / "logs" / "driver.log"

    def status(self) -> dict[str, Any]:
        server = RunningServer(self.data_dir)
        server.url = self.url
        found: dict[str, Any] = server.status()
        return found

    def wait(self, what: str, is_so: Callable[[], bool], end: float) -> float:
        """Poll until `is_so()`; return the seconds since the start of the script.

        Raises RuntimeError if the script ends before, TimeoutError at `end`.
        """
        while True:
            try:
                if is_so():
                    return round(time.monotonic() - self.began, 1)
            except (OSError, httpx.HTTPError):
                pass
            if self.process.poll() is not None:
                raise RuntimeError(f"the script ended with {self.process.returncode} before {what}")
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not in time")
            time.sleep(0.2)

    def says(self, log: Path, what: str) -> bool:
        return log.is_file() and what in log.read_text(errors="replace")

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def run(host: NodeHost) -> dict[str, Any]:
    is_large = (host.gpus, host.engines) == (4, 1) and not host.is_tiny
    where = host.work / "qwen3-4b" if is_large else host.checkpoint
    checkpoint = models.qwen3(host.work / "tokenizer", where, device=host.device)
    end = host.ends_at - END_S[host.gpus]
    figures: dict[str, Any] = {"model": checkpoint.name, "start-up s": {}}
    cards = Cards()
    cards.watch()
    with voting(f"http://127.0.0.1:{PRM_PORT}") as votes:
        script = start(host, checkpoint, votes.url)
        started = []
        try:
            come_up(script, figures["start-up s"], end)
            started = script.below()
            load = Load(script.url, host.streams)
            load.start()
            try:
                figures |= _learn(script, load, end)
            finally:
                load.stop(60)
            pushes = events(script.log, "weights_received") + events(script.log, "weights_swapped")
            figures |= load.figures(held(script.log))
            figures["pushes s: cut, push, held"] = [
                [round(event[key], 3) for key in ("cut_s", "push_s", "held_s")] for event in pushes
            ]
            figures["weights GB"] = round(sum(f.stat().st_size for f in checkpoint.glob("*.safetensors")) / 1e9, 2)
        except (RuntimeError, TimeoutError, OSError, httpx.HTTPError) as error:
            figures["failed"] = repr(error)[:500]
            started = started or (script.below() if script.process.poll() is None else [])
        figures |= stop(script, started, END_S[host.gpus] - 20)
        cards.stop()
        figures["most memory of a card MiB"] = cards.most
        figures["the judge said"] = dict(votes.answers)
    if script.driver_log.is_file():
        figures |= driver_figures(script.driver_log, 0)
    figures["audit"] = list(audit(script.data_dir))
    return figures | {"findings": _findings(figures)}


def cards(host: NodeHost) -> dict[str, str]:
    """Return the script's variables of this host's GPUs. Raises ValueError for a layout that is not checked."""
    if (host.gpus, host.engines) not in CARDS:
        raise ValueError(f"--gpus {host.gpus} --engines {host.engines}: no layout of the script has these")
    given = dict(CARDS[host.gpus, host.engines])
    return given | ({} if host.push is None else {"PUSH": host.push})


def start(
    host: NodeHost,
    checkpoint: Path,
    judge_url: str,
    *,
    name: str = "script",
    variables: Mapping[str, str] | None = None,
    settings: Sequence[str] = SETTINGS,
) -> Script:
    """Start the script. name: begins the names of its data directory and its log. variables: more of the script's."""
    data_dir, log = host.work / f"{name}-data", host.out / f"{name}.log"
    given = {
        "HF_CKPT": str(checkpoint),
        "SAVE_CKPT": str(data_dir),
        **cards(host),
        "PORT": str(PORT),
        "PRM_PORT": str(PRM_PORT),
        "PRM_URL": judge_url,  # our passthrough to the script's own PRM
        "PRM_ARGS": " ".join(PRM_ARGS),
        "PYTHON": host.slime_python,
        "SERVER_PYTHON": host.ours_python,
        "ENGINE_PYTHON": host.engine_python,
        **(variables or {}),
    }
    flags = [
        "--no-transformer-engine",
        *(word for setting in settings for word in ("--set", setting)),
    ]
    engine = '["--cuda-graph-max-bs-decode", "64", "--sampling-backend", "pytorch"]'
    flags += ["--set", f"engine.args={engine}"]
    flags += SHARING.get((host.gpus, host.engines), [])
    if host.is_tiny:
        flags += ["--set", "training.min_batch=4", "--batch-size", "8"]
    command = ["bash", str(SCRIPT), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=host.environ | given,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return Script(process, data_dir, log, time.monotonic())


def come_up(
    script: Script, took: dict[str, float], end: float, *, on_server: Callable[[], None] = lambda: None
) -> None:
    """Wait until the driver serves. took: gets the seconds of each part. on_server: called when chats can begin."""

    def prm_answers() -> bool:
        return httpx.get(f"http://127.0.0.1:{PRM_PORT}/model_info", timeout=5).is_success

    took["judge"] = script.wait("the judge answers", prm_answers, end)
    took["server"] = script.wait("the server answers", (script.data_dir / "run" / "server.json").is_file, end)
    on_server()

    def driver_serves() -> bool:
        if script.log.read_text(errors="replace").count("[launch] driver ended") >= GIVE_UP:
            raise RuntimeError(f"the driver ended {GIVE_UP} times")
        return script.says(script.driver_log, " serves")

    took["driver"] = script.wait("the driver serves", driver_serves, end)


def _learn(script: Script, load: Load, end: float) -> dict[str, Any]:
    first, began = script.status()["serving"], time.monotonic()
    seen, at = first, []

    def served() -> bool:
        nonlocal seen
        now = script.status()["serving"]
        if now > seen:
            at.append(round(time.monotonic() - began, 1))
            load.burst()
        seen = now
        return bool(now >= first + 2 * UPDATES)

    with suppress(TimeoutError):
        script.wait("twice the updates", served, end)
    status = script.status()
    return {
        "updates served": seen - first,
        "served after s": at,
        "rest": {key: status[key] for key in ("serving", "tip", "counts", "problems")},
    }


def stop(script: Script, started: list[psutil.Process], grace_s: float) -> dict[str, Any]:
    """End the script as Ctrl-C does; report the processes that it left behind, then kill them."""
    asked = time.monotonic()
    if script.process.poll() is None:
        script.process.send_signal(signal.SIGTERM)
        try:
            script.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            started = started + script.below()
            os.killpg(script.process.pid, signal.SIGKILL)
            script.process.wait()
    figures: dict[str, Any] = {"script exit": script.process.returncode, "stop s": round(time.monotonic() - asked, 1)}
    _, left = psutil.wait_procs(started, timeout=3)
    figures["left behind"] = [f"{process.pid} {process.name()}" for process in left if process.is_running()]
    for process in left:
        process.kill()
    return figures


def _findings(figures: dict[str, Any]) -> list[str]:
    findings = [
        f"{key}: {figures[key]}" for key in ("failed", "refused or cut", "left behind", "audit") if figures.get(key)
    ]
    if figures.get("updates served", 0) < UPDATES:
        findings.append(f"only {figures.get('updates served')} updates")
    if figures["script exit"] != 0:
        findings.append(f"the script ended with {figures['script exit']}")
    if not any(step.get("hint_share") for step in figures.get("step metrics", ())):
        findings.append("no step had a hint")
    if not any("HINT" in answer for answer in figures["the judge said"]):
        findings.append("the judge wrote no hint")
    return findings
