"""Reads of the ledger for people and for the gate."""

from openclaw_rl.types import DropReason, SideCount, TurnState, Verdict, VersionRun


async def test_the_story_of_a_turn_is_told(ledger, driver, clock):
    turn_id = await driver.sampled()
    clock.advance(5)
    lease = await ledger.lease(trainer="a", now=True)
    await driver.commit(lease)
    record = await ledger.turn(turn_id)
    assert [(event.state, event.detail) for event in record.events] == [
        ("served", ""),
        ("paired", ""),
        ("judged", "+1"),
        ("sampled", ""),
        ("leased", lease.lease_id),
        ("trained", "version 1"),
    ]
    assert [event.at for event in record.events] == [1000.0] * 4 + [1005.0] * 2
    assert record.request.scope.user == "ann"
    assert record.answered_by == f"after-{turn_id}"
    assert record.judged.verdict.rationale == "thanks"
    assert (record.sample.reward, record.reason) == (1.0, None)


async def test_a_drop_says_why(ledger, driver):
    turn_id = await driver.paired()
    await ledger.drop(turn_id, DropReason.UNJUDGED, "quorum 1 of 2")
    record = await ledger.turn(turn_id)
    assert (record.state, record.reason, record.turn.drop) == (
        TurnState.DROPPED,
        DropReason.UNJUDGED,
        DropReason.UNJUDGED,
    )
    assert record.events[-1].detail == "unjudged: quorum 1 of 2"
    assert await ledger.turn("ghost") is None


async def test_turns_are_listed_newest_first_and_filtered(ledger, driver):
    first = await driver.judged(user="ann", session="s1")
    second = await driver.served(user="bob", session="s2")
    third = await driver.served(user="ann", session=None, drop=DropReason.CANCELLED)
    assert [turn.turn_id for turn in await ledger.turns(limit=2)] == [third, second]
    assert [turn.turn_id for turn in await ledger.turns(user="ann")] == [third, first]
    assert [turn.turn_id for turn in await ledger.turns(session_id="s2")] == [second]
    (summary,) = await ledger.turns(state=TurnState.JUDGED, user="ann", session_id="s1")
    assert (summary.verdict, summary.prompt_tokens, summary.response_tokens) == (1, 3, 4)
    assert (await ledger.turns(user="' OR 1"), (await ledger.turns(limit=1))[0].reason) == ([], DropReason.CANCELLED)


async def test_everything_is_counted_once(ledger, driver):
    await driver.served()
    await driver.paired()
    await driver.served(drop=DropReason.CANCELLED)
    await ledger.drop(await driver.sampled(), DropReason.METHOD)
    await ledger.count_side(SideCount("ann", "s", "title", 10, 2, 200, 1.0))
    await ledger.count_side(SideCount("ann", "s", "title", 10, 2, 503, 1.0))
    counts = await ledger.counts()
    assert {name: n for name, n in counts.items() if n} == {
        "served": 1,
        "paired": 1,
        "dropped": 2,
        "dropped.cancelled": 1,
        "dropped.method": 1,
        "requests": 4,
        "side": 2,
        "side.title": 2,
    }
    assert counts["trained"] == 0  # every state is named


async def test_gates_get_plain_replies_of_one_version(ledger, driver):
    await driver.served(version=0, prompt=(1,))
    await driver.served(version=1, prompt=(2,))
    await driver.served(runs=(VersionRun(1, 2), VersionRun(2, 2)), prompt=(3,))  # of two versions
    await driver.served(version=1, prompt=(4,), drop=DropReason.NOT_TRAINABLE_SAMPLING)
    await driver.served(version=1, prompt=(5,), drop=DropReason.OPTED_OUT)
    await driver.served(version=1, prompt=(6,), drop=DropReason.CANCELLED)
    response = (10, 11, 12, 13)
    assert await ledger.recent_replies(sampled_by=1, limit=5) == [((6,), response), ((2,), response)]
    assert [prompt for prompt, _ in await ledger.recent_replies(sampled_by=None, limit=2)] == [(6,), (2,)]


async def test_the_newest_prompts_of_recent_sessions(ledger, driver):
    for prompt, session in (((1,), "a"), ((2,), "b"), ((3,), "a"), ((4,), "c")):
        await driver.served(prompt=prompt, session=session)
    assert await ledger.recent_prompts(2) == [("ann", (4,)), ("ann", (3,))]


async def test_what_users_said_counts_no_silence_and_loses_nothing_to_a_step(ledger, driver):
    """A turn without a verdict is no verdict of 0, for any drop reason. A verdict that comes while a batch trains, or
    later, counts for the version that gave the reply. Tool results are not users."""
    first = await driver.sampled()
    late = await driver.paired()
    await driver.served()  # nobody answered it
    await ledger.drop(await driver.served(), DropReason.NO_NEXT_STATE)
    await ledger.drop(await driver.paired(), DropReason.UNJUDGED, "no quorum")
    await driver.judged(is_tool=True)
    assert await ledger.user_verdicts(limit=100) == [(0, 1)]
    lease = await ledger.lease(trainer="a", now=True)
    assert [sample.sample_id for sample in lease.samples] == [first]
    await ledger.record_verdict(late, Verdict(-1, (-1,), "rules"))
    assert await ledger.user_verdicts(limit=100) == [(0, 1), (0, -1)]
    await driver.serve(await driver.commit(lease))
    await ledger.record_verdict(await driver.paired(version=1), Verdict(0, (0,), "rules"))
    await ledger.record_verdict(await driver.paired(version=0), Verdict(-1, (-1,), "rules"))
    assert await ledger.user_verdicts(limit=100) == [(0, 1), (0, -1), (1, 0), (0, -1)]
    assert await ledger.user_verdicts(limit=2) == [(1, 0), (0, -1)]


async def test_verdicts_behind_a_turn_that_waits_for_the_judge_are_left_out_on_request(ledger, driver):
    """The judge is away: later turns have a verdict only where a user complained."""
    await ledger.record_verdict(await driver.paired(), Verdict(1, (1,), "llm"))
    waiting = await driver.paired()
    await driver.paired(is_tool=True)
    await ledger.record_verdict(await driver.paired(), Verdict(-1, (-1,), "user"))
    assert await ledger.user_verdicts(limit=100) == [(0, 1), (0, -1)]
    assert await ledger.user_verdicts(limit=100, before_waiting=True) == [(0, 1)]
    await ledger.record_verdict(waiting, Verdict(1, (1,), "llm"))
    assert await ledger.user_verdicts(limit=100, before_waiting=True) == [(0, 1), (0, 1), (0, -1)]
