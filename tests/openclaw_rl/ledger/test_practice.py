"""Practice replies are turns of their own, behind the users' samples, and never taken for a user's turn."""

from dataclasses import replace

import pytest
from practising import corrected, practice, praised

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.messages import Message
from openclaw_rl.types import Feedback, WishState


async def wish_of(ledger, text="shorter", **kwargs):
    turn_id = await corrected(ledger, text, **kwargs)
    return turn_id, (await ledger.wishes())[-1].wish_id


async def batch(ledger, turn_id, wish_id, *, version=0, size=3):
    """Record `size` practice replies and one built-in anchor; return their ids."""
    replies = [practice(turn_id, wish_id, version=version) for _ in range(size)] + [
        practice(None, None, version=version)
    ]
    assert await ledger.record_practice(replies) == size + 1
    return [reply.turn.turn_id for reply in replies]


async def train(ledger, driver, *, durable=True):
    lease = await ledger.lease(trainer="test")
    assert lease is not None
    return await driver.commit(lease, durable=durable), [sample.sample_id for sample in lease.samples]


async def test_a_practice_reply_is_marked_and_counted_apart(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    before = await ledger.counts()
    wished, *_, anchor = await batch(ledger, turn_id, wish_id)
    counts = await ledger.counts()
    assert {name: counts[name] for name in ("requests", "sampled", "running")} == {
        name: before[name] for name in ("requests", "sampled", "running")
    }
    assert (counts["practice.sampled"], counts["practice"]) == (4, 4)
    record = await ledger.turn(wished)
    assert (record.practice, record.practice_of, record.wish_id) == ("wish", turn_id, wish_id)
    assert [(event.state, event.detail) for event in record.events] == [
        ("sampled", f"practice of wish {wish_id}, on {turn_id}")
    ]
    rows = {row.turn_id: row for row in await ledger.turns()}
    assert (rows[wished].practice, rows[wished].practice_of, rows[wished].wish_id) == ("wish", turn_id, wish_id)
    assert (rows[anchor].practice, rows[anchor].practice_of, rows[anchor].wish_id) == ("anchor", None, None)
    assert rows[turn_id].practice is None
    assert await ledger.audit(is_deep=True) == []


async def test_no_part_takes_practice_for_a_turn_of_its_user(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    prompts, replies = await ledger.recent_prompts(10), await ledger.recent_replies(sampled_by=None, limit=10)
    wished, *_ = await batch(ledger, turn_id, wish_id)
    assert await ledger.recent_prompts(10) == prompts
    assert await ledger.recent_replies(sampled_by=None, limit=10) == replies
    assert (await ledger.feedback_target(user="ann", session_id="s")).turn_id == turn_id
    assert await ledger.feedback_target(user="ann", turn_id=wished) is None
    with pytest.raises(LedgerError, match="no turn"):
        await ledger.record_feedback(Feedback("f", wished, 1.0, value=1.0), user="ann")
    assert len(await ledger.user_verdicts(limit=10)) == 1
    assert await ledger.open_turns(10) == []
    assert await ledger.to_score(10) == await ledger.to_judge(10) == []
    assert wished not in await ledger.anchor_turns(user="ann", policy="policy", limit=10)


async def test_a_batch_of_practice_is_leased_at_once_and_whole_and_waiting_samples_fill_it_up(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)  # one user's sample of the four that make a batch
    assert await ledger.lease(trainer="test") is None
    first = await batch(ledger, turn_id, wish_id, size=2)
    second = await batch(ledger, turn_id, wish_id, size=2)
    version, trained = await train(ledger, driver)
    assert sorted(trained) == sorted([turn_id, *first])
    _, trained = await train(ledger, driver)
    assert sorted(trained) == sorted(second)
    assert (await ledger.turn(first[0])).trained_in == version
    (wish,) = await ledger.wishes()
    assert (wish.practised, wish.updates, wish.since) == (4, 2, version)
    assert wish.sources[0].practised == 4
    assert await ledger.audit(is_deep=True) == []


async def test_a_full_batch_of_users_goes_first(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id, size=1)
    users = [turn_id, *[await driver.sampled() for _ in range(3)]]
    _, trained = await train(ledger, driver)
    assert sorted(trained) == sorted(users)
    _, trained = await train(ledger, driver)
    assert sorted(trained) == sorted(replies)


async def test_a_lease_never_takes_more_than_its_batch(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    await driver.sampled()
    replies = await batch(ledger, turn_id, wish_id, size=2)
    _, trained = await train(ledger, driver)
    assert sorted(trained) == sorted([turn_id, *replies])


async def test_a_released_batch_of_practice_waits_again_whole(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    lease = await ledger.lease(trainer="test")
    await ledger.release(lease.lease_id, lease.fence, reason="crash")
    assert sorted(s.sample_id for s in (await ledger.lease(trainer="test")).samples) == sorted(
        s.sample_id for s in lease.samples
    )
    assert set(replies) <= {s.sample_id for s in lease.samples}


async def test_practice_is_refused_once_its_version_its_prompt_or_its_wish_is_gone(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    other, other_wish = await wish_of(ledger, "in verse", session="t")
    reply = practice(turn_id, wish_id)
    for _ in range(2):
        await driver.sampled()
    version, _ = await train(ledger, driver)
    await driver.serve(version)
    assert await ledger.record_practice([reply]) == 0
    await ledger.forget("s")
    assert await ledger.record_practice([practice(turn_id, wish_id, version=1)]) == 0
    assert await ledger.record_practice([practice(None, None, version=1)]) == 0  # anchors alone teach no wish
    await ledger.remove_wish(other_wish)
    assert await ledger.record_practice([practice(other, other_wish, version=1, session="t")]) == 0
    assert await ledger.audit(is_deep=True) == []


async def test_nothing_is_practised_while_learning_is_paused(ledger):
    turn_id, wish_id = await wish_of(ledger)
    await ledger.set_learning(False)
    assert await ledger.record_practice([practice(turn_id, wish_id)]) == 0
    assert not (await ledger.practice_room()).learning


async def test_a_reply_with_a_secret_is_left_out(ledger):
    turn_id, wish_id = await wish_of(ledger)
    leaked = Message(role="assistant", content="the key is sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12")
    bad = practice(turn_id, wish_id)
    bad = replace(bad, turn=replace(bad.turn, reply=leaked))
    assert await ledger.record_practice([bad, practice(turn_id, wish_id)]) == 1


async def test_forgetting_a_turn_forgets_its_practice(ledger, ledger_path):
    mine, wish_id = await wish_of(ledger, session=None, prompt=(1, 2))
    await batch(ledger, mine, wish_id)
    kept = (await ledger.turns())[0]
    assert kept.practice == "anchor"
    await ledger.forget_turn(mine)
    left = await ledger.turns()
    assert [row.practice for row in left] == ["anchor"]  # of a built-in prompt: nothing of the user is in it
    await ledger.forget_user("ann")
    assert await ledger.turns() == []
    counts = await ledger.counts()
    assert counts["practice"] == counts["sampled"] == 0
    assert await ledger.audit(is_deep=True) == []


async def test_naming_a_practice_reply_forgets_the_conversation_that_it_is_of(ledger):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    await ledger.forget_turn(replies[0])
    assert await ledger.turn(turn_id) is None
    assert await ledger.wishes() == []


async def test_forgetting_a_leased_practice_reply_ends_the_lease(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    await batch(ledger, turn_id, wish_id)
    assert await ledger.lease(trainer="test") is not None
    await ledger.forget("s")
    assert await ledger.live_lease() is None
    assert await ledger.audit(is_deep=True) == []


async def test_a_rejected_version_stops_the_wishes_that_it_practised(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    version, _ = await train(ledger, driver)
    await ledger.reject(version, "KL 9")
    (wish,) = await ledger.wishes()
    assert (wish.state, wish.practised) == (WishState.STOPPED, 0)
    assert wish.reason == f"version {version}, which practised it, was rejected: KL 9"
    assert await driver.state(replies[0]) == "dropped.gate_rejected"
    assert await ledger.audit(is_deep=True) == []


@pytest.mark.parametrize("requeue", [False, True])
async def test_a_rollback_stops_the_wishes_it_undoes_unless_they_are_to_be_learned_again(ledger, driver, requeue):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    version, _ = await train(ledger, driver)
    await driver.serve(version)
    await ledger.rollback(0, requeue=requeue)
    (wish,) = await ledger.wishes()
    assert wish.state is (WishState.ACTIVE if requeue else WishState.STOPPED)
    assert await driver.state(replies[0]) == ("sampled" if requeue else "dropped.rolled_back")
    assert await ledger.audit(is_deep=True) == []


async def test_practice_of_a_lost_version_waits_again(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    version, _ = await train(ledger, driver, durable=False)
    await driver.serve(version)
    await ledger.lose_undurable("crash")
    assert await driver.state(replies[0]) == "sampled"
    _, trained = await train(ledger, driver)
    assert set(replies) <= set(trained)
    assert await ledger.audit(is_deep=True) == []


async def test_the_room_counts_what_is_under_way(ledger, driver):
    turn_id, wish_id = await wish_of(ledger)
    room = await ledger.practice_room()
    assert (room.tip, room.serving, room.learning, room.is_pinned) == (0, 0, True, False)
    assert (room.running, room.in_flight, room.waiting, room.real, room.open_wishes) == (0, 0, 0, 1, 1)
    await batch(ledger, turn_id, wish_id)
    assert (await ledger.practice_room()).waiting == 4
    version, _ = await train(ledger, driver)
    room = await ledger.practice_room()
    assert (room.tip, room.serving, room.waiting, room.in_flight) == (version, 0, 0, 1)
    await driver.serve(version)
    assert (await ledger.practice_room()).in_flight == 0


async def test_anchors_are_turns_that_nobody_corrected_spread_over_the_sessions(ledger):
    await corrected(ledger, "shorter", session="one")
    first, second = await praised(ledger, session="one"), await praised(ledger, session="one")
    other = await praised(ledger, session="two")
    await praised(ledger, session="b", user="bob")
    prompt = (await ledger.turn(await praised(ledger, session="three"))).request.prompt_ids
    await corrected(ledger, "in verse", session="four", prompt=prompt)  # the same question, at another time
    assert await ledger.anchor_turns(user="ann", policy="policy", limit=10) == [other, second, first]
    await ledger.record_feedback(Feedback("f", second, 1.0, value=-1.0), user="ann")
    assert second not in await ledger.anchor_turns(user="ann", policy="policy", limit=10)


async def test_retention_keeps_a_turn_whose_practice_waits(ledger, driver, clock):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    await ledger.drop(turn_id, "method", "")
    await ledger.retain(older_than=clock() + 1, most_bytes=None)
    assert await ledger.turn(turn_id) is not None
    version, _ = await train(ledger, driver)
    await driver.serve(version)
    clock.advance(10)
    await ledger.retain(older_than=clock() + 5, most_bytes=None)
    assert await ledger.turn(turn_id) is None
    assert await ledger.turn(replies[0]) is None
    assert await ledger.wishes() == []
    assert await ledger.audit(is_deep=True) == []


async def test_practice_survives_a_restart(ledger, driver, ledger_path, identity, training, clock):
    turn_id, wish_id = await wish_of(ledger)
    replies = await batch(ledger, turn_id, wish_id)
    await ledger.aclose()
    again = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    try:
        assert {sample.sample_id for sample in (await again.lease(trainer="test")).samples} == set(replies)
        assert await again.audit(is_deep=True) == []
    finally:
        await again.aclose()
