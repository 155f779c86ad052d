"""A reply's outcome is told to its user alone."""

from practising import corrected, practice

from openclaw_rl.types import DropReason, Feedback, TurnState


async def one(ledger, turn_id, user="ann"):
    (found,) = await ledger.outcomes([turn_id], user=user)
    return found


async def test_a_reply_from_its_rating_to_the_version_that_learned_it(ledger, driver):
    turn_id = await driver.served()
    assert (await one(ledger, turn_id)).state is TurnState.SERVED
    await ledger.record_feedback(Feedback("f", turn_id, 1.0, value=-1.0), user="ann")
    found = await one(ledger, turn_id)
    assert (found.state, found.verdict, found.source, found.feedback) == (TurnState.JUDGED, -1, "feedback", -1.0)
    trained, (learned,) = await driver.step()
    found = await one(ledger, learned)
    assert (found.state, found.trained_in, found.version_state) == (TurnState.TRAINED, trained, "candidate")


async def test_the_reason_of_a_drop_comes_with_its_detail(ledger, driver):
    turn_id = await driver.judged()
    await ledger.drop(turn_id, DropReason.METHOD, "no_hint: nothing to learn")
    found = await one(ledger, turn_id)
    assert (found.reason, found.detail) == (DropReason.METHOD, "no_hint: nothing to learn")


async def test_a_reply_that_its_user_wrote_has_an_outcome_of_its_own(ledger, driver):
    turn_id = await driver.served()
    await ledger.record_feedback(Feedback("f", turn_id, 1.0, demonstration="better"), user="ann", demonstration=(5, 6))
    written = (await one(ledger, turn_id)).demonstration
    assert written is not None
    assert (written.turn_id, written.state) == (f"{turn_id}-demo", TurnState.SAMPLED)


async def test_a_correction_names_its_wish_and_the_versions_that_practised_it(ledger, driver):
    turn_id = await corrected(ledger, "shorter")
    (wish,) = await ledger.wishes(user="ann")
    found = await one(ledger, turn_id)
    assert (found.wish_id, found.practised, found.practised_in) == (wish.wish_id, 0, None)
    await ledger.record_practice([practice(turn_id, wish.wish_id), practice(None, None)])
    version = await driver.commit(await ledger.lease(trainer="test"))
    found = await one(ledger, turn_id)
    assert (found.practised, found.practised_in) == (1, version)


async def test_of_four_corrected_prompts_the_last_is_held_back(ledger):
    turns = [await corrected(ledger, "shorter") for _ in range(3)]
    assert not any([(await one(ledger, turn_id)).is_held_back for turn_id in turns])
    turns.append(await corrected(ledger, "shorter"))
    assert [(await one(ledger, turn_id)).is_held_back for turn_id in turns] == [False, False, False, True]
    (wish,) = await ledger.wishes(user="ann")
    assert [source.turn_id for source in wish.held_back] == turns[3:]


async def test_nobody_hears_of_anothers_replies(ledger, driver):
    turn_id = await driver.served(user="ann")
    assert await ledger.outcomes([turn_id, "turn-99"], user="bob") == []
    assert [outcome.turn_id for outcome in await ledger.outcomes(["turn-99", turn_id], user="ann")] == [turn_id]
    assert (await ledger.owner(turn_id), await ledger.owner("turn-99")) == ("ann", None)
