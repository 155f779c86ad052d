"""Leases: their conditions, their samples, and their ends."""

import math
from dataclasses import replace

import pytest

from openclaw_rl.errors import CommitRefused
from openclaw_rl.ledger import Ledger
from openclaw_rl.types import DropReason, Feedback, HintTerm, Sample, TopK, TurnState, VersionRun


def ids(lease):
    return [sample.sample_id for sample in lease.samples]


async def test_a_full_batch_is_handed_out_oldest_first_and_once(ledger, driver):
    turns = [await driver.sampled() for _ in range(3)]
    assert await ledger.lease(trainer="a") is None
    turns += [await driver.sampled() for _ in range(2)]
    lease = await ledger.lease(trainer="a")
    assert (ids(lease), lease.fence, lease.parent) == (turns[:4], 1, 0)
    assert await ledger.lease(trainer="b", now=True) is None  # one live lease at a time
    assert [await driver.state(turn) for turn in turns] == ["leased"] * 4 + ["sampled"]


async def test_a_sample_reaches_the_trainer_exactly_as_sampled(ledger, driver):
    turn_id = await driver.sampled(prompt=tuple(range(1000)), runs=(VersionRun(0, 3),))
    (sample,) = (await ledger.lease(trainer="a", now=True)).samples
    assert (sample.sample_id, sample.prompt_ids, sample.response_ids) == (turn_id, tuple(range(1000)), (10, 11, 12))
    assert (sample.rollout_log_probs, sample.loss_mask) == ((-0.5,) * 3, (True,) * 3)
    assert (sample.versions, sample.temperature, sample.reward) == ((VersionRun(0, 3),), 0.7, 1.0)
    assert (sample.is_tool_turn, sample.teacher_log_probs, sample.student_log_probs) == (False, None, None)


@pytest.mark.parametrize("turn_mask", [(True, True, True), (True, True, False)])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"loss_mask": (True, False, True)},
        {"loss_mask": (True, True, True)},
        {"prompt_ids": (9, 9)},
        {"rollout_log_probs": (-1.0, -2.0, -3.0)},
        {"versions": (VersionRun(0, 1), VersionRun(0, 2))},
        {
            "response_ids": (5, 6, 70000),
            "teacher_log_probs": (-0.5, -0.25, 0.0),
            "student_log_probs": (-1.0, -1.0, -1.0),
        },
        {"response_ids": (5,), "loss_mask": (True,), "rollout_log_probs": (-0.5,), "versions": (VersionRun(0, 1),)},
        {"reward": None, "scored_version": 0, "hint": HintTerm(text="be short", gain=0.5), "temperature": 0.25},
        {"hint": HintTerm(absent="no_hint", top_k=TopK(((1, 2),) * 3, ((-0.5, -math.inf),) * 3))},
        {"hint": HintTerm(method_json='{"weight": 2}')},
    ],
)
async def test_a_method_may_change_any_field_of_a_sample(ledger, driver, turn_mask, change):
    turn_id = await driver.judged(runs=(VersionRun(0, 3),), mask=turn_mask)
    sample = replace(
        Sample(turn_id, (1, 2, 3), (10, 11, 12), turn_mask, (-0.5,) * 3, (VersionRun(0, 3),), 0.7), **change
    )
    await ledger.record_sample(sample)
    assert (await ledger.lease(trainer="a", now=True)).samples == (sample,)
    assert (await ledger.turn(turn_id)).turn.loss_mask == turn_mask


async def test_a_smaller_batch_goes_after_max_wait(ledger, driver, clock):
    await driver.sampled()
    clock.advance(100)
    assert await ledger.lease(trainer="a") is None  # one is less than min_batch
    await driver.sampled()
    lease = await ledger.lease(trainer="a")
    assert len(lease.samples) == 2


async def test_max_wait_counts_from_the_oldest_sample_of_the_batch(ledger, driver, clock):
    tools = [await driver.sampled(is_tool=True) for _ in range(2)]
    clock.advance(60)
    users = [await driver.sampled()]
    clock.advance(40)
    lease = await ledger.lease(trainer="a")  # the tool turn is due, and takes the younger user turn along
    assert ids(lease) == [tools[0], users[0]]
    await driver.commit(lease)
    await driver.sampled()
    assert ids(await ledger.lease(trainer="a"))[0] == tools[1]


async def test_a_tool_turn_beyond_its_share_hurries_nobody(ledger, driver, clock):
    for _ in range(3):
        await driver.sampled(is_tool=True)
    clock.advance(1000)
    assert await ledger.lease(trainer="a") is None
    await driver.sampled(is_tool=True)
    assert await ledger.lease(trainer="a") is None


async def test_before_max_wait_only_now_takes_a_smaller_batch(ledger, driver, clock):
    await driver.sampled()
    await driver.sampled()
    clock.advance(99)
    assert await ledger.lease(trainer="a") is None
    assert len((await ledger.lease(trainer="a", now=True)).samples) == 2


async def test_a_trainer_may_ask_for_another_size(ledger, driver):
    turns = [await driver.sampled() for _ in range(6)]
    assert await ledger.lease(trainer="a", n=7) is None
    assert ids(await ledger.lease(trainer="a", n=6)) == turns


async def test_user_turns_come_first_and_tool_turns_keep_to_their_share(ledger, driver):
    tools = [await driver.sampled(is_tool=True) for _ in range(5)]
    assert await ledger.lease(trainer="a", now=True) is None  # tool turns alone are more than half
    users = [await driver.sampled()]
    assert await ledger.lease(trainer="a") is None  # 1 + 1 is no full batch
    users.append(await driver.sampled())
    lease = await ledger.lease(trainer="a")
    assert set(ids(lease)) == {*users, *tools[:2]}
    assert [sample.is_tool_turn for sample in lease.samples] == [True, True, False, False]  # oldest first
    await ledger.release(lease.lease_id, lease.fence, reason="test")
    users += [await driver.sampled() for _ in range(3)]
    assert ids(await ledger.lease(trainer="a")) == users[:4]


async def test_paused_learning_and_disabled_training_hand_out_nothing(
    ledger, driver, ledger_path, identity, training, clock
):
    await driver.sampled()
    await ledger.set_learning(False)
    assert await ledger.lease(trainer="a", now=True) is None
    await ledger.aclose()
    reopened = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    assert not await reopened.learning()
    await reopened.set_learning(True)
    await reopened.aclose()
    off = training.model_copy(update={"enabled": False})
    reopened = await Ledger.open(ledger_path, identity=identity, training=off, clock=clock)
    assert await reopened.lease(trainer="a", now=True) is None
    await reopened.aclose()


async def test_a_released_lease_returns_its_samples_but_for_the_useless(ledger, driver):
    turns = [await driver.sampled() for _ in range(4)]
    lease = await ledger.lease(trainer="a")
    drop = {turns[1]: DropReason.TOO_LONG}
    await ledger.release(lease.lease_id, lease.fence, reason="oom", drop=drop)
    await ledger.release(lease.lease_id, lease.fence, reason="oom")  # said twice, done once
    assert await driver.state(turns[1]) == "dropped.too_long"
    again = await ledger.lease(trainer="a", now=True)
    assert (ids(again), again.fence) == ([turns[0], turns[2], turns[3]], 2)
    with pytest.raises(CommitRefused, match="is released: oom"):
        await ledger.renew(lease.lease_id, lease.fence)
    with pytest.raises(CommitRefused, match="is released: oom"):
        await driver.commit(lease)


async def test_a_lease_that_is_not_renewed_goes_back(ledger, driver, clock):
    await driver.sampled()
    first = await ledger.lease(trainer="a", now=True)
    clock.advance(59)
    assert await ledger.renew(first.lease_id, first.fence) == clock.now + 60
    clock.advance(59)
    assert await ledger.lease(trainer="b", now=True) is None
    clock.advance(1)
    second = await ledger.lease(trainer="b", now=True)
    assert ids(second) == ids(first)
    with pytest.raises(CommitRefused, match="is expired"):
        await driver.commit(first)
    assert await driver.commit(second) == 1


async def test_who_asks_for_a_lease_holds_none(ledger, driver):
    """The answer was lost on its way, or the trainer was killed before it wrote the lease down."""
    await driver.sampled()
    lost = await ledger.lease(trainer="a", now=True)
    found = await ledger.lease(trainer="a", now=True)
    assert ids(found) == ids(lost)
    with pytest.raises(CommitRefused, match="is revoked: its trainer asked for another"):
        await driver.commit(lost)
    assert await driver.commit(found) == 1


async def test_a_late_trainer_may_commit_while_nobody_took_its_place(ledger, driver, clock):
    await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    clock.advance(3600)
    assert await driver.commit(lease) == 1


async def test_a_lease_outlives_a_restart_only_within_its_deadline(
    ledger, driver, make_driver, ledger_path, identity, training, clock
):
    turn = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    for wait, state in ((59, "leased"), (1, "sampled")):
        await ledger.aclose()
        clock.advance(wait)
        ledger = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
        assert await make_driver(ledger).state(turn) == state
    with pytest.raises(CommitRefused, match="is expired"):
        await ledger.renew(lease.lease_id, lease.fence)
    await ledger.aclose()


@pytest.mark.parametrize("jump", [-3600, -86400, 3600])
async def test_no_lease_outlives_a_restart_by_more_than_its_time_whatever_the_clock_says_then(
    ledger, driver, make_driver, ledger_path, identity, training, clock, jump
):
    """The wall clock is read anew at a start: one that was set back must not keep a batch for an hour more."""
    turn = await driver.sampled()
    await ledger.lease(trainer="a", now=True)
    await ledger.aclose()
    clock.advance(jump)
    ledger = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    assert await make_driver(ledger).state(turn) == ("leased" if jump < 0 else "sampled")
    clock.advance(training.lease_s + 1)
    again = await ledger.lease(trainer="b", now=True)
    assert again is not None
    assert [sample.sample_id for sample in again.samples] == [turn]
    await ledger.aclose()


async def test_the_lease_of_a_dead_trainer_is_revoked_by_name(ledger, driver):
    await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    assert not await ledger.revoke(trainer="b", reason="it exited")
    assert await ledger.revoke(trainer="a", reason="it exited")
    assert not await ledger.revoke(trainer="a", reason="it exited")
    with pytest.raises(CommitRefused, match="is revoked: it exited"):
        await ledger.renew(lease.lease_id, lease.fence)


async def test_a_fence_must_fit_its_lease(ledger, driver):
    await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    with pytest.raises(CommitRefused, match="has fence 1, not 2"):
        await ledger.renew(lease.lease_id, 2)
    with pytest.raises(CommitRefused, match="no lease ghost"):
        await ledger.renew("ghost", 1)
    with pytest.raises(CommitRefused, match="sample ghost is not in this lease"):
        await ledger.release(lease.lease_id, lease.fence, reason="x", drop={"ghost": DropReason.TOO_LONG})


async def test_stale_samples_are_dropped_when_leasing(ledger, driver):
    """max_staleness is 2: a sample of version 0 is good for tips 0, 1 and 2."""
    await driver.step()
    await driver.step()
    just_good = await driver.sampled(version=0)
    mixed = await driver.sampled(runs=(VersionRun(2, 3), VersionRun(1, 1)))
    lease = await ledger.lease(trainer="a", now=True)
    assert ids(lease) == [just_good, mixed]
    await ledger.release(lease.lease_id, lease.fence, reason="x", drop={just_good: DropReason.METHOD})
    await driver.commit(await ledger.lease(trainer="a", now=True))
    stale = await driver.sampled(version=0)
    partly_stale = await driver.sampled(runs=(VersionRun(3, 3), VersionRun(0, 1)))
    good = await driver.sampled(version=1)
    assert ids(await ledger.lease(trainer="a", now=True)) == [good]
    assert [await driver.state(turn) for turn in (stale, partly_stale)] == ["dropped.stale"] * 2


async def test_a_flood_of_stale_samples_neither_blocks_nor_shortens_a_batch(ledger, driver, monkeypatch):
    monkeypatch.setattr("openclaw_rl.ledger.batches._SWEEP", 2)
    old = [await driver.sampled() for _ in range(12)]
    for _ in range(3):
        lease = await ledger.lease(trainer="a", n=1)
        await driver.commit(lease)
    good = [await driver.sampled(version=3) for _ in range(4)]
    assert ids(await ledger.lease(trainer="a")) == good
    assert {await driver.state(turn) for turn in old[3:]} == {"dropped.stale"}


async def test_more_samples_than_may_wait_end_with_the_oldest_and_are_counted(ledger, driver):
    turns = [await driver.sampled() for _ in range(6)]
    assert await ledger.drop_oldest(TurnState.SAMPLED, 4) == 2
    assert await ledger.drop_oldest(TurnState.SAMPLED, 4) == 0
    assert [await driver.state(turn) for turn in turns] == ["dropped.backlog"] * 2 + ["sampled"] * 4
    assert (await ledger.counts())["dropped.backlog"] == 2
    assert await ledger.audit() == []


async def test_turns_that_nobody_judges_are_bounded_as_well(ledger, driver):
    turns = [await driver.paired() for _ in range(5)]
    assert await ledger.drop_oldest(TurnState.PAIRED, 3) == 2
    assert [await driver.state(turn) for turn in turns] == ["dropped.backlog"] * 2 + ["paired"] * 3


@pytest.mark.parametrize("state", [TurnState.PAIRED, TurnState.JUDGED, TurnState.SAMPLED])
async def test_no_transaction_leaves_more_waiting_than_may(ledger, driver, state: TurnState):
    """Nobody sweeps here: the write that makes one too many drops the oldest."""
    ledger._most_waiting = {state: 3}
    turns = []
    for n in range(7):
        turns.append(await getattr(driver, state)())
        assert (await ledger.counts())[state] == min(n + 1, 3)
    assert [await driver.state(turn) for turn in turns] == ["dropped.backlog"] * 4 + [str(state)] * 3
    assert await ledger.drop_oldest(state, 3) == 4  # once, for the log
    assert await ledger.drop_oldest(state, 3) == 0
    assert await ledger.audit() == []


async def test_samples_that_come_back_or_come_otherwise_count_too(ledger, driver):
    ledger._most_waiting = {TurnState.SAMPLED: 4}
    for _ in range(4):
        await driver.sampled()
    lease = await ledger.lease(trainer="test", now=True)
    for _ in range(3):
        await driver.sampled()
    await ledger.release(lease.lease_id, lease.fence, reason="stopped")
    assert (await ledger.counts())["sampled"] == 4
    written = Feedback("f", await driver.served(), 1.0, demonstration="so")
    await ledger.record_feedback(written, user="ann", demonstration=(1, 2))
    assert (await ledger.counts())["sampled"] == 4
    assert await ledger.audit() == []


async def test_feedback_makes_no_more_judged_turns_than_may_wait(ledger, driver):
    ledger._most_waiting = {TurnState.JUDGED: 2}
    for n in range(5):
        await ledger.record_feedback(Feedback(f"f{n}", await driver.served(), 1.0, value=1.0), user="ann")
        assert (await ledger.counts())["judged"] == min(n + 1, 2)
    assert await ledger.audit() == []


async def test_a_trainer_that_lets_its_lease_run_out_is_named(ledger, driver, clock):
    for _ in range(4):
        await driver.sampled()
    lease = await ledger.lease(trainer="local@here")
    assert lease.lease_s == 60.0
    clock.now += 59
    assert await ledger.overdue() is None
    clock.now += 2
    assert await ledger.overdue() == "local@here"
    await ledger.revoke(trainer="local@here", reason="it hangs")
    assert await ledger.overdue() is None
