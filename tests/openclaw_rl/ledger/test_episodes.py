"""Episodes in the ledger: their registration, their order of steps, their ends, and the credit of their groups."""

import sqlite3

import pytest
from episode_runner import Runner, assistant, refused, user
from turns import KEY, make_turn

from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import EpisodeSettings
from openclaw_rl.types import (
    DropReason,
    EpisodeOutcome,
    EpisodeTally,
    Feedback,
    NewEpisode,
    Split,
)


async def test_two_episodes_of_two_steps_become_a_batch_with_their_advantages(runner, ledger):
    for name in ("a", "b"):
        await runner.open(name, group="g", size=2)
    a1, b1 = await runner.step("a"), await runner.step("b")
    a2, b2 = await runner.step("a"), await runner.step("b")
    await runner.judge({a1: [1, 1, None], b1: [-1, 0, 0]})
    await runner.end("a", 1.0, metrics={"passed": 3})
    assert await ledger.groups_to_credit() == []  # b runs
    assert await ledger.lease(trainer="test", now=True) is None
    await runner.end("b", -1.0, truncated=True)
    await runner.credit()
    # R: a 2, 1; b -4/3, -1.
    assert await runner.fates("a") == [(1, "sampled", 2.0, 1.0), (2, "sampled", 1.0, 1.0)]
    assert await runner.fates("b") == [
        (1, "sampled", pytest.approx(-4 / 3), pytest.approx(-1.0)),
        (2, "sampled", -1.0, -1.0),
    ]
    lease = await ledger.lease(trainer="test", now=True)
    assert [(s.sample_id, s.advantage, s.reward) for s in lease.samples] == [
        (a1, 1.0, None),
        (b1, pytest.approx(-1.0), None),
        (a2, 1.0, None),
        (b2, -1.0, None),
    ]
    numbers = [(await ledger.find_episode("ann", name)).number for name in ("a", "b")]
    assert [sample.episode for sample in lease.samples] == numbers * 2
    assert all(sample.is_tool_turn and sample.temperature == 0.7 for sample in lease.samples)


async def test_a_reply_that_the_harness_drops_from_the_history_pairs_by_order(runner, ledger):
    await runner.open("a")
    cut = await runner.step("a", reply="half a repl", keeps_reply=False, observation="your reply was cut")
    last = await runner.step("a")
    record = await ledger.turn(cut)
    assert [message.text() for message in record.next_state.messages] == ["your reply was cut 1"]
    assert (record.state, record.answered_by) == ("paired", f"r-{last}")
    assert [turn.turn.turn_id for turn in await ledger.to_judge(10)] == [cut]
    await runner.judge({cut: [-1]})
    await runner.end("a", -1.0)
    await runner.credit()
    assert await runner.fates("a") == [(1, "sampled", -2.0, -2.0), (2, "sampled", -1.0, -1.0)]


async def test_the_judge_of_a_step_reads_the_task_and_the_last_eight_steps(runner, ledger):
    await runner.open("a", task="list the files")
    turns = [await runner.step("a") for _ in range(11)]
    waiting = {turn.turn.turn_id: turn for turn in await ledger.to_judge(100)}
    assert list(waiting) == turns[:-1]
    context = waiting[turns[9]].episode
    assert context.task == "solve list the files (a)"
    assert [step.action.text() for step in context.before] == [f"do {n}" for n in range(2, 10)]
    assert [step.observation[0].text() for step in context.before] == [f"seen {n}" for n in range(2, 10)]
    assert waiting[turns[0]].episode.before == ()


async def test_a_request_again_without_a_new_message_answers_no_reply(runner, ledger):
    await runner.open("a")
    first = await runner.step("a")
    said = runner.told["a"][:1]
    runner.told["a"] = list(said)  # the harness asks for another reply
    second = await runner.step("a")
    third = await runner.step("a")
    assert (await ledger.turn(first)).next_state is None
    assert (await ledger.turn(second)).answered_by == f"r-{third}"  # and its history tells it from the first
    await runner.judge({})
    await runner.end("a", 1.0)
    await runner.credit()
    assert [fate[:3] for fate in await runner.fates("a")] == [(n, "sampled", 1.0) for n in (1, 2, 3)]


async def test_requests_at_once_are_answered_by_those_that_hold_their_history(runner, ledger):
    episode = await runner.open("a")
    for name in ("left", "right"):
        runner.told[name] = [user(f"the {name} half")]
        await ledger.begin(runner.request(name, episode, f"r-{name}"))
        await ledger.continue_episode(f"r-{name}")
    for name in ("left", "right"):
        await ledger.finish(make_turn(name, request=f"r-{name}", reply=f"{name} done"), KEY)
    for name in ("left", "right"):
        runner.told[name] += [assistant(f"{name} done"), user(f"{name} checked")]
        await ledger.begin(runner.request(name, episode, f"again-{name}"))
        assert await ledger.continue_episode(f"again-{name}") == name
        await ledger.finish(make_turn(f"{name}-2", request=f"again-{name}"), KEY)
    for name in ("left", "right"):
        assert [m.text() for m in (await ledger.turn(name)).next_state.messages] == [f"{name} checked"]


async def test_cancelled_replies_are_no_steps(runner):
    await runner.open("a")
    await runner.step("a")
    await runner.step("a", drop=DropReason.CANCELLED)
    await runner.step("a", drop=DropReason.NOT_TRAINABLE_SAMPLING)
    await runner.step("a")
    await runner.judge({})
    await runner.end("a", 1.0)
    await runner.credit()
    assert await runner.fates("a") == [
        (1, "sampled", 1.0, 1.0),
        (None, "cancelled", None, None),
        (2, "not_trainable_sampling", None, None),
        (3, "sampled", 1.0, 1.0),
    ]


async def test_an_aborted_episode_never_reaches_a_sample_and_is_not_compared(runner, ledger):
    for name in ("a", "b", "c"):
        await runner.open(name, group="g", size=3)
        await runner.step(name)
    await runner.step("c")
    await runner.judge({})
    await runner.end("a", 1.0)
    await runner.end("b", 0.0)
    aborted = await ledger.abort_episode("ann", "c", "the sandbox hung")
    assert (aborted.state, aborted.reason) == ("aborted", "the sandbox hung")
    assert await ledger.abort_episode("ann", "c", "again") == aborted
    await runner.credit()
    assert [fate[1:] for fate in await runner.fates("a")] == [("sampled", 1.0, 1.0)]
    assert [fate[1] for fate in await runner.fates("c")] == ["episode_aborted"] * 2
    await refused(runner.end("c", 1.0), "episode_over")
    await refused(ledger.abort_episode("ann", "a", "late"), "episode_over")
    assert (await ledger.counts())["episodes.aborted"] == 1


async def test_an_abort_with_a_successor_leaves_its_place_free(runner, ledger):
    for name in ("a", "b"):
        await runner.open(name, group="g", size=2)
        await runner.step(name)
    await runner.end("a", 1.0)
    await refused(runner.open("c", group="g", size=2), "group_full")
    await ledger.abort_episode("ann", "b", "no container", has_successor=True)
    assert await ledger.groups_to_credit() == []
    await runner.open("c", group="g", size=2)
    await runner.step("c")
    await runner.end("c", -1.0)
    await runner.credit()
    assert [fate[3] for name in ("a", "c") for fate in await runner.fates(name)] == [1.0, -1.0]


async def test_evaluations_are_recorded_and_never_judged_or_trained(runner, ledger):
    await runner.open("a", task="held-out", split=Split.EVAL)
    first = await runner.step("a")
    await runner.step("a")
    assert await ledger.to_judge(10) == []
    assert (await ledger.turn(first)).next_state is not None
    said = Feedback("f", first, 1.0, value=1.0, demonstration="so")
    outcome = await ledger.record_feedback(said, user="ann", demonstration=(1, 2))
    assert (outcome.effect, outcome.demonstration_id) == ("recorded", None)
    ended = await runner.end("a", 0.5)
    assert ended.outcome == EpisodeOutcome(0.5)
    assert await ledger.groups_to_credit() == []
    assert [fate[:2] for fate in await runner.fates("a")] == [(1, "eval"), (2, "eval")]
    error = await refused(runner.open("b", task="held-out"), "task_is_eval")
    assert error.param == "task"
    bob = Runner(ledger, who="bob")  # the policy is one for all
    await refused(bob.open("b", task="held-out"), "task_is_eval")
    await bob.open("b", task="held-out", split=Split.EVAL)


async def test_the_same_call_again_changes_nothing_and_another_is_refused(runner, ledger):
    opened = await runner.open("a", group="g", size=2)
    assert await ledger.open_episode(NewEpisode("ann", "a", "t", "g", 2)) == opened
    for other in (
        NewEpisode("ann", "a", "u", "g", 2),
        NewEpisode("ann", "a", "t"),
        NewEpisode("ann", "a", "t", "g", 3),
    ):
        await refused(ledger.open_episode(other), "episode_id_reused")
    await runner.step("a")
    ended = await runner.end("a", 0.5, metrics={"x": 1.5})
    assert await runner.end("a", 0.5, metrics={"x": 1.5}) == ended
    await refused(runner.end("a", 0.25), "outcome_conflict")
    await refused(runner.end("a", 0.5, truncated=True), "outcome_conflict")


async def test_what_does_not_fit_a_group_is_refused(runner, ledger):
    await runner.open("a", group="g", size=2)
    assert (await refused(runner.open("b", group="g", size=3), "group_conflict")).param == "group_size"
    assert (await refused(runner.open("b", group="g", size=2, task="u"), "group_conflict")).param == "task"
    assert (await refused(runner.open("b", group="g", size=2, split=Split.EVAL), "group_conflict")).param == "split"
    await Runner(ledger, who="bob").open("a", group="g", size=5)  # names are one's own
    await runner.open("b", group="g", size=2)
    for name in ("a", "b"):
        await ledger.abort_episode("ann", name, "x")
    await refused(runner.open("c", group="g", size=2), "group_closed")


async def test_outcomes_that_cannot_be_are_refused(runner, ledger):
    await refused(runner.end("none", 1.0), "episode_not_found", 404)
    episode = await runner.open("a")
    await refused(runner.end("a", 1.0), "episode_without_turns")
    await refused(Runner(ledger, who="bob").end("a", 1.0), "episode_not_found", 404)
    await runner.step("a")
    await ledger.begin(runner.request("a", episode, "streams"))
    busy = await refused(runner.end("a", 1.0), "episode_busy")
    assert busy.retry_after_s == 1
    await ledger.finish(make_turn("late", request="streams"), KEY)
    await runner.end("a", 1.0)
    await refused(ledger.begin(runner.request("a", episode, "too late")), "episode_over")
    await refused(runner.open("token=ghp_0123456789abcdefghijklmnopqrstuvwxyz"), "secret", 422)


async def test_a_reply_that_ends_after_the_abort_is_dropped_with_it(runner, ledger):
    episode = await runner.open("a")
    await ledger.begin(runner.request("a", episode, "streams"))
    await ledger.abort_episode("ann", "a", "gone")
    assert await ledger.finish(make_turn("late", request="streams"), KEY) is DropReason.EPISODE_ABORTED


async def test_what_got_no_outcome_in_time_expires(runner, ledger, clock):
    for name in ("a", "b"):
        await runner.open(name, group="g", size=3)
        await runner.step(name)
    clock.advance(EpisodeSettings().ttl_s / 2)
    await runner.step("a")
    assert await ledger.expire_episodes() == 0
    clock.advance(EpisodeSettings().ttl_s / 2 + 1)
    assert await ledger.expire_episodes() == 1
    assert [fate[1] for fate in await runner.fates("b")] == ["episode_expired"]
    await refused(runner.end("b", 1.0), "episode_over")
    clock.advance(EpisodeSettings().group_ttl_s)
    assert await ledger.expire_episodes() == 1
    assert [fate[1] for fate in await runner.fates("a")] == ["episode_expired"] * 2
    await runner.credit()
    assert await ledger.counts()
    assert (await ledger.counts())["groups.scored"] == 1
    assert await ledger.expire_episodes() == 0


async def test_forgetting_takes_an_episode_with_its_last_turn(runner, ledger):
    await runner.open("a", group="g", size=2)
    await runner.open("b", group="g", size=2)
    for name in ("a", "b"):
        await runner.step(name)
        await runner.end(name, 1.0 if name == "a" else -1.0)
    await runner.credit()
    assert (await ledger.forget("episode:a")).turns == 1
    assert await ledger.episode("a") is None
    assert await ledger.episode("b") is not None
    await ledger.forget_user("ann")
    assert await ledger.episodes() == []
    assert (await ledger.counts())["episodes"] == (await ledger.counts())["groups"] == 0


async def test_lists_are_newest_first_and_filtered(runner, ledger):
    await runner.open("a", group="g", size=2, task="one")
    await runner.open("b", group="g", size=2, task="one")
    await runner.open("c", task="two")
    await ledger.abort_episode("ann", "b", "x")

    async def listed(**wanted):
        return [episode.episode_id for episode in await ledger.episodes(**wanted)]

    assert await listed() == ["c", "b", "a"]
    assert await listed(limit=1) == ["c"]
    assert await listed(group="g") == ["b", "a"]
    assert await listed(task="two") == ["c"]
    assert await listed(state="aborted", user="ann") == ["b"]
    assert await listed(user="bob") == []


async def test_episodes_survive_a_restart_in_the_middle(runner, ledger, ledger_path, identity, training, clock):
    for name in ("a", "b"):
        await runner.open(name, group="g", size=2)
        await runner.step(name)
    await ledger.aclose()
    again = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    runner.ledger = again
    assert await again.open_turns(10) == []  # no chat pairs with a step
    assert await again.ended_turns(10) == []
    second = await runner.step("a")
    assert len(await again.to_judge(10)) == 1
    await runner.judge({})
    await runner.end("a", 1.0)
    await runner.end("b", 0.0)
    await runner.credit()
    assert [fate[0] for fate in await runner.fates("a")] == [1, 2]
    assert second
    assert await again.audit(is_deep=True) == []
    await again.aclose()
    runner.ledger = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    with sqlite3.connect(ledger_path) as db:
        assert db.execute("SELECT count(*) FROM credit").fetchone() == (3,)
    await runner.ledger.aclose()


async def test_outcomes_are_told_by_version_split_and_set_of_tasks(runner, ledger):
    train = {"split": Split.TRAIN, "group": "g", "size": 2}
    for name, task, reward, more in (
        ("a", "shell/train/1", 1.0, train),
        ("b", "shell/train/1", -1.0, train),
        ("c", "shell/eval/1", 0.5, {"split": Split.EVAL}),
        ("d", "alone", 1.0, {"split": Split.EVAL}),
    ):
        await runner.open(name, task=task, **more)
        await runner.step(name)
        await runner.step(name)
        await runner.end(name, reward)
    await runner.open("running", task="shell/eval/2", split=Split.EVAL)
    assert await ledger.tally(newest=100) == [
        EpisodeTally(0, Split.EVAL, "alone", 1, 1, 1.0),
        EpisodeTally(0, Split.EVAL, "shell", 1, 0, 0.5),
        EpisodeTally(0, Split.TRAIN, "shell", 2, 1, 0.0),
    ]
    assert [tally.tasks for tally in await ledger.tally(newest=1)] == ["alone"]


async def test_evaluations_are_read_with_the_version_that_played_their_end(runner, ledger):
    for name, split, reward in (("a", Split.EVAL, 0.5), ("b", Split.TRAIN, 1.0), ("c", Split.EVAL, -1.0)):
        await runner.open(name, task=f"shell/{split}/{name}", split=split)
        await runner.step(name)
        await runner.end(name, reward)
    await runner.open("running", task="shell/eval/2", split=Split.EVAL)
    await runner.step("running")
    assert await ledger.evaluated() == [("shell/eval/a", 0, 0.5), ("shell/eval/c", 0, -1.0)]
    assert await ledger.evaluated(policy="user:bob") == []
