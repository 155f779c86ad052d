"""Chats through the whole node: SGLang on one GPU, Megatron through slime on another, our server in front.

One SGLang stays up over the methods; server and driver are started anew for each, on the same ledger. The parts end as
they would in bad luck: a Megatron worker is killed in the middle of a step, Ray's head, the engine.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from chat_load import Reply, chat, quantile

from openclaw_rl.children import free_port
from openclaw_rl.engines.sglang import launch as sglang
from openclaw_rl.settings import EngineSettings
from openclaw_rl.testing.running_server import RunningServer
from openclaw_slime.arguments import NodeOptions
from openclaw_slime.launch import Plan, Pythons, ServerOptions, Training, make_plan
from openclaw_slime.layout import Layout
from openclaw_slime.processes import Command, Restarted

if TYPE_CHECKING:
    from node_check import Host

PORT = 30000
TOPICS = ("rivers", "bread", "stars", "trains", "gardens", "music", "winter", "bees")
ANSWERS = ("Thanks, that is perfect!", "No, that is wrong. Please answer in one short sentence.")
VISITORS = 16
COMMITTED = ': {"loss"'
LEAVE_S = 40.0
"""Of a part's time: for its kill, its clean-up and its figures."""
QUICK_RAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10", "PYTHONWARNINGS": "ignore"}
"""A driver notices that Ray's head is gone."""
ENGINE_ARGS = ["--cuda-graph-max-bs-decode", "64", "--sampling-backend", "pytorch"]


# -- parts -------------------------------------------------------------------------------------------------------------


def plan_of(host: "Host", method: str, *, port: int = PORT) -> Plan:
    layout = Layout(host.gpus, 1, 1, 0, actor_tp=1, engine_tp=1, is_shared=host.gpus == 1)
    options = NodeOptions(
        hf_checkpoint=str(host.checkpoint),
        method=method,
        layout=layout,
        batch_size=8,
        learning_rate=1e-6,
        weight_decay=0.0,
        max_tokens_per_gpu=16384,
        context_length=4096,
        temperature=0.8,
        optimizer_on_cpu=False,
        has_transformer_engine=False,
        push="nccl" if host.gpus > 1 else "disk",  # NCCL takes no two ranks on one card
    )
    extra = ('log_format="json"', "training.max_wait_s=10", "training.min_batch=4", "training.max_staleness=200")
    extra += ("publisher.max_step_kl=1000", "publisher.max_base_kl=1000", "engine.hold_s=280")
    server = ServerOptions(
        port=port,
        data_dir=str(host.data_dir),
        judge="rules",
        reasoning_parser="",
        tool_call_parser="",
        mem_fraction_static=host.engine_share,
        extra=extra,
    )
    pythons = Pythons(host.slime_python, host.ours_python, host.engine_python)
    return make_plan(options, server, pythons, Training(checkpoint_every=4), prm_checkpoint=None)


def settings_of(plan: Plan) -> list[str]:
    """The server's flags, less what a running engine and the check decide; empty parsers are none."""
    words = iter(plan.server.arguments[1:])
    pairs = [(word, next(words)) for word in words]
    kept = [(flag, value) for flag, value in pairs if flag == "--set" and not value.endswith("_parser=")]
    return [
        word
        for pair in kept
        if not pair[1].startswith(("engine.kind=", "engine.args=", "engine.python="))
        for word in pair
    ]


class Engine:
    """SGLang on the last GPU, with the flags that our server would start it with. It outlives the call."""

    def __init__(self, host: "Host", port: int, pid: int | None = None) -> None:
        self._host, self._port, self._pid = host, port, pid
        self.url = f"http://127.0.0.1:{port}"
        self.start_s = 0.0

    @classmethod
    def of(cls, host: "Host", *, may_start: bool = True) -> "Engine":
        """The one that runs; a new one when none does."""
        file = host.work / "engine.json"
        if file.is_file():
            found = json.loads(file.read_text())
            engine = cls(host, found["port"], found["pid"])
            if not may_start or engine.is_healthy():
                return engine
        engine = cls(host, free_port())
        engine.start()
        return engine

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def start(self) -> None:
        started = time.monotonic()
        with (self._host.out / "engine.log").open("ab") as log:
            process = subprocess.Popen(
                self._command(), env=self._environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._pid = process.pid
        (self._host.work / "engine.json").write_text(json.dumps({"port": self._port, "pid": self._pid}))
        while not self.is_healthy():
            if process.poll() is not None:
                raise RuntimeError(f"the engine died with {process.returncode}")
            time.sleep(0.3)
        self.start_s = round(time.monotonic() - started, 1)

    def kill(self) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def _command(self) -> list[str]:
        if self._host.fake:
            config = {"port": self._port, "model": {"path": str(self._host.checkpoint)}, "engine": {"threads": 1}}
            config |= {"cache_dir": str(self._host.work / "cache"), "port_file": str(self._host.work / "port.json")}
            file = self._host.work / "embedded.json"
            file.write_text(json.dumps(config))
            return [self._host.ours_python, "-m", "openclaw_rl.engines.embedded", "--config", str(file)]
        settings = EngineSettings(kind="sglang", args=tuple(ENGINE_ARGS), memory_fraction=self._host.engine_share)
        arguments = sglang.argv(
            sglang.look(self._host.engine_python), settings, folder=self._host.checkpoint, name="node",
            port=self._port, context_length=4096, adapters=None,
        )  # fmt: skip
        return [self._host.engine_python, "-I", "-m", sglang.MODULE, *arguments]

    def _environ(self) -> dict[str, str]:
        return self._host.environ | sglang.ENVIRON | {"CUDA_VISIBLE_DEVICES": str(self._host.gpus - 1)}


class Driver:
    """The trainer's process, started again by the node's own supervision until the part ends."""

    def __init__(self, command: Command, log: Path) -> None:
        self._log, self._read = log, 0
        self._stop = threading.Event()
        self.exits: list[int] = []
        self._restarted = Restarted(command, log)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stop.wait(0.2):
            code = self._restarted.look()
            if code is not None:
                self.exits.append(code)

    def wait_for_line(self, what: str, timeout_s: float) -> bool:
        """Whether a new line says so, in time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self._log.open("rb") as log:
                log.seek(self._read)
                text = log.read()
            if what.encode() in text:
                self._read += text.index(what.encode()) + len(what)
                return True
            time.sleep(0.002)
        return False

    def skip(self) -> None:
        self._read = self._log.stat().st_size

    def find(self, *words: str) -> list[psutil.Process]:
        """Processes below the driver whose command line has one of the words."""
        found = []
        with suppress(psutil.Error):
            for process in psutil.Process(self._restarted.process._popen.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if any(word in " ".join(process.cmdline()) for word in words):
                        found.append(process)
        return found

    def stop(self, grace_s: float) -> None:
        self._stop.set()
        self._thread.join(5)
        below = self.find("")
        self._restarted.process.stop(grace_s)
        for process in below:
            with suppress(psutil.Error):
                process.kill()


# -- load --------------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Chats in a thread of their own, so that the part's steps can wait for what they wait for."""

    url: str
    streams: int
    replies: list[Reply] = field(default_factory=list)
    offset: float = field(default_factory=lambda: time.time() - time.perf_counter())
    _stop: threading.Event = field(default_factory=threading.Event)
    _burst: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def burst(self) -> None:
        """Sixteen visitors at once, more or less."""
        self._burst.set()

    def stop(self, timeout_s: float = 120) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(timeout_s)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self.streams):
                tasks.create_task(self._talk(client, number))
            while not self._stop.is_set():
                await asyncio.sleep(0.003)
                if self._burst.is_set():
                    self._burst.clear()
                    for number in range(VISITORS):
                        tasks.create_task(self._visit(client, number))

    async def _talk(self, client: httpx.AsyncClient, number: int) -> None:
        """Two-turn sessions; the second message says what was thought of the first reply."""
        for session in itertools.count():
            if self._stop.is_set():
                return
            name = f"person-{number}-{session}-{time.time():.0f}"
            ask = f"Tell me about {TOPICS[number % 8]}, story {session}. " * (1 + number % 5)
            messages = [{"role": "user", "content": ask}]
            first = await chat(client, messages, session=name, max_tokens=64 + 16 * (number % 12))
            self.replies.append(first)
            messages += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": ANSWERS[(session + number) % 2]},
            ]
            self.replies.append(await chat(client, messages, session=name, max_tokens=16))
            if first.error:
                await asyncio.sleep(0.5)

    async def _visit(self, client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(0.001 * number)
        messages = [{"role": "user", "content": f"Good morning, visitor {number} here. What is new?"}]
        self.replies.append(await chat(client, messages, session=f"visitor-{time.time_ns()}", max_tokens=24))

    def figures(self, pauses: list[tuple[float, float]]) -> dict[str, Any]:
        """pauses: wall-clock intervals in which the gate was shut."""
        replies, shift = list(self.replies), self.offset
        gaps = [gap for reply in replies for gap in reply.gaps]
        errors = Counter(reply.error for reply in replies if reply.error)
        inside = [
            reply for reply in replies if any(a <= reply.started + shift <= b for a, b in pauses)
        ]  # fmt: skip
        mid = [
            reply
            for reply in replies
            if reply.token_times
            and any(reply.token_times[0] + shift < a < reply.token_times[-1] + shift for a, _ in pauses)
        ]
        ttft = [reply.token_times[0] - reply.started for reply in replies if reply.token_times]
        held = [reply.token_times[0] - reply.started for reply in inside if reply.token_times]
        tokens = sum((reply.usage or {}).get("completion_tokens", 0) for reply in replies)
        took = max((r.token_times[-1] for r in replies if r.token_times), default=0) - min(r.started for r in replies)
        return {
            "replies": len(replies),
            "tokens_per_s": round(tokens / max(took, 1e-9), 1),
            "refused or cut": dict(errors),
            "arrived during a pause": len(inside),
            "most in one pause": max((sum(a <= r.started + shift <= b for r in replies) for a, b in pauses), default=0),
            "running at a pause": len(mid),
            "wait of those that arrived, p50/max s": [_r(quantile(held, 0.5)), _r(max(held, default=0.0))],
            "ttft p50/p99 s": [_r(quantile(ttft, 0.5)), _r(quantile(ttft, 0.99))],
            "gap p50/p99/max s": [_r(quantile(gaps, 0.5)), _r(quantile(gaps, 0.99)), _r(max(gaps, default=0.0))],
            "finish": dict(Counter(reply.finish_reason for reply in replies)),
            "versions said in headers": sorted({r.weight_version for r in replies if r.weight_version is not None}),
        }


def _r(value: float) -> float:
    return round(value, 4)


# -- what was logged ---------------------------------------------------------------------------------------------------


def events(server_log: Path, name: str) -> list[dict[str, Any]]:
    found = []
    for line in server_log.read_text(errors="replace").splitlines():
        if f'"{name}"' in line:
            with suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
    return found


def at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def driver_figures(log: Path, start: int) -> dict[str, Any]:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    metrics = [line.split(": ", 1)[1] for line in lines if " version " in line and ": {" in line]
    parsed = []
    for text in metrics:
        with suppress(ValueError):
            parsed.append(json.loads(text))
    keys = ("loss", "abs_log_ratio", "masked_share", "samples", "fillers", "grad_norm")
    wanted = ("started again", "is durable", "not sent", "not taken", "server is away", "left out")
    notable = [line[-220:] for line in lines if any(w in line for w in wanted)]
    return {
        "steps": len(parsed),
        "step metrics": [{k: _r(v) for k, v in row.items() if k in keys} for row in parsed[:8]],
        "notable": notable[:12],
    }


# -- a part ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(host: "Host", plan: Plan, engine: Engine) -> Iterator[RunningServer]:
    flags = ["--engine-url", engine.url, "--port", str(PORT), *settings_of(plan)]
    launch = (host.ours_python, "-m", "openclaw_rl", "serve")
    server = RunningServer(host.data_dir, flags, start_s=120, launch=launch)
    with server:
        yield server


def _driver(host: "Host", plan: Plan) -> Command:
    if not host.fake:
        return replace(plan.driver, environ={**plan.driver.environ, **QUICK_RAY})
    python, module, *arguments = host.fake
    return Command("driver", python, module, (*arguments, "--data-dir", str(host.data_dir)))


@dataclass(frozen=True, slots=True)
class Part:
    method: str
    ends_with: str
    """`actor`, `head` or `engine`: what is killed when enough versions were served; empty: nothing."""
    updates: int = 5


def run_part(host: "Host", engine: Engine, part: Part) -> dict[str, Any]:
    plan = plan_of(host, part.method)
    driver_log, server_log = host.out / "driver.log", host.data_dir / "server.log"
    figures: dict[str, Any] = {"method": part.method}
    driver_log.touch()
    log_start = driver_log.stat().st_size
    with serving(host, plan, engine) as server:
        figures["serving at start"] = server.status()["serving"]
        driver = Driver(_driver(host, plan), driver_log)
        driver.skip()
        load = Load(server.url, host.streams)
        load.start()
        try:
            figures |= _until_served(part, driver, server, load, host.ends_at - LEAVE_S)
            if part.ends_with:
                figures["kill"] = _kill(host, part, engine, driver, server, load)
        except BaseException as error:  # what there is by then is wanted, when the time is over above all
            figures["failed"] = repr(error)[:500]
        _keep(host, part, figures)
        load.stop()
        status = server.status()
        figures["rest"] = {key: status[key] for key in ("serving", "tip", "counts", "problems")}
        driver.stop(2 if part.ends_with else 45)  # one that was killed is on its way up again: no need to wait
        received = events(server_log, "weights_received")
        figures |= load.figures([(at(event) - event["held_s"], at(event)) for event in received])
        _keep(host, part, figures)
        figures["driver exits"] = driver.exits
        figures["pushes s: cut, push, held"] = [
            [_r(event["cut_s"]), _r(event["push_s"]), _r(event["held_s"])] for event in received[-12:]
        ]
        figures |= driver_figures(driver_log, log_start)
        figures["versions"] = dict(Counter(row["state"] for row in server.status()["versions"]))
        figures["engine says"] = httpx.get(f"{engine.url}/model_info", timeout=10).json().get("weight_version")
        _keep_turns(host, server, part.method)
    findings = ["requests were refused or cut"] * bool(figures["refused or cut"])
    if figures.get("updates served", 0) < part.updates:
        findings.append(f"only {figures.get('updates served')} updates")
    return figures | {"findings": findings + ["failed"] * ("failed" in figures)}


def _keep(host: "Host", part: Part, figures: dict[str, Any]) -> None:
    """What is known so far, should the time end before the rest is."""
    (host.out / f"{part.method}.partial.json").write_text(json.dumps(figures, indent=1, default=str))


def _until_served(part: Part, driver: Driver, server: RunningServer, load: Load, end: float) -> dict[str, Any]:
    """Wait for the driver, then for enough versions; visitors come while the weights are on their way."""
    started, bursts = time.monotonic(), 0
    figures: dict[str, Any] = {}
    while not driver.wait_for_line(" serves", 3):
        if len(driver.exits) > 1 or time.monotonic() > end:
            raise RuntimeError(f"the driver does not come up: it ended with {driver.exits}")
    figures["driver up s"] = _r(time.monotonic() - started)
    first = server.status()["serving"]
    while time.monotonic() < end and server.status()["serving"] < first + part.updates:
        if driver.wait_for_line(COMMITTED, 3):  # its push begins with the next call
            load.burst()
            bursts += 1
    figures["seconds for the updates"] = _r(time.monotonic() - started - figures.get("driver up s", 0))
    status = server.status()
    return figures | {"updates served": status["serving"] - first, "bursts": bursts}


def _kill(
    host: "Host", part: Part, engine: Engine, driver: Driver, server: RunningServer, load: Load
) -> dict[str, Any]:
    """In the middle of a step where there is one; then chats for a while. What became of them is in the figures."""
    driver.skip()
    is_in_step = driver.wait_for_line("step: lease", 20)
    count, serves = len(load.replies), server.status()["serving"]
    killed = time.monotonic()
    figures: dict[str, Any] = {"what": part.ends_with, "in a step": is_in_step, "serving": serves}
    if part.ends_with == "engine":
        engine.kill()
        time.sleep(1)
        engine.start()
        figures["engine back s"] = _r(time.monotonic() - killed)
        with suppress(TimeoutError):
            server.wait_for("chats go on", lambda s: len(load.replies) > count + host.streams and not s["problems"], 60)
        figures["chats back s"] = _r(time.monotonic() - killed)
        figures["problems"] = server.status()["problems"]
    else:
        found = driver.find(*(("PolicyActor", "TrainRayActor") if part.ends_with == "actor" else ("gcs_server",)))
        for process in found:
            process.kill()
        figures["killed"] = [process.pid for process in found]
        time.sleep(5)
    figures["replies since"] = len(load.replies) - count
    figures["errors since"] = dict(Counter(r.error for r in load.replies[count:] if r.error))
    return figures


def _turns(host: "Host", server: RunningServer, limit: int) -> Iterator[dict[str, Any]]:
    key = (host.data_dir / "keys" / "admin.key").read_text().strip()
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
        for row in client.get(f"/v1/turns?limit={limit}").json()["turns"]:
            yield client.get(f"/v1/turns/{row['turn_id']}").json()


def _keep_turns(host: "Host", server: RunningServer, method: str) -> None:
    """What was recorded, and where the versions lie that it was sampled from, for a later comparison."""
    folders = {row["weight_version"]: row["folder"] for row in server.status()["versions"]}
    rows = []
    for turn in _turns(host, server, 120):
        reply, runs = turn["turn"], turn["turn"]["versions"]
        if len(runs) == 1 and reply["response_ids"]:
            rows.append(
                {
                    "version": runs[0]["weight_version"],
                    "prompt_ids": turn["request"]["prompt_ids"],
                    "response_ids": reply["response_ids"],
                    "log_probs": reply["rollout_log_probs"],
                    "temperature": turn["request"]["sampling"]["temperature"],
                }
            )
    text = json.dumps({"folders": folders, "turns": rows})
    (host.work / f"turns-{method}.json").write_text(text)


def recorded(host: "Host") -> dict[str, Any]:
    """The engine's log-probs of recorded turns against plain passes under what Megatron exported as their version."""
    import models

    figures: dict[str, Any] = {}
    for file in sorted(host.work.glob("turns-*.json")):
        kept = json.loads(file.read_text())
        by_version: dict[int, list[models.Forced]] = {}
        for row in kept["turns"]:
            forced = models.Forced(row["prompt_ids"], row["response_ids"], row["log_probs"], row["temperature"])
            by_version.setdefault(row["version"], []).append(forced)
        for version, replies in sorted(by_version.items(), key=lambda pair: -len(pair[1])):
            name = kept["folders"].get(str(version))
            folder = host.data_dir / name if name else host.checkpoint if version == 0 else None
            if folder is None or not any(folder.glob("*.safetensors")) or len(figures) >= 6:
                continue
            label = f"{file.stem.removeprefix('turns-')}, version {version}, {len(replies)} turns"
            figures[label] = models.compare(replies[:24], folder, None, host.device)
    return figures


def audit(host: "Host") -> list[str]:
    from kill.audit import audit as look

    return list(look(host.data_dir / "ledger.sqlite3", [], is_deep=True))
