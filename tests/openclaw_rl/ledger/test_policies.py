"""Policies beside each other in one ledger: nothing of one lineage touches another, in any order of calls."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from practising import corrected, practice

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.ledger.snapshot import Snapshot
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import SHARED_POLICY, Feedback, TurnState, Version, VersionState, WeightKind

ANN, BOB = "user:ann", "user:bob"
CALLS = ("chat", "chat", "judge", "sample", "sample", "train", "serve", "reject", "back", "crash")


async def seen(ledger: Ledger, policy: str) -> dict[str, Any]:
    """Everything of one policy that another could touch."""
    versions = [one for one in await ledger.versions() if await policy_of(ledger, one) == policy]
    return {
        "tip": (await ledger.tip(policy)).weight_version,
        "serving": await ledger.serving_version(policy),
        "pinned": await ledger.pinned(policy),
        "rejections": await ledger.rejections_in_a_row(policy),
        "states": {one.weight_version: one.state for one in versions},
    }


async def policy_of(ledger: Ledger, version: Version) -> str:
    """Return the policy whose root the version descends from."""
    roots = {(await ledger.open_policy(name)).weight_version: name for name in (ANN, BOB)}
    number: int | None = version.weight_version
    while number is not None and number not in roots:
        number = (await ledger.version(number)).parent
    return SHARED_POLICY if number is None else roots[number]


async def test_a_policy_starts_at_the_base_under_a_number_of_its_own(ledger, driver) -> None:
    root = await ledger.open_policy(ANN)
    assert (root.weight_version, root.parent, root.folder, root.same_weights_as) == (1, None, None, 0)
    assert root.state is VersionState.SERVING
    assert await ledger.policies() == [SHARED_POLICY, ANN]
    assert (await ledger.serving_version(), await ledger.serving_version(ANN)) == (0, 1)
    assert (await ledger.open_policy(ANN, start=0)).weight_version == 1, "opened once"
    number, _ = await driver.step()
    assert (number, (await ledger.tip()).weight_version, (await ledger.tip(ANN)).weight_version) == (2, 2, 1)
    assert await ledger.audit(is_deep=True) == []


async def test_the_figures_and_the_rows_of_one_policy_count_no_other(ledger, driver, ledger_path) -> None:
    root = (await ledger.open_policy(ANN)).weight_version
    mine = await driver.sampled(policy=ANN, version=root)
    others = await driver.sampled()
    await ledger.set_learning(False, ANN)
    anns, shared = await ledger.policy_figures(ANN), await ledger.policy_figures(SHARED_POLICY)
    assert (anns.serving, anns.tip, anns.pinned, anns.learning, anns.waiting) == (root, root, None, False, 1)
    assert (shared.serving, shared.learning, shared.waiting, shared.practice_waiting) == (0, True, 1, 0)
    assert await ledger.all_policy_figures() == [shared, anns]
    with pytest.raises(LedgerError, match="there is no policy 'user:bob'"):
        await ledger.policy_figures(BOB)
    await ledger.set_pin(root, policy=ANN)
    assert await ledger.targets([ANN, BOB, SHARED_POLICY]) == {ANN: root, SHARED_POLICY: 0}
    assert [one.weight_version for one in await ledger.versions(policy=ANN)] == [root]
    with Snapshot.of(ledger_path) as snapshot:
        assert snapshot.policies() == [SHARED_POLICY, ANN]
        rows = {policy: [one.turn.turn_id for one in snapshot.turns(policy=policy)] for policy in (ANN, BOB)}
        assert rows == {ANN: [mine], BOB: []}
        assert [one.turn.turn_id for one in snapshot.turns(policy=SHARED_POLICY)] == [others]


async def test_a_batch_is_of_the_policy_that_has_one_and_waits_longest(ledger, driver, clock) -> None:
    """A policy with too few samples keeps none with enough of them waiting, and has its batch after `max_wait_s`."""
    for policy in (ANN, BOB):
        await ledger.open_policy(policy)
    ann, bob = [(await ledger.tip(policy)).weight_version for policy in (ANN, BOB)]
    for _ in range(2):
        await driver.sampled(policy=ANN, version=ann)
    clock.advance(1)
    for _ in range(3):
        await driver.sampled(policy=BOB, version=bob)
    first = await ledger.lease(trainer="test", n=3)
    assert first is not None
    assert first.policy == BOB
    await ledger.release(first.lease_id, first.fence, reason="test")
    clock.advance(10_000)
    late = await ledger.lease(trainer="test", n=3)
    assert late is not None
    assert (late.policy, len(late.samples)) == (ANN, 2)


async def test_a_policy_may_start_at_weights_that_the_shared_one_learned(ledger, driver) -> None:
    number, _ = await driver.step()
    await driver.serve(number)
    root = await ledger.open_policy(ANN, start=number)
    assert root.folder == (await ledger.version(number)).folder
    assert (await ledger.tip(ANN)).needs_fresh_moments
    await ledger.rollback(0, requeue=False)
    assert root.weight_version in await ledger.needed_versions(0)
    with pytest.raises(LedgerError, match="is needed"):
        await ledger.prune_weights(root.weight_version, 0)
    assert await ledger.prune_weights(number, 0) is None, "its folder is the root's too"
    with pytest.raises(LedgerError, match="is rolled_back: no policy can start from it"):
        await ledger.open_policy(BOB, start=number)
    assert await ledger.audit(is_deep=True) == []


async def test_no_policy_is_opened_beside_full_weights_or_under_no_name(tmp_path: Path) -> None:
    identity = Identity("base", "tokenizer", "tiny", WeightKind.FULL)
    ledger = await Ledger.open(tmp_path / "l.sqlite", identity=identity, training=TrainingSettings())
    try:
        with pytest.raises(LedgerError, match="full weights have one policy"):
            await ledger.open_policy(ANN)
        for name in ("", SHARED_POLICY):
            with pytest.raises(LedgerError, match="another name"):
                await ledger.open_policy(name)
        for call in (ledger.tip(ANN), ledger.serving_version(ANN)):
            with pytest.raises(LedgerError, match="there is no policy 'user:ann'"):
                await call
    finally:
        await ledger.aclose()


async def test_a_batch_is_of_one_policy_and_the_longest_waiting_one_goes_first(ledger, driver, clock) -> None:
    ann, bob = (await ledger.open_policy(ANN), await ledger.open_policy(BOB))
    turns: dict[str, list[str]] = {ANN: [], BOB: [], SHARED_POLICY: []}
    for policy, version in ((BOB, bob.weight_version), (ANN, ann.weight_version), (SHARED_POLICY, 0)) * 2:
        clock.now += 1
        turns[policy].append(await driver.sampled(policy=policy, version=version))
    for policy in (BOB, ANN, SHARED_POLICY):
        lease = await ledger.lease(trainer="test", now=True)
        assert (lease.policy, [sample.sample_id for sample in lease.samples]) == (policy, turns[policy])
        assert lease.parent == (await ledger.tip(policy)).weight_version
        await driver.commit(lease)
        assert await ledger.audit() == []
    assert await ledger.lease(trainer="test", now=True) is None


async def test_a_policy_with_too_few_samples_holds_up_no_other(ledger, driver, clock) -> None:
    ann, bob = (await ledger.open_policy(ANN), await ledger.open_policy(BOB))
    await driver.sampled(policy=ANN, version=ann.weight_version)  # a batch needs four
    clock.now += 1
    for _ in range(4):
        await driver.sampled(policy=BOB, version=bob.weight_version)
    lease = await ledger.lease(trainer="test")
    assert (lease.policy, len(lease.samples)) == (BOB, 4)
    await driver.commit(lease)
    assert await ledger.lease(trainer="test") is None


async def test_practice_of_one_policy_waits_behind_the_samples_of_another(ledger, driver, clock) -> None:
    ann = (await ledger.open_policy(ANN)).weight_version
    assert [(await ledger.practice_room(policy)).tip for policy in (ANN, SHARED_POLICY)] == [ann, 0]
    turn = await corrected(ledger, "shorter")
    (wish,) = await ledger.wishes(user="ann")
    exercise = practice(turn, wish.wish_id)
    anns = replace(exercise, request=replace(exercise.request, scope=replace(exercise.request.scope, policy=ANN)))
    with pytest.raises(LedgerError, match="an update of several policies: policy, user:ann"):
        await ledger.record_practice([exercise, anns])
    assert await ledger.record_practice([anns]) == 0, "another policy's tip sampled it"
    assert await ledger.record_practice([exercise]) == 1
    clock.now += 1
    real = await driver.sampled(policy=ANN, version=ann)
    found = []
    while (lease := await ledger.lease(trainer="test", now=True)) is not None:
        found.append((lease.policy, [sample.sample_id for sample in lease.samples]))
        await driver.commit(lease)
    assert found == [(SHARED_POLICY, [turn]), (ANN, [real]), (SHARED_POLICY, [exercise.turn.turn_id])]
    assert await ledger.audit() == []


async def test_a_demonstration_waits_for_the_policy_of_its_turn(ledger, driver) -> None:
    ann = await ledger.open_policy(ANN)
    turn = await driver.served(policy=ANN, version=ann.weight_version)
    await ledger.record_feedback(Feedback("f", turn, 5.0, None, None, "better"), user="ann", demonstration=(9,))
    lease = await ledger.lease(trainer="test", now=True)
    assert (lease.policy, lease.samples[0].is_demonstration) == (ANN, True)
    assert await ledger.audit(is_deep=True) == []


async def test_pins_and_rollbacks_name_versions_of_their_own_policy(ledger, driver) -> None:
    ann = (await ledger.open_policy(ANN)).weight_version
    shared, _ = await driver.step()
    await driver.serve(shared)
    await driver.sampled(policy=ANN, version=ann)
    anns = await driver.commit(await ledger.lease(trainer="test", now=True))
    await driver.serve(anns)
    with pytest.raises(LedgerError, match=f"version {shared} is of another policy"):
        await ledger.set_pin(shared, policy=ANN)
    await ledger.set_pin(anns, policy=ANN)
    assert (await ledger.pinned(), await ledger.pinned(ANN)) == (None, anns)
    assert await ledger.way_back(anns) == anns
    before = await seen(ledger, SHARED_POLICY)
    await ledger.rollback(ann, requeue=True)
    assert await seen(ledger, SHARED_POLICY) == before
    assert (await ledger.serving_version(ANN), await ledger.pinned(ANN)) == (ann, ann)
    assert await ledger.audit(is_deep=True) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**20))
async def test_two_users_chat_train_and_crash_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, identity: Identity, make_driver: Callable[[Ledger], Any], seed: int
) -> None:
    """Each call is of one user; the other's lineage is as it was, and the audit finds nothing."""
    chance, now = random.Random(seed), [2000.0]
    training = TrainingSettings(batch_size=2, min_batch=1, max_wait_s=5, max_staleness=2, lease_s=60)
    path = tmp_path_factory.mktemp("two") / "l.sqlite"

    async def opened() -> Ledger:
        return await Ledger.open(path, identity=identity, training=training, clock=lambda: now[0])

    ledger = await opened()
    driver = make_driver(ledger)
    for policy in (ANN, BOB):
        await ledger.open_policy(policy)
    try:
        for _ in range(24):
            now[0] += chance.choice((0.0, 1.0, 10.0))
            one = chance.choice((ANN, BOB, SHARED_POLICY))
            others = {policy: await seen(ledger, policy) for policy in (ANN, BOB, SHARED_POLICY) if policy != one}
            match chance.choice(CALLS):
                case "chat":
                    await driver.served(policy=one, version=await ledger.serving_version(one))
                case "judge":
                    await driver.judged(policy=one, version=await ledger.serving_version(one))
                case "sample":
                    await driver.sampled(policy=one, version=await ledger.serving_version(one))
                case "train":
                    lease = await ledger.lease(trainer="test", now=chance.random() < 0.5)
                    if lease is not None:
                        others = {policy: what for policy, what in others.items() if policy != lease.policy}
                        if chance.random() < 0.7:
                            await driver.commit(lease)
                        else:
                            await ledger.release(lease.lease_id, lease.fence, reason="no step")
                case "serve":
                    tip = await ledger.version((await ledger.tip(one)).weight_version)
                    if tip.state is VersionState.CANDIDATE:
                        await driver.serve(tip.weight_version)
                case "reject":
                    tip = await ledger.version((await ledger.tip(one)).weight_version)
                    if tip.state is VersionState.CANDIDATE:
                        await ledger.reject(tip.weight_version, "its gate")
                case "back":
                    target = await ledger.way_back(await ledger.serving_version(one))
                    await ledger.rollback(target, requeue=chance.random() < 0.5)
                case "crash":
                    lease = await ledger.lease(trainer="test", now=True)
                    await ledger.aclose()
                    ledger = await opened()
                    driver.ledger = ledger
                    if lease is not None:
                        await ledger.revoke(trainer="test", reason="its trainer was started again")
                        with pytest.raises(CommitRefused):
                            await driver.commit(lease)
            for policy, before in others.items():
                assert await seen(ledger, policy) == before, (one, policy)
            assert await ledger.audit() == []
    finally:
        await ledger.aclose()


async def test_learning_of_one_policy_pauses_alone_and_resumes_with_everyones(ledger, driver) -> None:
    ann, bob = (await ledger.open_policy(ANN), await ledger.open_policy(BOB))
    await driver.sampled(policy=ANN, version=ann.weight_version)
    await driver.sampled(policy=BOB, version=bob.weight_version)
    await ledger.set_learning(False, ANN)
    assert [await ledger.learning(name) for name in (SHARED_POLICY, ANN, BOB)] == [True, False, True]
    assert [(await ledger.practice_room(name)).learning for name in (ANN, BOB)] == [False, True]
    lease = await ledger.lease(trainer="test", now=True)
    assert lease.policy == BOB
    await driver.commit(lease)
    assert await ledger.lease(trainer="test", now=True) is None
    await ledger.set_learning(False)
    assert not await ledger.learning(BOB)
    await ledger.set_learning(True)
    assert (await ledger.lease(trainer="test", now=True)).policy == ANN


async def test_gate_watch_and_publisher_read_one_policy(ledger, driver) -> None:
    ann, bob = [(await ledger.open_policy(name)).weight_version for name in (ANN, BOB)]
    await driver.judged(policy=ANN, version=ann, prompt=(7, 8))
    await driver.judged(policy=BOB, version=bob, prompt=(9,), user="bob")
    await driver.judged(prompt=(5,))
    for policy, version, prompt in ((ANN, ann, (7, 8)), (BOB, bob, (9,)), (SHARED_POLICY, 0, (5,))):
        assert [ids for ids, _ in await ledger.recent_replies(sampled_by=None, limit=9, policy=policy)] == [prompt]
        assert [ids for _, ids in await ledger.recent_prompts(9, policy)] == [prompt]
        assert await ledger.user_verdicts(limit=9, before_waiting=True, policy=policy) == [(version, 1)]
        assert (await ledger.root(policy)).is_base
        assert (await ledger.target(policy)).weight_version == version
    await driver.paired(policy=ANN, version=ann)
    await driver.judged(policy=BOB, version=bob)
    assert len(await ledger.user_verdicts(limit=9, before_waiting=True, policy=BOB)) == 2, "ann's judge is ann's"


async def test_the_tips_that_passed_and_do_not_serve_are_known_for_every_policy(ledger, driver) -> None:
    ann = (await ledger.open_policy(ANN)).weight_version
    await driver.sampled(policy=ANN, version=ann)
    number = await driver.commit(await ledger.lease(trainer="test", now=True))
    await driver.serve(number)
    assert await ledger.passed_tips() == []
    await ledger.set_pin(ann, serves=True, policy=ANN)
    assert (await ledger.target(ANN)).weight_version == ann
    assert await ledger.passed_tips() == []
    await ledger.set_pin(None, policy=ANN)
    assert [(tip.weight_version, tip.policy) for tip in await ledger.passed_tips()] == [(number, ANN)]
    with pytest.raises(LedgerError, match="there is no policy"):
        await ledger.root(BOB)


async def test_a_rebuild_goes_back_in_each_policy_that_learned_the_words_and_in_no_other(ledger, driver) -> None:
    """Numbers count over all policies: the version before one of ann's may be bob's."""
    shared, _ = await driver.step()
    await driver.serve(shared)
    numbers = {}
    for policy, session in ((ANN, "kept"), (BOB, "his"), (ANN, "told"), (BOB, "his")):
        root = (await ledger.open_policy(policy)).weight_version
        await driver.sampled(policy=policy, version=root, session=session, user=policy.removeprefix("user:"))
        lease = await ledger.lease(trainer="a", now=True)
        assert lease.policy == policy
        numbers.setdefault(policy, []).append(await driver.commit(lease))
        await driver.serve(numbers[policy][-1])
    (kept, told), (_, bobs) = numbers[ANN], numbers[BOB]
    before = await seen(ledger, BOB)
    forgotten = await ledger.forget("told", "ann")
    assert forgotten.trained_in == (told,)
    # As an older ledger, in which the shared policy learned from the user too.
    assert await ledger.rollback_from((shared, told)) == {SHARED_POLICY: 0, ANN: kept}
    assert await seen(ledger, BOB) == before
    assert [await ledger.serving_version(policy) for policy in (SHARED_POLICY, ANN, BOB)] == [0, kept, bobs]
    assert (await ledger.version(told)).state is VersionState.ROLLED_BACK
    assert await ledger.audit(is_deep=True) == []


async def test_a_policy_whose_batch_was_given_back_lets_the_others_go_first(ledger, driver, clock) -> None:
    for policy in (ANN, BOB):
        root = (await ledger.open_policy(policy)).weight_version
        await driver.sampled(policy=policy, version=root)
        clock.advance(1)
    taken = []
    for _ in range(4):
        lease = await ledger.lease(trainer="test", now=True)
        taken.append(lease.policy)
        await ledger.release(lease.lease_id, lease.fence, reason="its weights are torn")
    assert taken == [ANN, BOB, ANN, BOB]


async def test_samples_of_a_policy_that_is_paused_are_dropped_before_those_of_another(ledger, driver) -> None:
    ann, bob = [(await ledger.open_policy(policy)).weight_version for policy in (ANN, BOB)]
    await ledger.set_learning(False, ANN)
    bobs = [await driver.sampled(policy=BOB, version=bob) for _ in range(2)]
    anns = [await driver.sampled(policy=ANN, version=ann) for _ in range(5)]
    assert await ledger.drop_oldest(TurnState.SAMPLED, 4) == 3
    assert [await driver.state(turn) for turn in bobs] == ["sampled"] * 2
    assert [await driver.state(turn) for turn in anns] == ["dropped.backlog"] * 3 + ["sampled"] * 2


async def test_a_policy_that_began_with_forgotten_turns_is_reported(ledger, driver) -> None:
    told, _ = await driver.step()  # session "s"
    await driver.serve(told)
    await driver.sampled(session="other", version=told)
    later = await driver.commit(await ledger.lease(trainer="a", now=True))
    await driver.serve(later)
    root = await ledger.open_policy(BOB, start=later)
    await ledger.open_policy(ANN)
    forgotten = await ledger.forget("s")
    assert (forgotten.trained_in, forgotten.began_with) == ((told,), (root.weight_version,))
    assert (await ledger.forget("other")).began_with == (root.weight_version,)
