"""Composition root of the server: builds every component from one frozen settings tree, runs them, stops them in order.

    Lifetime            owns the tasks and the child processes, and stops them in order
    Core                data folder, keys, engine, front end, ledger: what every other component stands on
    proxy (routes)      answers chats: renders, asks the engine, records each turn
    Sessions            pairs a turn with its next state
    start_judging       judge and method: paired turns become verdicts, then samples that wait for a batch
    credit_groups       the method gives credit to the steps of closed groups of episodes
    PracticeLoop        while nobody chats, answers corrected prompts anew, and makes samples of the replies
    trainer (child)     leases a batch over HTTP, steps, commits a version
    Publisher           takes a committed version through its gate to the engine, and switches
    OnDemand            brings the adapter of a user's policy when a request needs it (`policies.mode = "per_user"`)
    TrainerPushes       the same for a trainer that sends full weights to the engine itself
    PooledEngine         watches the engines of a pool, which the other parts see as one
    EngineReadiness      holds chats while the engine is away, and restores its version
    end_when_hung       ends a trainer that hangs; its supervisor starts it again
    RegressionMonitor   rolls back when users' verdicts fall
    Retention           deletes turns that are over and old
    Tracking            sends the figures of each step to files and trackers
    Alerts              posts faults to the owner's webhook

Rule between them: components share the ledger and call no other component's task. An event (`ServerEvents`) only means
"check the ledger again". So serving, judging, training and publishing never wait for each other.

A crash of any task ends the server, through its task group. A component that fails on purpose degrades alone, and
`/healthz` lists it.

Start: socket, which answers 503 until the end of the start (`api.app.Door`) → lock → keys → engine and front end →
ledger (`startup`) → the version that the ledger names → tasks → chats. Stop (SIGTERM, Ctrl-C): no new leases → the
trainer gives its batch back → running replies finish (`server.drain_s`) → ledger → engine (`lifecycle`).
"""

import asyncio
import gc
import signal
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial

import httpx
import structlog

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.pictures import Album
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.errors import AlignmentError, EngineGone, OpenClawRLError
from openclaw_rl.judge.llm import LlmJudge
from openclaw_rl.judge.pictures import Sight
from openclaw_rl.judge.rules import RulesJudge
from openclaw_rl.judge.steps import JudgeOfBoth, StepLlmJudge, StepRulesJudge
from openclaw_rl.log import configure as configure_log
from openclaw_rl.methods.base import Method, ScoringTools, load_method
from openclaw_rl.models.resolve import model_display_name
from openclaw_rl.processes import malloc
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.publishing.canary import Canary, ScoreBase, read_canaries
from openclaw_rl.publishing.engine_weights import PolicyEngine, RemoteOnlyWeights
from openclaw_rl.publishing.on_demand import OnDemand
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.scoring.groups import credit_groups
from openclaw_rl.scoring.stage import StageLimits
from openclaw_rl.scoring.workers import (
    ConcurrencyLimits,
    judge_model,
    judge_turns,
    renderer,
    report_unreached,
    score_turns,
)
from openclaw_rl.server import preflight
from openclaw_rl.server.api.app import Door
from openclaw_rl.server.api.status import Condition
from openclaw_rl.server.child_commands import trainer_child
from openclaw_rl.server.engine_readiness import EngineReadiness
from openclaw_rl.server.events import ServerEvents
from openclaw_rl.server.lifecycle import Lifetime, announced, ready_to_listen
from openclaw_rl.server.practice import practice_loop
from openclaw_rl.server.privacy import Forgetting, Retention
from openclaw_rl.server.regression import RegressionMonitor
from openclaw_rl.server.routes import chat_routes, served_app, trainer_routes
from openclaw_rl.server.startup import Core, open_core
from openclaw_rl.server.tracking import Tracking
from openclaw_rl.server.trainer_watchdog import TrainerHeartbeat, end_when_hung, report_silence
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import EngineSettings, Settings
from openclaw_rl.telemetry.alerts import Alert, Alerts
from openclaw_rl.types import Ids, LogProbs
from openclaw_rl.web.auth import Keys
from openclaw_rl.web.user_keys import UserKeys

log = structlog.get_logger()

_SWITCH_S = 0.0005
"""Longest time that the event loop waits for another thread to give up Python's lock; Python's own value is 0.005.
The loop needs the lock again after each wait for its sockets, so beside the ledger's threads a chat waits often."""


async def run(settings: Settings, *, frontend: FrontEnd | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises SettingsError, LedgerError or EngineError when the server cannot start.

    frontend: for a program that starts many servers and made it before; None: the front end of `settings.model`.
    """
    configure_log(settings.log_level, settings.log_format)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = ready_to_listen(settings)
    try:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            await _serve(settings, frontend, listener, Lifetime(listener, stop, tasks), stack)
    except* OpenClawRLError as group:
        raise _first(group) from None
    finally:
        listener.close()


def _first(group: BaseExceptionGroup[OpenClawRLError]) -> OpenClawRLError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _serve(
    settings: Settings, frontend: FrontEnd | None, listener: socket.socket, life: Lifetime, stack: AsyncExitStack
) -> None:
    """Build, run and stop one server. `stack` closes what the components hold open; `life` owns their tasks."""
    method, events = load_method(settings.method.name), ServerEvents()
    keys = Keys(settings.server.api_keys, UserKeys(DataDir.of(settings.data_dir).users), limits=settings.limits)
    door = Door(settings.server, settings.server.served_model_name or model_display_name(settings.model), keys)
    life.open(door, settings.server)
    core = await open_core(
        settings, frontend, life=life, stack=stack, engine_exited=events.engine_exited, door=door, keys=keys
    )
    if core is None:  # asked to stop before the engine came up
        return await life.leave()
    client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
    alerts = Alerts(settings.alerts, client, server=core.model_name, health=core.health)
    for reason in preflight.hardly_trains(settings):
        core.health.failed(f"learning, {reason.partition(' ')[0].rstrip(':')}", reason, at_once=True)
        alerts.raise_alert("hardly_trains", reason=reason)
    if isinstance(core.engine, PooledEngine):
        life.own(core.engine.run(), "engines")
    publisher = await _publisher(settings, core, alerts, life, stack)
    sessions = Sessions(core.ledger, settings.sessions, paired=events.paired, clock=core.clock)
    await sessions.refill()
    retention = Retention(core.ledger, sessions, settings.retention, clock=core.clock)
    activity = ChatActivity()
    tools = start_judging(settings, core, method, events, client=client, life=life, stack=stack)
    practice = practice_loop(settings, core, method, tools, events, activity, client)
    tracking = Tracking(core.ledger, core.health, core.data, settings, model_name=core.model_name, clock=core.clock)
    condition = Condition(
        core.ledger,
        core.serving,
        core.health,
        retention,
        children=life.statuses,
        practice=lambda: None if practice is None else practice.status,
        trainer_age_s=lambda: events.trainer_spoke.age_s,
        data_dir=core.data.root,
        engines=core.engine.statuses if isinstance(core.engine, PooledEngine) else list,
        tracked=lambda: tracking.sent,
    )

    life.own(alerts.run(), "alerts")
    life.own(_engine_readiness(core, publisher, events).run(), "engine readiness")
    life.own(publisher.run(), "publisher")
    life.own(publisher.pushes.run(), "pushes")
    life.own(sessions.expire_forever(), "sessions")
    life.own(retention.run(), "retention")
    life.own(tracking.run(), "tracking")
    life.own(malloc.give_back_forever(), "malloc")
    if settings.watch.enabled:
        life.own(RegressionMonitor(core.ledger, publisher, settings.watch, alerts).run(), "regression monitor")
    if practice is not None:
        life.own(practice.run(), "practice")
    url = _url(listener)
    _start_trainer(settings, core, life, url, events.trainer_spoke, alerts.raise_alert)

    app = served_app(
        settings,
        core,
        events,
        chats=chat_routes(settings, core, events, sessions, activity),
        trainer=trainer_routes(core, events, life, publisher, alerts.raise_alert),
        publisher=publisher,
        condition=condition,
        forgetting=Forgetting(core.ledger, sessions, publisher, core.data.root),
    )
    # The objects of now live as long as the server: a full collection over them would stall every stream for 0.2 s.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    async with announced(core.data, url, proof_key=core.proof_key):
        version = core.serving.current
        door.open(app)
        log.info("ready", url=f"{url}/v1", model=core.model_name, method=method.name, weight_version=version)
        await life.answer(settings.server, events.lease_wait)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _engine_readiness(core: Core, publisher: Publisher, events: ServerEvents) -> EngineReadiness:
    return EngineReadiness(
        core.engine,
        core.serving,
        publisher.restore,
        is_in_place=publisher.is_in_place,
        exited=events.engine_exited,
        health=core.health,
    )


def start_judging(
    settings: Settings,
    core: Core,
    method: Method,
    events: ServerEvents,
    *,
    client: httpx.AsyncClient,
    life: Lifetime,
    stack: AsyncExitStack,
) -> ScoringTools:
    """Start the workers that turn paired turns into verdicts, and verdicts into samples that wait for a batch.

    Return the tools that the method scores with.
    """
    limits = ConcurrencyLimits.of(settings)
    ask = partial(judge_model, settings.judge, core.engine, core.frontend, client=client)
    is_ruled = settings.judge.kind == "rules"
    model = ask(slots=limits.verdicts)
    sight = Sight.of(settings.judge, core.album, partial(core.health.count, "judge_pictures_refused"))
    chats = RulesJudge() if is_ruled else LlmJudge(model, settings.judge, sight)
    steps = StepRulesJudge() if is_ruled else StepLlmJudge(model, settings.judge, sight)
    judge = JudgeOfBoth(chats, steps if settings.method.judges_steps else None)
    tools = ScoringTools(
        settings=settings.method,
        teacher=core.engine,
        base_teacher=_base_engine(settings.method.base_teacher_url, settings, stack, core.album),
        serving=core.serving,
        render=renderer(core.frontend),
        ask=ask(slots=limits.hints),
        judge_tokens=settings.judge.max_new_tokens,
        context_length=core.context_length,
        slots=limits.scores,
        health=core.health,
    )
    judging = judge_turns(core.ledger, judge, settings.judge, events.paired, judged=events.judged, health=core.health)
    scoring = score_turns(
        core.ledger,
        method,
        tools,
        StageLimits(settings.method.score_workers, settings.judge.retries, settings.training.max_waiting),
        events.judged,
        sampled=events.sampled,
    )
    life.own(report_unreached(settings, client, core.health), "judge's address")
    life.own(judging, "judge")
    life.own(scoring, "method")
    crediting = credit_groups(core.ledger, method, settings.method, events.groups, sampled=events.sampled)
    life.own(crediting, "groups")
    life.own(events.lease_wait.follow(events.sampled), "samples")
    return tools


def _base_engine(url: str | None, settings: Settings, stack: AsyncExitStack, album: Album | None) -> HttpEngine | None:
    if url is None:
        return None
    engine = HttpEngine(url, settings=EngineSettings(kind="url", url=url))
    if album is not None:
        engine.show(album)
    stack.push_async_callback(engine.aclose)
    return engine


async def _publisher(
    settings: Settings, core: Core, alerts: Alerts, life: Lifetime, stack: AsyncExitStack
) -> Publisher:
    """Return the publisher, once the engine holds the version that the ledger names or the engine is away."""

    async def start() -> int:
        return await core.ledger.serving_version() if settings.policies.start == "shared" else 0

    # Those of a ledger that was served per user before still train on what waits, and must not block the shared one.
    has_policies = settings.policies.is_per_user or len(await core.ledger.policies()) > 1
    policy = PolicyEngine(
        core.engine,
        core.serving,
        settings.publisher,
        core.data.root,
        base_folder=core.folder,
        health=core.health,
        most_adapters=settings.policies.loaded if has_policies else None,
    )
    if has_policies:
        core.serving.loader = on_demand = OnDemand(core.ledger, policy, start=start, health=core.health)
        life.own(on_demand.run(), "adapters")
    publisher = Publisher(
        core.ledger,
        policy,
        settings.publisher,
        health=core.health,
        canaries=await asyncio.to_thread(_canaries, settings, core),
        score_base=_base_score(settings, stack, core.album),
        alert=alerts.raise_alert,
    )
    try:
        await publisher.restore()
    except RemoteOnlyWeights:
        pass  # chats wait until the trainer has sent the weights, or lost them
    except (EngineGone, AlignmentError, TimeoutError) as error:
        # The engine answered a moment ago: chats wait until `EngineReadiness` finds it again.
        log.warning("engine_not_restored", error=repr(error))
        await publisher.wait_for_engine()
    return publisher


def _base_score(settings: Settings, stack: AsyncExitStack, album: Album | None = None) -> ScoreBase | None:
    """Return the scores of an engine that holds the base; None where the policy's engine has it, or none does."""
    if settings.training.weights == "lora":
        return None
    engine = _base_engine(settings.publisher.base_url or settings.method.base_teacher_url, settings, stack, album)
    if engine is None:
        return None

    async def score(prompt_ids: Ids, response_ids: Ids) -> LogProbs:
        return (await engine.score(prompt_ids, response_ids, lora_path=None, extra_key=None)).log_probs

    return score


def _canaries(settings: Settings, core: Core) -> tuple[Canary, ...]:
    if settings.publisher.canary_file is None:
        return ()
    return read_canaries(
        settings.publisher.canary_file,
        render=renderer(core.frontend),
        reply_ids=core.frontend.reply_ids,
        context_length=core.context_length,
    )


def _start_trainer(
    settings: Settings, core: Core, life: Lifetime, url: str, heartbeat: TrainerHeartbeat, alert: Alert
) -> None:
    """Start the local trainer, where the settings name one, and watch it or the one of another program."""
    if not settings.training.enabled:
        return
    if settings.trainer.kind == "external":
        life.own(report_silence(core.health, heartbeat, alert), "trainer watchdog")
    else:
        trainer = trainer_child(settings, core.data, url=url, token=core.trainer_token, base_hash=core.base_hash)
        life.start(trainer)
        lease_s = settings.training.lease_s
        life.own(end_when_hung(trainer, core.ledger, core.health, heartbeat, lease_s=lease_s), "trainer watchdog")
