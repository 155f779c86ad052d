"""Variants of a corrected prompt: other requests that begin like it, written by the base.

A handful of corrections are a handful of prompts. Practised on these alone, a model learns the wish there, and new
requests lag. A chat model continues a user's message as well as its own (Magpie, arXiv:2406.08464): behind the first
words of a corrected request ("How do I …") the base writes requests of the same kind. The reply to such a variant is
practised with the correction's own words.

Words about the answer's content ("No, it is Canberra.") are wrong for any other request. So a correction has variants
only if its words fit other requests as well as their own:

    b = ℓ(h | q) − mean_o ℓ(h | o)        it is bound to its request where b > `BOUND`

ℓ(h | q): mean log-prob per token of the correction h under the base, as the user's next message after the request q and
an answer; o: requests of other kinds.
"""

import asyncio
import re
import statistics
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import structlog

from openclaw_rl.engines.base import PRIORITY_BACKGROUND, Engine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.errors import AlignmentError, EngineRefused
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.practice.sampling import Decoder
from openclaw_rl.sessions.conversation_key import own_words
from openclaw_rl.sessions.openclaw import is_background
from openclaw_rl.types import Ids, Request

log = structlog.get_logger(__name__)

BOUND = 0.5
"""Nats a token. Of twelve corrections of manner eleven had −.09 to .29, and "No lists, please." .78, behind a request
for three tips. Eleven of content had .63 to 2.5 (bundled model)."""
OTHERS = BUILT_IN[:6]
"""Requests of other kinds that a correction is compared on."""
_ANSWER = "Here is my answer."
_WORDS = 3
"""First words that a variant shares with the request, at most; and at most half of the request."""
_LEAST_WORDS, _MOST_CHARS = 3, 300
"""A variant has at least this many words, and at most these characters."""
_TOKENS = 48
_TRIES = 3
_TEMPERATURE = 0.7
"""At 1 a small model's requests are often nonsense."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """The request's last message, cut behind its first words."""

    before: str
    """The client's wrapping."""
    start: str
    after: str
    prompt: Ids
    """The prompt up to the end of `start`."""


class Variants:
    """Writes variants of corrected prompts."""

    def __init__(
        self,
        base: Engine,
        frontend: Decoder,
        render: Render,
        encode: Callable[[str], Ids],
        *,
        timeout_s: float = 120.0,
    ) -> None:
        """base: an engine that serves the base when no adapter is named. encode: tokens of a text alone."""
        self._base, self._frontend, self._render, self._encode = base, frontend, render, encode
        self._timeout_s = timeout_s
        self._one_at_a_time = asyncio.Lock()
        self._is_bound: dict[tuple[str, str], bool] = {}
        """By turn and words of its correction."""
        self._said: dict[str, float] = {}
        """Mean ℓ(h | o), by the words of a correction."""

    async def of(self, turn_id: str, request: Request, words: str) -> Request | None:
        """Return the request with another last message of the same kind; None where it has no variant.

        words: the user's correction of the reply to `request`. Raises EngineError, RequestError, TimeoutError.
        """
        try:
            return await self._of(turn_id, request, words)
        except (EngineRefused, AlignmentError) as error:  # this prompt's fault alone: there may be no room behind it
            log.debug("variant_refused", turn=turn_id, error=str(error))
            return None

    async def _of(self, turn_id: str, request: Request, words: str) -> Request | None:
        opening = await asyncio.to_thread(self._opening, request)
        if opening is None or await self._bound(turn_id, request, words):
            return None
        for _ in range(_TRIES):
            text = await self._written(opening)
            if text is not None:
                messages = _with_last(request.messages, opening.before + text + opening.after)
                tools, template = request.tools_json, request.template_kwargs_json
                ids = await asyncio.to_thread(self._render, messages, tools, template)
                return replace(request, messages=messages, prompt_ids=ids)
        return None

    def forget_all_but(self, turn_ids: Collection[str]) -> None:
        """Forget the words of turns that are practised no more."""
        self._is_bound = {key: is_bound for key, is_bound in self._is_bound.items() if key[0] in turn_ids}
        known = {words for _, words in self._is_bound}
        self._said = {words: value for words, value in self._said.items() if words in known}

    # -- one variant ---------------------------------------------------------------------------------------------------

    def _opening(self, request: Request) -> _Opening | None:
        """Return the part of the prompt that a variant shares; None where the last message is no request in words."""
        last = request.messages[-1] if request.messages else None
        if last is None or last.role != "user" or is_background(last) or not _is_text(last) or request.pictures:
            return None  # a part of a prompt with pictures is no prompt that an engine could be given
        text, own = last.text(), own_words(last)
        count = min(_WORDS, len(own.split()) // 2)
        place = text.rfind(own)
        if not count or place < 0:
            return None
        found = re.match(rf"(?:\S+\s+){{{count - 1}}}\S+", own)
        if found is None:
            return None
        before, start, after = text[:place], found.group(), text[place + len(own) :]
        prompt = self._up_to(request, before + start)
        return None if prompt is None else _Opening(before, start, after, prompt)

    def _up_to(self, request: Request, text: str) -> Ids | None:
        """Return the prompt's ids up to the end of `text`, the beginning of the last message."""
        rendered = [
            self._render(_with_last(request.messages, text + rest), request.tools_json, request.template_kwargs_json)
            for rest in ("", " and", " one")
        ]
        common = _common(_common(rendered[0], rendered[1]), rendered[2])
        return common or None

    async def _written(self, opening: _Opening) -> str | None:
        """Return a message that the base wrote behind the opening; None for one that is no request."""
        asked = GenerateRequest(
            input_ids=list(opening.prompt),
            sampling_params=EngineSampling(
                max_new_tokens=_TOKENS,
                temperature=_TEMPERATURE,
                stop_token_ids=sorted(self._frontend.end_ids) or None,
                skip_special_tokens=False,
            ),
            rid=f"variant-{uuid.uuid4().hex}",
            return_logprob=True,
            lora_path=None,
            extra_key="v0",
            priority=PRIORITY_BACKGROUND,
        )
        async with asyncio.timeout(self._timeout_s):
            reply = await self._base.generate(asked)
        ended = reply.meta_info.finish_reason
        if ended is None or ended.type != "stop":
            return None
        ids = [one for one in reply.output_ids if one not in self._frontend.end_ids]
        # Decoded with what stands before: some tokenizers drop a text's first blank.
        shared = self._frontend.decode(opening.prompt)
        text = opening.start + self._frontend.decode([*opening.prompt, *ids])[len(shared) :].rstrip()
        is_fit = "\n" not in text and len(text) <= _MOST_CHARS and len(text.split()) >= _LEAST_WORDS
        return text if is_fit and text != opening.start else None

    # -- words that hold for other requests ----------------------------------------------------------------------------

    async def _bound(self, turn_id: str, request: Request, words: str) -> bool:
        """Return True if the words are about the answer to this one request."""
        key = turn_id, words
        async with self._one_at_a_time:  # the replies of an update ask at once
            if key not in self._is_bound:
                if words not in self._said:
                    self._said[words] = statistics.fmean([await self._likely(other, words) for other in OTHERS])
                own = await self._likely(own_words(request.messages[-1]), words)
                self._is_bound[key] = own - self._said[words] > BOUND
        return self._is_bound[key]

    async def _likely(self, asked: str, words: str) -> float:
        """Return ℓ(words | asked) in nats a token."""
        ids = self._encode(words)
        prompt = await asyncio.to_thread(self._behind, asked)
        async with asyncio.timeout(self._timeout_s):
            score = await self._base.score(prompt, ids, lora_path=None, extra_key="v0")
        return statistics.fmean(score.log_probs)

    def _behind(self, asked: str) -> Ids:
        """Return the prompt of a user's next message after `asked` and an answer."""
        begun = (Message(role="user", content=asked), Message(role="assistant", content=_ANSWER))
        one, other = (self._render((*begun, Message(role="user", content=text)), None, None) for text in ("No", "But"))
        return _common(one, other)


def _is_text(message: Message) -> bool:
    """Return True if the content is one text: an image has no variant."""
    parts = message.content if isinstance(message.content, list) else ()
    return isinstance(message.content, str) or [part.type for part in parts] == ["text"]


def _with_last(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    return (*messages[:-1], messages[-1].model_copy(update={"content": text}))


def _common(one: Ids, other: Ids) -> Ids:
    """Return the ids with which both begin."""
    length = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return tuple(one[:length])
