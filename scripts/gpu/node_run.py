"""Parts of the node check: chats through the whole node, with one method each, and a kill at the end.

SGLang runs on one GPU, Megatron through slime on the others, our server in front. One SGLang stays up over the methods.
Each part starts its own server and driver, on the same ledger. A part ends with SIGKILL of a Megatron worker in the
middle of a step, of Ray's head, or of the engine.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx

from gpu.engine_process import EngineProcess
from gpu.host import NodeHost
from gpu.node_load import Load, keep_turns
from gpu.node_processes import Driver, Engine, driver_figures, start_prm, voting
from gpu.node_weights import CheckedEngine, ServedWeights
from gpu.server_files import events, held
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer
from openclaw_slime.arguments import NodeOptions
from openclaw_slime.launch import Plan, Pythons, Training, make_plan
from openclaw_slime.node_settings import ServerOptions
from openclaw_slime.processes import Command

PORT = 30000
COMMITTED = ': {"loss"'
LEAVE_S = 40.0
"""Part of a part's time that is kept for its clean-up and its figures."""
KILL_S = 80.0
"""Time that is kept, in addition, for a kill."""
BACK_S = 120.0
"""Time to recover from a kill. A kill of the engine restarts the driver too, since its weights channel died."""
HINTED = ("opd", "combine")
QUICK_RAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10", "PYTHONWARNINGS": "ignore"}
"""Let the driver notice within seconds that Ray's head died."""


# -- parts -------------------------------------------------------------------------------------------------------------


def plan_of(host: NodeHost, method: str, judge_url: str | None = None) -> Plan:
    """Return the node's launch plan. judge_url: URL of a model that judges; None: the rules judge."""
    options = NodeOptions(
        hf_checkpoint=str(host.checkpoint),
        method=method,
        layout=host.layout,
        batch_size=8,
        learning_rate=1e-6,
        weight_decay=0.0,
        max_tokens_per_gpu=16384,
        context_length=4096,
        temperature=0.8,
        optimizer_on_cpu=False,
        has_transformer_engine=False,
        push="disk" if host.layout.is_shared else "nccl",  # NCCL takes no two ranks on one card
    )
    extra = ['log_format="json"', "training.max_wait_s=10", "training.min_batch=4", "training.max_staleness=200"]
    extra += ["training.max_waiting=16"]  # two batches: the next method soon trains on its own samples
    extra += ["publisher.max_step_kl=1000", "publisher.max_base_kl=1000", "engine.hold_s=280"]
    if judge_url is not None:
        extra += ["judge.workers=16"]
    server = ServerOptions(
        port=PORT,
        data_dir=str(host.data_dir),
        judge="rules" if judge_url is None else "llm",
        judge_url=judge_url,
        reasoning_parser="",
        tool_call_parser="",
        mem_fraction_static=host.engine_share,
        extra=tuple(extra),
    )
    pythons = Pythons(host.slime_python, host.ours_python, host.engine_python)
    return make_plan(options, server, pythons, Training(checkpoint_every=4), prm_checkpoint=None)


def settings_of(plan: Plan) -> list[str]:
    """Return the server's flags of the plan, without the engine's own and without empty parsers."""
    words = iter(plan.server.arguments[1:])
    pairs = [(word, next(words)) for word in words]
    kept = [(flag, value) for flag, value in pairs if flag == "--set" and not value.endswith("_parser=")]
    return [
        word
        for pair in kept
        if not pair[1].startswith(("engine.kind=", "engine.args=", "engine.python="))
        for word in pair
    ]


def _r(value: float) -> float:
    return round(value, 4)


# -- a part ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(host: NodeHost, plan: Plan, engine: Engine) -> Iterator[RunningServer]:
    flags = ["--engine-url", engine.url, "--port", str(PORT), *settings_of(plan)]
    launch = (host.ours_python, "-m", "openclaw_rl", "serve")
    server = RunningServer(host.data_dir, flags, start_s=120, launch=launch, must_be_ok=False)
    with server:
        yield server


def _driver(plan: Plan) -> Command:
    return replace(plan.driver, environ={**plan.driver.environ, **QUICK_RAY})


@dataclass(frozen=True, slots=True)
class Part:
    method: str
    ends_with: str
    """Process to kill once enough versions have served: `actor`, `head` or `engine`; empty: no kill."""
    updates: int = 5

    @property
    def name(self) -> str:
        """Name in the part's files: two parts may share a method."""
        return "engine_kill" if self.ends_with == "engine" else self.method


def judge_engine(host: NodeHost) -> EngineProcess | None:
    """Start the judge's engine; return None if the layout has no card for it."""
    command = plan_of(host, "binary_rl", "http://judge/v1").prm
    return None if command is None else start_prm(host, command)


def run_method(host: NodeHost, part: Part) -> Figures:
    """Run a part on the engine that runs, or on a new one."""
    return run_part(host, Engine.of(host), part)


def run_part(host: NodeHost, engine: Engine, part: Part) -> dict[str, Any]:
    prm = judge_engine(host)
    if prm is None:
        return _run_part(host, engine, part, plan_of(host, part.method))
    with voting(prm.url) as votes:
        figures = _run_part(host, engine, part, plan_of(host, part.method, votes.url))
    heard = {"the judge said": dict(votes.answers)}
    findings = figures["findings"] + ["the judge did not vote"] * (not any("boxed" in said for said in votes.answers))
    return figures | heard | {"findings": findings}


def _run_part(host: NodeHost, engine: Engine, part: Part, plan: Plan) -> dict[str, Any]:
    driver_log, server_log = host.out / "driver.log", host.data_dir / "server.log"
    figures: dict[str, Any] = {"method": part.method}
    driver_log.touch()
    log_start = driver_log.stat().st_size
    with serving(host, plan, engine) as server, httpx.Client(base_url=engine.url, timeout=20) as looking:
        figures["serving at start"] = server.status()["serving"]
        driver = Driver(_driver(plan), driver_log)
        driver.skip()
        load = Load(server.url, host.streams)
        load.start()
        weights = ServedWeights(CheckedEngine(looking), lambda: int(server.status()["serving"]))
        try:
            figures |= _until_served(
                part, driver, server, load, host.ends_at - LEAVE_S - KILL_S * bool(part.ends_with), on_up=weights.start
            )
            if part.ends_with:
                figures["kill"] = _kill(host, part, engine, driver, server, load)
        except BaseException as error:  # OutOfTime too: the figures so far are wanted above all then
            figures["failed"] = repr(error)[:500]
        _keep(host, part, figures)
        load.stop()
        weights.stop()
        status = server.status()
        figures["rest"] = {key: status[key] for key in ("serving", "tip", "counts", "problems")}
        driver.stop(2 if part.ends_with else 45)  # a killed driver is starting again: no clean end to wait for
        received = events(server_log, "weights_received") + events(server_log, "weights_swapped")
        figures |= load.figures(held(server_log))
        _keep(host, part, figures)
        figures["driver exits"] = driver.exits
        figures["pushes s: cut, push, held"] = [
            [_r(event["cut_s"]), _r(event["push_s"]), _r(event["held_s"])] for event in received[-12:]
        ]
        figures |= driver_figures(driver_log, log_start)
        figures["versions"] = dict(Counter(row["state"] for row in server.status()["versions"]))
        figures["engine says"] = httpx.get(f"{engine.url}/model_info", timeout=10).json().get("weight_version")
        keep_turns(host, server, part.name)
        weights.keep(host.work / f"weights-{part.name}.json", server.status()["versions"])
        figures["versions whose weights were looked at"] = sorted(weights.taken)
    return figures | {"findings": _findings(part, figures)}


def _findings(part: Part, figures: dict[str, Any]) -> list[str]:
    findings = ["requests were refused or cut"] * bool(figures["refused or cut"])
    findings += ["no request arrived during a pause"] * (not figures["arrived during a pause"])
    if figures.get("updates served", 0) < part.updates:
        findings.append(f"only {figures.get('updates served')} updates")
    kill = figures.get("kill", {})
    if part.ends_with == "engine" and "chats back s" not in kill:
        findings.append("chats did not go on after the engine's restart")
    if part.ends_with in ("actor", "head") and not (kill.get("killed") and "trains again s" in kill):
        findings.append(f"after the kill of the {part.ends_with} the driver did not train again: {kill}")
    if part.method in HINTED and not any(step.get("hint_share") for step in figures["step metrics"]):
        findings.append("no step had a hint")
    return findings + ["failed"] * ("failed" in figures)


def _keep(host: NodeHost, part: Part, figures: dict[str, Any]) -> None:
    """Write the figures so far, in case that the stage runs out of time."""
    (host.out / f"{part.name}.partial.json").write_text(json.dumps(figures, indent=1, default=str))


def _until_served(
    part: Part, driver: Driver, server: RunningServer, load: Load, end: float, *, on_up: Callable[[], None]
) -> dict[str, Any]:
    """Wait for the driver, then for enough versions; start visitors while weights are pushed.

    on_up: called when the driver has sent its first weights.
    """
    started, bursts = time.monotonic(), 0
    figures: dict[str, Any] = {}
    while not driver.wait_for_line(" serves", 3):
        if len(driver.exits) > 1 or time.monotonic() > end:
            raise RuntimeError(f"the driver does not come up: it ended with {driver.exits}")
    figures["driver up s"] = _r(time.monotonic() - started)
    on_up()
    first = server.status()["serving"]
    while time.monotonic() < end and server.status()["serving"] < first + part.updates:
        if driver.wait_for_line(COMMITTED, 3):  # the push of the committed version begins now
            load.burst()
            bursts += 1
    figures["seconds for the updates"] = _r(time.monotonic() - started - figures.get("driver up s", 0))
    status = server.status()
    return figures | {"updates served": status["serving"] - first, "bursts": bursts}


def _kill(
    host: NodeHost, part: Part, engine: Engine, driver: Driver, server: RunningServer, load: Load
) -> dict[str, Any]:
    """Kill the part's process, in the middle of a step if one runs, and wait until chats or training go on."""
    driver.skip()
    is_in_step = driver.wait_for_line("step: lease", 20)
    count, exits, serves = len(load.replies), len(driver.exits), server.status()["serving"]
    killed = time.monotonic()
    figures: dict[str, Any] = {"what": part.ends_with, "in a step": is_in_step, "serving": serves}
    if part.ends_with == "engine":
        engine.kill()
        time.sleep(1)
        engine.start_again()
        figures["engine back s"] = _r(time.monotonic() - killed)
        with suppress(TimeoutError):
            server.wait_for("chats go on", lambda _: len(load.replies) > count + host.streams, BACK_S)
            figures["chats back s"] = _r(time.monotonic() - killed)
        status = server.status()
        figures |= {"serving since": status["serving"], "problems": status["problems"]}
    else:
        found = driver.find(*(("PolicyActor", "TrainRayActor") if part.ends_with == "actor" else ("gcs_server",)))
        for process in found:
            process.kill()
        figures["killed"] = [process.pid for process in found]
        with suppress(TimeoutError):
            server.wait_for("the driver ended", lambda _: len(driver.exits) > exits, BACK_S)
            figures["driver ended s"] = _r(time.monotonic() - killed)
            was = server.status()["tip"]
            server.wait_for("it trains again", lambda s: s["tip"] > was and s["serving"] == s["tip"], BACK_S)
            figures |= {"trains again s": _r(time.monotonic() - killed), "serving since": server.status()["serving"]}
    figures["replies since"] = len(load.replies) - count
    figures["errors since"] = dict(Counter(r.error for r in load.replies[count:] if r.error))
    return figures
