"""Stage `pool`: two engines on two cards as one pool, under streamed chats. One is killed and comes back.

First prefix-cache hits of a pool that places each call at random (`random_routes`). Then adapters, which this module
commits as the trainer: the sessions' engines, prefix-cache hits with affinity and of one engine (the other is drained),
swaps under load, `kill -9` of the first engine, a swap while it is out, its return. Then full weights over disk, which
roll through the pool: two versions of a trainer whose step is noise, the pin of each in turn, `kill -9` of the second
engine, its return. Afterwards recorded log-probs are compared with plain passes under each token's version.

Weights by NCCL need a third card, for the trainer: NCCL takes no two ranks on one. `node_check.sh --gpus 4 --engines 2`
sends them.

Each step prints its figures as it ends. A step that fails is named, and its part ends.
"""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.many_users import commit
from gpu import foreign, full_load, load, models, pool_chats, pool_hits
from gpu.engine_process import EngineProcess, start_engine
from gpu.host import SglangHost
from gpu.node_load import Load
from gpu.server_files import audit, events, keep_logs, set_flags
from gpu.stages import Figures
from openclaw_rl.testing.running_server import RunningServer
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.types import SHARED_POLICY

ENGINES = 2
SLOTS = 5
SWAPS = 3
"""Adapter swaps while both engines serve; one more comes while an engine is out."""
NATS = 0.5
CALM_S, BETWEEN_S = 3.0, 1.5
SERVES_S, OUT_S, BACK_S = 60.0, 30.0, 200.0
SCORE_S = 60.0
HELD_MOST_S = 0.1
"""Longest hold of a rolling swap by the server's own measure: the documents say that nobody is held."""
AWAY = (httpx.HTTPError, OSError, RuntimeError, TimeoutError)


@dataclass(slots=True)
class Pool:
    """The engines, each on a card of its own, and the figures so far."""

    host: SglangHost
    figures: Figures
    engines: list[EngineProcess] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def start(self) -> None:
        """Start all engines at once: no two share a card."""
        with ThreadPoolExecutor(ENGINES) as threads:
            self.engines = list(threads.map(self._started, range(ENGINES)))
        self.note("engines start_s", [engine.start_s for engine in self.engines])

    def _started(self, number: int, port: int | None = None) -> EngineProcess:
        host, card = self.host, None if self.host.device == "cpu" else number
        work, log = host.work / f"pool-{number + 1}", f"pool-engine-{number + 1}.log"
        return start_engine(host, work, slots=SLOTS, log=log, port=port, card=card)[0]

    def start_again(self, number: int) -> None:
        self.engines[number] = self._started(number, self.engines[number].port)

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()

    def note(self, what: str, value: Any) -> None:
        """Print a step's figures, and write all so far."""
        self.figures[what] = value
        print(f"-- pool, {what}: {json.dumps(value, default=str)[:2000]}", flush=True)
        (self.host.out / "pool.partial.json").write_text(json.dumps(self.figures, indent=1, default=str) + "\n")


@dataclass(slots=True)
class Part:
    """A server in front of the pool, chats on it, and the times of what happened."""

    name: str
    pool: Pool
    server: RunningServer
    load: Load
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each event, on the clock of the replies."""

    def note(self, what: str, value: Any) -> None:
        self.pool.note(f"{self.name}: {what}", value)

    @contextmanager
    def window(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.windows[what] = (began, time.perf_counter())

    def wait(self, what: str, is_so: Callable[[Any], bool], timeout_s: float) -> float:
        """Poll the status; return the seconds. Raises TimeoutError."""
        began = time.monotonic()
        self.server.wait_for(what, is_so, timeout_s * self.slow)
        return round(time.monotonic() - began, 2)

    @property
    def slow(self) -> float:
        return 4.0 if self.pool.host.is_tiny else 1.0

    def killed(self, number: int, meanwhile: Callable[[], None]) -> list[str]:
        """SIGKILL an engine; start it again after `meanwhile`, and wait until it serves. Return the findings."""
        name = f"kill of engine {number + 1}"
        running = [engine["running"] for engine in self.server.status()["engines"]]
        with self.window(name):
            self.pool.engines[number].kill()
            out_s = self.wait("the engine is out", lambda now: not now["engines"][number]["is_in"], OUT_S)
            time.sleep(CALM_S)
        meanwhile()
        with self.window(f"return of engine {number + 1}"):
            began = time.monotonic()
            self.pool.start_again(number)
            back_s = self.wait("the engine is back", lambda now: now["engines"][number]["is_in"], BACK_S)
            took_s = round(time.monotonic() - began, 1)
            calls = self.server.status()["engines"][number]["calls"]
            time.sleep(CALM_S * self.slow)
        engines = self.server.status()["engines"]
        self.note(name, {
            "calls on each engine before": running, "out after s": out_s, "start_s": self.pool.engines[number].start_s,
            "back after it answered s": back_s, "back after its start s": took_s, "calls then": calls,
            "engines after": engines,
        })  # fmt: skip
        return pool_chats.killed_findings(name, running[number], engines[number]["calls"] - calls)


def run(host: SglangHost, data_dir: Path) -> Figures:
    pool = Pool(host, {"streams": host.streams})
    folders = [host.work / "pool-adapters" / str(number) for number in range(SWAPS + 1)]
    shutil.rmtree(folders[0].parent, ignore_errors=True)
    models.synthetic_adapters(host.model, folders, 0, host.device, NATS)
    findings: list[str] = []
    try:
        pool.start()
        hits = {"at random": _hits_at_random(pool, data_dir / "random")}
        findings += _part(
            pool, "adapters", data_dir / "adapters", ADAPTERS, lambda part: _adapters(part, folders, hits)
        )
        findings += _part(pool, "full weights", data_dir / "full", FULL, _full)
    finally:
        pool.kill()
    return pool.figures | {"findings": findings}


COMMON = (*load.SETTINGS, "engine.kind=url", "trainer.kind=external", "watch.enabled=false")
ADAPTERS = (
    *COMMON,
    "training.batch_size=4",
    "training.min_batch=1",
    "training.max_wait_s=1",
    "publisher.keep_versions=50",
)
FULL = (
    *COMMON, "training.weights=full", "training.batch_size=8", "training.min_batch=4", "training.max_wait_s=2",
    "publisher.self_test_tolerance=0.1",
)  # fmt: skip


def _part(
    pool: Pool, name: str, data_dir: Path, settings: Sequence[str], steps: Callable[[Part], list[str]]
) -> list[str]:
    """Run the steps on a server of their own under load; return what does not hold."""
    host, found = pool.host, list[str]()
    try:
        with RunningServer(data_dir, _flags(pool, settings), start_s=120) as server:
            part = Part(name, pool, server, Load(server.url, host.streams))
            part.wait("both engines are in", lambda now: all(one["is_in"] for one in now["engines"]), BACK_S)
            try:
                found += steps(part)
            finally:
                with suppress(AssertionError):  # the chats have not begun
                    part.load.stop(60)
                part.note("chats", chats := pool_chats.figures_of(part.load.replies, part.windows))
            found += [f"{name}: refused or cut: {chats['refused or cut']}"] * bool(chats["refused or cut"])
            found += [] if host.is_tiny else [f"{name}: {one}" for one in pool_chats.roll_findings(chats)]
            status = server.status()
            part.note("counts", {key: n for key, n in status["scoring"]["counts"].items() if "engine" in key})
            found += [f"{name}: problem: {one}" for one in status["problems"]]
        found += [f"{name}: audit: {one}" for one in audit(data_dir)]
    except AWAY as error:
        found.append(f"{name}: failed: {error!r}"[:500])
        pool.note(f"{name}: failed", repr(error)[:1000])
    finally:
        keep_logs(data_dir, host.out, f"pool-{data_dir.name}")
    return found


def _flags(pool: Pool, settings: Sequence[str]) -> list[str]:
    words = [*settings, f"engine.urls={json.dumps(pool.urls)}"]
    words += ["model.context_length=4096"] if pool.host.engine == "sglang" else []
    return ["--model", str(pool.host.model), "--judge", "rules", *set_flags(words)]


def _talks(host: SglangHost, url: str) -> pool_hits.Conversations:
    count, words = (4, 24) if host.is_tiny else (16, 160)
    return pool_hits.Conversations(url, count, words=words)


def _hits_at_random(pool: Pool, data_dir: Path) -> Figures:
    launch = (sys.executable, "-m", "gpu.random_routes", "serve")
    with RunningServer(data_dir, _flags(pool, COMMON), start_s=120, launch=launch) as server:
        server.wait_for("both engines are in", lambda now: all(one["is_in"] for one in now["engines"]), BACK_S)
        found = _talks(pool.host, server.url).run("random")
    pool.note("prefix-cache hits at random", found)
    return found


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapters(part: Part, folders: Sequence[Path], hits: Figures) -> list[str]:
    server = part.server
    part.note("homes", stayed := pool_hits.homes(server))
    talks = _talks(part.pool.host, server.url)
    hits["with affinity"] = talks.run("kept")
    with _drained(part, 1):  # while no load takes its cache, as in the other two
        hits["one engine"] = talks.run("one")
    part.note("prefix-cache hits", hits)
    part.load.start()
    time.sleep(CALM_S)
    for number in range(SWAPS):
        _swap_adapter(part, folders[number], f"swap {number + 1}")
        time.sleep(BETWEEN_S)

    found = part.killed(0, lambda: _swap_adapter(part, folders[SWAPS], "swap with one engine"))
    part.load.stop(60)
    time.sleep(CALM_S)
    held = [sorted(_adapters_of(url)) for url in part.pool.urls]
    part.note("adapters of each engine", held)
    part.note("log-probs", looked := _explained(part))
    found += pool_hits.findings(hits) + foreign.findings(looked)
    found += [f"a session changed its engine: {stayed}"] * bool(stayed["sessions that changed engine"])
    serving = f"policy-v{server.status()['serving']}"
    return found + [f"{serving} is not on every engine: {held}"] * (not all(serving in names for names in held))


@contextmanager
def _drained(part: Part, number: int) -> Iterator[None]:
    """Take an engine out of the pool inside the block, and wait behind it until the engine is back."""
    path = f"/v1/admin/engines/{number + 1}"
    part.server.admin("POST", path, {"drained": True})
    try:
        yield
    finally:
        part.server.admin("POST", path, {"drained": False})
        part.wait("the drained engine is back", lambda now: now["engines"][number]["is_in"], BACK_S)


def _swap_adapter(part: Part, adapter: Path, what: str) -> None:
    """Commit a copy of the adapter as a version, and wait until it serves."""
    server = part.server
    trainer = TrainerClient(server.url, (server.data_dir / "keys" / "trainer.token").read_text().strip())
    try:
        end = time.monotonic() + SERVES_S * part.slow
        while (lease := trainer.lease("pool", wait_s=5)) is None:
            if time.monotonic() > end:
                raise TimeoutError("no batch of samples")

        def copy(folder: Path, _: int) -> None:
            shutil.copytree(adapter, folder)

        with part.window(what):
            version = commit(trainer, lease, server.data_dir / "versions" / lease.lease_id, copy, 0)
            took_s = part.wait("it serves", lambda now: now["serving"] >= version, SERVES_S)
    finally:
        trainer.close()
    part.note(what, {"version": version, "serves after s": took_s})


def _adapters_of(url: str) -> set[str]:
    return {card["id"] for card in httpx.get(f"{url}/v1/models", timeout=20).json()["data"]} - {"check"}


def _explained(part: Part) -> Figures:
    """Score the replies of the load under each one's version."""
    data_dir, host = part.server.data_dir, part.pool.host
    ledger = data_dir / "ledger.sqlite3"
    ids = [reply.turn_id for reply in part.load.replies if reply.turn_id and not reply.error]
    versions = {
        number: (policy, data_dir / folder if folder else None)
        for number, (policy, folder) in foreign.owners(ledger).items()
    }
    return foreign.scored(
        foreign.said(ledger, ids), versions, host.model, host.device, SCORE_S,
        policy_of=lambda _: SHARED_POLICY, apart_by=lambda one: one.versions,
    )  # fmt: skip


# -- full weights ------------------------------------------------------------------------------------------------------


def _full(part: Part) -> list[str]:
    host, server, halt = part.pool.host, part.server, threading.Event()
    part.load.start()
    training = threading.Thread(target=full_load.train, args=(server, host, server.data_dir, halt), daemon=True)
    try:
        with part.window("versions of the trainer"):
            training.start()
            took_s = part.wait("they serve", lambda now: now["serving"] >= full_load.MADE, 2 * SERVES_S)
    finally:
        halt.set()
    part.note("versions of the trainer serve after s", took_s)
    for number in range(host.full_swaps):
        time.sleep(BETWEEN_S)
        _pin(part, full_load.MADE - 1 + number % 2, f"pin {number + 1}")
    found = part.killed(1, lambda: None)
    serving, returned = server.status()["serving"], _held(part.pool)  # before another push hides what it took
    found += [f"after its return the engines hold {returned}, not {serving}"] * (returned != [str(serving)] * ENGINES)
    _pin(part, 0, "pin of the base")
    part.load.stop(60)
    held = _held(part.pool)
    part.note("weight version of each engine, after the return and at the end", [returned, held])
    swaps = events(server.data_dir / "server.log", "weights_swapped")
    part.note("phases of each swap, s", full_load.swap_phases(server.data_dir / "server.log"))
    versions = {row["weight_version"]: row for row in server.status()["versions"]}
    looked = full_load.recorded(host, server.data_dir, server.turns(limit=full_load.SCORED_TURNS), versions)
    part.note("recorded", looked)
    found += [f"a rolling swap held chats for {one['held_s']} s" for one in swaps if one["held_s"] > HELD_MOST_S]
    found += [f"only {len(swaps)} swaps"] * (len(swaps) < full_load.MADE)
    found += [f"the engines hold {held}, not the pinned base"] * (held != ["0"] * ENGINES)
    scored = looked["log-probs against fp32 under each token's version"]
    found += [f"{name}: {row}" for name, row in scored.items() if "before" not in name and row["mean_abs"] > FAR]
    return found


def _held(pool: Pool) -> list[str]:
    return [str(httpx.get(f"{url}/model_info", timeout=20).json()["weight_version"]) for url in pool.urls]


FAR = 0.1
"""Mean distance in nats a token that no kernel noise explains; two versions are some tenths apart."""


def _pin(part: Part, version: int, what: str) -> None:
    with part.window(what):
        part.server.admin("POST", "/v1/admin/pin", {"weight_version": version})
        took_s = part.wait("it serves", lambda now: now["serving"] == version, SERVES_S)
    part.note(what, {"version": version, "serves after s": took_s})
