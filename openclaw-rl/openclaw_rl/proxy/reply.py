"""One chat, from the prepared request to the recorded turn; HTTP and SSE are the routes' business.

The order is the promise: rendered and classified → the engine is asked, and beside it the request row is committed and
the former turn paired → only then the first token goes out → the turn is committed → only then the finish. A ledger
that cannot write makes the turn untrained, with a log line, and nothing else. Background requests are served and
counted, never recorded.

The engine does not wait for the row, since nobody can tell: until it is committed, no word of the reply leaves this
class, and a reply is abandoned or kept only after it. So whatever a client read a word of is in the ledger, as are all
requests whose process lives. (Where the ledger takes longer than `server.keepalive_s`, a stream's head and its
keep-alives go out before: they say that we are there, and nothing of the reply.) A process that dies in between, a
millisecond, leaves a request that never was to both sides: no client read a word of it, and what the engine sampled is
nobody's.

Tokens to a `Turn`: what was sampled, exactly, and whether it may ever be trained on.

The reply's text is carried along for people and for pairing; nothing that is trained on is made from it.
"""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from openclaw_rl.errors import EngineRefused, LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.messages import Message
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.generation import Generation, Sampled
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.proxy.request import Prepared
from openclaw_rl.proxy.responses import TokenLogProb, Usage
from openclaw_rl.settings import SamplingSettings
from openclaw_rl.types import DropReason, Request, SideCount, Turn, TurnType
from openclaw_rl.web.asgi import run_to_completion


@dataclass(frozen=True, slots=True)
class Ending:
    """How a reply ended, beside its tokens."""

    finish_reason: str
    """`stop`, `length`, `tool_calls` or `cancelled`."""
    reply: Message
    kept: int | None = None
    """Tokens in front of a stop string; None when none matched."""
    opted_out: bool = False


def record(
    request: Request,
    turn_id: str,
    sampled: Sampled,
    ending: Ending,
    settings: SamplingSettings,
    *,
    vocab_size: int,
    at: float,
) -> Turn:
    """The turn of this reply; never raises for what the engine did. at: when it was finished."""
    t = len(sampled.ids)
    kept = t if ending.kept is None else ending.kept
    drop = _drop(request, sampled, ending, kept, settings)
    if drop is None and max(sampled.ids) >= vocab_size:
        drop = DropReason.MISALIGNED
    return Turn(
        turn_id=turn_id,
        request_id=request.request_id,
        finished_at=at,
        response_ids=tuple(sampled.ids),
        rollout_log_probs=tuple(sampled.log_probs),
        loss_mask=(True,) * kept + (False,) * (t - kept),
        versions=sampled.versions,
        finish_reason=ending.finish_reason,
        reply=ending.reply,
        drop=drop,
        cached_tokens=sampled.cached_tokens,
    )


def _drop(
    request: Request, sampled: Sampled, ending: Ending, kept: int, settings: SamplingSettings
) -> DropReason | None:
    sampling = request.sampling
    if ending.opted_out:
        return DropReason.OPTED_OUT
    if ending.finish_reason == "cancelled":
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
        return DropReason.NOT_TRAINABLE_SAMPLING  # a seed does not go on where it was cut
    if sampling.is_truncated and settings.truncated_sampling == "drop":
        return DropReason.TRUNCATED_SAMPLING
    return None


log = structlog.get_logger()

NUMBERS = "engine's numbers"
"""A part of its own to the meters: the chats go on, and what cannot be trained on grows."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine event made visible, and the tokens it took."""

    delta: Delta | None
    log_probs: tuple[TokenLogProb, ...] | None = None


class Reply:
    """A reply on its way. `async with`, iterate `steps()` once, then `commit()` before telling the client that it is
    complete. Before the first step, which waits for the ledger (`has_arrived`), no word of it is told.

    Leaving the block without a commit records what there is as cancelled, or abandons the request.
    """

    def __init__(self, deps: ProxyDeps, prepared: Prepared, only_version: int | None = None) -> None:
        """only_version: the client named it; another one must not answer."""
        self._deps, self._prepared = deps, prepared
        self.reply_id = f"chatcmpl-{uuid.uuid4().hex}"
        """The turn's id."""
        request = prepared.request
        self._generation = Generation(
            deps.engine,
            deps.serving,
            rid=self.reply_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            end_ids=deps.frontend.end_ids,
            extras=prepared.extras,
            only_version=only_version,
            health=deps.health,
        )
        self._parser = deps.frontend.parser(prepared.rendered, stop=request.sampling.stop)
        self._is_main = prepared.classified.type is TurnType.MAIN
        self._arrival: asyncio.Task[None] | None = None
        self._is_begun = self._is_committed = self._is_lost = False
        self._status = 200

    @property
    def weight_version(self) -> int | None:
        return self._generation.weight_version

    @property
    def usage(self) -> Usage:
        sampled = self._generation.sampled
        return Usage(len(self._prepared.request.prompt_ids), len(sampled.ids), sampled.cached_tokens)

    @property
    def finish_reason(self) -> str:
        finish = "stop" if self._parser.is_stopped else self._generation.sampled.finish or "cancelled"
        return "tool_calls" if finish == "stop" and self._parser.has_calls else finish

    async def __aenter__(self) -> Self:
        # It runs once `steps` has asked the engine, and waits for the answer.
        self._arrival = asyncio.create_task(self._arrive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_committed:
                await run_to_completion(self._give_up(error))
        finally:
            await self._generation.__aexit__(kind, error, trace)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Raises EngineRefused, RequestError."""
        sampled, feed = self._generation.sampled, self._parser.feed
        shown, is_first = 0, True
        events = self._generation.events()
        try:
            async for new in events:
                if is_first:
                    await self._arrived()
                    is_first = False
                    self._deps.health.first_token.observe(self._deps.clock() - self._prepared.request.received_at)
                ids = sampled.ids
                if new == 1:
                    delta = feed(ids[-1])
                else:
                    delta = _joined([found for token in ids[-new:] if (found := feed(token)) is not None])
                if self._prepared.wants_log_probs:
                    if delta is not None:
                        yield Step(delta, self._log_probs(shown))
                        shown = len(ids)
                elif delta is not None:
                    yield Step(delta)
                if self._parser.is_stopped:
                    break
        finally:
            await events.aclose()  # after a stop string: aborts the engine's request
        await self._arrived()  # of a reply without a token, too
        last = self._parser.finish(is_complete=self.finish_reason != "length")
        rest = self._log_probs(shown) if self._prepared.wants_log_probs and shown < len(sampled.ids) else None
        if last is not None or rest is not None:
            yield Step(last, rest)

    async def commit(self) -> None:
        """Record the turn. When it returns, the reply is in the ledger, or the log says why not."""
        self._is_committed = True
        await run_to_completion(self._keep(self.finish_reason))

    def message(self) -> Message:
        """The whole reply as the client gets it."""
        return self._parser.reply()

    def log_probs(self) -> tuple[TokenLogProb, ...] | None:
        """Of all tokens, when the client asked for them."""
        return self._log_probs(0) if self._prepared.wants_log_probs else None

    @property
    def is_recorded(self) -> bool:
        """False: the ledger could not take the request, or not its end, so the turn will never be trained on. (The head
        of a stream is out before the end is known.)"""
        return not self._is_main or (self._is_begun and not self._is_lost)

    @property
    def has_arrived(self) -> bool:
        """The ledger has the request and the pairing of the turn before, or the log says why not."""
        arrival = self._arrival
        return arrival is not None and arrival.done() and not arrival.cancelled() and arrival.exception() is None

    async def _arrived(self) -> None:
        """It goes on to its end even when the caller is cancelled meanwhile."""
        assert self._arrival is not None
        await asyncio.shield(self._arrival)

    async def _arrive(self) -> None:
        request = self._prepared.request
        if self._is_main:
            # Both writes are queued before either waits, so one commit of the ledger takes them together.
            await asyncio.gather(self._begin(), self._deps.sessions.observe(request))
        else:
            await self._deps.sessions.observe_side(request.scope, request.messages)

    async def _begin(self) -> None:
        try:
            await self._deps.ledger.begin(self._prepared.request)
            self._is_begun = True
        except LedgerUnavailable:  # the ledger's writer has one line for all of them
            self._deps.health.count("not_recorded")
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
        prepared = self._prepared
        ending = Ending(
            finish_reason=finish_reason,
            reply=self._parser.reply(),
            kept=self._parser.kept if self._parser.is_stopped else None,
            opted_out=prepared.opted_out,
        )
        turn = record(
            prepared.request,
            self.reply_id,
            self._generation.sampled,
            ending,
            self._deps.sampling,
            vocab_size=self._deps.frontend.vocab_size,
            at=self._deps.clock(),
        )
        if turn.drop in (DropReason.MISALIGNED, DropReason.NON_FINITE):
            self._deps.health.failed(NUMBERS, f"{turn.drop} in {turn.turn_id}")
        elif turn.drop is None:
            self._deps.health.ok(NUMBERS)
        return turn

    async def _give_up(self, error: BaseException | None) -> None:
        """The reply will not be completed: the client left, or the engine failed."""
        self._is_committed = True
        try:
            await self._arrived()  # what it began has to end
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
        request, usage = self._prepared.request, self.usage
        side = SideCount(
            user=request.scope.user,
            session_id=request.scope.session_id,
            kind=self._prepared.classified.kind,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
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
            for i in range(start, len(sampled.ids))
        )


def _joined(deltas: list[Delta]) -> Delta | None:
    if len(deltas) < 2:
        return deltas[0] if deltas else None
    return Delta(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple(call for delta in deltas for call in delta.calls),
    )


def _status(error: BaseException | None) -> int:
    if isinstance(error, RequestError | EngineRefused):
        return error.status
    return 502 if isinstance(error, Exception) else 499
