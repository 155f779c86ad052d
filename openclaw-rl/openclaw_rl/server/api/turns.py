"""`/v1/turns*`: recorded turns, for the operator and for their own users; and `/v1/outcomes`.

The admin key reads every turn. A chat key reads the turns of its own user alone; any other turn does not exist for it.
A server without chat keys gives no turn to a caller without the admin key, because every program of the machine is
such a caller. `/v1/outcomes` holds no content: it tells the owner of a reply what became of it.
"""

import asyncio
import hmac
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.ledger import Effect, Ledger
from openclaw_rl.ledger.records import BY_OPERATOR, TurnRecord
from openclaw_rl.ledger.search import TurnFilter
from openclaw_rl.server.api.status import plain
from openclaw_rl.types import Feedback, LogProbs, TurnState
from openclaw_rl.web.auth import Keys, Secret

_LARGEST = 2**63 - 1
"""Largest number of a column."""


class TurnQuery(BaseModel):
    """Conditions on a list of turns, and the part of it to return."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=20, ge=1, le=1000)
    before: int | None = Field(default=None, ge=0, le=_LARGEST)
    """`next` of the answer before: the list goes on there."""
    state: TurnState | None = None
    session_id: str | None = None
    user: str | None = None
    weight_version: int | None = Field(default=None, ge=0, le=_LARGEST)
    """Oldest version that sampled the reply."""
    trained_in: int | None = Field(default=None, ge=0, le=_LARGEST)
    """Version whose step had the turn in its batch."""
    verdict: int | None = Field(default=None, ge=-1, le=1)
    source: str | None = Field(default=None, max_length=20)
    """Source of the verdict: `rules`, `llm` or `feedback`."""
    practice: bool | None = None
    """True: practice replies alone. False: none of them."""
    q: str | None = Field(default=None, max_length=200)
    """Words that the newest message of the request, or the reply, contains."""

    def filter(self, user: str | None, *, is_own: bool) -> TurnFilter:
        return TurnFilter(
            state=self.state,
            session_id=self.session_id,
            user=user,
            is_own=is_own,
            weight_version=self.weight_version,
            trained_in=self.trained_in,
            verdict=self.verdict,
            source=self.source,
            is_practice=self.practice,
            words=self.q,
        )


class TurnChange(BaseModel):
    """Change of one turn: exactly one field."""

    model_config = ConfigDict(extra="forbid")

    verdict: int | None = Field(default=None, ge=-1, le=1)
    """It replaces the judge's, as feedback of the turn's user."""
    train: bool | None = None
    """False: leave the turn out of training for good."""


class TokenTexts(Protocol):
    """Members of the front end that the tokens of a reply need."""

    def token_text(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True)
class TurnsDeps:
    ledger: Ledger
    keys: Keys
    admin_key: Secret
    frontend: TokenTexts
    on_judged: Callable[[], None]
    """A turn waits to be scored."""
    clock: Callable[[], float] = time.time
    has_own_policies: bool = False
    """A policy for each user: the operator's list has texts of a user that it names, and of no other."""


class Places:
    """Places in the list of all turns, in a form that tells a user nothing of it: not even how many turns it has.

    A permutation of 52 bits, which a browser's number holds: four rounds of a Feistel network under the user's key.
    """

    _HALF, _ROUNDS = 26, 4

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sealed(self, place: int) -> int:
        left, right = divmod(place, 1 << self._HALF)
        for number in range(self._ROUNDS):
            left, right = right, left ^ self._mixed(number, right)
        return left << self._HALF | right

    def opened(self, sealed: int) -> int:
        """Return the place; of a number that this user never got, any place."""
        left, right = divmod(sealed % (1 << 2 * self._HALF), 1 << self._HALF)
        for number in reversed(range(self._ROUNDS)):
            left, right = right ^ self._mixed(number, left), left
        return left << self._HALF | right

    def _mixed(self, number: int, half: int) -> int:
        digest = hmac.digest(self._key, f"{number} {half}".encode(), "sha256")
        return int.from_bytes(digest[:8], "big") % (1 << self._HALF)


@dataclass(frozen=True, slots=True)
class Reader:
    """Caller of these routes; `user` is None for the operator, who reads every turn."""

    user: str | None


def build_turns_router(deps: TurnsDeps) -> APIRouter:
    router = APIRouter()
    ledger = deps.ledger

    async def reader(request: Request) -> Reader:
        authorization = request.headers.get("authorization")
        if deps.admin_key.opens(authorization):
            return Reader(None)
        if deps.keys.are_set:
            return Reader(deps.keys.caller(authorization).user)
        raise RequestError(
            "this route needs the admin key (keys/admin.key in the data directory)", status=401, code="invalid_api_key"
        )

    async def chat_user(request: Request) -> str:
        return deps.keys.caller(request.headers.get("authorization")).user

    Reads = Annotated[Reader, Depends(reader)]

    async def owner_of(turn_id: str, who: Reader) -> str:
        """Return the turn's user. Raises RequestError (404) if the caller may not know the turn."""
        owner = await ledger.owner(turn_id)
        if owner is None or who.user not in (None, owner):
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return owner

    @router.get("/v1/turns")
    async def turns(who: Reads, asked: Annotated[TurnQuery, Query()]) -> JSONResponse:
        """Return turns, newest first, with the starts of their texts; `next` is null at the end of the list.

        A search by words, verdict, source or practice, or by two conditions, looks at the newest few thousand turns
        from `before` on. It may return fewer than `limit`, or none, and still have a `next`. `looked_at` counts them.
        With a policy for each user, the operator gets texts, and searches them, for one `user` at a time.
        """
        if who.user is not None and asked.user not in (None, who.user):
            raise RequestError("a chat key reads the turns of its own user", status=403, code="not_yours", param="user")
        is_own = who.user is not None
        has_texts = is_own or asked.user is not None or not deps.has_own_policies
        if asked.q is not None and not has_texts:
            raise RequestError("q: name the `user` whose texts to search", status=400, code="user_needed", param="user")
        wanted = asked.filter(who.user if is_own else asked.user, is_own=is_own)
        places = Places(deps.admin_key.derived(f"places of {who.user}")) if is_own else None
        before = asked.before if places is None or asked.before is None else places.opened(asked.before)
        page = await ledger.search(wanted, limit=asked.limit, before=before)
        following = page.next if places is None or page.next is None else places.sealed(page.next)
        rows = [plain(row) | ({} if has_texts else {"asked": "", "said": ""}) for row in page.turns]
        return JSONResponse({"turns": rows, "next": following, "looked_at": page.looked_at})

    @router.get("/v1/turns/{turn_id}")
    async def turn(who: Reads, turn_id: str, tokens: bool = True) -> Response:
        """Return one turn, and why the trainer did or did not learn from it. `tokens=false`: counts in place of ids."""
        await owner_of(turn_id, who)
        record = await ledger.turn(turn_id)
        if record is None:
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return await _json(lambda: plain(record) if tokens else _without_tokens(record))

    @router.get("/v1/turns/{turn_id}/state")
    async def state(who: Reads, turn_id: str) -> JSONResponse:
        """Return the state of a turn, and the numbers of its events and pieces of feedback: each change shows there."""
        await owner_of(turn_id, who)
        mark = await ledger.turn_mark(turn_id)
        if mark is None:
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return JSONResponse(plain(mark))

    @router.get("/v1/turns/{turn_id}/tokens")
    async def tokens(who: Reads, turn_id: str) -> Response:
        """Return the reply token by token: text, log-prob, version, and the terms of its credit.

        `reward` holds for all trained tokens; `gap` is the teacher's log-prob minus the student's. The trainer clips
        the gap, weighs both and takes off a baseline."""
        await owner_of(turn_id, who)
        found = await ledger.turn(turn_id)
        if found is None:
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return await _json(lambda: _tokens(found, deps.frontend))

    @router.post("/v1/turns/{turn_id}")
    async def change(who: Reads, turn_id: str, body: TurnChange) -> JSONResponse:
        """Replace the verdict of a turn, or leave it out of training."""
        owner = await owner_of(turn_id, who)
        if (body.verdict is None) == (body.train is None):
            raise RequestError("say one thing: `verdict` or `train`", param="verdict")
        if body.train:
            raise RequestError("train: only false; a turn that was left out stays out", param="train")
        effect = None
        try:
            if body.verdict is not None:
                name = f"{BY_OPERATOR if who.user is None else 'verdict-'}{uuid.uuid4().hex}"
                said = Feedback(name, turn_id, deps.clock(), value=float(body.verdict))
                effect = (await ledger.record_feedback(said, user=owner)).effect
                if effect in (Effect.JUDGED, Effect.RESCORED):
                    deps.on_judged()
            else:
                by = "the operator" if who.user is None else "its user"
                await ledger.leave_out(turn_id, f"left out by {by}")
        except LedgerUnavailable:
            raise
        except LedgerError as error:
            mark = await ledger.turn_mark(turn_id)
            if mark is not None and mark.state is TurnState.LEASED:
                text = f"a trainer has turn {turn_id}: it can be left out if the trainer gives it back"
                raise RequestError(text, status=409, code="turn_is_leased") from error
            raise RequestError(str(error), status=409, code="turn_is_over") from error
        record = await ledger.turn(turn_id)
        state = {} if record is None else {"state": str(record.state), "reason": record.reason and str(record.reason)}
        return JSONResponse({"turn_id": turn_id, "effect": effect and str(effect), **state})

    @router.get("/v1/outcomes")
    async def outcomes(
        user: Annotated[str, Depends(chat_user)],
        turn_id: Annotated[list[str], Query(min_length=1, max_length=100)],
    ) -> JSONResponse:
        """Return what became of one's own replies: state, verdict, and the versions that learned from each.

        A reply that the caller does not own, or that was not recorded, is left out."""
        return JSONResponse({"outcomes": [plain(row) for row in await ledger.outcomes(turn_id, user=user)]})

    return router


async def _json(make: Callable[[], Any]) -> Response:
    """Return the answer that `make` gives. It runs in a thread, because the ids of a long turn would hold the loop."""
    content = await asyncio.to_thread(lambda: orjson.dumps(make()))
    return Response(content, media_type="application/json")


def _without_tokens(record: TurnRecord) -> dict[str, Any]:
    """Return a turn as JSON, with counts in place of its ids, log-probs and masks."""
    fields: dict[str, Any] = plain(record)
    fields["request"]["prompt_tokens"] = len(fields["request"].pop("prompt_ids"))
    fields["turn"]["response_tokens"] = len(record.turn.response_ids)
    for part in (fields["turn"], fields["sample"] or {}):
        for name in [name for name in part if name.endswith(("_ids", "_log_probs", "_mask"))]:
            del part[name]
    return fields


def _tokens(found: TurnRecord, frontend: TokenTexts) -> dict[str, Any]:
    """Return the tokens of a reply, each with the terms of its credit."""
    sample, of = found.sample, found.sample or found.turn
    ids = of.response_ids
    gaps = [None] * len(ids) if sample is None else _gaps(sample.teacher_log_probs, sample.student_log_probs, len(ids))
    versions = [run.weight_version for run in of.versions for _ in range(run.length)]
    rows = zip(ids, of.rollout_log_probs, versions, of.loss_mask, gaps, strict=True)
    return {
        "turn_id": found.turn.turn_id,
        "reward": None if sample is None else plain(sample.reward),
        "has_gap": any(gap is not None for gap in gaps),
        "is_demonstration": sample is not None and sample.is_demonstration,
        "tokens": [
            {
                "text": frontend.token_text(token),
                "log_prob": plain(log_prob),
                "weight_version": version,
                "is_trained": is_trained,
                "gap": None if gap is None else plain(gap),
            }
            for token, log_prob, version, is_trained, gap in rows
        ],
    }


def _gaps(teacher: LogProbs | None, student: LogProbs | None, count: int) -> list[float | None]:
    """Return the teacher's log-prob minus the student's of each token; None where a side is absent."""
    if teacher is None or student is None:
        return [None] * count
    return [a - b if math.isfinite(a - b) else None for a, b in zip(teacher, student, strict=True)]
