"""The practice loop on the real ledger and a fake engine: users first, one update at a time, and it stops by itself."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from practice_bench import Answers, Bench, Varied, render
from practising import corrected

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import EngineGone
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import PracticeSettings, TrainingSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Scripted
from openclaw_rl.types import JudgedTurn, SamplingParams, Verdict, WishState
from openclaw_rl.types.pictures import Picture


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(
        tmp_path / "ledger.sqlite3",
        identity=Identity("base", "tokenizer", "tiny"),
        training=TrainingSettings(batch_size=8),
    )
    yield opened
    assert await opened.audit(is_deep=True) == []
    await opened.aclose()


@pytest.fixture
def bench(ledger: Ledger) -> Bench:
    return Bench(ledger, FakeEngine(), PracticeSettings(replies=6, idle_s=20.0, patience=3))


async def test_one_update_is_sampled_written_and_trained_with_the_users_samples_that_wait(bench):
    turn_id = await corrected(bench.ledger, "shorter")
    assert await bench.loop.turn() is None
    assert bench.batches == 1
    rows = await bench.practice()
    assert sorted(row.practice for row in rows) == ["anchor"] * 3 + ["wish"] * 3
    assert {row.practice_of for row in rows} == {turn_id, None}
    assert {hint for _, hint in bench.method.asked} == {"shorter", None}
    assert all(call.priority == 0 for call in bench.engine.calls)
    assert await bench.loop.turn() == "the last update is on its way"
    version = await bench.train()
    assert (await bench.ledger.turn(turn_id)).trained_in == version
    assert await bench.loop.turn() is None
    (wish,) = await bench.ledger.wishes()
    assert (wish.updates, wish.practised, wish.since, wish.measured_in) == (1, 3, version, version)
    assert {row.oldest_version for row in await bench.practice()} == {0, version}


async def test_the_prompt_is_the_users_and_the_sampling_too_but_for_the_bounds(bench):
    turn_id = await corrected(bench.ledger, "shorter")
    await bench.loop.turn()
    source = (await bench.ledger.turn(turn_id)).request
    for judged, hint in bench.method.asked:
        assert judged.request.sampling.max_new_tokens == 8
        assert judged.request.sampling.seed is None
        assert judged.turn.versions[0].weight_version == 0
        if hint is not None:
            assert judged.request.prompt_ids == source.prompt_ids
            assert judged.request.messages == source.messages


async def test_a_chat_ends_the_sampling_at_once_and_complete_replies_are_kept(bench):
    await corrected(bench.ledger, "shorter")
    bench.engine.script(Scripted((65, 0)), Scripted((66, 0)), *[Scripted((67, 0), hold_after=1)] * 4)
    turning = asyncio.create_task(bench.loop.turn())
    while bench.engine.holding < 4 or len(bench.method.asked) < 2:
        await asyncio.sleep(0.001)
    bench.activity.begin()
    assert await turning == "a chat runs"
    assert bench.engine.running == 0
    assert len(bench.engine.aborted) == 4
    assert await bench.practice() == []
    assert await bench.loop.turn() == "a chat runs"
    bench.activity.end()
    assert await bench.loop.turn() == "a chat ran a moment ago"
    bench.clock.now += 20
    assert await bench.loop.turn() is None
    assert len(await bench.practice()) == 6
    assert len(bench.engine.calls) == 10  # the two complete replies were not sampled again


async def test_replies_of_a_version_that_is_no_longer_the_tip_are_made_anew(bench):
    for _ in range(8):
        await corrected(bench.ledger, "shorter")
    bench.engine.script(Scripted((65, 0)), *[Scripted((67, 0), hold_after=1)] * 5)
    assert await bench.loop.turn() == "users' samples fill a batch"
    await bench.train()
    turning = asyncio.create_task(bench.loop.turn())
    while bench.engine.holding < 5:
        await asyncio.sleep(0.001)
    bench.activity.begin()
    await turning
    for _ in range(8):
        await corrected(bench.ledger, "shorter", version=1)
    version = await bench.train()
    bench.activity.end()
    bench.clock.now += 20
    assert await bench.loop.turn() is None
    assert {row.oldest_version for row in await bench.practice()} == {version}


async def test_it_waits_while_something_goes_first(bench):
    async def reason() -> str | None:
        return await bench.loop.turn()

    assert (await reason(), bench.loop.status.line()) == ("there is no wish", "practice: there is no wish")
    await corrected(bench.ledger, "shorter")
    await bench.ledger.set_learning(False)
    assert await reason() == "learning is paused"
    await bench.ledger.set_learning(True)
    bench.is_alive = False
    assert await reason() == "the trainer is silent"
    bench.is_alive = True
    bench.serving.hold()
    assert await reason() == "the engine is on its way to the version"
    bench.serving.release_hold()
    await bench.ledger.set_pin(0)
    assert await reason() == "a version is pinned"
    await bench.ledger.set_pin(None)
    assert await reason() is None


async def test_it_stops_when_the_wish_is_learned_and_goes_on_when_it_is_asked_for_again(bench):
    await corrected(bench.ledger, "shorter")
    for share in (0.4, 0.9, 1.4):
        assert await bench.loop.turn() is None
        await bench.train()
        bench.meter.share = share
    assert await bench.loop.turn() == "all wishes are learned, or rest"
    assert bench.loop.status.line() == "practice: 1 wish, learned 100 %; all wishes are learned, or rest"
    (wish,) = await bench.ledger.wishes()
    assert (wish.rests, wish.learned_share, wish.updates) == ("learned", 1.4, 3)
    await corrected(bench.ledger, "shorter", version=3)
    assert await bench.loop.turn() is None
    assert bench.loop.status.line() == "practising 1 wish, update 4, learned 100 %"


async def test_a_wish_that_goes_too_far_is_stopped_and_says_so(bench):
    await corrected(bench.ledger, "shorter")
    await bench.loop.turn()
    await bench.train()
    bench.meter.kl = 9.0
    assert await bench.loop.turn() == "all wishes are learned, or rest"
    (wish,) = await bench.ledger.wishes()
    assert (wish.state, wish.reason) == (
        WishState.STOPPED,
        "its replies are 9.00 nats a token from the base (practice.max_kl)",
    )
    assert await bench.loop.turn() == "there is no wish"


async def test_a_wish_whose_prompt_cannot_be_practised_is_stopped(bench):
    await corrected(bench.ledger, "shorter")
    bench.method.refuses = True
    for _ in range(3):
        assert await bench.loop.turn() is None
    assert await bench.practice() == []
    (wish,) = await bench.ledger.wishes()
    assert wish.state is WishState.STOPPED
    assert "no practice reply of it was usable" in wish.reason


async def test_nothing_is_learned_from_a_reply_that_does_not_answer(bench):
    turn_id = await corrected(bench.ledger, "shorter")
    bench.relevance = Answers("nyn")
    bench.loop = bench.make()
    assert await bench.loop.turn() is None
    assert bench.relevance.asked == 3, "anchors are not asked about"
    assert bench.relevance.kept == {turn_id}, "it forgets the requests of all other turns"
    assert bench.health.counts["practice_off_topic"] == 2
    rows = await bench.practice()
    assert sorted(row.practice for row in rows) == ["anchor"] * 3 + ["wish"]
    assert {row.practice_of for row in rows} == {turn_id, None}


@pytest.mark.parametrize(
    ("pattern", "updates", "why"),
    [
        ("y", 9, None),
        ("yyn", 9, None),  # a third of them is not too many
        ("ynn", 7, "16 of its last 24 replies did not answer (practice.least_relevance)"),
        ("n", 0, "no practice reply of it was usable in 3 rounds (metrics: practice_dropped)"),
    ],
)
async def test_a_wish_of_which_too_many_replies_do_not_answer_is_stopped(bench, pattern, updates, why):
    await corrected(bench.ledger, "say abracadabra")
    bench.relevance = Answers(pattern)
    bench.loop = bench.make()
    written = 0
    for number in range(9):
        await bench.loop.turn()
        bench.meter.share = 0.1 * number  # it makes progress
        if bench.batches > written:
            written = bench.batches
            await bench.train()
    (wish,) = await bench.ledger.wishes()
    assert (wish.updates, wish.reason) == (updates, why)
    assert (wish.state is WishState.STOPPED) == (why is not None)


async def test_a_removed_wish_is_not_written_even_if_its_replies_are_sampled(bench):
    await corrected(bench.ledger, "shorter")
    bench.engine.script(*[Scripted((67, 0), hold_after=1)] * 6)
    turning = asyncio.create_task(bench.loop.turn())
    while bench.engine.holding < 6:
        await asyncio.sleep(0.001)
    (wish,) = await bench.ledger.wishes()
    await bench.ledger.remove_wish(wish.wish_id)
    bench.engine.release()
    await turning
    assert await bench.practice() == []
    assert bench.batches == 0


async def test_a_prompt_that_the_engine_refuses_costs_its_reply_alone(bench):
    await corrected(bench.ledger, "shorter")
    bench.engine.script(Scripted((), refuse=(400, "no")), *[Scripted((67, 0))] * 5)
    assert await bench.loop.turn() is None
    assert len(await bench.practice()) == 5


async def test_before_a_version_serves_it_waits(bench):
    bench.serving = VersionAdmission(hold_s=1.0)
    loop = bench.make()
    await corrected(bench.ledger, "shorter")
    assert await loop.turn() == "the engine is on its way to the version"


async def test_a_failure_costs_the_round_and_is_told(bench, monkeypatch):
    await corrected(bench.ledger, "shorter")
    monkeypatch.setattr("openclaw_rl.practice.loop._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("openclaw_rl.practice.loop._LONGEST_PAUSE_S", 0.001)
    bench.method.fails = EngineGone("no engine")
    running = asyncio.create_task(bench.loop.run())
    while not bench.health.is_failing("practice"):
        await asyncio.sleep(0.001)
    assert bench.health.problems()[0].startswith("practice: failed")
    bench.method.fails = None
    while bench.health.is_failing("practice"):
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert bench.batches == 1


async def test_it_rests_for_its_share_of_the_machine(ledger):
    bench = Bench(ledger, FakeEngine(), PracticeSettings(replies=2, machine_share=0.25))
    await corrected(ledger, "shorter")
    inner = bench.method.practise

    async def slow(*args: Any) -> Any:
        bench.clock.now += 5
        return await inner(*args)

    bench.method.practise = slow  # type: ignore[method-assign]
    await bench.loop.turn()
    await bench.train()
    assert await bench.loop.turn() == "it rests (practice.machine_share)"
    bench.clock.now += 31  # ten seconds of work: thirty of rest
    assert await bench.loop.turn() is None


async def test_room_is_left_for_users_samples_that_wait(ledger):
    bench = Bench(ledger, FakeEngine(), PracticeSettings(replies=16))
    for number in range(3):
        await corrected(ledger, f"wish {number}")
    await bench.loop.turn()
    assert len(await bench.practice()) == 5
    lease = await ledger.lease(trainer="test")
    assert len(lease.samples) == 8


async def test_a_judge_votes_with_the_wish_in_view_and_anchors_are_not_judged(ledger):
    seen: list[str] = []

    async def vote(judged: JudgedTurn, wish: str) -> Verdict | None:
        seen.append(wish)
        return Verdict(-1, (-1,), "llm") if len(seen) == 1 else None

    bench = Bench(ledger, FakeEngine(), PracticeSettings(replies=4), vote=vote)
    await corrected(ledger, "shorter")
    await bench.loop.turn()
    assert seen == ["shorter", "shorter"]
    rewards = [(await ledger.turn(row.turn_id)).sample.reward for row in await bench.practice()]
    assert sorted(map(str, rewards)) == ["-1.0", "None", "None", "None"]


async def test_no_judge_is_asked_about_a_reply_that_does_not_answer(ledger):
    seen: list[str] = []

    async def vote(judged: JudgedTurn, wish: str) -> Verdict | None:
        seen.append(wish)
        return None

    bench = Bench(ledger, FakeEngine(), PracticeSettings(replies=4), vote=vote, relevance=Answers("yn"))
    await corrected(ledger, "shorter")
    await bench.loop.turn()
    assert seen == ["shorter"]


async def test_the_judge_lets_the_newer_of_two_contradicting_wishes_win(ledger):
    asked: list[tuple[str, str]] = []

    async def contradicts(older: str, newer: str) -> bool:
        asked.append((older, newer))
        return "lawyer" in newer

    bench = Bench(ledger, FakeEngine(), PracticeSettings(replies=4), contradicts=contradicts)
    await corrected(ledger, "no lists")
    await corrected(ledger, "like a pirate", user="bob", session="b")
    await corrected(ledger, "like a lawyer")
    await bench.loop.turn()
    old, other, new = await ledger.wishes()
    assert (old.state, old.superseded_by) == (WishState.SUPERSEDED, new.wish_id)
    assert other.state is new.state is WishState.ACTIVE
    await bench.train()
    await bench.loop.turn()
    assert asked == [("no lists", "like a lawyer")]  # once a pair, and never across users


async def test_greedy_turns_and_turns_with_stop_strings_are_not_practised(bench):
    request = (await bench.ledger.turn(await corrected(bench.ledger, "shorter"))).request
    sampler = bench.loop._deps.sampler
    from dataclasses import replace

    assert sampler.is_fit(request)
    assert not sampler.is_fit(replace(request, sampling=SamplingParams(8, temperature=0.0)))
    assert not sampler.is_fit(replace(request, sampling=SamplingParams(8, stop=("\n",))))
    assert not sampler.is_fit(replace(request, prompt_ids=()))
    assert not sampler.is_fit(replace(request, prompt_ids=tuple(range(4000))))
    assert not sampler.is_fit(replace(request, pictures=(Picture("a1" * 32, 32, 32),)))
    built_in = await sampler.built_in("Tell me about elephants.", ("ann", "policy"))
    assert built_in.messages == (Message(role="user", content="Tell me about elephants."),)
    assert built_in.prompt_ids == render(built_in.messages, None, None)


@pytest.mark.parametrize("has_one", [True, False])
async def test_half_of_a_prompts_replies_answer_its_variants_where_it_has_some(ledger, has_one):
    settings = PracticeSettings(replies=8, anchor_share=0.0)
    bench = Bench(ledger, FakeEngine(), settings, relevance=Answers("y"), variants=Varied(has_one=has_one))
    turn_id = await corrected(ledger, "shorter")
    assert await bench.loop.turn() is None
    own = (await ledger.turn(turn_id)).request.prompt_ids
    # The user's own sample waits too, and takes a place of the batch.
    prompts = Counter(judged.request.prompt_ids for judged, _ in bench.method.asked)
    assert prompts == ({own: 4, (*own, 9): 3} if has_one else {own: 7})
    assert bench.variants is not None
    assert bench.variants.asked == [(turn_id, "shorter")] * 3
    assert bench.relevance is not None
    assert Counter(bench.relevance.turns) == ({turn_id: 4, None: 3} if has_one else {turn_id: 7})
    assert bench.variants.kept == bench.relevance.kept == {turn_id}
    rows = await bench.practice()
    assert {row.practice_of for row in rows} == {turn_id}
    events = [(await ledger.turn(row.turn_id)).events[-1].detail for row in rows]
    assert Counter(events) == Counter(
        [f"practice of wish 1, on {'a variant of ' * (has_one and place < 3)}{turn_id}" for place in range(7)]
    )


async def test_variants_that_cannot_be_answered_stop_no_wish(ledger):
    settings = PracticeSettings(replies=8, anchor_share=0.0, variant_share=1.0)
    bench = Bench(ledger, FakeEngine(), settings, relevance=Answers("ynn"), variants=Varied())
    await corrected(ledger, "shorter")
    for number in range(9):
        await bench.loop.turn()
        bench.meter.share = 0.1 * number  # it makes progress
        await bench.train()
    (wish,) = await ledger.wishes()
    assert (wish.updates, wish.state) == (9, WishState.ACTIVE)


async def test_policies_take_turns_and_an_update_is_of_one(bench: Bench) -> None:
    owners = {"user:ann": "ann", "user:bob": "bob"}
    for policy, user in owners.items():
        root = (await bench.ledger.open_policy(policy)).weight_version
        bench.serving.switch(root, None, policy)
        await corrected(bench.ledger, f"{user}'s wish", user=user, policy=policy, version=root, session=user)
    assert await bench.loop.turn() is None
    assert await bench.loop.turn() is None, "another policy's update waits for nothing of the first"
    assert await bench.loop.turn() == "the last update is on its way"
    rows = await bench.practice()
    trained = {}
    for _ in owners:
        lease_of = {turn.turn_id for turn in await bench.practice() if turn.state == "sampled"}
        number = await bench.train()
        version = await bench.ledger.version(number)
        trained[version.policy] = number
        left = {turn.turn_id for turn in await bench.practice() if turn.state == "sampled"}
        users = {row.user for row in rows if row.turn_id in lease_of - left}
        assert users == {owners[version.policy]}
    assert trained.keys() == owners.keys()
    assert bench.serving.current == 0
    wishes = await bench.ledger.wishes()
    assert {(wish.policy, wish.updates) for wish in wishes} == {(policy, 1) for policy in owners}


async def test_a_policy_whose_version_is_pinned_holds_up_no_other(bench: Bench) -> None:
    for policy in ("user:ann", "user:bob"):
        root = (await bench.ledger.open_policy(policy)).weight_version
        bench.serving.switch(root, None, policy)
        user = policy.removeprefix("user:")
        await corrected(bench.ledger, "shorter", user=user, policy=policy, version=root, session=user)
    await bench.ledger.set_pin((await bench.ledger.root("user:ann")).weight_version, policy="user:ann")
    assert await bench.loop.turn() is None
    assert {row.user for row in await bench.practice()} == {"bob"}


async def test_words_that_are_forgotten_leave_memory_while_practice_waits(bench):
    await corrected(bench.ledger, "shorter")
    bench.relevance = Answers("yyy")
    bench.loop = bench.make()
    assert await bench.loop.turn() is None
    assert bench.relevance.kept
    assert bench.loop._newest
    bench.activity.begin()
    for wish in await bench.ledger.wishes(only_active=True):
        await bench.ledger.forget_user(wish.user)
    assert await bench.loop.turn() == "a chat runs"
    assert (bench.relevance.kept, dict(bench.loop._newest)) == (set(), {})
