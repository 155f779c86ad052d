"""Stage `kills` of the node check: the launch script under chats, while one process after the other is killed.

    openclaw-combine/run_qwen3_4b_openclaw_combine.sh

All parts share one card, and weights go by disk. Of two cards the trainer has the first, policy and judge share the
second, and weights go by NCCL. Four cards have one for the judge alone. With `--engines 2` the policy has two engines.

SIGKILL goes to the driver, Ray's head, our server, the policy's SGLang and the judge's SGLang, in turn. After each the
run must go on alone: a further version is trained and serves. The ledger tells what became of the feedback that no
checkpoint held. Then an operator pins, rolls back and forgets (`node_steering`). The judge's first hints stand behind
long thoughts.

A kill for which too little time is left is skipped and named. The figures so far are printed after each step.
"""

import itertools
import json
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from gpu import models, node_feedback, node_steering
from gpu.host import NodeHost
from gpu.node_feedback import Given, People
from gpu.node_kill_findings import LEAST_AT_STAKE, findings
from gpu.node_processes import LONG_HINT_SAYS, PRM_ARGS, Votes, driver_figures, voting
from gpu.node_script import PRM_PORT, SETTINGS, Cards, Script, cards, come_up, start, stop
from gpu.server_files import audit, events, held, keep_logs
from gpu.stages import Figures

LONG_HINTS = 4
STEER_S, END_S = 30.0, 22.0
"""Time that is kept for the operator's commands, and to stop."""
READY_S, IN_STEP_S = 150.0, 5.0
"""Longest wait for a checkpoint with versions after it, which a crash would lose, and for a step to kill in."""
JUDGE_CONTEXT = "16384"
"""Room for the script's own token budget of a hint, 8192."""
VARIABLES = {
    "CHECKPOINT_MINUTES": "2",
    "CHECKPOINT_EVERY": "1000",  # the minutes come first
    "PRM_ARGS": " ".join([*PRM_ARGS[:-1], JUDGE_CONTEXT]),
}
NO_BACKLOG = "training.max_waiting=20000"
"""No sample ends as `backlog`: that would look like a loss."""
AWAY = (OSError, httpx.HTTPError, sqlite3.Error, psutil.Error, LookupError, ValueError)
"""Errors of a look at a process that is dead or starts."""


@dataclass(frozen=True, slots=True)
class Kill:
    name: str
    takes_s: float
    """Expected time until a further version serves."""


KILLS = (
    Kill("driver", 60),
    Kill("head", 70),
    Kill("server", 110),
    Kill("engine", 112),
    Kill("prm", 45),
)
_KILL = {kill.name: kill for kill in KILLS}
NAMES = tuple(_KILL)


@dataclass(slots=True)
class Run:
    """The running script under load, and the figures so far."""

    host: NodeHost
    script: Script
    people: People
    votes: Votes
    figures: Figures
    given: dict[str, Given] = field(default_factory=dict)
    """Feedback at stake at each kill."""

    @property
    def ledger(self) -> Path:
        return self.script.data_dir / "ledger.sqlite3"

    @property
    def end(self) -> float:
        return self.host.ends_at - END_S

    def keep(self, what: str, row: object = None) -> None:
        """Print these figures, or the row, and write all figures so far: the stage may be cut."""
        (self.host.out / "kills.partial.json").write_text(json.dumps(self.figures, indent=1, default=str))
        print(f"-- kills, {what}: {json.dumps(row or self.figures.get(what), default=str)[:3000]}", flush=True)


def run(host: NodeHost) -> Figures:
    checkpoint = models.qwen3(host.work / "tokenizer", host.checkpoint, device=host.device)
    figures: Figures = {"gpus": host.gpus, "engines": host.engines, "start-up s": {}, "kills": {}}
    figures["wanted push"] = cards(host)["PUSH"]
    memory = Cards()
    memory.watch()
    with voting(f"http://127.0.0.1:{PRM_PORT}") as votes:
        votes.think_long(LONG_HINTS)
        settings = (*(word for word in SETTINGS if "max_waiting" not in word), NO_BACKLOG)
        script = start(host, checkpoint, votes.url, name="kills", variables=VARIABLES, settings=settings)
        going = Run(host, script, People(script.url, host.streams), votes, figures)
        try:
            _go(going)
        except BaseException as error:  # OutOfTime too: the figures so far are wanted above all then
            figures["failed"] = repr(error)[:500]
        _finish(going)
    memory.stop()
    figures["most memory of a card MiB"] = memory.most
    return figures | {"findings": findings(figures)}


def _go(going: Run) -> None:
    figures, script = going.figures, going.script
    come_up(script, figures["start-up s"], going.end, on_server=going.people.start)
    going.keep("start-up s")
    figures["set"] = _set(script)
    going.keep("set")
    for kill in (_KILL[name] for name in going.host.kills or NAMES):
        row: Figures = {}
        figures["kills"][kill.name] = row
        try:
            if _has_time(going, kill, row) and _await_stakes(going) and _has_time(going, kill, row):
                _kill(going, kill, row)
        except (*AWAY, TimeoutError) as error:
            row["failed"] = repr(error)[:300]
        going.keep(kill.name, row)
    for name, given in going.given.items():  # before an operator drops samples by a rollback
        figures["kills"][name]["feedback after all kills"] = node_feedback.kept(going.ledger, given)
    figures["never lost"] = going.people.lost(going.ledger)  # before an operator deletes a session
    figures["steered at"] = time.time()
    figures["steering"] = {}
    node_steering.steer(node_steering.Operator(going.host, script), figures["steering"])
    going.keep("steering")
    with suppress(TimeoutError):
        since = time.time()
        figures["trains after steering s"] = f"not within {going.end - time.monotonic():.0f} s"
        figures["trains after steering s"] = _seconds_until(
            going, lambda: node_feedback.trained_since(going.ledger, since) is not None, going.end
        )


def _set(script: Script) -> Figures:
    """Return how the script's server and driver were started: the teacher, the gate's base, the way of the weights."""
    server, driver = (_words(psutil.Process(started_pid(script, name))) for name in ("server", "driver"))
    pairs = [word.partition("=")[::2] for word in server if word.startswith(("method.", "publisher.base_url="))]
    return dict(pairs) | {"push": dict(itertools.pairwise(driver)).get("--push")}


def _seconds_until(going: Run, is_so: Callable[[], bool], end: float) -> float:
    """Poll; return the seconds. Raises TimeoutError at `end`, RuntimeError if the script ends."""
    began = time.monotonic()
    while True:
        with suppress(*AWAY):
            if is_so():
                return round(time.monotonic() - began, 1)
        if (code := going.script.process.poll()) is not None:
            raise RuntimeError(f"the script ended with {code}")
        if time.monotonic() > end:
            raise TimeoutError(f"not within {time.monotonic() - began:.0f} s")
        time.sleep(0.1)


# -- one kill ----------------------------------------------------------------------------------------------------------


def _has_time(going: Run, kill: Kill, row: Figures) -> bool:
    """Return True if the kill can show its result. Else name it as skipped: a part that was cut off is no fault."""
    left_s = going.end - time.monotonic()
    if left_s < kill.takes_s + STEER_S:
        row["skipped"] = f"{left_s:.0f} s left"
    return "skipped" not in row


def _await_stakes(going: Run) -> bool:
    """Wait for a checkpoint with versions after it, READY_S at most. Less at stake is a finding of its own."""
    ledger = going.ledger
    with suppress(TimeoutError):
        _seconds_until(
            going,
            lambda: node_feedback.has_checkpoint(ledger) and node_feedback.undurable(ledger) >= LEAST_AT_STAKE,
            min(time.monotonic() + READY_S, going.end),
        )
    return True


def _kill(going: Run, kill: Kill, row: Figures) -> None:
    """Kill the process and wait until a further version serves. The figures go to `row` as they are known."""
    script, ledger = going.script, going.ledger
    if kill.name in ("driver", "head"):
        row["in a step"] = _is_in_step(script, IN_STEP_S)
    _seconds_until(going, lambda: _lives(_victim(script, kill.name)), going.end)
    victim, is_back = _victim(script, kill.name), recovery(script, kill.name)
    processes = [victim, *victim.children(recursive=True)]
    given = going.given[kill.name] = node_feedback.given_since_checkpoint(ledger)
    row |= {"versions at stake": node_feedback.undurable(ledger), "newest on disk": given.durable}
    row["at"] = time.time()
    victim.kill()
    began, back_at = time.monotonic(), 0.0
    end = min(began + max(1.8 * kill.takes_s, 60), going.end)

    def goes_on() -> bool:
        nonlocal back_at
        if "its processes gone s" not in row and not any(map(_lives, processes)):
            row["its processes gone s"] = round(time.monotonic() - began, 1)
        if not back_at and is_back():
            back_at = time.time()
            row["back s"] = round(back_at - row["at"], 1)
        if not back_at or (kill.name == "prm" and not node_feedback.judged_since(ledger, back_at)):
            return False
        row["trained since"] = node_feedback.trained_since(ledger, back_at)
        return row["trained since"] is not None

    try:
        row["trains again s"] = _seconds_until(going, goes_on, end)
    except TimeoutError as error:
        row["trains again s"] = str(error)
        with suppress(*AWAY):
            row["problems"] = script.status()["problems"]
    row["feedback since the checkpoint"] = node_feedback.kept(ledger, given)
    row["chats"] = going.people.between(row["at"], time.time())


def _is_in_step(script: Script, timeout_s: float) -> bool:
    """Wait until the driver says that a step begins."""
    at, end = script.driver_log.stat().st_size, time.monotonic() + timeout_s
    while time.monotonic() < end:
        if "step: lease" in _text_from(script.driver_log, at):
            return True
        time.sleep(0.01)
    return False


def _victim(script: Script, name: str) -> psutil.Process:
    if name == "engine":
        return psutil.Process(_engine_starts(script)[-1])
    if name != "head":
        return psutil.Process(started_pid(script, name))
    for process in psutil.Process(started_pid(script, "driver")).children(recursive=True):
        if any("gcs_server" in word for word in _words(process)):
            return process
    raise LookupError("Ray's head does not run")


def recovery(script: Script, name: str) -> Callable[[], bool]:
    """Return a function that is true once the part works again; to be called before the kill."""
    if name in ("driver", "head"):
        return _DriverIsBack(script, started_pid(script, "driver"))
    if name == "engine":
        starts = len(_engine_starts(script))
        return lambda: len(_engine_starts(script)) > starts and _takes_chats(script)
    pid = started_pid(script, name)
    if name == "prm":
        url = f"http://127.0.0.1:{PRM_PORT}/model_info"
        return lambda: started_pid(script, name) != pid and httpx.get(url, timeout=5).is_success
    return lambda: started_pid(script, name) != pid and _takes_chats(script)


@dataclass(slots=True)
class _DriverIsBack:
    """True once another driver serves; what the dying one still sends does not count."""

    script: Script
    killed: int
    log_end: int = 0

    def __call__(self) -> bool:
        if started_pid(self.script, "driver") == self.killed:
            self.log_end = self.script.driver_log.stat().st_size
            return False
        return " serves" in _text_from(self.script.driver_log, self.log_end)


def _takes_chats(script: Script) -> bool:
    """Return True if no chat is held, and every engine of a pool is in it."""
    status = script.status()
    return not any("chats are held" in problem for problem in status["problems"]) and all(
        engine["is_in"] for engine in status.get("engines") or ()
    )


def started_pid(script: Script, name: str) -> int:
    """Return the pid that the launcher wrote last for this process."""
    return int(re.findall(rf"\[launch\] {name} started, pid (\d+)", script.log.read_text(errors="replace"))[-1])


def _engine_starts(script: Script) -> list[int]:
    # A pool's are `engine 1`, `engine 2`.
    return [row["pid"] for row in events(script.log, "child_started") if row["child"].startswith("engine")]


def _text_from(log: Path, at: int) -> str:
    with log.open("rb") as file:
        file.seek(at)
        return file.read().decode(errors="replace")


def _words(process: psutil.Process) -> Sequence[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


# -- the end -----------------------------------------------------------------------------------------------------------


def _finish(going: Run) -> None:
    """Read the figures of the whole run, and end its processes. A step that fails is named, and stops no other."""
    figures, script, host, people = going.figures, going.script, going.host, going.people
    steps = {
        "status": lambda: _status(going),
        "people": lambda: people.stop(10),
        "stop": lambda: figures.update(
            stop(
                script,
                script.below() if script.process.poll() is None else [],
                max(5.0, host.ends_at - time.monotonic() - 8),
            )
        ),
        "ledger": lambda: _look_back(going),
        "load": lambda: figures.update(people.figures(held(script.log))),
        "logs": lambda: keep_logs(script.data_dir, host.out, "kills"),
        "driver": lambda: figures.update(driver_figures(script.driver_log, 0)),
        "audit": lambda: figures.update(audit=list(audit(script.data_dir))),
    }
    for name, step in steps.items():
        try:
            step()
        except Exception as error:
            figures[f"{name} failed"] = repr(error)[:300]
        if name == "people":
            going.keep("rest")


def _status(going: Run) -> None:
    going.figures["long hints"] = going.votes.long_hints
    status = going.script.status()
    going.figures["rest"] = {key: status[key] for key in ("serving", "tip", "counts", "problems")}


def _look_back(going: Run) -> None:
    """Read from the ledger and from the people what became of their chats and of their feedback."""
    figures, people = going.figures, going.people
    figures["long hints in samples"] = node_feedback.samples_with(going.ledger, LONG_HINT_SAYS)
    times = [row["at"] for row in figures["kills"].values() if "at" in row]
    times.append(figures.get("steered at", time.time()))
    figures["chats before the first kill"] = people.between(0, times[0])
    for name, begin, end in zip(going.given, times, times[1:], strict=False):
        figures["kills"][name]["chats until the next"] = people.between(begin, end)
    figures["chats while steered"] = people.between(times[-1], time.time())
