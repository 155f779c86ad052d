"""The practice loop of a server, from its settings and its parts."""

import asyncio
from collections.abc import Callable

import httpx
import structlog

from openclaw_rl.judge.practice import PracticeJudge
from openclaw_rl.methods.base import Method, ScoringTools, can_practise
from openclaw_rl.practice.deps import PracticeDeps
from openclaw_rl.practice.loop import PracticeLoop
from openclaw_rl.practice.measuring import TOKENS, Meter, Reading
from openclaw_rl.practice.relevance import Relevance
from openclaw_rl.practice.sampling import ReplySampler, base_reply
from openclaw_rl.practice.variants import Variants
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.scoring.workers import BACKGROUND_SHARE, judge_model, renderer
from openclaw_rl.server.events import ServerEvents
from openclaw_rl.server.startup import Core
from openclaw_rl.server.trainer_watchdog import SILENT_S
from openclaw_rl.settings import Settings
from openclaw_rl.types import Ids, Request, SamplingParams

log = structlog.get_logger(__name__)


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
    client: httpx.AsyncClient,
) -> PracticeLoop | None:
    """Return the loop; None where the server never practises."""
    if (reason := why_off(settings, method)) is not None:
        log.info("practice_off", reason=reason)
        return None
    render = renderer(core.frontend)
    judge = _judge(settings, core, client)
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
                reading=Reading(
                    getattr(settings.method, "hint_place", "behind"),
                    getattr(settings.method, "neutral_hint", ""),
                    getattr(settings.method, "guidance", 0.0),
                    core.album,
                ),
                timeout_s=settings.practice.score_timeout_s,
            ),
            health=core.health,
            on_batch=events.lease_wait.samples_came,
            trainer_lives=_lives(events),
            batch_size=settings.training.batch_size,
            aim=aim_of(settings),
            share_of=lambda user: core.keys.limits_of(user).practice_share,
            # A verdict is a term of Combined alone.
            vote=judge.vote if judge is not None and has_reward_term(settings) else None,
            contradicts=None if judge is None else judge.contradicts,
            relevance=_relevance(settings, core, tools),
            variants=_variants(settings, core, tools),
        ),
        settings.practice,
    )


def _relevance(settings: Settings, core: Core, tools: ScoringTools) -> Relevance | None:
    if not settings.practice.least_relevance:
        return None
    base = tools.base_teacher or core.engine

    async def sample(request: Request) -> str:
        end_ids, temperature = sorted(core.frontend.end_ids), request.sampling.temperature
        ids = await base_reply(
            base,
            request.prompt_ids,
            end_ids=end_ids,
            max_tokens=TOKENS,
            temperature=temperature,
            seed=0,
            album=core.album,
        )
        return core.frontend.decode(ids)

    return Relevance(
        base,
        renderer(core.frontend),
        _encoder(core),
        least=settings.practice.least_relevance,
        sample=sample,
        timeout_s=settings.practice.score_timeout_s,
    )


def _variants(settings: Settings, core: Core, tools: ScoringTools) -> Variants | None:
    if not settings.practice.variant_share:
        return None
    base, timeout_s = tools.base_teacher or core.engine, settings.practice.score_timeout_s
    return Variants(base, core.frontend, renderer(core.frontend), _encoder(core), timeout_s=timeout_s)


def _encoder(core: Core) -> Callable[[str], Ids]:
    return lambda text: core.frontend.reply_ids(text)[:-1]  # its last is the end token


def has_reward_term(settings: Settings) -> bool:
    """Return True if the method makes something of a verdict on a practice reply."""
    return float(getattr(settings.method, "binary_weight", 0.0)) > 0


def _judge(settings: Settings, core: Core, client: httpx.AsyncClient) -> PracticeJudge | None:
    """Return the judge of practice where a model judges; rules have no words for a wish."""
    if settings.judge.kind != "llm":
        return None
    slots = asyncio.Semaphore(max(1, settings.engine.max_running // BACKGROUND_SHARE))
    ask = judge_model(settings.judge, core.engine, core.frontend, client=client, slots=slots)
    return PracticeJudge(ask, settings.judge)


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
        album=core.album if settings.trains_pictures else None,
    )


def _lives(events: ServerEvents) -> Callable[[], bool]:
    return lambda: events.trainer_spoke.age_s < SILENT_S
