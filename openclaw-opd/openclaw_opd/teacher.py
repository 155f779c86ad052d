"""Scoring passes of a turn: the log-probs of its own reply under policy and teacher, with the hint and without.

The prompt is the served one: the same messages, tools and template options through the same front end. The hint stands
in the last user message (`method.hint_place`), and the sampled response ids follow unchanged. Both terms are prompt
log-probs at temperature 1 of one engine. One version is held meanwhile, so that neither its adapter nor its weights
change. After a failure the whole pair is scored again. The drift of the policy since that version belongs to the loss's
ratio.

`method.teacher = "base"` takes the teacher's term with the adapter off, or from a second engine (`method.teacher_url`).
`"ema"` takes it under the version's EMA adapter, which is loaded beside the version (`openclaw_rl.trainers.lora`).

With `method.guidance` a third pass scores the reply under the base without the hint, or with neutral words in its place
(`method.neutral_hint`), on the base's own engine. With `method.request_guidance` a fourth pass has a neutral request
too. The teacher's log-probs are then the guided ones (`guidance`). While the policy is the base itself, the student's
pass is the one without the hint. A top-k table needs these passes for the hinted base's ids, token by token.
"""

import asyncio
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openclaw_opd.guidance import NONE, Weights, guided, guided_table
from openclaw_opd.hindsight import Absent, Hindsight
from openclaw_opd.hints import ANCHOR, Found
from openclaw_opd.settings import OpdSettings
from openclaw_rl.backoff import Backoff
from openclaw_rl.engines.admission import VersionAdmission, VersionUse
from openclaw_rl.engines.base import Engine, Score
from openclaw_rl.engines.version_keys import cache_salt
from openclaw_rl.errors import AlignmentError, EngineError, RequestError
from openclaw_rl.methods.base import Render, ScoringTools
from openclaw_rl.methods.hinted_prompt import asked_instead, hinted
from openclaw_rl.types import Ids, JudgedTurn, LogProbs, Request, Scope, TopK

ATTEMPTS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 4.0
"""Seconds before the second attempt, and at most; each pause doubles the one before."""
NOISE_SHARE = 16
"""Of one in so many turns the unhinted prompt is scored twice, to measure the effect of an empty hint."""


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The served prompt, and the prompt of each hint."""

    plain: Ids
    hinted: tuple[tuple[str, Ids], ...]
    aside: Ids
    """The prompt that a hint's effect is taken against: the served one, or that with neutral words."""
    away: Ids
    """The prompt that the request's effect is taken against: the same with a neutral request."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights on an engine, as a scoring call names them."""

    engine: Engine
    lora_path: str | None
    extra_key: str


@dataclass(frozen=True, slots=True)
class _Passes:
    weight_version: int
    student: Score | None
    teachers: tuple[Score, ...]
    """One of each hint, as the hinted teacher gave it."""
    aside: Score | None
    """The base with what the hints' effect is taken against; its table holds the ids of all teachers' tables. None: no
    guidance."""
    away: Score | None
    """The same with a neutral request; None: no guidance by the request."""
    again: Score | None
    """That once more, past the prefix cache; without guidance the unhinted prompt under the policy."""

    def guided(self, number: int, weights: Weights) -> LogProbs:
        """Return the teacher's log-probs with this hint."""
        hinted = self.teachers[number].log_probs
        if self.aside is None:
            return hinted
        return guided(hinted, self.aside.log_probs, (self.away or self.aside).log_probs, weights)

    def table(self, number: int, weights: Weights) -> TopK | None:
        """Return the teacher's top-k with this hint."""
        teacher = self.teachers[number]
        if teacher.top_ids is None or teacher.top_log_probs is None:
            return None
        if self.aside is None:
            return TopK(teacher.top_ids, teacher.top_log_probs)
        aside, away = (_of_ids(score, teacher.top_ids) for score in (self.aside, self.away or self.aside))
        return TopK(teacher.top_ids, guided_table(teacher.top_log_probs, aside, away, weights))

    @property
    def noise(self) -> tuple[LogProbs, LogProbs] | None:
        """Return two scores of one prompt, whose difference is the effect of an empty hint."""
        first = self.student if self.aside is None else self.aside
        return None if first is None or self.again is None else (first.log_probs, self.again.log_probs)


def _of_ids(score: Score, ids: Sequence[Ids]) -> list[LogProbs]:
    """Return a score's table for these ids alone, in their order: an engine may give more, in another one."""
    if score.top_ids is None or score.top_log_probs is None:
        raise AlignmentError("the engine gave no log-probs of the ids that were asked for")
    told = [dict(zip(*row, strict=True)) for row in zip(score.top_ids, score.top_log_probs, strict=True)]
    return [tuple(of[token] for token in row) for of, row in zip(told, ids, strict=True)]


async def score_hints(judged: JudgedTurn, found: Found, tools: ScoringTools[OpdSettings]) -> Hindsight:
    """Return the term of the best of these hints. Never raises for an engine that fails."""
    if tools.teacher is None or tools.serving is None or tools.render is None:
        raise RuntimeError("hindsight needs an engine, its versions and a front end")
    prompts = await asyncio.to_thread(_prompts, judged.request, found.hints, tools.render, tools.settings)
    if isinstance(prompts, Hindsight):
        return prompts
    response = judged.turn.response_ids
    # An anchor's hint is empty: the base with it is the base without it.
    weights = NONE if found.source == ANCHOR else weights_of(tools.settings)
    # SGLang refuses a prompt as long as its context; each pass has one of these before the response.
    beside = max((len(prompts.aside), len(prompts.away)) if weights != NONE else (0,))
    lengths = [max(len(ids), beside) + len(response) for _, ids in prompts.hinted]
    fitting = [one for one, n in zip(prompts.hinted, lengths, strict=True) if n < tools.context_length]
    if not fitting:
        shortest = min(lengths)
        return Hindsight(Absent.HINT_OVERFLOWS, f"{shortest} tokens, the context holds {tools.context_length}")
    is_sampled = not found.is_practice and zlib.crc32(judged.turn.turn_id.encode()) % NOISE_SHARE == 0
    fit = replace(prompts, hinted=tuple(fitting))
    job = _Job(tools.teacher, tools.serving, tools, fit, response, weights, judged.request.scope)
    try:
        passes = await job.run(with_noise=is_sampled)
    except _Failed as error:
        tools.health.failed("teacher", str(error))
        return Hindsight(Absent.TEACHER_FAILED, str(error))
    term = await _best(judged, found, [hint for hint, _ in fitting], passes, weights, tools)
    if term.absent is Absent.NON_FINITE:
        tools.health.failed("teacher", "its log-probs are not finite")
    else:
        tools.health.ok("teacher")
    return term


def weights_of(settings: OpdSettings) -> Weights:
    return Weights(settings.guidance, settings.request_guidance if settings.guidance else 0.0)


def gain(teacher: LogProbs, student: LogProbs, mask: Sequence[bool], *, clip: float, verdict: int) -> float:
    """Return how far the hint moves the teacher to the user's view of the reply.

    v · mean_t clip(gap_t, ±c) over the trained tokens, gap_t = teacher_t − student_t; the mean of |clip(gap_t, ±c)|
    without a verdict (v = 0).

    After a complaint the better hint makes the reply less likely, after praise more likely. A plain Σ gap would prefer
    the emptiest hint for a rejected reply. The clip is the loss's, so that one token does not decide. A hint that makes
    the reply likely by quoting it is removed before (`hints`).
    """
    gaps = [min(max(t - s, -clip), clip) for t, s, is_trained in zip(teacher, student, mask, strict=True) if is_trained]
    if not gaps:
        return 0.0
    if verdict == 0:
        return math.fsum(map(abs, gaps)) / len(gaps)
    return verdict * math.fsum(gaps) / len(gaps)


class _Failed(Exception):
    """After the last attempt."""


@dataclass(frozen=True, slots=True)
class _Job:
    engine: Engine
    serving: VersionAdmission
    tools: ScoringTools[OpdSettings]
    prompts: _Prompts
    response: Ids
    weights: Weights
    scope: Scope
    """The prompts' owner, whose chat the engine reuses, and the policy that sampled the response."""

    async def run(self, *, with_noise: bool) -> _Passes:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff.next_s())
            try:
                # The place first: a call that waits for one holds no version, and so delays no unload.
                async with self.tools.slots, self.serving.use(policy=self.scope.policy, opens=False) as use:
                    passes = await self._passes(use, with_noise=with_noise)
                    if self.serving.still_serves(use):
                        return passes
                    failure = "the weights were replaced meanwhile"
            except (EngineError, AlignmentError) as error:
                failure = str(error)
            except RequestError as error:  # the gate stayed closed
                failure = error.message
            except TimeoutError:
                failure = f"no answer within {self.tools.settings.score_timeout_s:g} s"
        raise _Failed(failure)

    async def _passes(self, use: VersionUse, *, with_noise: bool) -> _Passes:
        settings = self.tools.settings
        policy = _Weights(self.engine, use.lora_path, use.cache_of(self.scope.user))
        teacher = self._teacher(use, policy)
        prompts, plain = self.prompts, self.prompts.plain
        student = aside = away = again = None
        if settings.student_term == "engine" or len(prompts.hinted) > 1:  # the choice among hints needs it in any case
            student = await self._score(policy, plain)
        teachers = []
        for _, ids in prompts.hinted:
            if ids == plain and teacher == policy and student is not None and not settings.top_k:
                teachers.append(student)  # an anchor while the policy is the base
            else:
                teachers.append(await self._score(teacher, ids, top_k=settings.top_k))
        if self.weights.hint:
            is_known = teacher == policy and student is not None and prompts.aside == plain and not settings.top_k
            aside = student if is_known else await self._beside(teacher, prompts.aside, teachers)
        if self.weights.request:
            away = await self._beside(teacher, prompts.away, teachers)
        if with_noise and (self.weights.hint or student is not None):
            of, ids = (teacher, prompts.aside) if self.weights.hint else (policy, plain)
            again = await self._score(replace(of, extra_key=f"{of.extra_key}-again"), ids)
        return _Passes(use.weight_version, student, tuple(teachers), aside, away, again)

    async def _beside(self, of: _Weights, prompt: Ids, teachers: Sequence[Score]) -> Score:
        """Return the score behind a prompt that an effect is taken against, with all ids of the teachers' tables."""
        tables = [score.top_ids for score in teachers if score.top_ids is not None]
        if not tables:
            return await self._score(of, prompt)
        ids = [_union(rows) for rows in zip(*tables, strict=True)]
        async with asyncio.timeout(self.tools.settings.score_timeout_s):
            return await of.engine.score_ids(prompt, self.response, ids, lora_path=of.lora_path, extra_key=of.extra_key)

    def _teacher(self, use: VersionUse, policy: _Weights) -> _Weights:
        kind = self.tools.settings.teacher
        if kind == "base":
            return _Weights(self.tools.base_teacher or self.engine, None, cache_salt(0, self.scope.user))
        if kind == "ema" and use.ema_path != use.lora_path:
            return _Weights(self.engine, use.ema_path, f"ema-{use.cache_of(self.scope.user)}")
        return policy

    async def _score(self, of: _Weights, prompt: Ids, *, top_k: int = 0) -> Score:
        async with asyncio.timeout(self.tools.settings.score_timeout_s):
            return await of.engine.score(
                prompt, self.response, lora_path=of.lora_path, extra_key=of.extra_key, top_k=top_k
            )


def _union(rows: Sequence[Ids]) -> Ids:
    return tuple(dict.fromkeys(token for row in rows for token in row))


def _prompts(request: Request, hints: Sequence[str], render: Render, settings: OpdSettings) -> _Prompts | Hindsight:
    """Render the prompts; blocks. The unhinted messages must render to the served prompt."""

    def told(words: str) -> Ids | None:
        messages = hinted(request.messages, words, settings.hint_place)
        return None if messages is None else render(messages, request.tools_json, request.template_kwargs_json)

    try:
        plain = render(request.messages, request.tools_json, request.template_kwargs_json)
        if plain != request.prompt_ids:
            detail = f"{len(plain)} tokens, {len(request.prompt_ids)} were served"
            return Hindsight(Absent.PROMPT_CHANGED, detail)
        prompts: list[tuple[str, Ids]] = []
        for hint in hints:
            if not hint:  # an anchor's: the teacher reads the served prompt
                prompts.append((hint, plain))
                continue
            if (ids := told(hint)) is None:
                return Hindsight(Absent.NO_USER_MESSAGE)
            prompts.append((hint, ids))
        is_aside = bool(settings.neutral_hint and settings.guidance)
        aside = told(settings.neutral_hint) if is_aside else None
        away = None
        if weights_of(settings).request and (instead := asked_instead(request.messages, settings.neutral_request)):
            words = settings.neutral_hint if is_aside else ""
            instead = hinted(instead, words, settings.hint_place) or instead
            away = render(instead, request.tools_json, request.template_kwargs_json)
    except RequestError as error:
        return Hindsight(Absent.PROMPT_CHANGED, error.message)
    return _Prompts(plain, tuple(prompts), aside or plain, away or aside or plain)


async def _best(
    judged: JudgedTurn,
    found: Found,
    hints: Sequence[str],
    passes: _Passes,
    weights: Weights,
    tools: ScoringTools[OpdSettings],
) -> Hindsight:
    settings, health, mask = tools.settings, tools.health, judged.turn.loss_mask
    scores = [score for score in (passes.student, passes.aside, passes.away, *passes.teachers) if score is not None]
    if not all(math.isfinite(value) for score in scores for value in score.log_probs):
        return Hindsight(Absent.NON_FINITE)
    student = None if passes.student is None else passes.student.log_probs
    chosen, chosen_gain, hinted_gap = 0, None, None
    if student is not None:
        verdict = judged.verdict.value if judged.verdict is not None else 0
        # Of the guided teacher: these are the numbers that the loss clips.
        gains = [
            gain(passes.guided(k, weights), student, mask, clip=settings.opd_clip, verdict=verdict)
            for k in range(len(hints))
        ]
        chosen = max(range(len(gains)), key=gains.__getitem__)
        chosen_gain = gains[chosen]
        hinted_gap = _mean_gap(passes.teachers[chosen].log_probs, student, mask)
        kind = f"{found.source}_" if found.is_practice else ""
        if not found.is_practice:
            health.observe("hint_gain", chosen_gain)
        health.observe(f"{kind}gap_abs", _mean_abs_gap(passes.teachers[chosen].log_probs, student, mask))
        if weights.hint:
            health.observe(f"{kind}guided_gap_abs", _mean_abs_gap(passes.guided(chosen, weights), student, mask))
    if passes.noise is not None:
        first, again = passes.noise
        health.observe("empty_hint_gap_abs", _mean_abs_gap(guided(again, first, first, weights), first, mask))
    # A guided table takes milliseconds, and the event loop serves chats.
    top_k = await asyncio.to_thread(passes.table, chosen, weights)
    return Hindsight(
        hint=hints[chosen] or None,
        gain=chosen_gain,
        guidance=weights.hint or None,
        hinted_gap=hinted_gap if weights.hint else None,
        teacher_log_probs=passes.guided(chosen, weights),
        student_log_probs=student if settings.student_term == "engine" else None,
        scored_version=passes.weight_version,
        top_k=top_k,
    )


def _mean_gap(a: LogProbs, b: LogProbs, mask: Sequence[bool]) -> float:
    gaps = [x - y for x, y, is_trained in zip(a, b, mask, strict=True) if is_trained]
    return math.fsum(gaps) / len(gaps) if gaps else 0.0


def _mean_abs_gap(a: LogProbs, b: LogProbs, mask: Sequence[bool]) -> float:
    gaps = [abs(x - y) for x, y, is_trained in zip(a, b, mask, strict=True) if is_trained]
    return math.fsum(gaps) / len(gaps) if gaps else 0.0
