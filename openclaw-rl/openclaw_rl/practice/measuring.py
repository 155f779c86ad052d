"""Measures of wishes: the learned share on fixed texts, and the distance of practice replies from the base.

The fixed texts of a wish are two replies on each of a few prompts: one of the base, one of the base that reads the
wish. They are sampled once, with a seed that depends on the prompt alone, so a restart measures on the same texts. The
base's log-probs of each are kept; a measure costs one scoring pass of the policy a text. Under the base itself the
share is 0, and nothing is sampled or scored.

Prompts, best first: those of the wish that practice holds back; the wish's own practised prompts; prompts that the same
user corrected with other words. Uncorrected turns are none: there the anchors hold the policy to the base, on purpose.
For a wish that is said to be general they are the best, because no anchor holds them.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from openclaw_rl.engines.admission import VersionAdmission, VersionUse
from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.pictures import Album
from openclaw_rl.errors import AlignmentError, EngineRefused
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.methods.hinted_prompt import HintPlace, hinted
from openclaw_rl.practice.sampling import Decoder, base_reply
from openclaw_rl.practice.share import Forced, learned_share, mean_kl, moved_once
from openclaw_rl.types import Ids, LogProbs, PracticeReply, Request, Wish
from openclaw_rl.types.pictures import pictures_of, with_pictures

log = structlog.get_logger()

T = TypeVar("T")

PROMPTS = 2
"""Prompts that a wish is measured on, at most."""
TOKENS = 48
"""Tokens of a fixed text."""
KL_REPLIES = 4
"""Newest practice replies of a wish whose distance from the base is measured. One short reply alone says little."""


@dataclass(frozen=True, slots=True)
class FixedText:
    prompt: Ids
    response: Ids
    base: LogProbs
    hinted: LogProbs
    """The base, moved once by the effect of the wish."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The way in which the teacher reads a wish: `method.hint_place`, `neutral_hint` and `guidance`."""

    place: HintPlace = "behind"
    neutral: str = ""
    guidance: float = 0.0
    album: Album | None = None
    """Pictures of the prompts that it reads."""


class Requests(Protocol):
    """Method of the ledger that measuring uses."""

    async def practice_request(self, turn_id: str) -> Request | None: ...


@dataclass(frozen=True, slots=True)
class Measure:
    share: float | None
    kl: float | None


class Meter:
    """Measures wishes, and remembers their fixed texts."""

    def __init__(
        self,
        ledger: Requests,
        engine: Engine,
        serving: VersionAdmission,
        frontend: Decoder,
        render: Render,
        *,
        base: Engine | None = None,
        reading: Reading | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """base: an engine that serves the base alone; None: `engine` with its adapter off."""
        self._ledger, self._engine, self._serving = ledger, engine, serving
        self._frontend, self._render, self._timeout_s = frontend, render, timeout_s
        self._base, self._reading = base or engine, reading or Reading()
        self._texts: dict[tuple[int, str, str], tuple[FixedText, ...]] = {}
        """By wish, words and prompt."""
        self._plain: dict[str, Ids] = {}
        """Replies of the base to plain prompts, by turn: several wishes are measured on one."""
        self._far: dict[str, LogProbs] = {}
        """Log-probs of practice replies under the base, by sample."""
        self._scored: tuple[str, dict[tuple[Ids, Ids], LogProbs]] = ("", {})
        """Log-probs under the policy, of one version."""

    async def measure(
        self, wish: Wish, others: Sequence[Wish], replies: Sequence[PracticeReply], *, uncorrected: Sequence[str] = ()
    ) -> Measure:
        """Measure a wish under the version that serves. Raises EngineError, RequestError, AlignmentError, TimeoutError.

        others: the active wishes. replies: the newest practice replies of this wish. uncorrected: turns of its user
        that nobody corrected, for a wish that is general.
        """
        kl = await self._kl(replies)
        async with self._serving.use(policy=wish.policy, opens=False) as use:
            if use.lora_path is None and self._base is self._engine:
                return Measure(0.0, kl)
            turns = probe_turns(wish, others, uncorrected)
            made = await _together(self._fixed(wish, turn_id) for turn_id in turns)
            texts = [text for some in made for text in some]
            policy = await _together(self._policy(text, use) for text in texts)
        scored = [(now, text) for now, text in zip(policy, texts, strict=True) if now is not None]
        forced = [Forced(now, text.base, text.hinted) for now, text in scored]
        return Measure(learned_share(forced), kl)

    def forget_all_but(self, wishes: Sequence[Wish], replies: Iterable[PracticeReply] = ()) -> None:
        """Forget the fixed texts of wishes that are no longer practised, and on turns that are gone: users' words."""
        kept = {reply.sample.sample_id for reply in replies}
        self._far = {sample_id: log_probs for sample_id, log_probs in self._far.items() if sample_id in kept}
        general = {wish.wish_id: wish.is_general for wish in wishes}
        asked = {source.turn_id for wish in wishes for source in wish.sources}
        self._texts = {
            (wish_id, words, turn_id): texts
            for (wish_id, words, turn_id), texts in self._texts.items()
            if wish_id in general and (turn_id in asked or general[wish_id])
        }
        turns = {turn_id for _, _, turn_id in self._texts}
        self._plain = {turn_id: ids for turn_id, ids in self._plain.items() if turn_id in turns}

    async def _fixed(self, wish: Wish, turn_id: str) -> tuple[FixedText, ...]:
        key = (wish.wish_id, wish.text, turn_id)
        if key not in self._texts:
            self._texts[key] = await self._make(wish.text, turn_id)
        return self._texts[key]

    async def _make(self, words: str, turn_id: str) -> tuple[FixedText, ...]:
        request = await self._ledger.practice_request(turn_id)
        messages = None if request is None else hinted(request.messages, words, self._reading.place)
        if request is None or messages is None or not request.prompt_ids:
            return ()
        made = self._texts_on(request, messages, words, turn_id)
        return await self._or_left_out(made, request.prompt_ids) or ()

    async def _texts_on(
        self, request: Request, messages: Sequence[Message], words: str, turn_id: str
    ) -> tuple[FixedText, ...]:
        prompt = request.prompt_ids
        told = await asyncio.to_thread(self._render, messages, request.tools_json, request.template_kwargs_json)
        if turn_id not in self._plain:
            self._plain[turn_id] = await self._sampled(request, prompt, turn_id)
        untold = None
        if self._reading.neutral and self._reading.guidance:
            aside = hinted(request.messages, self._reading.neutral, self._reading.place) or messages
            untold = await asyncio.to_thread(self._render, aside, request.tools_json, request.template_kwargs_json)
        responses = (self._plain[turn_id], await self._sampled(request, told, f"{turn_id} {words}"))
        made = []
        for response in filter(None, responses):
            base, hinted_base = await self._of_base(prompt, response), await self._of_base(told, response)
            if untold is not None:
                neutral = await self._of_base(untold, response)
                hinted_base = moved_once(base, hinted_base, neutral, self._reading.guidance)
            made.append(FixedText(prompt, response, base, hinted_base))
        return tuple(made)

    async def _sampled(self, request: Request, prompt: Ids, name: str) -> Ids:
        """Return a reply of the base; an empty one where the prompt fills the context."""
        reply = base_reply(
            self._base,
            prompt,
            end_ids=sorted(self._frontend.end_ids),
            max_tokens=min(TOKENS, request.sampling.max_new_tokens),
            temperature=request.sampling.temperature,
            seed=zlib.crc32(name.encode()) >> 1,
            album=self._reading.album,
        )
        try:
            return await self._within(reply)
        except EngineRefused:
            return ()

    async def _kl(self, replies: Sequence[PracticeReply]) -> float | None:
        """Return the distance of the newest replies from the base; None while there are too few of them."""
        scored = [reply for reply in replies[-KL_REPLIES:] if reply.sample.student_log_probs is not None]
        if len(scored) < KL_REPLIES:
            return None
        pairs = []
        for sample, shown in ((reply.sample, reply.request.pictures) for reply in scored):
            if sample.sample_id not in self._far:
                prompt = with_pictures(sample.prompt_ids, shown)  # a sample's own ids are a trainer's: digests beside
                far = await self._or_left_out(self._of_base(prompt, sample.response_ids), prompt)
                if far is None:
                    continue
                self._far[sample.sample_id] = far
            pairs.append((sample.student_log_probs or (), self._far[sample.sample_id]))
        return mean_kl(pairs) if pairs else None

    async def _policy(self, text: FixedText, use: VersionUse) -> LogProbs | None:
        """Return the text's log-probs under the policy; None: the pictures of its prompt fail."""
        if self._scored[0] != use.extra_key:
            self._scored = (use.extra_key, {})
        known, key = self._scored[1], (text.prompt, text.response)
        if key not in known:
            score = self._engine.score(*key, lora_path=use.lora_path, extra_key=use.extra_key)
            if (found := await self._or_left_out(self._within(score), text.prompt)) is None:
                return None
            known[key] = found.log_probs
        return known[key]

    async def _of_base(self, prompt: Ids, response: Ids) -> LogProbs:
        return (await self._within(self._base.score(prompt, response, lora_path=None, extra_key="v0"))).log_probs

    async def _or_left_out(self, call: Awaitable[T], prompt: Ids) -> T | None:
        """Return the call's answer; None if it fails for a prompt with pictures: such a prompt stops no practice."""
        try:
            return await call
        except (EngineRefused, AlignmentError) as error:
            is_busy = isinstance(error, EngineRefused) and error.status == 429
            if is_busy or not pictures_of(prompt):
                raise
            log.warning("measure_left_out", error=str(error))
            return None

    async def _within(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self._timeout_s):
            return await call


async def _together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of calls that run at once, in order; the first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def probe_turns(wish: Wish, wishes: Sequence[Wish], uncorrected: Sequence[str] = ()) -> list[str]:
    """Return the turns on whose prompts a wish is measured, the best first."""
    back = [source.turn_id for source in wish.held_back]
    near = [
        source.turn_id
        for other in wishes
        if other.user == wish.user and other.policy == wish.policy and other.wish_id != wish.wish_id
        for source in other.sources[-1:]
    ]
    own = [source.turn_id for source in reversed(wish.practised_sources)]
    general = list(uncorrected) if wish.is_general else []
    found = [*general[: PROMPTS // 2], *back, *own[:1], *reversed(near), *own[1:]]
    return list(dict.fromkeys(found))[:PROMPTS]
