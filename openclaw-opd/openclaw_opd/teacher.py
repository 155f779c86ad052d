"""Scoring pair of a turn: the log-probs of its own reply under the policy, with the hint in the prompt and without.

The prompt is the served one: the same messages, tools and template options through the same front end. The hint stands
at the end of the last user message, and the sampled response ids follow unchanged. Both terms are prompt log-probs at
temperature 1 of one engine. One version is held meanwhile, so that neither its adapter nor its weights change. After a
failure the whole pair is scored again. The drift of the policy since that version belongs to the loss's ratio.

`method.teacher = "base"` takes the teacher's term with the adapter off, or from a second engine (`method.teacher_url`).
`"ema"` takes it under the version's EMA adapter, which is loaded beside the version (`openclaw_rl.trainers.lora`).
"""

import asyncio
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_opd.hindsight import Absent, Hindsight
from openclaw_opd.hints import Found
from openclaw_opd.settings import OpdSettings
from openclaw_rl.backoff import Backoff
from openclaw_rl.engines.admission import VersionAdmission, VersionUse
from openclaw_rl.engines.base import Engine, Score
from openclaw_rl.errors import AlignmentError, EngineError, RequestError
from openclaw_rl.methods.base import Render, ScoringTools
from openclaw_rl.methods.hinted_prompt import hinted
from openclaw_rl.types import Ids, JudgedTurn, LogProbs, Request, TopK

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


@dataclass(frozen=True, slots=True)
class _Pair:
    weight_version: int
    student: Score | None
    teachers: tuple[Score, ...]
    again: Score | None
    """Score of the student's prompt once more, past the prefix cache."""


async def score_hints(judged: JudgedTurn, found: Found, tools: ScoringTools[OpdSettings]) -> Hindsight:
    """Return the term of the best of these hints. Never raises for an engine that fails."""
    if tools.teacher is None or tools.serving is None or tools.render is None:
        raise RuntimeError("hindsight needs an engine, its versions and a front end")
    prompts = await asyncio.to_thread(_prompts, judged.request, found.hints, tools.render)
    if isinstance(prompts, Hindsight):
        return prompts
    response = judged.turn.response_ids
    # SGLang refuses a prompt as long as its context.
    fitting = [(hint, ids) for hint, ids in prompts.hinted if len(ids) + len(response) < tools.context_length]
    if not fitting:
        shortest = min(len(ids) for _, ids in prompts.hinted) + len(response)
        return Hindsight(Absent.HINT_OVERFLOWS, f"{shortest} tokens, the context holds {tools.context_length}")
    is_sampled = not found.is_practice and zlib.crc32(judged.turn.turn_id.encode()) % NOISE_SHARE == 0
    job = _Job(tools.teacher, tools.serving, tools, prompts.plain, tuple(ids for _, ids in fitting), response)
    try:
        pair = await job.run(with_noise=is_sampled)
    except _Failed as error:
        tools.health.failed("teacher", str(error))
        return Hindsight(Absent.TEACHER_FAILED, str(error))
    term = _best(judged, found, [hint for hint, _ in fitting], pair, tools)
    if term.absent is Absent.NON_FINITE:
        tools.health.failed("teacher", "its log-probs are not finite")
    else:
        tools.health.ok("teacher")
    return term


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
    plain: Ids
    hinted: tuple[Ids, ...]
    response: Ids

    async def run(self, *, with_noise: bool) -> _Pair:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff.next_s())
            try:
                # The place first: a call that waits for one holds no version, and so delays no unload.
                async with self.tools.slots, self.serving.use() as use:
                    pair = await self._pair(use, with_noise=with_noise)
                    if self.serving.still_serves(use):
                        return pair
                    failure = "the weights were replaced meanwhile"
            except (EngineError, AlignmentError) as error:
                failure = str(error)
            except RequestError as error:  # the gate stayed closed
                failure = error.message
            except TimeoutError:
                failure = f"no answer within {self.tools.settings.score_timeout_s:g} s"
        raise _Failed(failure)

    async def _pair(self, use: VersionUse, *, with_noise: bool) -> _Pair:
        settings = self.tools.settings
        student = again = None
        if settings.student_term == "engine" or len(self.hinted) > 1:  # the choice among hints needs it in any case
            student = await self._score(self.plain, use.lora_path, use.extra_key)
            if with_noise:
                again = await self._score(self.plain, use.lora_path, f"{use.extra_key}-again")
        lora_path, extra_key, engine = use.lora_path, use.extra_key, self.engine
        if settings.teacher == "base":
            lora_path, extra_key, engine = None, "v0", self.tools.base_teacher or self.engine
        elif settings.teacher == "ema" and use.ema_path != use.lora_path:
            lora_path, extra_key = use.ema_path, f"ema-{use.extra_key}"
        top_k = settings.top_k
        is_policy = lora_path == use.lora_path and engine is self.engine  # version 0: the base is the policy
        teachers = []
        for ids in self.hinted:
            if is_policy and ids == self.plain and student is not None and not top_k:
                teachers.append(student)
            else:
                teachers.append(await self._score(ids, lora_path, extra_key, top_k=top_k, engine=engine))
        return _Pair(use.weight_version, student, tuple(teachers), again)

    async def _score(
        self, prompt: Ids, lora_path: str | None, extra_key: str, *, top_k: int = 0, engine: Engine | None = None
    ) -> Score:
        engine = engine or self.engine
        async with asyncio.timeout(self.tools.settings.score_timeout_s):
            return await engine.score(prompt, self.response, lora_path=lora_path, extra_key=extra_key, top_k=top_k)


def _prompts(request: Request, hints: Sequence[str], render: Render) -> _Prompts | Hindsight:
    """Render the prompts; blocks. The unhinted messages must render to the served prompt."""
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
            messages = hinted(request.messages, hint)
            if messages is None:
                return Hindsight(Absent.NO_USER_MESSAGE)
            prompts.append((hint, render(messages, request.tools_json, request.template_kwargs_json)))
    except RequestError as error:
        return Hindsight(Absent.PROMPT_CHANGED, error.message)
    return _Prompts(plain, tuple(prompts))


def _best(
    judged: JudgedTurn, found: Found, hints: Sequence[str], pair: _Pair, tools: ScoringTools[OpdSettings]
) -> Hindsight:
    settings, health, mask = tools.settings, tools.health, judged.turn.loss_mask
    scores = [score for score in (pair.student, *pair.teachers) if score is not None]
    if not all(math.isfinite(value) for score in scores for value in score.log_probs):
        return Hindsight(Absent.NON_FINITE)
    student = None if pair.student is None else pair.student.log_probs
    chosen, chosen_gain = 0, None
    if student is not None:
        verdict = judged.verdict.value if judged.verdict is not None else 0
        gains = [
            gain(score.log_probs, student, mask, clip=settings.opd_clip, verdict=verdict) for score in pair.teachers
        ]
        chosen = max(range(len(gains)), key=gains.__getitem__)
        chosen_gain = gains[chosen]
        kind = f"{found.source}_" if found.is_practice else ""
        if not found.is_practice:
            health.observe("hint_gain", chosen_gain)
        health.observe(f"{kind}gap_abs", _mean_abs_gap(pair.teachers[chosen].log_probs, student, mask))
        if pair.again is not None:
            health.observe("empty_hint_gap_abs", _mean_abs_gap(pair.again.log_probs, student, mask))
    teacher = pair.teachers[chosen]
    has_table = teacher.top_ids is not None and teacher.top_log_probs is not None
    return Hindsight(
        hint=hints[chosen] or None,
        gain=chosen_gain,
        teacher_log_probs=teacher.log_probs,
        student_log_probs=student if settings.student_term == "engine" else None,
        scored_version=pair.weight_version,
        top_k=TopK(teacher.top_ids or (), teacher.top_log_probs or ()) if has_table else None,
    )


def _mean_abs_gap(a: LogProbs, b: LogProbs, mask: Sequence[bool]) -> float:
    gaps = [abs(x - y) for x, y, is_trained in zip(a, b, mask, strict=True) if is_trained]
    return math.fsum(gaps) / len(gaps) if gaps else 0.0
