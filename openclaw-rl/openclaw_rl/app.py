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
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import structlog
from fastapi import APIRouter, FastAPI

from openclaw_rl import c_heap, log, version_folders
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
from openclaw_rl.hung_trainer import LastWord, end_when_hung
from openclaw_rl.judge.llm import LlmJudge
from openclaw_rl.judge.rules import RulesJudge
from openclaw_rl.keeper import EngineKeeper
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.ledger.lock import InstanceLock
from openclaw_rl.lifetime import Lifetime
from openclaw_rl.listening import announced, ready_to_listen
from openclaw_rl.meters import Meters
from openclaw_rl.methods.base import Method, ScoringTools, load_method
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
from openclaw_rl.trainers.api import Started
from openclaw_rl.trainers.push_routes import build_push_router
from openclaw_rl.trainers.pushes import TrainerPushes
from openclaw_rl.trainers.routes import TRAINER, LeaseWait, build_trainer_router
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
            await _Server(settings, listener, stack, Lifetime(listener, stop, tasks)).serve(frontend)
    except* OpenClawRLError as group:
        raise _first(group) from None
    finally:
        listener.close()


def _first(group: BaseExceptionGroup[OpenClawRLError]) -> OpenClawRLError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


@dataclass(frozen=True, slots=True)
class _Core:
    """What every other part stands on."""

    data: DataDir
    admin_key: str
    trainer_token: str
    serving: ServingVersions
    engine: HttpEngine
    frontend: FrontEnd
    folder: Path | None
    """The model's, where the front end was made here."""
    context_length: int
    ledger: Ledger
    model_name: str
    base_hash: str
    meters: Meters
    clock: SteadyClock
    started_at: float


@dataclass(frozen=True, slots=True)
class _Bells:
    """What one part rings and another waits for; the ledger says what is there."""

    paired: asyncio.Event = field(default_factory=asyncio.Event)
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    lease_wait: LeaseWait = field(default_factory=LeaseWait)
    trainer_spoke: LastWord = field(default_factory=LastWord)


class _Server:
    """The parts of one run. `stack` closes what they hold open, `life` owns what they do."""

    def __init__(self, settings: Settings, listener: socket.socket, stack: AsyncExitStack, life: Lifetime) -> None:
        self._settings, self._listener, self._stack, self._life = settings, listener, stack, life
        self._keepers: list[EngineKeeper] = []
        """The one there is, once it is built: the engine may end before."""

    async def serve(self, frontend: FrontEnd | None) -> None:
        settings, method = self._settings, load_method(self._settings.method.name)
        core = await self._core(frontend)
        if core is None:  # asked to stop before the engine came up
            return await self._life.stop_children()
        ledger, bells = core.ledger, _Bells()
        client = await self._stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        alerts = Alerts(settings.alerts, client, server=core.model_name, meters=core.meters)
        publisher = await self._publisher(core, alerts)
        keeper = EngineKeeper(
            core.engine, core.serving, publisher.restore, is_in_place=publisher.is_in_place, meters=core.meters
        )
        self._keepers.append(keeper)
        pushes = TrainerPushes(publisher.take_pushed)
        sessions = Sessions(ledger, settings.sessions, paired=bells.paired, clock=core.clock)
        await sessions.refill()
        retention = Retention(ledger, settings.retention, clock=core.clock)

        chats = self._chat_routes(core, sessions)
        app = http_app()
        app.include_router(chats)
        self._include_trainer_routes(app, core, publisher, pushes, bells)
        app.include_router(build_page_router())
        app.include_router(self._admin_routes(core, publisher, retention, bells.lease_wait, method=method.name))
        app.include_router(self._feedback_routes(core, bells))

        if settings.watch.enabled:
            self._life.own(Watch(ledger, publisher, settings.watch, alerts).run(), "watch")
        self._life.own(alerts.run(), "alerts")
        self._life.own(keeper.run(), "keeper")
        self._life.own(publisher.run(), "publisher")
        self._life.own(pushes.run(), "pushes")
        self._life.own(sessions.expire_forever(), "sessions")
        self._life.own(retention.run(), "retention")
        self._life.own(c_heap.give_back_forever(), "c_heap")
        self._own_judging(core, method, client, bells)
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._start_trainer(core, url, bells.trainer_spoke)
        # What lives now lives as long as we do: a full collection over it would stall every stream for 0.2 s.
        gc.collect()
        gc.freeze()
        body_limit = int(settings.server.max_body_mb * 2**20)
        async with announced(core.data, url):
            version = core.serving.current
            events.info("ready", url=f"{url}/v1", model=core.model_name, method=method.name, weight_version=version)
            guarded = behind_doors(chats_first(bounded(app, body_limit, but="/v1/trainer"), chats), settings.server)
            await self._life.answer(guarded, settings.server, bells.lease_wait)

    async def _core(self, frontend: FrontEnd | None) -> _Core | None:
        """Keys → engine → front end → ledger. None when asked to stop before the engine came up."""
        settings, clock = self._settings, SteadyClock()
        started_at = clock()
        data = DataDir.prepare(settings.data_dir)
        # Before anything is written for the engine: its file in `run/` is read again at each of its restarts.
        lock = InstanceLock.beside(data.ledger)
        self._stack.callback(lock.release)
        admin_key = data.secret("admin.key", settings.server.admin_key)
        token = data.secret("trainer.token", settings.server.trainer_token)
        serving = ServingVersions(settings.engine.hold_s)
        engine = await self._engine(data, serving)

        folder = None
        if frontend is None:
            folder = await asyncio.to_thread(tokenizer_folder, settings.model, data.cache)
            texts_mb = settings.memory.texts_mb
            frontend = await asyncio.to_thread(FrontEnd, settings.model, folder, texts_mb=texts_mb)
        info = await self._model_info(engine)
        if info is None:
            return None
        model_name = settings.server.served_model_name or model_display_name(settings.model)
        base_hash = await asyncio.to_thread(
            served_base_hash, info, settings.model, cache=data.cache, ours=(data.versions, data.push)
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
        return _Core(
            data=data,
            admin_key=admin_key,
            trainer_token=token,
            serving=serving,
            engine=engine,
            frontend=frontend,
            folder=folder,
            context_length=info.context_length or frontend.context_length,
            ledger=ledger,
            model_name=model_name,
            base_hash=base_hash,
            meters=Meters(),
            clock=clock,
            started_at=started_at,
        )

    async def _publisher(self, core: _Core, alerts: Alerts) -> Publisher:
        """With the version that the ledger says serves, on the engine."""
        publisher = Publisher(
            core.ledger,
            core.engine,
            core.serving,
            self._settings.publisher,
            core.data.root,
            base_folder=core.folder,
            meters=core.meters,
            canaries=await asyncio.to_thread(_canaries, self._settings, core),
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
        return publisher

    # -- routes ------------------------------------------------------------------------------------------------------

    def _chat_routes(self, core: _Core, sessions: Sessions) -> APIRouter:
        settings = self._settings
        return build_router(
            ProxyDeps(
                frontend=core.frontend,
                engine=core.engine,
                serving=core.serving,
                sessions=sessions,
                ledger=core.ledger,
                server=settings.server,
                sampling=settings.sampling,
                session=settings.sessions,
                model_name=core.model_name,
                meters=core.meters,
                clock=core.clock,
            )
        )

    def _include_trainer_routes(
        self, app: FastAPI, core: _Core, publisher: Publisher, pushes: TrainerPushes, bells: _Bells
    ) -> None:
        ledger, settings = core.ledger, self._settings

        async def trainer_started(name: str) -> Started:
            pushes.give_up("its trainer was started again")
            await ledger.revoke(trainer=name, reason="its trainer was started again")
            await ledger.lose_undurable("its trainer was started again")
            publisher.wake()
            bells.lease_wait.samples_came()
            tip = await publisher.describe(await ledger.tip())
            return Started(tip=tip, engine_url=core.engine.url, trainer=settings.trainer, method=settings.method)

        def committed(_: int) -> None:
            for child in self._life.children:
                if child.name == TRAINER:
                    child.worked()
            publisher.wake()

        app.include_router(
            build_trainer_router(
                ledger,
                token=core.trainer_token,
                lease_wait=bells.lease_wait,
                on_commit=committed,
                describe=publisher.describe,
                meters=core.meters,
                on_word=bells.trainer_spoke.heard,
            )
        )
        app.include_router(build_push_router(ledger, token=core.trainer_token, pushes=pushes, on_start=trainer_started))

    def _admin_routes(
        self, core: _Core, publisher: Publisher, retention: Retention, lease_wait: LeaseWait, *, method: str
    ) -> APIRouter:
        return build_admin_router(
            AdminDeps(
                admin_key=core.admin_key,
                ledger=core.ledger,
                serving=core.serving,
                publisher=publisher,
                meters=core.meters,
                children=lambda: [child.status() for child in self._life.children],
                forgetting=Forgetting(core.ledger, publisher, core.data.root),
                retention=retention,
                train_now=lease_wait.train_now,
                training=self._settings.training,
                model_name=core.model_name,
                method=method,
                started_at=core.started_at,
            )
        )

    def _feedback_routes(self, core: _Core, bells: _Bells) -> APIRouter:
        return build_feedback_router(
            FeedbackDeps(
                ledger=core.ledger,
                keys=Keys(self._settings.server.api_keys),
                frontend=core.frontend,
                on_judged=bells.judged.set,
                on_sampled=bells.lease_wait.samples_came,
                clock=core.clock,
            )
        )

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _engine(self, data: DataDir, serving: ServingVersions) -> HttpEngine:
        """The engine's client, and the engine itself when it is ours."""
        settings = self._settings
        url = settings.engine.url
        if settings.engine.kind != "url":
            port = free_port()
            url = f"http://127.0.0.1:{port}"

            async def on_exit() -> None:
                serving.close_gate()
                for keeper in self._keepers:
                    keeper.child_exited()

            if settings.engine.kind == "embedded":
                self._life.start(engine_child(settings, data, port, on_exit))
            else:
                self._life.start(await asyncio.to_thread(sglang_engine_child, settings, data, port, on_exit))
        assert url is not None  # settings say so
        engine = HttpEngine(url, settings=settings.engine)
        self._stack.push_async_callback(engine.aclose)
        return engine

    def _own_judging(self, core: _Core, method: Method, client: httpx.AsyncClient, bells: _Bells) -> None:
        """From paired turns to samples that wait."""
        settings, frontend = self._settings, core.frontend
        slots = asyncio.Semaphore(max(1, settings.engine.max_running // BACKGROUND_SHARE))
        ask = judge_model(settings.judge, core.engine, frontend, client=client, slots=slots)
        judge = RulesJudge() if settings.judge.kind == "rules" else LlmJudge(ask, settings.judge)
        tools = ScoringTools(
            settings=settings.method,
            teacher=core.engine,
            base_teacher=self._base_teacher(),
            serving=core.serving,
            render=renderer(frontend),
            ask=ask,
            context_length=core.context_length,
            slots=slots,
            meters=core.meters,
        )
        judging = judge_turns(core.ledger, judge, settings.judge, bells.paired, judged=bells.judged, meters=core.meters)
        scoring = score_turns(
            core.ledger,
            method,
            tools,
            bells.judged,
            sampled=bells.sampled,
            workers=settings.method.score_workers,
            retries=settings.judge.retries,
            max_waiting=settings.training.max_waiting,
        )
        self._life.own(judging, "judge")
        self._life.own(scoring, "method")
        self._life.own(bells.lease_wait.follow(bells.sampled), "samples")

    def _start_trainer(self, core: _Core, url: str, last_word: LastWord) -> None:
        """Where one is to run here."""
        settings = self._settings
        if settings.training.enabled and settings.trainer.kind == "local":
            trainer = trainer_child(settings, core.data, url=url, token=core.trainer_token, base_hash=core.base_hash)
            self._life.start(trainer)
            lease_s = settings.training.lease_s
            self._life.own(
                end_when_hung(trainer, core.ledger, core.meters, last_word, lease_s=lease_s), "trainer watch"
            )

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
        while not self._life.stop.is_set():
            if await engine.is_healthy():
                with contextlib.suppress(EngineGone):  # gone again
                    return await engine.model_info()
            for child in self._life.children:
                if child.status().restarts > 2:
                    raise EngineError(f"the {child.name} does not start: {child.last_line()}")
            if time.monotonic() > end:
                raise EngineError(f"the engine did not come up within {self._settings.engine.start_timeout_s:g} s")
            await asyncio.sleep(START_POLL_S)
        return None


def _canaries(settings: Settings, core: _Core) -> tuple[Canary, ...]:
    if settings.publisher.canary_file is None:
        return ()
    return read_canaries(
        settings.publisher.canary_file,
        render=renderer(core.frontend),
        reply_ids=core.frontend.reply_ids,
        context_length=core.context_length,
    )
