"""Requests, replies and their pairing: what is stored comes back as it was, and every change is legal."""

import asyncio
import sqlite3
import stat
from dataclasses import replace

import pytest

from openclaw_rl.errors import LedgerError
from openclaw_rl.messages import Message
from openclaw_rl.types import (
    DropReason,
    EndedTurn,
    Feedback,
    NextState,
    Request,
    SamplingParams,
    Scope,
    Turn,
    TurnKey,
    Verdict,
    VersionRun,
)

PROMPT = tuple(range(1300))
REQUEST = Request(
    request_id="r1",
    scope=Scope("ann", None),
    received_at=5.0,
    messages=(
        Message(role="system", content="be kind"),
        Message.model_validate(
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache": 1}], "mood": {"a": [1]}}
        ),
        Message(role="assistant", content=None, tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}]),
    ),
    tools_json='[{"type":"function"}]',
    template_kwargs_json=None,
    prompt_ids=PROMPT,
    sampling=SamplingParams(max_new_tokens=7, temperature=0.3, stop=("a", "b"), seed=3),
    episode="e",
    step=2,
)
TURN = Turn(
    turn_id="t1",
    request_id="r1",
    finished_at=6.0,
    response_ids=(70000, 2, 3),
    rollout_log_probs=(-0.25, -1.5, float("-inf")),
    loss_mask=(True, True, False),
    versions=(VersionRun(0, 2), VersionRun(1, 1)),
    finish_reason="stop",
    reply=Message(role="assistant", content="hello", reasoning_content="hm"),
    cached_tokens=512,
)
KEY = TurnKey("reply", "before", "history")


async def test_a_turn_comes_back_as_it_was_stored(ledger):
    await ledger.begin(REQUEST)
    await ledger.finish(TURN, KEY)
    (open_turn,) = await ledger.open_turns(10)
    assert await ledger.ended_turns(10) == []
    assert (open_turn.turn_id, open_turn.scope, open_turn.key, open_turn.finished_at) == ("t1", REQUEST.scope, KEY, 6.0)
    next_state = NextState((Message(role="user", content="no!"),), ("👎",))
    await ledger.pair("t1", next_state, by_request_id="r2")
    (judged,) = await ledger.to_judge(10)
    assert (judged.request, judged.turn, judged.next_state) == (REQUEST, TURN, next_state)
    assert await ledger.open_turns(10) == []
    (ended,) = await ledger.ended_turns(10)
    assert ended == EndedTurn("t1", REQUEST.scope, REQUEST.messages, TURN.reply, 6.0)


async def test_a_turn_dropped_at_finish_keeps_its_state_and_its_next_state(ledger, driver):
    turn_id = await driver.served(drop=DropReason.CANCELLED)
    assert await ledger.open_turns(10) == []
    await ledger.pair(turn_id, NextState((Message(role="user", content="go on"),)), by_request_id="r2")
    assert await ledger.to_judge(10) == []
    with pytest.raises(LedgerError, match="paired already"):
        await ledger.pair(turn_id, NextState((Message(role="user", content="go on"),)), by_request_id="r3")


async def test_illegal_changes_are_named_and_leave_no_trace(ledger, driver):
    turn_id = await driver.served()
    with pytest.raises(LedgerError, match="is served and cannot become judged"):
        await ledger.record_verdict(turn_id, Verdict(1, (1,), "rules"))
    with pytest.raises(LedgerError, match="no turn ghost"):
        await ledger.drop("ghost", DropReason.BRANCH)
    with pytest.raises(LedgerError, match="served already"):
        await ledger.abandon("request-1", DropReason.ENGINE_FAILED)
    with pytest.raises(LedgerError, match="no request"):
        await ledger.finish(TURN, KEY)
    await ledger.drop(turn_id, DropReason.SUPERSEDED)
    with pytest.raises(LedgerError, match=r"is dropped and cannot become dropped \(branch\)"):
        await ledger.drop(turn_id, DropReason.BRANCH)


@pytest.mark.parametrize("verdict", [Verdict(0, (0, 0, 1), "llm"), Verdict(-1, (-1,), "rules"), None])
async def test_every_verdict_even_none_goes_on_to_the_method(ledger, driver, verdict):
    turn_id = await driver.paired()
    await ledger.record_verdict(turn_id, verdict)
    (judged,) = await ledger.to_score(10)
    assert judged.verdict == verdict
    with pytest.raises(LedgerError, match="is judged"):
        await ledger.record_verdict(turn_id, Verdict(1, (1,), "llm"))
    await ledger.drop(turn_id, DropReason.NEUTRAL)  # what binary_rl says of a 0
    assert (await ledger.counts())["dropped.neutral"] == 1
    assert await ledger.audit() == []


async def test_a_continuation_and_the_end_of_its_retries_are_one_transaction(ledger, driver):
    retry, other, continued, rated = [await driver.served() for _ in range(4)]
    state = NextState((Message(role="user", content="go on"),))
    with pytest.raises(LedgerError, match="no turn ghost"):
        await ledger.pair("ghost", state, by_request_id="x", superseded=[retry])
    assert await driver.state(retry) == "served"
    await ledger.record_feedback(Feedback("f", rated, 1.0, 1.0), user="ann")
    await ledger.pair(continued, state, by_request_id="x", superseded=[retry, rated, "ghost"])
    states = [await driver.state(turn) for turn in (retry, other, continued, rated)]
    assert states == ["dropped.superseded", "served", "paired", "judged"]
    assert (await ledger.turn(retry)).events[-1].detail == f"superseded: continued: {continued}"


async def test_open_turns_expire(ledger, driver):
    old, new = await driver.served(), await driver.served()
    (newest,) = await ledger.open_turns(1)
    assert newest.turn_id == new
    assert await ledger.expire(newest.finished_at) == [old]
    assert [turn.turn_id for turn in await ledger.open_turns(10)] == [new]


async def test_equal_prompts_and_messages_are_stored_once(ledger, driver, ledger_path):
    long_prompt = tuple(range(4096))
    for _ in range(50):
        await driver.served(prompt=long_prompt)
    with sqlite3.connect(ledger_path) as db:
        (prompt_pieces,) = db.execute("SELECT count(*) FROM piece WHERE length(data) > 300").fetchone()
    assert prompt_pieces == 8


async def test_a_request_is_begun_once(ledger):
    begun = await asyncio.gather(
        *(ledger.begin(replace(REQUEST, request_id=f"g{i % 3}")) for i in range(4)), return_exceptions=True
    )
    assert [isinstance(result, LedgerError) for result in begun] == [False, False, False, True]


async def test_files_are_private(ledger, driver, ledger_path):
    await driver.served()
    for path in ledger_path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(ledger_path.parent.stat().st_mode) == 0o700
