"""Lists of turns with filters, words and places to go on from, and the make-up of steps."""

import pytest
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Ledger, search
from openclaw_rl.ledger.search import StepMakeup, TurnFilter
from openclaw_rl.messages import Message
from openclaw_rl.types import Feedback, TurnState


async def ids(ledger: Ledger, *, limit: int = 50, **wanted) -> list[str]:
    return [turn.turn_id for turn in (await ledger.search(TurnFilter(**wanted), limit=limit)).turns]


async def test_the_filters_say_which(ledger, driver):
    trained, _ = await driver.step(size=2)
    assert await driver.judged(user="bob", session="t", version=0) == "turn-3"
    await driver.served()
    assert await ids(ledger) == ["turn-4", "turn-3", "turn-2", "turn-1"]
    assert await ids(ledger, trained_in=trained) == ["turn-2", "turn-1"]
    assert await ids(ledger, user="bob") == await ids(ledger, session_id="t") == ["turn-3"]
    assert await ids(ledger, state=TurnState.SERVED) == ["turn-4"]
    assert await ids(ledger, verdict=1, source="rules") == ["turn-3", "turn-2", "turn-1"]
    assert (
        await ids(ledger, source="feedback")
        == await ids(ledger, is_practice=True)
        == await ids(ledger, verdict=-1)
        == []
    )
    await ledger.record_feedback(Feedback("f", "turn-4", 1.0, value=-1.0), user="ann")
    assert await ids(ledger, verdict=-1, source="feedback", user="ann") == ["turn-4"]


async def test_a_search_by_two_conditions_is_read_in_parts_and_counts_what_it_looked_at(ledger, driver, monkeypatch):
    monkeypatch.setattr(search, "_LOOKED_AT", 3)
    await driver.served(user="bob", session="t")
    for _ in range(4):
        await driver.served()
    wanted = TurnFilter(weight_version=0, user="bob")
    first = await ledger.search(wanted, limit=2)
    assert (first.turns, first.next is not None, first.looked_at) == ((), True, 3)
    last = await ledger.search(wanted, limit=2, before=first.next)
    assert ([turn.turn_id for turn in last.turns], last.next, last.looked_at) == (["turn-1"], None, 2)


async def test_a_request_without_a_turn_leaves_no_gap_in_a_users_list(ledger, driver):
    await driver.served()
    for n in range(3):
        await ledger.begin(make_request(f"running-{n}"))
    assert await ids(ledger, user="ann", limit=1) == ["turn-1"]
    assert [turn.turn_id for turn in await ledger.turns(limit=1, user="ann")] == ["turn-1"]


async def test_the_list_shows_the_users_words_and_not_the_clients_context_behind_them(ledger, driver):
    context = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data: ten messages\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    said = [Message(role="user", content=text) for text in ("Name a river.", context)]
    await serve_turn(ledger, make_request("r", *said), make_turn("t", request="r"))
    await serve_turn(ledger, make_request("alone", said[1]), make_turn("u", request="alone"))
    only, shown = (await ledger.search(TurnFilter(), limit=5)).turns
    assert shown.asked == "Name a river."
    assert "ten messages" in only.asked, "a request of nothing else"
    assert await ids(ledger, words="river") == ["t"]


async def test_words_are_found_in_the_message_and_in_the_reply_and_the_list_shows_both(ledger, driver):
    for _ in range(3):
        await driver.served()
    (found,) = (await ledger.search(TurnFilter(words="QUESTION 2"), limit=5)).turns
    assert (found.turn_id, found.asked, found.said) == ("turn-2", "question 2", "answer 2")
    assert await ids(ledger, words="answer") == ["turn-3", "turn-2", "turn-1"]
    assert await ids(ledger, words="nowhere") == []


@pytest.mark.parametrize("wanted", [{}, {"words": "question"}, {"is_practice": False}, {"user": "ann"}])
async def test_a_list_of_any_length_is_read_in_parts(ledger, driver, monkeypatch, wanted):
    monkeypatch.setattr(search, "_LOOKED_AT", 3)
    monkeypatch.setattr(search, "_READ", 3)
    for _ in range(7):
        await driver.served()
    seen, place = [], None
    for _ in range(10):
        page = await ledger.search(TurnFilter(**wanted), limit=2, before=place)
        assert len(page.turns) <= 2
        seen += [turn.turn_id for turn in page.turns]
        if (place := page.next) is None:
            break
    assert seen == [f"turn-{n}" for n in range(7, 0, -1)]


async def test_a_search_that_found_nothing_yet_says_where_it_stopped(ledger, driver, monkeypatch):
    monkeypatch.setattr(search, "_READ", 2)
    for _ in range(4):
        await driver.served()
    first = await ledger.search(TurnFilter(words="question 1"), limit=5)
    assert (first.turns, first.next is not None) == ((), True)
    (found,) = (await ledger.search(TurnFilter(words="question 1"), limit=5, before=first.next)).turns
    assert found.turn_id == "turn-1"


async def test_a_steps_make_up_is_its_samples_and_how_old_they_were(ledger, driver):
    first, _ = await driver.step(size=2)
    await driver.serve(first)
    await driver.sampled(version=first)
    second, _ = await driver_step_with_waiting(driver)
    assert await ledger.step_makeup([0, first, second]) == [
        StepMakeup(first, samples=2, practice=0, lag=0.0),
        StepMakeup(second, samples=2, practice=0, lag=0.5),
    ]


async def driver_step_with_waiting(driver) -> tuple[int, list[str]]:
    """One batch of the waiting sample and one of the base."""
    await driver.sampled(version=0)
    lease = await driver.ledger.lease(trainer="test", now=True)
    return await driver.commit(lease), [sample.sample_id for sample in lease.samples]
