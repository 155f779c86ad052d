"""The practice loop: one task of the server that practises wishes while nobody chats.

    idle → measure the wishes under the version that serves → plan one update → sample and score its replies
         → write them as one batch → the trainer leases it at once → its version serves → again

Promises:

* Users go first. A chat that begins ends the sampling and scoring at once, and replies that are complete are kept for
  later. A full batch of users' samples is trained before any practice, and waiting ones fill a practice batch up.
* A batch is sampled by the version that serves and is the tip, and comes into the ledger whole or not at all. A crash
  loses replies that nobody waits for.
* One update of a policy is under way at a time, so a reply is never older than one version. An update is of one policy;
  policies with wishes take turns.
* It stops by itself (`stops`), and says why in the list of wishes and in the log.
* Nothing is learned from a reply that no longer answers its request (`relevance`).

A failure of engine, teacher or ledger costs the round, and the next one comes after a pause.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import structlog

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import AlignmentError, EngineError, EngineRefused, LedgerError, RequestError, TeacherError
from openclaw_rl.methods.base import Dropped
from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.practice.deps import PracticeDeps
from openclaw_rl.practice.measuring import KL_REPLIES
from openclaw_rl.practice.plan import AnchorUse, Exercise, Owner, plan
from openclaw_rl.practice.share import leak
from openclaw_rl.practice.status import PracticeStatus
from openclaw_rl.practice.stops import rule
from openclaw_rl.settings import PracticeSettings
from openclaw_rl.types import (
    SHARED_POLICY,
    DropReason,
    JudgedTurn,
    PracticeKind,
    PracticeReply,
    PracticeRoom,
    Request,
    Wish,
    WishMeasure,
)

log = structlog.get_logger(__name__)

PART = "practice"
"""Name of the part in `Health` that is out of order while rounds fail."""
_POLL_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_ANCHORS = 64
"""Uncorrected turns of a user that the choice is made from."""
_MEASURED = 6
"""Wishes that are measured under one version: a measure is a few passes of the engine."""
_EMPTY_ROUNDS = 3
"""Rounds in a row without one usable reply of a wish, after which it is stopped."""
_ANSWERED, _LEAST_ANSWERED = 24, 16
"""Newest replies of a wish, and how many of them must answer their request, or the wish is stopped."""

_VOTED = 12
"""Newest replies of a wish whose verdicts decide with the learned share (`practice.stop_passed`)."""

NO_WISH, ALL_REST = "there is no wish", "all wishes are learned, or rest"


@dataclass(slots=True)
class _Round:
    """One update in the making."""

    policy: str
    weight_version: int
    todo: list[Exercise]
    planned: frozenset[int] = frozenset()
    """Wishes of the exercises."""
    made: list[PracticeReply] = field(default_factory=list)
    began_at: float = 0.0


class PracticeLoop:
    """Practises until cancelled; the server's task group owns `run`."""

    def __init__(
        self,
        deps: PracticeDeps,
        settings: PracticeSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = _POLL_S,
    ) -> None:
        self._deps, self._settings, self._clock, self._poll_s = deps, settings, clock, poll_s
        self._round: _Round | None = None
        self._newest: dict[int, deque[PracticeReply]] = {}
        """Newest replies of each wish that were written."""
        self._last: frozenset[int] = frozenset()
        """Wishes of the last batch that was written."""
        self._shares: dict[int, list[float]] = {}
        self._measured_in: dict[str, int] = {}
        """By policy: the version under which its wishes were measured last."""
        self._turns: dict[str, int] = {}
        """By policy: the place of its last turn in the order of all turns."""
        self._order = count()
        self._anchored = AnchorUse()
        self._empty: Counter[int] = Counter()
        self._passed: dict[int, deque[bool]] = {}
        """By wish: whether the judge passed each of its newest replies."""
        self._answered: dict[int, deque[bool]] = {}
        """By wish: whether each of its newest replies answered its request."""
        self._compared: set[tuple[int, int]] = set()
        self._worked_s = 0.0
        """Seconds of sampling and scoring since the last batch was written."""
        self._is_written = False
        self._rest_until = 0.0
        self.status = PracticeStatus(waits="it begins")

    async def run(self) -> None:
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                self._wait_for(await self.turn())
                self._deps.health.ok(PART)
                pauses.reset()
                pause_s = self._poll_s if self.status.waits is not None else 0.0
            except (LedgerError, EngineError, RequestError, TeacherError, AlignmentError, TimeoutError) as error:
                self._round = None
                self._wait_for(f"it failed: {error!r}")
                self._deps.health.failed(PART, str(error) or repr(error))
                pause_s = pauses.next_s()
            await asyncio.sleep(pause_s)

    async def turn(self) -> str | None:
        """Do the next thing that may be done. Return the reason to wait; None after work that another may follow."""
        reason: str | None = NO_WISH
        self._forget_all_but(await self._deps.ledger.wishes(only_active=True))  # first: practice may wait for long
        for policy in await self._policies():
            room = await self._deps.ledger.practice_room(policy)
            reason = self._why_not(room, policy)
            if reason is None:
                return await self._practise(room, policy)
        return reason

    async def _policies(self) -> list[str]:
        """Return the policies to practise: the one of the running update first, then the one that waited longest."""
        found = await self._deps.ledger.practice_policies() or [SHARED_POLICY]
        running = None if self._round is None else self._round.policy
        self._turns = {policy: place for policy, place in self._turns.items() if policy in found}
        self._measured_in = {policy: number for policy, number in self._measured_in.items() if policy in found}
        return sorted(found, key=lambda policy: (policy != running, self._turns.get(policy, -1)))

    async def _practise(self, room: PracticeRoom, policy: str) -> str | None:
        self._turns[policy] = next(self._order)
        if self._round is not None and (self._round.policy, self._round.weight_version) != (policy, room.tip):
            self._round = None
        began_at = self._clock()
        try:
            if not await self._deps.activity.unless_chat(self._advance(room, policy)):
                return "a chat runs"
        finally:
            self._worked_s += self._clock() - began_at
        if self._is_written:
            self._rest_until = self._clock() + self._worked_s * (1 / self._settings.machine_share - 1)
            self._worked_s, self._is_written = 0.0, False
        return self.status.waits

    def _why_not(self, room: PracticeRoom, policy: str) -> str | None:
        """Return the reason to wait; None: practice may go on."""
        if (reason := self._deps.why_wait(room, policy, idle_s=self._settings.idle_s)) is not None:
            return reason
        if self._clock() < self._rest_until:
            return "it rests (practice.machine_share)"
        if not room.open_wishes and self._measured_in.get(policy) == room.tip:
            return ALL_REST if self.status.wishes else NO_WISH
        return None

    # -- one round -----------------------------------------------------------------------------------------------------

    async def _advance(self, room: PracticeRoom, policy: str) -> None:
        """Measure, plan, sample, score and write, as far as it is not done yet."""
        everyones = await self._deps.ledger.wishes(only_active=True)
        self._forget_all_but(everyones)
        wishes = [wish for wish in everyones if wish.policy == policy]
        if not wishes:
            self._measured_in[policy] = room.tip
            self._show(everyones, waits=NO_WISH)
            return
        if self._round is None:
            await self._let_newer_win(wishes)
            if await self._measure(wishes, room.tip, policy):
                everyones = await self._deps.ledger.wishes(only_active=True)
                wishes = [wish for wish in everyones if wish.policy == policy]
            if not any(wish.is_open for wish in wishes):
                self._show(everyones, waits=ALL_REST)
                return
            self._round = await self._planned(wishes, room, policy)
            if not self._round.todo:
                self._round = None
                self._show(everyones, waits="no wish has a prompt that can be practised")
                return
        self._show(everyones)
        await self._make(self._round)
        await self._write(self._round)

    async def _planned(self, wishes: Sequence[Wish], room: PracticeRoom, policy: str) -> _Round:
        anchors: dict[Owner, Sequence[str]] = {}
        for user in sorted({wish.user for wish in wishes}):
            turns = await self._deps.ledger.anchor_turns(user=user, policy=policy, limit=_ANCHORS)
            anchors[user, policy] = turns
        known = {turn_id for turns in anchors.values() for turn_id in turns} | set(BUILT_IN)
        self._anchored = self._anchored.only(known)
        # Users' samples that wait fill the batch up, so it leaves room for them, and they for half of it.
        room_left = self._deps.batch_size - min(room.real, self._deps.batch_size // 2)
        todo = plan(
            wishes,
            anchors,
            replies=max(1, min(self._settings.replies, room_left)),
            anchor_share=self._settings.anchor_share,
            anchored=self._anchored,
            variant_share=self._settings.variant_share if self._deps.variants is not None else 0.0,
            share_of=self._deps.share_of,
        )
        planned = frozenset(one.wish_id for one in todo if one.wish_id is not None)
        return _Round(policy, room.tip, todo, planned, began_at=self._clock())

    async def _make(self, round: _Round) -> None:
        """Sample and score what is left to do, all at once: the engine decodes them together."""

        async def one(exercise: Exercise) -> None:
            reply = await self._reply(exercise)
            round.todo.remove(exercise)
            if reply is not None:
                round.made.append(reply)

        async with asyncio.TaskGroup() as group:
            for exercise in list(round.todo):
                group.create_task(one(exercise))

    async def _reply(self, exercise: Exercise) -> PracticeReply | None:
        deps = self._deps
        if exercise.turn_id is not None:
            request = await deps.ledger.practice_request(exercise.turn_id)
        else:
            request = await deps.sampler.built_in(exercise.text or "", exercise.owner)
        if request is None or not deps.sampler.is_fit(request):
            return None
        varied = await self._variant(exercise, request)
        request = varied or request
        try:
            judged = await deps.sampler.reply(request)
        except EngineRefused as error:  # this prompt's fault alone
            log.debug("practice_reply_refused", error=error.message)
            return None
        if judged is None:
            return None
        if exercise.turn_id is not None and exercise.wish_id is not None and deps.relevance is not None:
            of = exercise.turn_id if varied is None else None
            answers = await deps.relevance.answers(of, request, judged.turn.reply.text())
            if of is not None:  # a variant may be no request that can be answered
                self._answered.setdefault(exercise.wish_id, deque(maxlen=_ANSWERED)).append(answers)
            if not answers:
                deps.health.count("practice_off_topic")
                return None
        if deps.vote is not None and exercise.hint is not None:
            verdict = await deps.vote(judged, exercise.hint)
            judged = JudgedTurn(judged.request, judged.turn, judged.next_state, verdict)
            if verdict is not None and exercise.wish_id is not None:
                self._passed.setdefault(exercise.wish_id, deque(maxlen=_VOTED)).append(verdict.value > 0)
        try:
            made = await deps.method.practise(judged, exercise.hint, deps.tools)
        except AlignmentError as error:
            made = Dropped(DropReason.MISALIGNED, str(error))
        if isinstance(made, Dropped):
            deps.health.count(f"practice_dropped_{made.reason}")
            log.debug("practice_reply_dropped", reason=str(made.reason), detail=made.detail)
            return None
        of_turn, of_wish = exercise.turn_id, exercise.wish_id
        return PracticeReply(exercise.kind, judged.request, judged.turn, made, of_turn, of_wish, varied is not None)

    async def _variant(self, exercise: Exercise, request: Request) -> Request | None:
        """Return a variant of the request, where one is planned and possible."""
        variants, turn_id = self._deps.variants, exercise.turn_id
        if not exercise.is_variant or variants is None or turn_id is None or exercise.hint is None:
            return None
        varied = await variants.of(turn_id, request, exercise.hint)
        return varied if varied is not None and self._deps.sampler.is_fit(varied) else None

    async def _write(self, made: _Round) -> None:
        self._round = None
        replies, took_s = made.made, self._clock() - made.began_at
        await self._stop_unusable(made)
        written = await self._deps.ledger.record_practice(replies)
        if not written:
            log.info("practice_left_out", replies=len(replies), reason="its version, its wishes or its turns are gone")
            return
        for reply in replies:
            if reply.kind is PracticeKind.ANCHOR:
                self._anchored.add(reply.of or reply.request.messages[0].text(), leak(reply))
        self._last = frozenset(reply.wish_id for reply in replies if reply.wish_id is not None)
        for reply in replies:
            if reply.wish_id is not None:
                self._newest.setdefault(reply.wish_id, deque(maxlen=KL_REPLIES)).append(reply)
        self._deps.on_batch()
        self._is_written = True
        log.info("practising", **self.status.fields(), replies=written, took_s=round(took_s, 1))

    async def _stop_unusable(self, round: _Round) -> None:
        """Stop a wish of which no reply could be used several rounds in a row, or many replies answer no request."""
        used = {reply.wish_id for reply in round.made}
        over: dict[int, str] = {}
        for wish_id in round.planned:
            answered = self._answered.get(wish_id, ())
            if len(answered) == _ANSWERED and sum(answered) < _LEAST_ANSWERED:
                off = _ANSWERED - sum(answered)
                over[wish_id] = f"{off} of its last {_ANSWERED} replies did not answer (practice.least_relevance)"
            if wish_id in used:
                self._empty.pop(wish_id, None)
                continue
            self._empty[wish_id] += 1
            if self._empty[wish_id] >= _EMPTY_ROUNDS:
                over[wish_id] = (
                    f"no practice reply of it was usable in {_EMPTY_ROUNDS} rounds (metrics: practice_dropped)"
                )
        if over:
            log.warning("wish_stopped", wishes=over)
            version = round.weight_version
            await self._deps.ledger.record_measures(
                [WishMeasure(wish_id, version, None, None, stopped=why) for wish_id, why in over.items()]
            )

    # -- measures ------------------------------------------------------------------------------------------------------

    async def _measure(self, wishes: Sequence[Wish], version: int, policy: str) -> bool:
        """Measure a few wishes once under each version, the last practised first. Return True if any was measured."""
        if self._measured_in.get(policy) == version:
            return False

        def order(wish: Wish) -> tuple[bool, int]:
            return wish.wish_id not in self._last, -1 if wish.measured_in is None else wish.measured_in

        found = []
        for wish in sorted(wishes, key=order)[:_MEASURED]:
            uncorrected: Sequence[str] = ()
            if wish.is_general:
                uncorrected = await self._deps.ledger.anchor_turns(user=wish.user, policy=wish.policy, limit=2)
            newest = tuple(self._newest.get(wish.wish_id, ()))
            measured = await self._deps.meter.measure(wish, wishes, newest, uncorrected=uncorrected)
            history = list(self._shares.get(wish.wish_id, ()))
            history += [] if measured.share is None else [measured.share]
            kl = wish.kl if measured.kl is None else measured.kl
            votes = self._passed.get(wish.wish_id)
            passed = sum(votes) / len(votes) if votes else None
            ruling = rule(wish, measured.share, kl, history, self._settings, aim=self._deps.aim, passed=passed)
            found.append(WishMeasure(wish.wish_id, version, measured.share, kl, ruling.rests, ruling.stopped))
            self._shares[wish.wish_id] = history
            if ruling.stopped or (ruling.rests and wish.rests is None):
                log.info("wish_rests", wish=wish.wish_id, reason=ruling.stopped or ruling.rests, updates=wish.updates)
        await self._deps.ledger.record_measures(found)
        self._measured_in[policy] = version
        return True

    async def _let_newer_win(self, wishes: Sequence[Wish]) -> None:
        """Ask the judge, where there is one, whether a newer wish contradicts an older one of the same user."""
        if self._deps.contradicts is None:
            return
        for number, newer in enumerate(wishes):
            for older in wishes[:number]:
                pair = (older.wish_id, newer.wish_id)
                if (older.user, older.policy) != (newer.user, newer.policy) or pair in self._compared:
                    continue
                if await self._deps.contradicts(older.text, newer.text):
                    reason = f"wish {newer.wish_id} contradicts it, says the judge"
                    await self._deps.ledger.supersede_wish(older.wish_id, by=newer.wish_id, reason=reason)
                self._compared.add(pair)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _forget_all_but(self, wishes: Sequence[Wish]) -> None:
        active = {wish.wish_id for wish in wishes}
        self._deps.meter.forget_all_but(wishes, [reply for newest in self._newest.values() for reply in newest])
        turns = {source.turn_id for wish in wishes for source in wish.sources}
        for part in (self._deps.relevance, self._deps.variants):
            if part is not None:
                part.forget_all_but(turns)
        for kept in (self._shares, self._newest, self._empty, self._answered, self._passed):
            for wish_id in kept.keys() - active:
                del kept[wish_id]
        self._compared = {pair for pair in self._compared if set(pair) <= active}

    def _wait_for(self, reason: str | None) -> None:
        self.status = self.status.waiting(reason)

    def _show(self, wishes: Sequence[Wish], waits: str | None = None) -> None:
        self.status = PracticeStatus.of(wishes, aim=self._deps.aim, waits=waits)
