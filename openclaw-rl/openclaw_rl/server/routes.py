"""Every route of the server, each over the components it uses, behind the checks and limits that all routes share."""

import uuid

from fastapi import APIRouter
from starlette.types import ASGIApp

from openclaw_rl.engines.kind import load_kind
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.pictures import PictureReader
from openclaw_rl.proxy.routes import build_router, chats_first
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.api.app import http_app, with_host_guard, with_plain_paths
from openclaw_rl.server.api.compare import Comparison
from openclaw_rl.server.api.control import Controls, build_admin_router
from openclaw_rl.server.api.episodes import EpisodesDeps, build_episodes_router
from openclaw_rl.server.api.feedback import FeedbackDeps, build_feedback_router
from openclaw_rl.server.api.page import build_page_router
from openclaw_rl.server.api.policies import Steering, build_own_policy_router
from openclaw_rl.server.api.status import Condition, ServerInfo
from openclaw_rl.server.api.trainer import TRAINER, build_push_router, build_trainer_router
from openclaw_rl.server.api.turns import TurnsDeps, build_turns_router
from openclaw_rl.server.api.users import UsersDeps
from openclaw_rl.server.api.wishes import build_wishes_router
from openclaw_rl.server.chat_commands import ChatCommands
from openclaw_rl.server.events import ServerEvents
from openclaw_rl.server.lifecycle import Lifetime
from openclaw_rl.server.practice import aim_of
from openclaw_rl.server.privacy import Forgetting
from openclaw_rl.server.startup import Core
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import Settings
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.trainer_protocol import Start, Started
from openclaw_rl.web.auth import Secret
from openclaw_rl.web.bodies import bounded


def served_app(
    settings: Settings,
    core: Core,
    events: ServerEvents,
    *,
    chats: APIRouter,
    trainer: APIRouter,
    publisher: Publisher,
    condition: Condition,
    forgetting: Forgetting,
) -> ASGIApp:
    app = http_app()
    app.include_router(chats)
    app.include_router(trainer)
    app.include_router(_pushes(settings, core, events, publisher))
    app.include_router(build_page_router())
    app.include_router(_admin(settings, core, events, publisher, condition, forgetting))
    app.include_router(build_feedback_router(_feedback(settings, core, events)))
    app.include_router(_turns(settings, core, events))
    app.include_router(_episodes(settings, core, events))
    app.include_router(build_wishes_router(core.ledger, core.keys, aim=aim_of(settings)))
    steering = Steering(core.ledger, publisher, settings.training)
    app.include_router(build_own_policy_router(steering, core.keys, settings.policies))
    body_limit = int(settings.server.max_body_mb * 2**20)
    served = chats_first(bounded(app, body_limit, but="/v1/trainer"), chats)
    return with_host_guard(with_plain_paths(served), settings.server, core.keys)


def chat_routes(
    settings: Settings, core: Core, events: ServerEvents, sessions: Sessions, activity: ChatActivity
) -> APIRouter:
    """Return the routes of chats; `activity` learns of each reply that runs."""
    commands = ChatCommands(
        core.ledger,
        _feedback(settings, core, events),
        lambda user: core.serving.currents.get(settings.policies.of(user)),
        settings.training,
        aim_of(settings),
        settings.policies.of,
    )
    return build_router(
        ProxyDeps(
            frontend=core.frontend,
            engine=core.engine,
            serving=core.serving,
            sessions=sessions,
            ledger=core.ledger,
            server=settings.server,
            keys=core.keys,
            sampling=settings.sampling,
            session=settings.sessions,
            model_name=core.model_name,
            has_grammars=load_kind(settings.engine.kind).has_grammars,
            pictures=_pictures(settings, core),
            trains_pictures=settings.trains_pictures,
            trains=settings.training.enabled,
            longest_sample=settings.trainer.max_tokens if settings.trainer.kind == "local" else None,
            health=core.health,
            clock=core.clock,
            activity=activity,
            policy_of=settings.policies.of,
            commands=commands if settings.server.chat_commands else None,
        )
    )


def _pictures(settings: Settings, core: Core) -> PictureReader:
    """Return the reader of requests' pictures, which refuses them where the model, the engine or the settings do."""
    refusal = None
    if core.frontend.vision is None:
        refusal = f"the model {core.model_name!r} {core.frontend.why_blind}"
    elif not load_kind(settings.engine.kind).takes_pictures:
        refusal = f"the engine of kind {settings.engine.kind!r} shows its model text only"
    elif not settings.pictures.enabled:
        refusal = "pictures are switched off (pictures.enabled)"
    return PictureReader(settings.pictures, refusal, None if core.album is None else core.album.memory)


def trainer_routes(core: Core, events: ServerEvents, life: Lifetime, publisher: Publisher, alert: Alert) -> APIRouter:
    def committed(_: int) -> None:
        for child in life.children:
            if child.name == TRAINER:
                child.worked()
        publisher.wake()

    events.lease_wait.on_granted = publisher.step_begins
    return build_trainer_router(
        core.ledger,
        token=core.trainer_token,
        lease_wait=events.lease_wait,
        on_commit=committed,
        describe=publisher.pushes.describe,
        health=core.health,
        on_word=events.trainer_spoke.heard,
        alert=alert,
    )


def _pushes(settings: Settings, core: Core, events: ServerEvents, publisher: Publisher) -> APIRouter:
    ledger, pushes = core.ledger, publisher.pushes

    async def trainer_started(start: Start) -> Started:
        pushes.give_up("its trainer was started again")
        await ledger.revoke(trainer=start.trainer, reason="its trainer was started again")
        await ledger.lose_undurable("its trainer was started again", whole_fences=start.whole_fences)
        publisher.wake()
        events.lease_wait.samples_came()
        urls = pushes.meet(start.writes_files) or [core.engine.url]
        tip = await pushes.describe(await ledger.tip())
        count = settings.engine.count
        return Started(tip=tip, engine_urls=urls, engines=count, trainer=settings.trainer, method=settings.method)

    return build_push_router(ledger, token=core.trainer_token, pushes=pushes, on_start=trainer_started)


def _admin(
    settings: Settings,
    core: Core,
    events: ServerEvents,
    publisher: Publisher,
    condition: Condition,
    forgetting: Forgetting,
) -> APIRouter:
    return build_admin_router(
        core.admin_key,
        condition,
        ServerInfo(
            core.model_name,
            settings.method.name,
            core.started_at,
            settings.training,
            core.proof_key,
            engine=settings.engine.kind,
            judge=settings.judge.kind,
            trainer=settings.trainer.kind,
        ),
        Controls(
            ledger=core.ledger,
            publisher=publisher,
            forgetting=forgetting,
            train_now=events.lease_wait.train_now,
            training=settings.training,
            comparison=Comparison(publisher, core.engine, core.frontend),
            users=UsersDeps(core.ledger, core.keys, aim_of(settings), core.clock),
            drains=core.drains,
        ),
    )


def _turns(settings: Settings, core: Core, events: ServerEvents) -> APIRouter:
    return build_turns_router(
        TurnsDeps(
            ledger=core.ledger,
            keys=core.keys,
            admin_key=Secret(core.admin_key),
            frontend=core.frontend,
            on_judged=events.judged.set,
            clock=core.clock,
            has_own_policies=settings.policies.is_per_user,
        )
    )


def _episodes(settings: Settings, core: Core, events: ServerEvents) -> APIRouter:
    return build_episodes_router(
        EpisodesDeps(
            ledger=core.ledger,
            keys=core.keys,
            admin_key=Secret(core.admin_key),
            method=settings.method,
            make_id=lambda: f"episode-{uuid.uuid4().hex}",
            on_change=events.groups.set,
        )
    )


def _feedback(settings: Settings, core: Core, events: ServerEvents) -> FeedbackDeps:
    return FeedbackDeps(
        ledger=core.ledger,
        keys=core.keys,
        frontend=core.frontend,
        on_judged=events.judged.set,
        on_sampled=events.lease_wait.samples_came,
        on_paired=events.paired.set,
        clock=core.clock,
    )
