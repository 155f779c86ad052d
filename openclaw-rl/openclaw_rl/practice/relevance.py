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
from collections.abc import Awaitable, Callable, Collection

from openclaw_rl.engines.base import Engine
from openclaw_rl.judge.prompt import is_request
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.sessions.conversation_key import conversation, own_words
from openclaw_rl.types import Ids, Request

TASK = "Here is a text:\n\n{}\n\nWrite the request that this text answers."
NEUTRAL = "The table stands by the window. In the afternoon the light falls on it, and somebody has left a cup there."
OTHERS = 3
"""Other requests that one reply is compared on."""
_LEAST_TOKENS, _MOST_TOKENS = 3, 48
"""Tokens of a request: a shorter one ("hi") says nothing, and a longer one is cut."""
_REPLY_CHARS = 600


class Relevance:
    """Tells whether replies answer their requests, and remembers the requests of practised turns."""

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
        self._turns: dict[str, set[str]] = {}
        """Practised turns by the words of their request, the newest request last."""
        self._alone: dict[str, float] = {}
        """ℓ(q | n) by request."""
        self._can_tell: dict[str, bool] = {}

    async def answers(self, turn_id: str | None, request: Request, reply: str) -> bool:
        """Return True if the reply answers the request of the turn, or if that cannot be told of this request.

        turn_id: None for a request that no user wrote; the next `forget_all_but` forgets it.

        Raises EngineError, AlignmentError, TimeoutError.
        """
        asked = _asked(request)
        if len(self._tokens(asked)) < _LEAST_TOKENS:
            return True
        # Known from here on, also to the replies that are scored beside this one.
        if turn_id is not None:
            self._turns.setdefault(asked, set()).add(turn_id)
        found = await self.of(asked, reply)
        if found is None or found >= self._least:
            return True
        if asked not in self._can_tell:
            self._can_tell[asked] = await self._is_told_by_replies(request, asked)
        return not self._can_tell[asked]

    def forget_all_but(self, turn_ids: Collection[str]) -> None:
        """Forget the requests of turns that are practised no more: users' words."""
        kept = {asked: turns & set(turn_ids) for asked, turns in self._turns.items()}
        self._turns = {asked: turns for asked, turns in kept.items() if turns}
        self._alone = {text: value for text, value in self._alone.items() if text in self._turns or text in BUILT_IN}
        self._can_tell = {text: value for text, value in self._can_tell.items() if text in self._turns}

    async def of(self, asked: str, reply: str) -> float | None:
        """Return r in nats a token; None for a request of too few tokens."""
        own = self._tokens(asked)
        if len(own) < _LEAST_TOKENS:
            return None
        known = dict.fromkeys([*reversed(self._turns), *BUILT_IN])
        others = [text for text in known if text != asked][:OTHERS]
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

    async def _behind_neutral(self, text: str) -> float:
        if text not in self._alone:
            self._alone[text] = await self._mean(await asyncio.to_thread(self._prompt, NEUTRAL), self._tokens(text))
        return self._alone[text]

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
    said = [message for message in conversation(request.messages) if is_request(message)]
    return own_words(said[-1]) if said else ""
