"""Wishes come from hints, are grouped by their words, and end by newer ones, by their user or by a refused version."""

import pytest
from practising import corrected, practice, sample_of, serve

from openclaw_rl.errors import LedgerError
from openclaw_rl.types import Feedback, WishMeasure, WishState


async def states(ledger):
    return {wish.text: wish.state for wish in await ledger.wishes()}


async def test_equal_words_are_one_wish_with_a_source_for_each_turn(ledger):
    first, second = await corrected(ledger, "Shorter, please!"), await corrected(ledger, "shorter")
    await corrected(ledger, "shorter", user="bob", session="b")
    (wish,) = await ledger.wishes(user="ann")
    assert [(source.turn_id, source.text, source.kind) for source in wish.sources] == [
        (first, "Shorter, please!", "verbatim"),
        (second, "shorter", "verbatim"),
    ]
    assert (wish.text, wish.state, wish.practised, wish.is_open) == ("shorter", WishState.ACTIVE, 0, True)
    assert len(await ledger.wishes()) == 2
    assert await ledger.audit() == []


async def test_a_sample_without_a_hint_is_no_wish(ledger, driver):
    await driver.sampled()
    assert await ledger.wishes() == []


async def test_the_newer_wish_on_the_same_prompt_wins_there(ledger):
    await corrected(ledger, "answer in French", prompt=(1, 2))
    await corrected(ledger, "answer in verse", prompt=(1, 2))
    old, new = await ledger.wishes()
    assert (old.state, old.superseded_by) == (WishState.SUPERSEDED, new.wish_id)
    assert old.reason == f"wish {new.wish_id} corrects the same prompt"
    assert new.state is WishState.ACTIVE


async def test_a_wish_keeps_its_other_prompts(ledger):
    await corrected(ledger, "answer in French", prompt=(1, 2))
    await corrected(ledger, "answer in French", prompt=(3, 4))
    await corrected(ledger, "answer in verse", prompt=(1, 2))
    old, _ = await ledger.wishes()
    assert old.state is WishState.ACTIVE
    assert [source.is_over for source in old.sources] == [True, False]


async def test_the_opposite_wish_supersedes_and_names_the_axis(ledger):
    await corrected(ledger, "shorter")
    await corrected(ledger, "no lists")
    await corrected(ledger, "longer")
    found = {wish.text: (wish.state, wish.reason) for wish in await ledger.wishes()}
    newest = (await ledger.wishes())[-1].wish_id
    assert found["shorter"] == (WishState.SUPERSEDED, f"wish {newest} asks for the opposite: length")
    assert found["no lists"] == (WishState.ACTIVE, None)


async def test_a_comment_on_the_same_turn_takes_the_place_of_the_hint_before(ledger):
    turn_id = await corrected(ledger, "shorter")
    await ledger.record_feedback(Feedback("f", turn_id, 1.0, comment="in verse"), user="ann")
    (judged,) = await ledger.to_score(10)
    await ledger.record_sample(
        sample_of(turn_id, (10, 11), judged.request.prompt_ids, hint="in verse"), seen_feedback=("f",)
    )
    assert await states(ledger) == {"shorter": WishState.SUPERSEDED, "in verse": WishState.ACTIVE}


async def test_the_oldest_of_very_many_wishes_is_superseded(ledger):
    for number in range(65):
        await corrected(ledger, f"wish number {number}")
    found = await ledger.wishes()
    assert [wish.state for wish in found] == [WishState.SUPERSEDED] + [WishState.ACTIVE] * 64
    assert found[0].reason == "64 newer wishes are practised"


async def test_removing_a_wish_drops_its_waiting_practice_and_asking_again_makes_a_new_one(ledger, driver):
    turn_id = await corrected(ledger, "shorter")
    (wish,) = await ledger.wishes()
    reply, anchor = practice(turn_id, wish.wish_id), practice(None, None)
    assert await ledger.record_practice([reply, anchor]) == 2
    removed = await ledger.remove_wish(wish.wish_id, user="ann")
    assert (removed.state, removed.reason) == (WishState.REMOVED, "its user withdrew it")
    assert await driver.state(reply.turn.turn_id) == "dropped.wish_over"
    assert await driver.state(anchor.turn.turn_id) == "sampled"
    assert await ledger.remove_wish(wish.wish_id) == removed
    await corrected(ledger, "shorter")
    assert [wish.state for wish in await ledger.wishes()] == [WishState.REMOVED, WishState.ACTIVE]
    assert await ledger.audit() == []


async def test_a_wish_is_of_its_user_alone(ledger):
    await corrected(ledger, "shorter")
    (wish,) = await ledger.wishes()
    for change in (
        ledger.remove_wish(wish.wish_id, user="bob"),
        ledger.set_wish_general(wish.wish_id, True, user="bob"),
        ledger.practise_wish(wish.wish_id, user="bob"),
        ledger.remove_wish(77),
    ):
        with pytest.raises(LedgerError, match="no wish"):
            await change
    assert (await ledger.set_wish_general(wish.wish_id, True, user="ann")).is_general
    assert await ledger.wishes(user="bob") == []


async def test_measures_let_a_wish_rest_and_asking_again_wakes_it(ledger):
    await corrected(ledger, "shorter")
    (wish,) = await ledger.wishes()
    await ledger.record_measures([WishMeasure(wish.wish_id, 0, 1.25, 0.5, rests="learned")])
    (rested,) = await ledger.wishes()
    assert (rested.learned_share, rested.kl, rested.measured_in, rested.rests) == (1.25, 0.5, 0, "learned")
    assert not rested.is_open
    await corrected(ledger, "shorter")
    (again,) = await ledger.wishes()
    assert again.is_open
    assert again.learned_share == 1.25


async def test_a_stopped_wish_is_practised_again_on_request(ledger):
    await corrected(ledger, "shorter")
    (wish,) = await ledger.wishes()
    await ledger.record_measures([WishMeasure(wish.wish_id, 0, 0.5, 2.0, stopped="KL 2.00")])
    (stopped,) = await ledger.wishes()
    assert (stopped.state, stopped.reason, stopped.kl) == (WishState.STOPPED, "KL 2.00", 2.0)
    await ledger.record_measures([WishMeasure(wish.wish_id, 0, 0.1, 0.1)])  # of a wish that ended: no effect
    assert (await ledger.wishes())[0].kl == 2.0
    assert (await ledger.practise_wish(wish.wish_id)).state is WishState.ACTIVE


async def test_a_judge_supersedes_a_wish_only_while_both_are_active(ledger):
    await corrected(ledger, "like a pirate")
    await corrected(ledger, "like a lawyer")
    pirate, lawyer = await ledger.wishes()
    await ledger.supersede_wish(pirate.wish_id, by=lawyer.wish_id, reason="one voice at a time")
    assert (await ledger.wishes())[0].superseded_by == lawyer.wish_id
    await ledger.supersede_wish(lawyer.wish_id, by=pirate.wish_id, reason="no")
    assert (await ledger.wishes())[1].state is WishState.ACTIVE
    with pytest.raises(LedgerError, match="was superseded"):
        await ledger.practise_wish(pirate.wish_id)


async def test_forgetting_the_turns_of_a_wish_forgets_its_words(ledger, ledger_path):
    await corrected(ledger, "never mention Aunt Petunia", session="s1")
    await corrected(ledger, "never mention Aunt Petunia", session="s2")
    (wish,) = await ledger.wishes()
    await ledger.forget("s1")
    (left,) = await ledger.wishes()
    assert (left.wish_id, len(left.sources)) == (wish.wish_id, 1)
    await ledger.forget("s2")
    assert await ledger.wishes() == []
    await corrected(ledger, "shorter")
    assert (await ledger.wishes())[0].wish_id > wish.wish_id  # a number never comes again
    assert await ledger.audit(is_deep=True) == []
    assert b"Petunia" not in ledger_path.read_bytes()


async def test_forgetting_a_wish_leaves_the_one_that_it_superseded(ledger):
    await corrected(ledger, "shorter", session="s1")
    await corrected(ledger, "longer", session="s2")
    await ledger.forget("s2")
    (left,) = await ledger.wishes()
    assert (left.text, left.state, left.superseded_by) == ("shorter", WishState.SUPERSEDED, None)
    assert await ledger.audit(is_deep=True) == []


async def commented(ledger, name, text, prompt):
    """Serve a turn with a comment that became a wish."""
    await serve(ledger, name, user="ann", session="s", prompt=prompt, version=0)
    await ledger.record_feedback(Feedback(f"rl-{name}", name, 1.0, -1.0, comment=text), user="ann")
    await ledger.record_sample(sample_of(name, (10, 11), prompt, hint=text), seen_feedback=(f"rl-{name}",))


async def take_back(ledger, name):
    assert await ledger.take_back_feedback(name, user="ann", prefix="rl-") is not None
    assert await ledger.audit(is_deep=True) == []


async def test_a_comment_that_is_taken_back_takes_its_wish_along(ledger):
    await commented(ledger, "t", "in verse", (1, 2))
    await take_back(ledger, "t")
    assert await ledger.wishes() == []


async def test_a_wish_that_was_practised_is_removed_with_its_waiting_practice(ledger, driver):
    await commented(ledger, "t", "in verse", (1, 2))
    (wish,) = await ledger.wishes()
    reply = practice("t", wish.wish_id)
    await ledger.record_practice([reply])
    await take_back(ledger, "t")
    (left,) = await ledger.wishes()
    assert (left.text, left.state, left.reason) == ("in verse", WishState.REMOVED, "its correction was taken back")
    assert await driver.state(reply.turn.turn_id) == "dropped.wish_over"


@pytest.mark.parametrize(
    ("older", "newer", "prompt"), [("in French", "in verse", (1, 2)), ("shorter", "longer", (3, 4))]
)
async def test_the_older_wish_holds_again_where_the_newer_one_is_taken_back(ledger, older, newer, prompt):
    await corrected(ledger, older, prompt=(1, 2))
    await commented(ledger, "t", newer, prompt)
    assert await states(ledger) == {older: WishState.SUPERSEDED, newer: WishState.ACTIVE}
    await take_back(ledger, "t")
    (left,) = await ledger.wishes()
    assert (left.text, left.state, left.superseded_by, left.reason) == (older, WishState.ACTIVE, None, None)
    assert [source.is_over for source in left.sources] == [False]


async def test_a_wish_stays_superseded_if_a_still_newer_one_took_the_place_of_the_one_taken_back(ledger):
    await corrected(ledger, "shorter")
    await commented(ledger, "t", "longer", (1, 2))
    await corrected(ledger, "shorter")
    await take_back(ledger, "t")
    old, new = await ledger.wishes()
    assert (old.state, old.superseded_by, new.state) == (WishState.SUPERSEDED, new.wish_id, WishState.ACTIVE)


async def test_a_wish_keeps_its_other_turns_and_gives_back_the_prompt(ledger):
    await corrected(ledger, "in French", prompt=(1, 2))
    await corrected(ledger, "in verse", prompt=(5, 6))
    await commented(ledger, "t", "in verse", (1, 2))
    assert await states(ledger) == {"in French": WishState.SUPERSEDED, "in verse": WishState.ACTIVE}
    await take_back(ledger, "t")
    assert await states(ledger) == {"in French": WishState.ACTIVE, "in verse": WishState.ACTIVE}
    assert [len(wish.sources) for wish in await ledger.wishes()] == [1, 1]
