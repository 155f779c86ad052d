"""A server with a real ledger, trainer API, publisher and readiness, and toy weights.

A version's weights are the list of the samples it was trained on, so that tests can compare them with the ledger.
"""

import asyncio
import io
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from ledger import FULL_IDENTITY, give_sample
from turns import make_request, make_turn

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import EngineError
from openclaw_rl.ledger import Ledger
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.engine_weights import PolicyEngine, RemoteOnlyWeights
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.api.trainer import LeaseWait, build_push_router, build_trainer_router
from openclaw_rl.server.engine_readiness import EngineReadiness
from openclaw_rl.settings import PublisherSettings, TrainerSettings, TrainingSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine
from openclaw_rl.trainer_protocol import LeaseRef, Start, Started, Tip
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime import rollout
from openclaw_slime.checkpoints import Checkpoints
from openclaw_slime.lease_guard import LeaseGuard, is_over
from openclaw_slime.node import NodeConfig
from openclaw_slime.outcome import RankShare
from openclaw_slime.rollout import LeasedBatches, lease_of, train_data_of
from openclaw_slime.slime_node import SlimeNode

TOKEN = "trainer-token"
BATCH = 2
HANGS_S = 45.0
Value = TypeVar("Value")
Client = TypeVar("Client", bound=TrainerClient)


class Hung(AssertionError):
    """The server's thread did not come to an end."""


class ToyEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.holds: list[str] = []
        self.starts = 0

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        await super().update_weights(folder, weight_version)
        self.holds = json.loads((folder / "weights.json").read_text())

    def restart(self) -> None:
        """It comes back with the base, and the trainer's NCCL group is gone."""
        self.weight_version, self.holds, self.starts = 0, [], self.starts + 1
        self._unpaused.set()


class _InProcess(httpx.BaseTransport):
    """HTTP without a socket: the application answers in the server's thread."""

    def __init__(self, server: "ToyServer") -> None:
        self._server, self._asgi = server, httpx.ASGITransport(server.answer, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._server.do(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._asgi.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


class ToyServer:
    """In a thread of its own, and on a port of its own if it has one."""

    def __init__(self, folder: Path, *, max_staleness: int = 4, keep_versions: int = 20, has_port: bool = True) -> None:
        self._max_staleness, self._keep_versions, self._has_port = max_staleness, keep_versions, has_port
        self.folder, self.engine, self.url = folder, ToyEngine(), "http://toy"
        for name in ("base", "versions"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "base" / "weights.json").write_text("[]")
        # One for all clients: a new one reads the system's certificates.
        self._transport = httpx.HTTPTransport() if has_port else _InProcess(self)
        self.hung: list[str] = []
        self._count = 0
        self._app: FastAPI | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def client(self, kind: type[Client] = TrainerClient) -> Client:
        return kind(self.url, TOKEN, sleep=lambda _: None, transport=self._transport)

    def do(self, work: Coroutine[Any, Any, Value]) -> Value:
        return self.result(self.later(work))

    def later(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, call: Future[Value]) -> Value:
        """Return what the server's thread found. Raises Hung, which says what that thread waits for."""
        if not wait([call], HANGS_S).done:
            call.cancel()
            self.hung.append(f"no end within {HANGS_S:g} s\n{self.waits_for()}")
            raise Hung(self.hung[-1])
        return call.result()

    def waits_for(self) -> str:
        """Return the stacks of the server's tasks."""
        said = io.StringIO()
        for task in asyncio.all_tasks(self._loop):
            task.print_stack(limit=6, file=said)
        return said.getvalue()

    def restart(self) -> None:
        """End the server and its engine, which is its child, and start both anew. What is on disk stays."""
        self.do(self._end())
        self.engine.restart()
        self.do(self._start())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a call as the application does; 503 while the server is away."""
        app = self._app or JSONResponse({"error": {"message": "away"}}, 503)
        await app(scope, receive, send)

    async def _run(self) -> None:
        await self._start()
        if not self._has_port:
            self._ready.set()
            await self._stop.wait()
            return await self._end()
        config = uvicorn.Config(self.answer, port=0, interface="asgi3", log_level="warning", lifespan="off")
        http = uvicorn.Server(config)
        answering = asyncio.create_task(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        http.should_exit = True
        await answering
        await self._end()

    async def _start(self) -> None:
        training = TrainingSettings(min_batch=1, batch_size=BATCH, max_wait_s=0.01, max_staleness=self._max_staleness)
        self.ledger = ledger = await Ledger.open(
            self.folder / "ledger.sqlite3", identity=FULL_IDENTITY, training=training
        )
        await version_folders.tidy(ledger, self.folder / "versions")
        self.serving, self.health = VersionAdmission(120), Health()
        settings = PublisherSettings(call_timeout_s=120, unbroken_drain_s=0, keep_versions=self._keep_versions)
        policy = PolicyEngine(self.engine, self.serving, settings, self.folder, base_folder=self.folder / "base")
        self.publisher = publisher = Publisher(ledger, policy, settings)
        with suppress(RemoteOnlyWeights):
            await publisher.restore()
        pushes = publisher.pushes
        readiness = EngineReadiness(
            self.engine, self.serving, publisher.restore, is_in_place=publisher.is_in_place, poll_s=0.02
        )

        async def on_start(start: Start) -> Started:
            pushes.give_up("started again")
            pushes.meet(start.writes_files)
            await ledger.revoke(trainer=start.trainer, reason="started again")
            await ledger.lose_undurable("started again", whole_fences=start.whole_fences)
            publisher.wake()
            tip = await pushes.describe(await ledger.tip())
            return Started(tip=tip, engine_urls=["http://e"], trainer=TrainerSettings(), method=BinarySettings())

        self._app = app = FastAPI()
        parts = {"token": TOKEN, "lease_wait": LeaseWait(), "on_commit": lambda _: publisher.wake()}
        app.include_router(build_trainer_router(ledger, describe=pushes.describe, health=self.health, **parts))
        app.include_router(build_push_router(ledger, token=TOKEN, pushes=pushes, on_start=on_start))

        @app.exception_handler(EngineError)
        async def engine_error(_: Any, error: EngineError) -> JSONResponse:
            return JSONResponse({"error": {"message": str(error)}}, 503)

        self._tasks = [asyncio.create_task(part.run()) for part in (publisher, pushes, readiness)]

    async def _end(self) -> None:
        self._app = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ledger.aclose()

    async def sample(self, version: int) -> str:
        self._count += 1
        name = f"turn-{self._count:03d}"
        turn = make_turn(name, ids=(7, 8, 9), version=version)
        return await give_sample(self.ledger, make_request(name, prompt=(1, 5)), turn)


class Killed(BaseException):
    """The process is gone: no code after it runs."""


class _Remote:
    """A method of a Ray actor: `.remote(...)` gives at once what `ray.get` would."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


_ray = SimpleNamespace(get=lambda value, timeout=None: value, wait=lambda refs, num_returns, timeout: (refs, []))
"""`ray.get` and `ray.wait` for values that are already there."""


class ToyMegatron:
    """slime's train group, rollout manager and one worker, under their own names, over toy weights.

    `dies_at` names where the process is killed; `fails_at` where Ray raises.
    """

    def __init__(
        self,
        server: ToyServer,
        checkpoints: Checkpoints,
        config: NodeConfig,
        tip: Tip,
        *,
        client: TrainerClient | None = None,
    ) -> None:
        """client: calls the server for slime's part."""
        self._server, self._checkpoints = server, checkpoints
        load = checkpoints.load_arguments(tip, str(server.folder / "base"))
        source = Path(load[1])
        if "--ckpt-step" in load:
            source = source / f"iter_{int(load[3]):07d}"
        self.weights: list[str] = json.loads((source / "weights.json").read_text())
        args = SimpleNamespace(openclaw=config, global_batch_size=BATCH, save=str(checkpoints.megatron))
        calls = client or server.client()
        with patch.object(rollout, "TrainerClient", return_value=calls):
            self._batches = LeasedBatches(args)  # type: ignore[arg-type]
        self._lease = LeaseRef(lease_id="", fence=0)
        self._optimizer = SimpleNamespace(prepare_grads=bool)
        self._guard = LeaseGuard(self._optimizer, lambda lease: is_over(calls, lease))
        self._number = 0
        self._group: int | None = None
        """The start of the engine that its NCCL group was made with."""
        self.dies_at = self.fails_at = ""
        self.not_finite: tuple[str, ...] = ()
        worker = SimpleNamespace(name_next_push=_Remote(self._name), update_weights=_Remote(self._push))
        self._actor_handlers = [worker]
        self.generate, self.save, self.load = _Remote(self._generate), _Remote(self._batches.save), _Remote(int)

    def node(self) -> SlimeNode:
        return SlimeNode(self, self, _ray, batch_size=BATCH)

    def at(self, point: str) -> None:
        if point == self.dies_at:
            raise Killed(point)
        if point == self.fails_at:
            raise RuntimeError(f"{point} failed")

    # slime's names

    def _generate(self, rollout_id: int) -> list[str]:
        self.at("generate")
        rows = self._batches.batch(rollout_id)
        self._lease = lease_of(rollout_id, train_data_of(rows))
        return [row.sample.sample_id for row in rows if not row.is_filler]

    def async_train(
        self, rollout_id: int, rollout_data_ref: list[str], external_data: object = None
    ) -> list[RankShare]:
        self.at("train")
        if guilty := tuple(name for name in rollout_data_ref if name in self.not_finite):
            return [RankShare(False, True, not_finite=guilty)]
        self._guard.watch(self._lease)
        self.at("computed")
        if self._optimizer.prepare_grads():  # as slime's `train_one_step`
            return [RankShare(False, True, is_lease_over=self._guard.has_left_out)]
        self.weights = [*self.weights, *rollout_data_ref]
        self.at("trained")
        return [RankShare(True, True, loss=1.0, trained_tokens=3 * len(rollout_data_ref))]

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        self.at("save")
        for folder in (
            self._checkpoints.megatron / f"iter_{rollout_id:07d}",
            self._server.folder / self._checkpoints.folder(rollout_id),
        ):
            folder.mkdir(parents=True)
            (folder / "weights.json").write_text(json.dumps(self.weights))
        self.at("saved")

    def _name(self, weight_version: int) -> None:
        self._number = weight_version

    def _push(self) -> None:
        """Send the weights. slime names their number with the first bucket already."""
        self.at("push")
        engine = self._server.engine
        self._check_group()
        engine.weight_version, engine.holds = self._number, ["half"]
        self.at("pushing")
        self._check_group()
        engine.holds = list(self.weights)
        self.at("pushed")

    def _check_group(self) -> None:
        starts = self._server.engine.starts
        self._group = starts if self._group is None else self._group
        if starts != self._group:
            raise RuntimeError("the engine is no longer in the group")
