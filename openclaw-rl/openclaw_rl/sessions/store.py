"""Sessions: pairing in memory and the ledger on disk, in step, for the proxy.

The proxy calls `observe` when a main request arrives and `served` when its reply is complete. It calls `observe_side`
for a background request, `abandon` when no reply came, and `done` when the client ends its session.

The steps of a registered episode pair in the ledger, by the order of their requests, and are not known here.

No method fails a chat. If the ledger cannot write, the chat goes on, the turn ends untrained, and the log says so; the
end of its request is written later. Pairing is decided before the first await, so parallel requests of one session
cannot take the same turn.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import structlog

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import turn_key
from openclaw_rl.sessions.pairing import Paired, Pairing
from openclaw_rl.settings import SessionSettings
from openclaw_rl.types import DropReason, EndedTurn, NextState, OpenTurn, Request, Scope, Turn, TurnKey

log = structlog.get_logger()

_SWEEP_S = 60.0
"""Longest time between two checks for turns past their time to live, which is hours."""
_KNOWN_AGAIN = 256
"""Newest turns of the ledger, of which the ended ones are known again after a start."""
_MOST_ENDINGS = 10_000
"""Most ends of requests that wait for the ledger; older ones end at the next start, as `interrupted`."""


_STEP = TurnKey("", "", "")
"""Key of a step of an episode, which no text pairs."""


class SessionLedger(Protocol):
    """The part of the ledger that sessions use."""

    async def finish(self, turn: Turn, key: TurnKey) -> DropReason | None: ...

    async def continue_episode(self, request_id: str) -> str | None: ...

    async def open_turns(self, limit: int) -> list[OpenTurn]: ...

    async def ended_turns(self, limit: int) -> list[EndedTurn]: ...

    async def pair(
        self, turn_id: str, next_state: NextState, *, by_request_id: str, superseded: Collection[str] = ()
    ) -> None: ...

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None: ...

    async def drop(self, turn_id: str, reason: DropReason, detail: str = "") -> None: ...

    async def deleted(self, turn_ids: Collection[str]) -> list[str]: ...

    async def expire(self, older_than: float) -> list[str]: ...


class Sessions:
    """Pairs turns with their next states. Sets `paired` whenever a turn becomes ready for the judge."""

    def __init__(
        self,
        ledger: SessionLedger,
        settings: SessionSettings,
        *,
        paired: asyncio.Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: the clock of `Turn.finished_at`."""
        self._clock = clock
        self._ledger = ledger
        self._settings = settings
        self._pairing = Pairing(settings.max_open_turns)
        self._paired = paired or asyncio.Event()
        self._ended: set[str] = set()
        """Open turns that ended when they finished (cancelled ones); they still pair, and need no second end."""
        self._endings: dict[str, tuple[DropReason, str]] = {}  # oldest first
        """Requests that are over, but still running in the ledger."""

    async def observe(self, request: Request) -> str | None:
        """Pair the turn that a new main request answers; return its id or None."""
        if request.in_episode is not None:
            return await self._observe_step(request)
        paired = self._pairing.observe(request.scope, request.messages, request.group)
        return await self._record(paired, by_request_id=request.request_id)

    async def observe_side(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> str | None:
        """Pair a turn with a reaction that a background request reports; return its id or None."""
        paired = self._pairing.observe_side(scope, messages, group)
        return await self._record(paired, by_request_id="side")

    def last_turn(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> OpenTurn | None:
        """Return the open turn whose reply the user read last, or None."""
        return self._pairing.last_turn(scope, messages, group)

    async def served(self, request: Request, turn: Turn) -> bool:
        """Record a complete reply, then keep it open for its next state. Return True if the ledger has it.

        The caller sends the finish chunk after this.
        """
        key = _STEP if request.in_episode is not None else self._pairing.key(request, turn.reply)
        try:
            drop = await self._ledger.finish(turn, key)
        except LedgerError as error:
            _tell(error, "turn.not_recorded", turn_id=turn.turn_id)
            self._end_later(request.request_id, DropReason.NOT_RECORDED, str(error))
            return False
        if request.in_episode is not None:
            return True  # the ledger pairs it, by order
        if drop is not None and not (turn.reply.text().strip() or turn.reply.tool_calls):
            return True  # an empty reply cannot come back in a history
        if drop is not None:
            self._ended.add(turn.turn_id)
        pushed_out = self._pairing.add(OpenTurn(turn.turn_id, request.scope, key, turn.finished_at))
        await self._drop(pushed_out, DropReason.NO_NEXT_STATE, "too many open turns")
        return True

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None:
        """End a request that got no reply."""
        try:
            await self._ledger.abandon(request_id, reason, detail)
        except LedgerError as error:
            _tell(error, "request_not_abandoned", request_id=request_id)
            self._end_later(request_id, reason, detail)

    async def done(self, scope: Scope) -> None:
        """End a session, after its last reply was `served`."""
        await self._drop(self._pairing.close(scope), DropReason.NO_NEXT_STATE, "session done")

    async def forget_deleted(self) -> None:
        """Forget what the ledger has deleted: its turns, and all digests of words. Raises LedgerError."""
        # The digests name no turn. All go, because they cost no more than to be computed again.
        self._pairing.forget_words()
        deleted = await self._ledger.deleted(self._pairing.turn_ids)
        self._pairing.forget(deleted)
        self._ended.difference_update(deleted)

    async def refill(self) -> None:
        """Load the turns that were open when the server last stopped, and the newest that had ended.

        A client sends a request again that a kill cut. Its turn may have its next state already; unknown, the request
        would pair with an open turn of another chat that says the same. Raises LedgerError, which must end the start.
        """
        ended = await self._ledger.ended_turns(_KNOWN_AGAIN)
        known = await asyncio.to_thread(_open_again, ended)
        opened = await self._ledger.open_turns(self._settings.max_open_turns)
        over = {turn.turn_id for turn in known}
        for turn in sorted([*known, *opened], key=lambda turn: turn.finished_at):
            if turn.turn_id in over:
                self._pairing.add_ended(turn)
            else:
                self._pairing.add(turn)

    async def expire_forever(self) -> None:
        """End turns that no request continued in time. A task of the server's task group."""
        sweep_s = min(_SWEEP_S, self._settings.pair_ttl_s / 10)
        while True:
            older_than = self._clock() - self._settings.pair_ttl_s
            try:
                expired = await self._ledger.expire(older_than)
            except LedgerError as error:
                log.warning("sessions_expire_failed", error=str(error))
                expired = []
            # Turns that ended when they finished are open in memory only, so the ledger does not return them.
            # The ledger's own expiry, if it failed, is tried again in the next round.
            self._forget(self._pairing.remove(expired))
            self._forget(self._pairing.expire(older_than - sweep_s))
            await self._end_late()
            await asyncio.sleep(sweep_s)

    def _end_later(self, request_id: str, reason: DropReason, detail: str) -> None:
        """Keep the end of a request until the ledger can write it."""
        # Without an end the request would run for ever in the ledger, and its session could not be forgotten.
        self._endings[request_id] = (reason, detail)
        if len(self._endings) > _MOST_ENDINGS:
            del self._endings[next(iter(self._endings))]

    async def _end_late(self) -> None:
        for request_id, (reason, detail) in list(self._endings.items()):
            try:
                await self._ledger.abandon(request_id, reason, detail)
            except LedgerUnavailable:
                return
            except LedgerError:
                pass  # the ledger had written the end before
            self._endings.pop(request_id, None)

    async def _record(self, paired: Paired | None, *, by_request_id: str) -> str | None:
        if paired is None:
            return None
        self._ended.discard(paired.turn_id)
        superseded = self._forget(paired.superseded)
        try:
            await self._ledger.pair(
                paired.turn_id, paired.next_state, by_request_id=by_request_id, superseded=superseded
            )
        except LedgerError as error:
            # The turn and its retries stay open in the ledger, and end there as no_next_state after `pair_ttl_s`.
            _tell(error, "turn.pair_not_recorded", turn_id=paired.turn_id)
        else:
            self._paired.set()
        return paired.turn_id

    async def _observe_step(self, request: Request) -> str | None:
        """Pair inside an episode. The request's own row is written before, on the ledger's one writer."""
        try:
            turn_id = await self._ledger.continue_episode(request.request_id)
        except LedgerError as error:
            _tell(error, "turn.pair_not_recorded", request_id=request.request_id)
            return None
        if turn_id is not None:
            self._paired.set()
        return turn_id

    async def _drop(self, turn_ids: Iterable[str], reason: DropReason, detail: str) -> None:
        for turn_id in self._forget(turn_ids):
            try:
                await self._ledger.drop(turn_id, reason, detail)
            except LedgerError as error:
                _tell(error, "turn.drop_not_recorded", turn_id=turn_id, reason=str(reason))

    def _forget(self, turn_ids: Iterable[str]) -> list[str]:
        """Return those of the turns that still need an end in the ledger."""
        ending = [turn_id for turn_id in turn_ids if turn_id not in self._ended]
        self._ended.difference_update(turn_ids)
        return ending


def _tell(error: LedgerError, event: str, **fields: str) -> None:
    """Log a failed write: at error if the ledger refused it, at debug if the ledger cannot write now."""
    # For a ledger that cannot write, its writer logs one line for all calls.
    say = log.debug if isinstance(error, LedgerUnavailable) else log.error
    say(event, error=str(error), **fields)


def _open_again(ended: Sequence[EndedTurn]) -> list[OpenTurn]:
    """Return the turns with their keys; those of a group of requests have the key without it, which matches none."""
    return [OpenTurn(turn.turn_id, turn.scope, turn_key(turn.messages, turn.reply), turn.finished_at) for turn in ended]
