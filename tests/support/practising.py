"""A corrected turn, and practice replies, as a test of the ledger wants them."""

import itertools
from dataclasses import replace
from typing import Any

from turns import make_request, make_turn

from openclaw_rl.ledger import Ledger
from openclaw_rl.messages import Message
from openclaw_rl.types import (
    SHARED_POLICY,
    HintTerm,
    Ids,
    NextState,
    PracticeKind,
    PracticeReply,
    Sample,
    SamplingParams,
    TurnKey,
    Verdict,
)

_COUNT = itertools.count()


def sample_of(turn_id: str, ids: Ids, prompt: Ids, *, version: int = 0, hint: str | None = None) -> Sample:
    turn = make_turn(turn_id, ids=ids, version=version)
    return Sample(
        sample_id=turn_id,
        prompt_ids=prompt,
        response_ids=ids,
        loss_mask=turn.loss_mask,
        rollout_log_probs=turn.rollout_log_probs,
        versions=turn.versions,
        temperature=0.7,
        teacher_log_probs=turn.rollout_log_probs,
        student_log_probs=turn.rollout_log_probs,
        hint=None if hint is None else HintTerm(text=hint, source="verbatim"),
    )


async def serve(
    ledger: Ledger,
    name: str,
    *,
    user: str,
    session: str | None,
    prompt: Ids,
    version: int,
    policy: str = SHARED_POLICY,
) -> None:
    request = make_request(
        name, user=user, session=session, text=f"question {name}", prompt=prompt, sampling=SamplingParams(16)
    )
    request = replace(request, scope=replace(request.scope, policy=policy))
    await ledger.begin(request)
    await ledger.finish(make_turn(name, version=version), TurnKey(name, name, name))


async def corrected(
    ledger: Ledger,
    text: str,
    *,
    user: str = "ann",
    session: str | None = "s",
    prompt: Ids | None = None,
    version: int = 0,
    policy: str = SHARED_POLICY,
) -> str:
    """Serve a turn that its user corrected with `text`; it waits for a trainer. Return its id."""
    n = next(_COUNT)
    name, prompt = f"corrected-{n}", prompt or (7, n + 10)
    await serve(ledger, name, user=user, session=session, prompt=prompt, version=version, policy=policy)
    said = NextState((Message(role="user", content=text),))
    await ledger.pair(name, said, by_request_id=f"after-{name}")
    await ledger.record_verdict(name, Verdict(-1, (-1,), "rules", "complaint"))
    await ledger.record_sample(sample_of(name, (10, 11), prompt, version=version, hint=text))
    return name


async def praised(ledger: Ledger, *, user: str = "ann", session: str | None = "s", version: int = 0) -> str:
    """Serve a turn that its user was content with. Return its id."""
    name = f"praised-{next(_COUNT)}"
    await serve(ledger, name, user=user, session=session, prompt=(8, next(_COUNT)), version=version)
    await ledger.pair(name, NextState((Message(role="user", content="thanks"),)), by_request_id=f"after-{name}")
    await ledger.record_verdict(name, Verdict(1, (1,), "rules", "thanks"))
    await ledger.record_sample(sample_of(name, (10, 11), (8, 1), version=version))
    return name


def practice(
    of: str | None,
    wish_id: int | None,
    *,
    name: str | None = None,
    version: int = 0,
    user: str = "ann",
    session: str | None = "s",
    **more: Any,
) -> PracticeReply:
    """A practice reply; an anchor without a wish. `more`: fields of the turn."""
    name = name or f"practice-{next(_COUNT)}"
    ids: Ids = (20, 21, 22)
    hint = None if wish_id is None else "the wish"
    return PracticeReply(
        kind=PracticeKind.ANCHOR if wish_id is None else PracticeKind.WISH,
        request=make_request(name, user=user, session=session, prompt=(7, 8), sampling=SamplingParams(16)),
        turn=make_turn(name, ids=ids, version=version, **more),
        sample=sample_of(name, ids, (7, 8), version=version, hint=hint),
        of=of,
        wish_id=wish_id,
    )
