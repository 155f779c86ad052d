"""One reply: from the prepared request to the recorded turn. HTTP and SSE belong to `routes`.

The order of the steps is the promise:

1. The engine is asked. At the same time the ledger commits the request row.
2. After that commit the first token goes to the client. Beside it the ledger pairs the former turn.
3. The ledger commits the turn, with its tokens and log-probs exactly as sampled.
4. After both commits the client gets the finish.

Every reply of which a client read a token is therefore in the ledger. If the ledger is slow, a stream's head and its
keep-alives go out before the commit. If the ledger cannot write, the reply is still served; the turn is not trained on,
and the log says so. Background requests are served and counted, never recorded. The text of a reply is stored for
people and for pairing; the trainer reads only the ids.
"""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from openclaw_rl.errors import EngineRefused, EpisodeRefused, LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.dialects.base import Outcome, TokenLogProb, Usage
from openclaw_rl.proxy.generation import Decoding, Generation, priority_of
from openclaw_rl.proxy.parser import Delta, joined
from openclaw_rl.proxy.request import Prepared
from openclaw_rl.types import DropReason, SideCount, Turn, TurnType
from openclaw_rl.web.client_gone import run_to_completion

log = structlog.get_logger()

_NUMBERS = "engine's numbers"
"""Part of the server in `Health`: the engine serves, but its turns cannot be trained on."""
_CONTENT, _MOST_EMPTY = "replies' content", 0.2
"""Part of the server in `Health`, and the share of turns that may end at their limit without content."""
_LIMIT_IS_SMALL = (
    "replies ended at their limit of tokens, in a thought or a call: raise the clients' max_tokens, or "
    "sampling.max_new_tokens for clients that send none"
)
_TRAINABLE, _MOST_UNTRAINABLE = "trainable turns", 0.9
"""Part of the server in `Health`, and the share of turns that may be such that no trainer will ever take them."""
_BY_REQUEST = {
    DropReason.NOT_TRAINABLE_SAMPLING: "sampled greedily, with penalties, a bias or a grammar",
    DropReason.TRUNCATED_SAMPLING: "sampled with top_p or top_k, which sampling.truncated_sampling drops",
    DropReason.OPTED_OUT: "opted out, by their key or by X-OpenClaw-Train",
    DropReason.UNSUPPORTED_CONTENT: "with pictures, which this trainer or this method does not take",
    DropReason.TOO_LONG: "longer than trainer.max_tokens",
}
"""Reasons that hold for every turn of a client, in words."""


class Step(NamedTuple):  # as `Delta`
    """The text that one engine event made visible, and its tokens."""

    delta: Delta | None
    log_probs: tuple[TokenLogProb, ...] | None = None


class Reply:
    """A reply in progress. Use it with `async with`; iterate `steps()` once, then `commit()`, then tell the client.

    Leaving the block without a commit records the tokens so far as cancelled, or abandons the request.
    """

    def __init__(
        self, deps: ProxyDeps, prepared: Prepared, only_version: int | None = None, *, id_prefix: str = "chatcmpl-"
    ) -> None:
        """only_version: the version that the client named; another version must not answer."""
        self._deps, self._prepared = deps, prepared
        self.reply_id = f"{id_prefix}{uuid.uuid4().hex}"
        """The id of the turn, too."""
        request = prepared.request
        self._generation = Generation(
            deps.engine,
            deps.serving,
            rid=self.reply_id,
            prompt_ids=request.prompt_ids,
            decoding=Decoding.of(request, deps.frontend.end_ids, prepared.extras, prepared.shown),
            only_version=only_version,
            health=deps.health,
            priority=priority_of(request),
        )
        self._parser = deps.frontend.parser(
            prepared.rendered,
            stop=request.sampling.stop,
            one_call=prepared.one_call,
            is_forced=prepared.is_forced,
        )
        self._show: Callable[[Delta], None] | None = None
        self._is_main = prepared.classified.type is TurnType.MAIN
        self._arrival: tuple[asyncio.Task[None], ...] = ()
        self._is_begun = self._is_committed = self._is_lost = False
        self._status = 200

    @property
    def weight_version(self) -> int | None:
        return self._generation.weight_version

    @property
    def usage(self) -> Usage:
        """The tokens of what the client gets."""
        prompt, parser = len(self._prepared.request.prompt_ids), self._parser
        cached = min(self._generation.sampled.cached_tokens, prompt)
        return Usage(prompt, parser.delivered, cached, parser.reasoned)

    @property
    def tokens(self) -> int:
        """Number of tokens that the engine took and gave: of the prompt and, so far, of the reply."""
        asked = 0 if self.weight_version is None else len(self._prepared.request.prompt_ids)
        return asked + len(self._generation.sampled.ids)

    @property
    def finish_reason(self) -> str:
        finish = "stop" if self._parser.is_over else self._generation.sampled.finish or "cancelled"
        return "tool_calls" if finish == "stop" and self._parser.has_calls else finish

    async def __aenter__(self) -> Self:
        # The tasks first run when `steps` has asked the engine and waits: the ledger's commit (about 1 ms) adds no
        # latency. If the process dies before the commit, the ledger has no such request and the client has no token.
        # The first token waits for the first of the tasks. One that waited for the pairing too would come 0.3 ms later;
        # a death before the pairing leaves the former turn open, and the request that the client repeats pairs it.
        if self._is_main:
            begun = asyncio.create_task(self._begin())
            self._arrival = begun, asyncio.create_task(self._observe(after=begun))
        else:
            self._arrival = (asyncio.create_task(self._observe_side()),)
        self._deps.activity.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_committed:
                await run_to_completion(self._give_up(error))
        finally:
            self._deps.activity.end()
            await self._generation.__aexit__(kind, error, trace)

    def show_at_once(self, show: Callable[[Delta], None] | None) -> None:
        """Give the visible parts to `show` in the moment in which they come, in place of `steps`; None: no longer.

        The caller goes on to iterate `steps`: some parts come there. A reply that may hold text back, or may end by its
        text, has no part for `show`.
        """
        wants_steps = (
            self._prepared.wants_log_probs or self._prepared.demands_call or self._prepared.request.sampling.stop
        )
        self._show = None if wants_steps else show
        self._generation.show = None if self._show is None else self._show_newest

    def _show_newest(self) -> None:
        delta = self._parser.feed(self._generation.sampled.ids[-1])
        if delta is not None and self._show is not None:
            self._show(delta)

    def _fed(self, new: int) -> Delta | None:
        """Give the parser the new tokens; return their visible parts."""
        ids, feed = self._generation.sampled.ids, self._parser.feed
        if new == 1:
            return feed(ids[-1])
        return joined([found for token in ids[-new:] if (found := feed(token)) is not None])

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield the visible steps; the first one waits for the ledger. Raises EngineRefused, RequestError."""
        shown, is_first = 0, True
        held: list[Delta] = []
        """Of a reply that must hold a call, the parts before its call."""
        events = self._generation.events()
        try:
            async for new in events:
                if is_first:
                    await asyncio.shield(self._arrival[0])
                    is_first = False
                    now = self._deps.clock()
                    waited_s = now - self._prepared.request.received_at
                    self._deps.health.first_token_came(now, self._generation.weight_version or 0, waited_s)
                delta = self._fed(new)
                if delta is not None and self._prepared.demands_call:
                    held.append(delta)
                    delta = joined(held) if self._parser.has_calls else None
                    held = held if delta is None else []
                if self._prepared.wants_log_probs:
                    if delta is not None:
                        yield Step(delta, self._log_probs(shown))
                        shown = self._parser.delivered
                elif delta is not None:
                    yield Step(delta)
                if self._parser.is_stopped:
                    break
        finally:
            await events.aclose()  # after a stop string this aborts the engine's request
        await self._arrived()  # needed for a reply without a token
        last = self._parser.finish(is_complete=self.finish_reason != "length")
        if self._prepared.demands_call:
            if not self._parser.has_calls:
                raise self._no_call()
            last = joined([*held, *([] if last is None else [last])])
        rest = self._log_probs(shown) if self._prepared.wants_log_probs and shown < self._parser.delivered else None
        if last is not None or rest is not None:
            yield Step(last, rest)

    async def commit(self) -> None:
        """Record the turn. On return the reply is in the ledger, or the log has the reason."""
        self._is_committed = True
        await run_to_completion(self._keep(self.finish_reason))

    def outcome(self) -> Outcome:
        """Return the whole reply as the client gets it."""
        log_probs = self._log_probs(0) if self._prepared.wants_log_probs else None
        return Outcome(self._parser.reply(), self.finish_reason, self.usage, log_probs, self._parser.stop)

    def _no_call(self) -> RequestError:
        """Return the refusal of a demand that the reply did not meet."""
        if self._generation.sampled.finish == "length" and not self._parser.is_over:
            most = self._prepared.request.sampling.max_new_tokens
            why = f"the reply reached its limit of {most} tokens before its call was complete; raise max_tokens"
        elif self._prepared.is_forced:
            why = "the engine did not hold the reply to a call; the demand cannot be enforced here"
        else:
            why = "the model answered without a call, and this engine has no grammar to enforce one"
        return RequestError(f"tool_choice: {why}", code="tool_choice_not_met", param="tool_choice")

    @property
    def is_recorded(self) -> bool:
        """False if the ledger could not write the request or its end: the turn will never be trained on."""
        # The head of a stream is sent before the end is known, so a late failure is not in its header.
        return not self._is_main or (self._is_begun and not self._is_lost)

    @property
    def has_arrived(self) -> bool:
        """True once the ledger has the request, or the log has the reason."""
        task = self._arrival[0] if self._arrival else None
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def _arrived(self) -> None:
        """Wait for the arrival. It runs to its end even if the caller is cancelled."""
        for task in self._arrival:
            await asyncio.shield(task)

    async def _observe(self, *, after: asyncio.Task[None]) -> None:
        await asyncio.wait((after,))
        await asyncio.sleep(0)  # the first token may wait for the same commit, and goes first
        await self._deps.sessions.observe(self._prepared.request)

    async def _observe_side(self) -> None:
        request = self._prepared.request
        await self._deps.sessions.observe_side(request.scope, request.messages, request.group)

    async def _begin(self) -> None:
        try:
            await self._deps.ledger.begin(self._prepared.request)
            self._is_begun = True
        except LedgerUnavailable:  # the ledger's writer logs one line for all requests
            self._deps.health.count("not_recorded")
        except EpisodeRefused as error:  # it ended between the look at it and this write
            raise RequestError(error.message, status=error.status, code=error.code) from error
        except LedgerError as error:
            log.error("request_not_recorded", request_id=self._prepared.request.request_id, error=str(error))

    async def _keep(self, finish_reason: str) -> None:
        prepared = self._prepared
        if not self._is_main:
            await self._count_side()
        elif self._is_begun:
            self._is_lost = not await self._deps.sessions.served(prepared.request, self._turn(finish_reason))
            if self._is_lost:
                self._deps.health.count("not_recorded")
        if prepared.session_done:
            await self._deps.sessions.done(prepared.request.scope)

    def _turn(self, finish_reason: str) -> Turn:
        """Return the turn of this reply, and report unusable numbers of the engine to `Health`."""
        prepared, sampled = self._prepared, self._generation.sampled
        t = len(sampled.ids)
        kept = self._parser.kept if self._parser.is_over else t  # the tokens before a stop string or an unwanted call
        turn = Turn(
            turn_id=self.reply_id,
            request_id=prepared.request.request_id,
            finished_at=self._deps.clock(),
            response_ids=tuple(sampled.ids),
            rollout_log_probs=tuple(sampled.log_probs),
            loss_mask=(True,) * kept + (False,) * (t - kept),
            versions=sampled.versions,
            finish_reason=finish_reason,
            reply=self._parser.reply(),
            drop=self._drop_reason(finish_reason, kept),
            cached_tokens=sampled.cached_tokens,
        )
        if turn.drop in (DropReason.MISALIGNED, DropReason.NON_FINITE):
            self._deps.health.failed(_NUMBERS, f"{turn.drop} in {turn.turn_id}")
        elif turn.drop is None:
            self._deps.health.ok(_NUMBERS)
        is_empty = finish_reason == "length" and not turn.reply.content
        if finish_reason != "cancelled":
            self._deps.health.answered(_CONTENT, is_bad=is_empty, limit=_MOST_EMPTY, error=_LIMIT_IS_SMALL)
            most, drop = self._deps.longest_sample, turn.drop
            if drop is None and most is not None and len(prepared.request.prompt_ids) + t > most:
                drop = DropReason.TOO_LONG
            self._count_trainable(None if drop is None else _BY_REQUEST.get(drop))
        return turn

    def _count_trainable(self, why: str | None) -> None:
        """Report clients whose turns can never be trained on, after some of them. why: None for a turn that can."""
        if not self._deps.trains:
            return
        error = f"turns can never be trained on; the last one was {why}"
        self._deps.health.answered(_TRAINABLE, is_bad=why is not None, limit=_MOST_UNTRAINABLE, error=error)

    def _drop_reason(self, finish_reason: str, kept: int) -> DropReason | None:
        """Return the reason why the turn may never be trained on, or None."""
        sampled, sampling = self._generation.sampled, self._prepared.request.sampling
        if self._prepared.opted_out:
            return DropReason.OPTED_OUT
        if finish_reason == "cancelled":
            return DropReason.CANCELLED
        if kept == 0:
            return DropReason.EMPTY
        if not sampled.is_aligned:
            return DropReason.MISALIGNED
        if not all(map(math.isfinite, sampled.log_probs)):
            return DropReason.NON_FINITE
        if not sampling.is_trainable:
            return DropReason.NOT_TRAINABLE_SAMPLING
        if sampling.seed is not None and sampled.is_joined:
            return DropReason.NOT_TRAINABLE_SAMPLING  # the engine restarts the seed in the resumed call
        if sampling.is_truncated and self._deps.sampling.truncated_sampling == "drop":
            return DropReason.TRUNCATED_SAMPLING
        if max(sampled.ids) >= self._deps.frontend.vocab_size:
            return DropReason.MISALIGNED
        if self._prepared.request.pictures and not self._deps.trains_pictures:
            return DropReason.UNSUPPORTED_CONTENT
        return None

    async def _give_up(self, error: BaseException | None) -> None:
        """Record or abandon a reply that will not be completed: the client left, or the engine failed."""
        self._is_committed = True
        try:
            await self._arrived()  # the request row must exist before it can end
        finally:
            await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        is_failure = isinstance(error, Exception)
        self._status = _status(error)
        if self._is_main and (is_failure or not self._generation.sampled.ids):
            reason = DropReason.CANCELLED
            if is_failure:
                reason = DropReason.ENGINE_FAILED if self._status >= 500 else DropReason.REFUSED
            await self._abandon(reason, str(error) if is_failure else "the client went away")
            return
        if not is_failure:
            self._parser.finish(is_complete=False)
        await self._keep("cancelled")

    async def _abandon(self, reason: DropReason, detail: str) -> None:
        if self._is_begun:
            await self._deps.sessions.abandon(self._prepared.request.request_id, reason, detail)

    async def _count_side(self) -> None:
        request = self._prepared.request
        if self._prepared.classified.kind == "other" and self._deps.session.turn_type_default == "side":
            self._count_trainable("taken for a background request, by sessions.turn_type_default")
        side = SideCount(
            user=request.scope.user,
            session_id=request.scope.session_id,
            kind=self._prepared.classified.kind,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(self._generation.sampled.ids),  # a record: what the engine was asked for
            status=self._status,
            at=request.received_at,
        )
        try:
            await self._deps.ledger.count_side(side)
        except LedgerUnavailable:
            self._deps.health.count("not_recorded")
        except LedgerError as error:
            log.error("side_request_not_counted", error=str(error))

    def _log_probs(self, start: int) -> tuple[TokenLogProb, ...]:
        sampled, text = self._generation.sampled, self._deps.frontend.token_text
        top = sampled.top or [None] * len(sampled.ids)
        return tuple(
            TokenLogProb(
                text(sampled.ids[i]),
                sampled.log_probs[i],
                tuple((text(token), float("nan") if lp is None else lp) for lp, token, _ in top[i] or ()),
            )
            for i in range(start, self._parser.delivered)
        )


def _status(error: BaseException | None) -> int:
    if isinstance(error, RequestError | EngineRefused):
        return error.status
    return 502 if isinstance(error, Exception) else 499
