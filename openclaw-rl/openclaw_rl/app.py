"""The composition root of the server: builds every part from one frozen settings tree, runs them, stops them in order.

Four kinds of work run at once and never wait for each other: serving, judging, training (a process of its own),
publishing. A crash of any task reaches this module; a part that fails on purpose degrades alone and says so in
`/healthz`.

Start: socket → lock → keys → engine and front end → ledger → the version the ledger says serves → tasks → HTTP.
Stop (SIGTERM, Ctrl-C): no new leases → the trainer gives its batch back → running replies finish (`server.drain_s`) →
ledger → engine.
"""

import asyncio
import contextlib
import gc
import signal
import socket
import time
from contextlib import AsyncExitStack

import httpx
import structlog
import uvicorn
from starlette.types import ASGIApp

from openclaw_rl import log, version_folders
from openclaw_rl.admin import AdminDeps, build_admin_router
from openclaw_rl.alerts import Alerts
from openclaw_rl.canary import Canary, read_canaries
from openclaw_rl.children import engine_child, free_port, sglang_engine_child, trainer_child
from openclaw_rl.clock import SteadyClock
from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.bundled import model_display_name, tokenizer_folder
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.http import HttpEngine
from openclaw_rl.engines.served_base import served_base_hash
from openclaw_rl.engines.serving import ServingVersions
from openclaw_rl.errors import (
    AlignmentError,
    EngineError,
    EngineGone,
    OpenClawRLError,
)
from openclaw_rl.feedback import FeedbackDeps, build_feedback_router
from openclaw_rl.forgetting import Forgetting
from openclaw_rl.http_app import behind_doors, http_app
from openclaw_rl.hung_trainer import end_when_hung
from openclaw_rl.judge.llm import LlmJudge
from openclaw_rl.judge.rules import RulesJudge
from openclaw_rl.keeper import EngineKeeper
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.ledger.lock import InstanceLock
from openclaw_rl.listening import HttpServer, announced, ready_to_listen
from openclaw_rl.meters import Meters
from openclaw_rl.methods.base import ScoringTools, load_method
from openclaw_rl.page import build_page_router
from openclaw_rl.proxy.asgi import bounded
from openclaw_rl.proxy.auth import Keys
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.proxy.ports import ProxyDeps
from openclaw_rl.proxy.routes import build_router, chats_first
from openclaw_rl.publisher import Publisher, WeightsElsewhere
from openclaw_rl.retaining import Retention
from openclaw_rl.rollout import judge_turns, score_turns
from openclaw_rl.scoring import judge_model, renderer
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import EngineSettings, Settings
from openclaw_rl.supervisor import Child
from openclaw_rl.trainers.api import Started
from openclaw_rl.trainers.push_routes import build_push_router
from openclaw_rl.trainers.pushes import TrainerPushes
from openclaw_rl.trainers.routes import LeaseWait, build_trainer_router
from openclaw_rl.types import WeightKind
from openclaw_rl.watch import Watch

events = structlog.get_logger()

START_POLL_S = 0.2
BACKGROUND_SHARE = 2
"""Judging and scoring take at most the engine's places divided by this."""


async def run(settings: Settings, *, frontend: FrontEnd | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises SettingsError, LedgerError or EngineError when it cannot start.

    frontend: one that was made before, for a program that starts many servers; else it is made of `settings.model`.
    """
    log.configure(settings.log_level, settings.log_format)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = ready_to_listen(settings)
    try:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            await _Server(settings, listener, stop, stack, tasks).serve(frontend)
    except* OpenClawRLError as group:
        raise _first(group) from None
    finally:
        listener.close()


def _first(group: BaseExceptionGroup[OpenClawRLError]) -> OpenClawRLError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class _Server:
    """The parts of one run. `stack` closes what they hold open, `tasks` owns what they do."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        stop: asyncio.Event,
        stack: AsyncExitStack,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._settings, self._listener, self._stop, self._stack, self._tasks = settings, listener, stop, stack, tasks
        self._running: list[asyncio.Task[None]] = []
        self._children: list[Child] = []

    async def serve(self, frontend: FrontEnd | None) -> None:
        settings, clock = self._settings, SteadyClock()
        started_at = clock()
        method = load_method(settings.method.name)
        data = DataDir.prepare(settings.data_dir)
        # Before anything is written for the engine: its file in `run/` is read again at each of its restarts.
        lock = InstanceLock.beside(data.ledger)
        self._stack.callback(lock.release)
        admin_key = data.secret("admin.key", settings.server.admin_key)
        token = data.secret("trainer.token", settings.server.trainer_token)
        serving = ServingVersions(settings.engine.hold_s)
        engine, keeper_exit = await self._engine(data, serving)

        folder = None
        if frontend is None:
            folder = await asyncio.to_thread(tokenizer_folder, settings.model, data.cache)
            texts_mb = settings.memory.texts_mb
            frontend = await asyncio.to_thread(FrontEnd, settings.model, folder, texts_mb=texts_mb)
        info = await self._model_info(engine)
        if info is None:  # asked to stop before the engine came up
            return await self._stop_children()
        model_name = settings.server.served_model_name or model_display_name(settings.model)
        base_hash = await asyncio.to_thread(
            served_base_hash, info, settings.model, cache=data.cache, versions=data.versions
        )
        ledger = await Ledger.open(
            data.ledger,
            identity=Identity(base_hash, frontend.tokenizer_hash, model_name, WeightKind(settings.training.weights)),
            training=settings.training,
            redaction=settings.redaction,
            memory=settings.memory,
            clock=clock,
            lock=lock,
        )
        self._stack.push_async_callback(ledger.aclose)

        await version_folders.tidy(ledger, data.versions)
        meters = Meters()
        client = await self._stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        alerts = Alerts(settings.alerts, client, server=model_name)
        canaries = await asyncio.to_thread(_canaries, settings, frontend, info.context_length)
        publisher = Publisher(
            ledger,
            engine,
            serving,
            settings.publisher,
            data.root,
            base_folder=folder,
            meters=meters,
            canaries=canaries,
            alert=alerts.raise_alert,
        )
        try:
            await publisher.restore()
        except WeightsElsewhere:
            pass  # chats wait until the trainer has sent them, or lost them
        except (EngineGone, AlignmentError, TimeoutError) as error:
            # It was there a moment ago: chats wait until the keeper finds it again.
            events.warning("engine_not_restored", error=repr(error))
            await publisher.wait_for_engine()
        keeper = EngineKeeper(engine, serving, publisher.restore, is_in_place=publisher.is_in_place, meters=meters)
        keeper_exit.append(keeper)
        paired, judged, lease_wait = asyncio.Event(), asyncio.Event(), LeaseWait()
        sessions = Sessions(ledger, settings.sessions, paired=paired, clock=clock)
        await sessions.refill()
        slots = asyncio.Semaphore(max(1, settings.engine.max_running // BACKGROUND_SHARE))
        ask = judge_model(settings.judge, engine, frontend, client=client, slots=slots)
        judge = RulesJudge() if settings.judge.kind == "rules" else LlmJudge(ask, settings.judge)
        tools = ScoringTools(
            settings=settings.method,
            teacher=engine,
            base_teacher=self._base_teacher(),
            serving=serving,
            render=renderer(frontend),
            ask=ask,
            context_length=info.context_length or frontend.context_length,
            slots=slots,
            meters=meters,
        )

        retention = Retention(ledger, settings.retention, clock=clock)
        app = http_app()
        chats = build_router(
            ProxyDeps(
                frontend=frontend,
                engine=engine,
                serving=serving,
                sessions=sessions,
                ledger=ledger,
                server=settings.server,
                sampling=settings.sampling,
                session=settings.sessions,
                model_name=model_name,
                meters=meters,
                clock=clock,
            )
        )
        app.include_router(chats)
        app.include_router(
            build_trainer_router(
                ledger,
                token=token,
                lease_wait=lease_wait,
                on_commit=lambda _: publisher.wake(),
                describe=publisher.describe,
                meters=meters,
            )
        )
        pushes = TrainerPushes(publisher.take_pushed)

        async def trainer_started(name: str) -> Started:
            pushes.give_up("its trainer was started again")
            await ledger.revoke(trainer=name, reason="its trainer was started again")
            await ledger.lose_undurable("its trainer was started again")
            publisher.wake()
            lease_wait.samples_came()
            tip = await publisher.describe(await ledger.tip())
            return Started(tip=tip, engine_url=engine.url, trainer=settings.trainer, method=settings.method)

        app.include_router(build_push_router(ledger, token=token, pushes=pushes, on_start=trainer_started))
        app.include_router(build_page_router())
        app.include_router(
            build_admin_router(
                AdminDeps(
                    admin_key=admin_key,
                    ledger=ledger,
                    serving=serving,
                    publisher=publisher,
                    meters=meters,
                    children=lambda: [child.status() for child in self._children],
                    forgetting=Forgetting(ledger, publisher, data.root),
                    retention=retention,
                    train_now=lease_wait.train_now,
                    training=settings.training,
                    model_name=model_name,
                    method=method.name,
                    started_at=started_at,
                )
            )
        )

        app.include_router(
            build_feedback_router(
                FeedbackDeps(
                    ledger=ledger,
                    keys=Keys(settings.server.api_keys),
                    frontend=frontend,
                    on_judged=judged.set,
                    on_sampled=lease_wait.samples_came,
                    clock=clock,
                )
            )
        )

        watch = Watch(ledger, publisher, settings.watch, alerts)
        if settings.watch.enabled:
            self._own(watch.run(), "watch")
        self._own(alerts.run(), "alerts")
        self._own(keeper.run(), "keeper")
        self._own(publisher.run(), "publisher")
        self._own(pushes.run(), "pushes")
        self._own(sessions.expire_forever(), "sessions")
        self._own(retention.run(), "retention")
        self._own(judge_turns(ledger, judge, settings.judge, paired, judged=judged, meters=meters), "judge")
        sampled = asyncio.Event()
        scoring = score_turns(
            ledger,
            method,
            tools,
            judged,
            sampled=sampled,
            workers=settings.method.score_workers,
            retries=settings.judge.retries,
            max_waiting=settings.training.max_waiting,
        )
        self._own(scoring, "method")
        self._own(_ring(sampled, lease_wait), "samples")
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if settings.training.enabled and settings.trainer.kind == "local":
            trainer = trainer_child(settings, data, url=url, token=token, base_hash=base_hash)
            self._start(trainer)
            self._own(end_when_hung(trainer, ledger, lease_s=settings.training.lease_s), "trainer watch")
        body_limit = int(settings.server.max_body_mb * 2**20)
        # What lives now lives as long as we do: a full collection over it would stall every stream for 0.2 s.
        gc.collect()
        gc.freeze()
        async with announced(data, url):
            events.info("ready", url=f"{url}/v1", model=model_name, method=method.name, weight_version=serving.current)
            await self._http(
                behind_doors(chats_first(bounded(app, body_limit, but="/v1/trainer"), chats), settings.server),
                lease_wait,
            )

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _engine(self, data: DataDir, serving: ServingVersions) -> tuple[HttpEngine, list[EngineKeeper]]:
        """The engine's client, and the engine itself when it is ours. The list gets the keeper, which is built
        later.
        """
        settings, keepers = self._settings, list[EngineKeeper]()
        url = settings.engine.url
        if settings.engine.kind != "url":
            port = free_port()
            url = f"http://127.0.0.1:{port}"

            async def on_exit() -> None:
                serving.close_gate()
                for keeper in keepers:
                    keeper.child_exited()

            if settings.engine.kind == "embedded":
                self._start(engine_child(settings, data, port, on_exit))
            else:
                self._start(await asyncio.to_thread(sglang_engine_child, settings, data, port, on_exit))
        assert url is not None  # settings say so
        engine = HttpEngine(url, settings=settings.engine)
        self._stack.push_async_callback(engine.aclose)
        return engine, keepers

    def _base_teacher(self) -> HttpEngine | None:
        url = self._settings.method.teacher_url
        if url is None:
            return None
        engine = HttpEngine(url, settings=EngineSettings(kind="url", url=url))
        self._stack.push_async_callback(engine.aclose)
        return engine

    async def _model_info(self, engine: HttpEngine) -> ModelInfo | None:
        """Wait for the engine. Raises EngineError after `engine.start_timeout_s`, or when our own child cannot
        start.
        """
        end = time.monotonic() + self._settings.engine.start_timeout_s
        while not self._stop.is_set():
            if await engine.is_healthy():
                with contextlib.suppress(EngineGone):  # gone again
                    return await engine.model_info()
            for child in self._children:
                if child.status().restarts > 2:
                    raise EngineError(f"the {child.name} does not start: {child.last_line()}")
            if time.monotonic() > end:
                raise EngineError(f"the engine did not come up within {self._settings.engine.start_timeout_s:g} s")
            await asyncio.sleep(START_POLL_S)
        return None

    # -- running and stopping ----------------------------------------------------------------------------------------

    def _own(self, work: object, name: str) -> None:
        self._running.append(self._tasks.create_task(work, name=name))  # type: ignore[arg-type]

    def _start(self, child: Child) -> None:
        self._children.append(child)
        self._tasks.create_task(child.run(), name=child.name)

    async def _http(self, app: ASGIApp, lease_wait: LeaseWait) -> None:
        """Answer until asked to stop, then let running replies finish."""
        settings = self._settings.server
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            timeout_keep_alive=75,
        )
        server = HttpServer(config)
        serving = self._tasks.create_task(server.serve(sockets=[self._listener]), name="http")
        stopping = self._tasks.create_task(self._stop.wait(), name="stop")
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        events.info("stopping", drain_s=settings.drain_s)
        lease_wait.close()
        await asyncio.gather(*(child.stop() for child in self._children if child.name == "trainer"))
        server.should_exit = True
        await serving
        self._stop.set()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._stop_children()

    async def _stop_children(self) -> None:
        await asyncio.gather(*(child.stop() for child in self._children))


def _canaries(settings: Settings, frontend: FrontEnd, context_length: int | None) -> tuple[Canary, ...]:
    if settings.publisher.canary_file is None:
        return ()
    return read_canaries(
        settings.publisher.canary_file,
        render=renderer(frontend),
        reply_ids=frontend.reply_ids,
        context_length=context_length or frontend.context_length,
    )


async def _ring(sampled: asyncio.Event, lease_wait: LeaseWait) -> None:
    """Tell waiting trainers that samples came."""
    while True:
        await sampled.wait()
        sampled.clear()
        lease_wait.samples_came()
