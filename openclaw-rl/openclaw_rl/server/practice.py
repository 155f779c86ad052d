"""The practice loop of a server, from its settings and its parts."""

from collections.abc import Callable

from openclaw_rl.methods.base import Method, ScoringTools, can_practise
from openclaw_rl.practice.loop import PracticeDeps, PracticeLoop
from openclaw_rl.practice.measuring import Meter
from openclaw_rl.practice.sampling import ReplySampler
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.scoring.workers import renderer
from openclaw_rl.server.events import ServerEvents
from openclaw_rl.server.startup import Core
from openclaw_rl.server.trainer_watchdog import SILENT_S
from openclaw_rl.settings import Settings
from openclaw_rl.types import SamplingParams


def why_off(settings: Settings, method: Method) -> str | None:
    """Return the reason why this server never practises; None: it does."""
    if not settings.practice.enabled:
        return "practice.enabled is off"
    if not settings.training.enabled:
        return "training.enabled is off"
    if not can_practise(method, settings.method):
        return f"method {method.name} has no teacher to practise with"
    return None


def aim_of(settings: Settings) -> float:
    """Return the learned share at which a wish is learned: a part of the guided teacher's own place, 1 + w."""
    guidance = float(getattr(settings.method, "guidance", 0.0))
    return settings.practice.stop_share * (1 + guidance)


def practice_loop(
    settings: Settings,
    core: Core,
    method: Method,
    tools: ScoringTools,
    events: ServerEvents,
    activity: ChatActivity,
) -> PracticeLoop | None:
    """Return the loop; None where the server never practises."""
    if why_off(settings, method) is not None:
        return None
    render = renderer(core.frontend)
    return PracticeLoop(
        PracticeDeps(
            ledger=core.ledger,
            activity=activity,
            method=method,
            tools=tools,
            sampler=_sampler(settings, core),
            meter=Meter(
                core.ledger,
                core.engine,
                core.serving,
                core.frontend,
                render,
                base=tools.base_teacher,
                timeout_s=settings.practice.score_timeout_s,
            ),
            health=core.health,
            on_batch=events.lease_wait.samples_came,
            trainer_lives=_lives(events),
            batch_size=settings.training.batch_size,
            aim=aim_of(settings),
        ),
        settings.practice,
    )


def _sampler(settings: Settings, core: Core) -> ReplySampler:
    sampling = settings.sampling
    return ReplySampler(
        engine=core.engine,
        serving=core.serving,
        frontend=core.frontend,
        render=renderer(core.frontend),
        context_length=core.context_length,
        max_tokens=settings.practice.max_tokens,
        # Greedy settings would make every built-in reply useless: no policy gradient is in it.
        sampling=SamplingParams(sampling.max_new_tokens, temperature=sampling.temperature or 1.0),
        clock=core.clock,
    )


def _lives(events: ServerEvents) -> Callable[[], bool]:
    return lambda: events.trainer_spoke.age_s < SILENT_S
