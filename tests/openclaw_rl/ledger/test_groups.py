"""Groups of episodes in the ledger: their ends, their limit, the credit of their steps, batches of whole groups."""

from episode_runner import Runner, refused

from openclaw_rl.ledger import Ledger, LedgerLimits
from openclaw_rl.methods.agent import METHOD, AgentSettings
from openclaw_rl.settings import EpisodeSettings
from openclaw_rl.types import (
    Feedback,
    Split,
    StepCredit,
)


async def test_a_group_with_one_that_ended_is_too_small(runner, ledger):
    for name in ("a", "b"):
        await runner.open(name, group="g", size=2)
        await runner.step(name)
    await runner.end("a", 1.0)
    await ledger.abort_episode("ann", "b", "gone")
    await runner.credit()
    assert [fate[1] for fate in await runner.fates("a")] == ["group_too_small"]
    assert (await ledger.counts())["dropped.group_too_small"] == 1


async def test_a_group_without_contrast_is_dropped_and_counted(runner, ledger):
    for name in ("a", "b"):
        await runner.open(name, group="g", size=2)
        await runner.step(name)
        await runner.end(name, 1.0)
    await runner.credit()
    assert (await ledger.counts())["dropped.no_contrast"] == 2
    assert await ledger.lease(trainer="test", now=True) is None


async def test_too_many_groups_ahead_refuse_a_new_group_and_never_a_member(ledger_path, identity, training, clock):
    path = ledger_path.with_name("few.sqlite")
    limits = LedgerLimits(episodes=EpisodeSettings(max_groups_ahead=2, groups_per_step=1))
    ledger = await Ledger.open(path, identity=identity, training=training, clock=clock, limits=limits)
    runner = Runner(ledger)
    await runner.open("a", group="g", size=2)
    await runner.open("b")
    full = await refused(runner.open("c"), "too_many_groups", 429)
    assert full.retry_after_s == 5
    await runner.open("d", group="g", size=2)
    await runner.open("e", split=Split.EVAL, task="eval")
    await runner.step("b")
    await runner.end("b", 1.0)
    await refused(runner.open("c"), "too_many_groups", 429)
    await runner.credit()
    await refused(runner.open("c"), "too_many_groups", 429)  # it waits for the trainer
    assert await ledger.lease(trainer="test")
    await runner.open("c")
    assert await ledger.audit() == []
    await ledger.aclose()


async def ready_groups(runner, *sizes):
    """Groups of two with so many steps for each member; their turns by group."""
    found = []
    for number, steps in enumerate(sizes):
        turns = []
        for member in range(2):
            name = f"{number}-{member}"
            await runner.open(name, group=f"g{number}", size=2)
            turns += [await runner.step(name) for _ in range(steps)]
        await runner.judge({})
        for member in range(2):
            await runner.end(f"{number}-{member}", float(member))
        runner.ledger._clock.advance(1)
        await runner.credit()
        found.append(set(turns))
    return found


async def test_a_batch_is_whole_groups(ledger_path, identity, training, clock):
    path = ledger_path.with_name("whole.sqlite")
    limits = LedgerLimits(episodes=EpisodeSettings(groups_per_step=2))
    ledger = await Ledger.open(path, identity=identity, training=training, clock=clock, limits=limits)
    first, second, third = await ready_groups(Runner(ledger), 1, 3, 2)
    lease = await ledger.lease(trainer="test")
    assert {sample.sample_id for sample in lease.samples} == first | second
    await ledger.release(lease.lease_id, lease.fence, reason="test")
    for most, expected in ((8, first | second), (7, first), (2, first)):
        lease = await ledger.lease(trainer="test", most=most)
        assert {sample.sample_id for sample in lease.samples} == expected
        await ledger.release(lease.lease_id, lease.fence, reason="test")
    lease = await ledger.lease(trainer="test", most=1)  # smaller than any group: it is cut
    assert len(lease.samples) == 1
    await ledger.release(lease.lease_id, lease.fence, reason="test")
    assert third
    assert await ledger.audit() == []
    await ledger.aclose()


async def test_one_group_is_enough_after_the_longest_wait(runner, ledger, clock, training):
    await ready_groups(runner, 1)
    assert await ledger.lease(trainer="test") is None
    clock.advance(training.max_wait_s)
    assert len((await ledger.lease(trainer="test")).samples) == 2


async def test_the_environments_own_step_reward_stands_in_for_the_judge(runner, ledger):
    await runner.open("a")
    first = await runner.step("a")
    await runner.step("a")
    effect = (await ledger.record_feedback(Feedback("f", first, 1.0, value=0.25), user="ann")).effect
    assert effect == "judged"
    assert await ledger.to_judge(10) == []
    assert await ledger.to_score(10) == []  # steps wait for their group
    await runner.end("a", 0.5)
    await runner.credit()
    assert [fate[2] for fate in await runner.fates("a")] == [0.75, 0.5]
    late = await ledger.record_feedback(Feedback("late", first, 1.0, value=-1.0), user="ann")
    assert (late.effect, late.state) == ("recorded", "sampled")


async def test_feedback_that_comes_while_the_method_counts_is_not_lost(runner, ledger):
    await runner.open("a")
    first = await runner.step("a")
    await runner.end("a", 0.5)
    (group,) = await ledger.groups_to_credit()
    await ledger.record_feedback(Feedback("f", first, 1.0, value=-1.0), user="ann")
    assert not await ledger.record_credit(group, METHOD.credit(group, AgentSettings()))
    await runner.credit()
    assert (await runner.fates("a"))[0][2] == -0.5
    assert not await ledger.record_credit(group, [StepCredit(first, 0.5, 0.5)])  # it has its credit


async def test_earlier_groups_of_one_are_the_baseline_of_the_next(runner):
    for number, reward in enumerate((1.0, 0.0, -0.5)):
        await runner.open(f"e{number}")
        await runner.step(f"e{number}")
        await runner.end(f"e{number}", reward)
        await runner.credit()
    assert [(await runner.fates(f"e{number}"))[0][3] for number in range(3)] == [1.0, -1.0, -1.0]
