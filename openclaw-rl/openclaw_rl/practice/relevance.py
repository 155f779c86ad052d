"""Relevance of a practice reply: the base tells whether the reply still answers its request, without rule or judge.

    r = [ℓ(q | y) − ℓ(q | n)] − mean_o [ℓ(o | y) − ℓ(o | n)]

ℓ(q | y): mean log-prob per token of the request q under the base, behind the reply y and the task to write the request
that it answers; o: other requests; n: a neutral text, which takes out how likely each request is by itself. A general
reply ("I am sorry, I cannot help with that") fits all requests alike: r is 0.

A user's few words may move the base into an apology or into talk about the words themselves. Guidance makes more of
that, and a policy that follows such a teacher meets the wish and answers nothing. A reply below the bound is therefore
no practice of the wish: nothing is learned from it. A wish is stopped when too many of its replies are below.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence

from openclaw_rl.engines.base import Engine
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.sessions.openclaw import strip_wrapping
from openclaw_rl.types import Ids, Request

TASK = "Here is a text:\n\n{}\n\nWrite the request that this text answers."
NEUTRAL = "The table stands by the window. In the afternoon the light falls on it, and somebody has left a cup there."
OTHERS = 3
"""Other requests that one reply is compared on."""
_LEAST_TOKENS, _MOST_TOKENS = 3, 48
"""Tokens of a request: a shorter one ("hi") says nothing, and a longer one is cut."""
_REPLY_CHARS = 600
_REMEMBERED = 64
"""Requests whose log-probs behind the neutral text are remembered."""


class Relevance:
    def __init__(
        self,
        base: Engine,
        render: Render,
        encode: Callable[[str], Ids],
        *,
        least: float,
        sample: Callable[[Request], Awaitable[str]] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """base: an engine that scores under the base when no adapter is named. encode: tokens of a text alone.

        least: r from which a reply answers, in nats a token. sample: draws a reply of the base to a request; None:
        every request is taken for one that replies can be told by.
        """
        self._base, self._render, self._encode = base, render, encode
        self._least, self._sample, self._timeout_s = least, sample, timeout_s
        self._alone: dict[str, float] = {}
        """ℓ(q | n) by request, the newest last."""
        self._can_tell: dict[str, bool] = {}

    async def answers(self, request: Request, reply: str) -> bool:
        """Return True if the reply answers the request, or if that cannot be told of this request.

        Raises EngineError, AlignmentError, TimeoutError.
        """
        asked = _asked(request)
        found = await self.of(asked, reply)
        if found is None or found >= self._least:
            return True
        if asked not in self._can_tell:
            self._can_tell[asked] = await self._is_told_by_replies(request, asked)
        return not self._can_tell[asked]

    async def of(self, asked: str, reply: str) -> float | None:
        """Return r in nats a token; None for a request of too few tokens."""
        own = self._tokens(asked)
        if len(own) < _LEAST_TOKENS:
            return None
        known = [text for text in reversed(self._alone) if text != asked]
        others = list(dict.fromkeys([*known, *BUILT_IN]))
        others = [text for text in others if text != asked][:OTHERS]
        self._remember(asked)
        behind = await asyncio.to_thread(self._prompt, reply)
        alone = await asyncio.gather(*(self._behind_neutral(text) for text in (asked, *others)))
        said = await asyncio.gather(*(self._mean(behind, self._tokens(text)) for text in (asked, *others)))
        gains = [a - b for a, b in zip(said, alone, strict=True)]
        return gains[0] - statistics.fmean(gains[1:])

    async def _is_told_by_replies(self, request: Request, asked: str) -> bool:
        """Return True if the base's own reply is told from others: of "tell me a joke" no reply may be."""
        if self._sample is None:
            return True
        found = await self.of(asked, await self._sample(request))
        return found is not None and found >= self._least

    def _remember(self, asked: str) -> None:
        # The request is known from here on, also to replies that are scored beside this one.
        if asked not in self._alone:
            self._alone[asked] = float("nan")
        while len(self._alone) > _REMEMBERED:
            gone = next(iter(self._alone))
            del self._alone[gone]
            self._can_tell.pop(gone, None)

    async def _behind_neutral(self, text: str) -> float:
        known = self._alone.get(text, float("nan"))
        if known == known:  # not NaN
            return known
        prompt = await asyncio.to_thread(self._prompt, NEUTRAL)
        found = await self._mean(prompt, self._tokens(text))
        if text in self._alone:
            self._alone[text] = found
        return found

    async def _mean(self, prompt: Ids, tokens: Ids) -> float:
        async with asyncio.timeout(self._timeout_s):
            score = await self._base.score(prompt, tokens, lora_path=None, extra_key="v0")
        return statistics.fmean(score.log_probs)

    def _prompt(self, text: str) -> Ids:
        return self._render((Message(role="user", content=TASK.format(text[:_REPLY_CHARS])),), None, None)

    def _tokens(self, text: str) -> Ids:
        return self._encode(text)[:_MOST_TOKENS]


def _asked(request: Request) -> str:
    """Return the words of the last message that a user wrote."""
    said: Sequence[str] = [message.text() for message in request.messages if message.role == "user"]
    return strip_wrapping(said[-1]).strip() if said else ""
