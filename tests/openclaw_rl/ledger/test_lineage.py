"""Commits, and the samples of versions that are cut off the chain."""

import math
from dataclasses import replace

import pytest

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.types import DropReason, VersionRun, VersionState, WeightKind


async def states(ledger):
    return [str(version.state) for version in await ledger.versions()]


async def test_a_commit_makes_a_candidate_and_is_idempotent(ledger, driver):
    turn = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    assert await driver.commit(lease) == 1
    assert await driver.commit(lease) == 1
    await driver.step(version=1)
    assert await driver.commit(lease) == 1  # also after later commits
    version = await ledger.version(1)
    assert (version.parent, version.state, version.lease_id) == (0, VersionState.CANDIDATE, lease.lease_id)
    assert (version.folder, version.sha256, version.kind) == (f"versions/{lease.lease_id}", "sha-1", WeightKind.LORA)
    assert version.report.probes[0].log_probs == (-1.0,)
    assert (await ledger.versions())[1].report.metrics == {"loss": 0.5}
    record = await ledger.turn(turn)
    assert (record.state, record.trained_in, record.lease_id) == ("trained", 1, lease.lease_id)
    tip = await ledger.tip()
    assert (tip.weight_version, tip.base_hash, tip.needs_fresh_moments) == (2, "base-1", False)


async def test_a_commit_leaves_out_what_the_trainer_could_not_use(ledger, driver):
    good, bad = await driver.sampled(), await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    await driver.commit(lease, drop={bad: "too_long"})
    assert (await driver.state(good), await driver.state(bad)) == ("trained", "dropped.too_long")


async def test_commits_that_do_not_fit_are_refused_and_change_nothing(ledger, driver):
    turn = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    with pytest.raises(CommitRefused, match="for base other"):
        await driver.commit(lease, base_hash="other")
    with pytest.raises(CommitRefused, match="no such drop reason"):
        await driver.commit(lease, drop={turn: "boring"})
    with pytest.raises(CommitRefused, match="none of its samples"):
        await driver.commit(lease, drop={turn: "too_long"})
    with pytest.raises(CommitRefused, match="not a folder below"):
        await driver.commit(lease, folder="versions/../../x")
    with pytest.raises(CommitRefused, match="the step builds on version 5"):
        await driver.commit(replace(lease, parent=5))
    assert await driver.state(turn) == "leased"
    assert await driver.commit(lease) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log_probs": [math.nan]}, "probes not finite"),
        ({"parent_log_probs": [-math.inf]}, "probes not finite"),
        ({"log_probs": [-1.0, -1.0]}, "two log-probs for each token"),
        ({"parent_log_probs": []}, "two log-probs for each token"),
        ({"prompt_ids": []}, "a prompt"),
    ],
)
async def test_probes_that_nobody_could_read_again_are_refused(ledger, driver, change, words):
    turn = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    probe = Probe(**{"prompt_ids": [1], "response_ids": [2], "log_probs": [-1.0], "parent_log_probs": [-1.5]} | change)
    with pytest.raises(CommitRefused, match=words):
        await driver.commit(lease, probe=probe)
    assert await driver.state(turn) == "leased"
    assert await driver.commit(lease) == 1


async def test_a_rejected_version_takes_those_on_top_of_it_along(ledger, driver):
    """The batch of the failed step ends; those on top did no wrong and wait again, where their sampler still counts."""
    _, (kept,) = await driver.step()
    bad, (at_fault,) = await driver.step()
    _, (innocent,) = await driver.step()
    _, (sampled_by_bad,) = await driver.step(version=bad)
    assert await ledger.reject(bad, "KL 9.0") == [4, 3, 2]
    assert (await ledger.tip()).weight_version == 1
    assert await states(ledger) == ["serving", "candidate", "rejected", "rejected", "rejected"]
    assert await driver.state(kept) == "trained"
    assert await driver.state(at_fault) == "dropped.gate_rejected"
    assert (await ledger.version(3)).reason == "built on version 2, which was rejected: KL 9.0"
    lease = await ledger.lease(trainer="a", now=True)
    assert [sample.sample_id for sample in lease.samples] == [innocent]
    assert await driver.state(sampled_by_bad) == "dropped.rolled_back"
    assert await driver.commit(lease) == 5  # numbers are never used again


async def test_the_commit_of_a_rejected_version_is_refused_when_said_again(ledger, driver):
    await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    await driver.commit(lease)
    await ledger.reject(1, "not finite")
    with pytest.raises(CommitRefused, match="version 1 is rejected: not finite"):
        await driver.commit(lease)


async def test_a_step_on_a_rejected_parent_is_refused(ledger, driver):
    await driver.step()
    turn = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    await ledger.reject(1, "KL")
    with pytest.raises(CommitRefused, match="is revoked: version 1 was rejected"):
        await driver.commit(lease)
    assert await driver.state(turn) == "sampled"


async def test_rejections_in_a_row_are_counted_until_one_passes(ledger, driver):
    for n in (1, 2):
        await driver.step()
        await ledger.reject(n, "KL")
        assert await ledger.rejections_in_a_row() == n
    await driver.step()
    await ledger.set_version_state(3, VersionState.GATED)
    assert await ledger.rejections_in_a_row() == 0


async def test_what_serves_is_not_rejected(ledger, driver):
    await driver.step()
    await driver.serve(1)
    with pytest.raises(LedgerError, match="version 1 is serving and cannot become rejected"):
        await ledger.reject(1, "KL")
    with pytest.raises(LedgerError, match="version 0 is retired and cannot become rejected"):
        await ledger.reject(0, "KL")


async def test_one_version_serves(ledger, driver):
    assert await ledger.serving_version() == 0
    await driver.step()
    await driver.serve(1)
    assert (await states(ledger), await ledger.serving_version()) == (["retired", "serving"], 1)
    with pytest.raises(LedgerError, match="version 1 is serving and cannot become candidate"):
        await ledger.set_version_state(1, VersionState.CANDIDATE)
    with pytest.raises(LedgerError, match="by reject, rollback or lose_undurable alone"):
        await ledger.set_version_state(1, VersionState.ROLLED_BACK)
    await ledger.set_version_state(1, VersionState.SERVING)  # what it is already
    await ledger.set_version_state(0, VersionState.SERVING)
    assert await states(ledger) == ["serving", "retired"]
    with pytest.raises(LedgerError, match="no version 7"):
        await ledger.version(7)


@pytest.mark.parametrize("requeue", [False, True])
async def test_rollback_frees_or_ends_the_samples_of_what_it_abandons(ledger, driver, requeue):
    _, (kept,) = await driver.step()
    await driver.serve(1)
    _, (sampled_by_1,) = await driver.step(version=1)
    await driver.serve(2)
    _, (sampled_by_2,) = await driver.step(version=2)
    waiting = await driver.sampled(runs=(VersionRun(1, 1), VersionRun(2, 2), VersionRun(1, 1)))
    version = await ledger.rollback(1, requeue=requeue)
    assert (version.weight_version, version.state) == (1, VersionState.SERVING)
    assert await states(ledger) == ["retired", "serving", "rolled_back", "rolled_back"]
    assert ((await ledger.tip()).weight_version, await ledger.serving_version()) == (1, 1)
    lease = await ledger.lease(trainer="a", now=True)
    assert ([sample.sample_id for sample in lease.samples] if lease else []) == ([sampled_by_1] if requeue else [])
    assert await driver.state(sampled_by_2) == "dropped.rolled_back"
    assert await driver.state(waiting) == "dropped.rolled_back"  # tokens in its middle are of an abandoned version
    assert await driver.state(kept) == "trained"
    if lease:
        assert await driver.commit(lease) == 4


async def test_rollback_goes_only_to_what_passed_the_gate_and_can_be_trained_from(ledger, driver):
    await driver.step()
    with pytest.raises(LedgerError, match="version 1 is candidate: only a version that passed"):
        await ledger.rollback(1, requeue=False)
    await driver.serve(1)
    await driver.step(durable=False)
    await driver.serve(2)
    await ledger.rollback(0, requeue=False)
    with pytest.raises(LedgerError, match="version 1 is rolled_back"):
        await ledger.rollback(1, requeue=False)
    number, _ = await driver.step(durable=False)
    await driver.serve(number)
    with pytest.raises(LedgerError, match="never checkpointed"):
        await ledger.rollback(number, requeue=False)


async def test_rollback_may_go_to_a_version_that_was_passed_over(ledger, driver):
    await driver.step()
    await driver.step()
    await ledger.set_version_state(1, VersionState.GATED)
    await ledger.set_version_state(1, VersionState.SUPERSEDED)
    await driver.serve(2)
    await ledger.rollback(1, requeue=False)
    assert await states(ledger) == ["retired", "serving", "rolled_back"]


async def test_a_rollback_revokes_the_lease_that_builds_on_what_it_abandons(ledger, driver):
    await driver.step()
    await driver.serve(1)
    turn = await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    await ledger.rollback(0, requeue=False)
    with pytest.raises(CommitRefused, match="is revoked: rolled back to version 0"):
        await driver.commit(lease)
    assert await driver.state(turn) == "sampled"


async def test_the_optimizer_state_of_the_tip_may_be_gone(ledger, driver):
    await driver.step()
    await ledger.optimizer_pruned(1)
    assert (await ledger.tip()).needs_fresh_moments


async def test_a_pin_is_kept_moved_by_a_rollback_and_gone_with_its_version(ledger, driver):
    await driver.step()
    await driver.serve(1)
    await driver.step()
    await ledger.set_pin(2)
    assert await ledger.pinned() == 2
    await ledger.rollback(1, requeue=False)
    assert await ledger.pinned() == 1
    with pytest.raises(LedgerError, match="version 2 is rolled_back and cannot be pinned"):
        await ledger.set_pin(2)
    number, _ = await driver.step()
    await ledger.set_pin(number)
    await ledger.reject(number, "KL")
    assert await ledger.pinned() is None


async def test_versions_behind_the_last_durable_one_are_lost_with_the_trainer(ledger, driver):
    _, (safe,) = await driver.step()
    _, (lost_first,) = await driver.step(durable=False)
    await ledger.durable(1)
    _, (lost_second,) = await driver.step(durable=False)
    await driver.serve(3)
    await driver.sampled(version=1)
    lease = await ledger.lease(trainer="a", now=True)
    version = await ledger.lose_undurable("the actor died")
    assert (version.weight_version, version.parent, version.same_weights_as, version.state) == (4, 1, 1, "serving")
    assert version.sha256 == (await ledger.version(1)).sha256
    assert await states(ledger) == ["retired", "candidate", "lost", "lost", "serving"]
    assert [await driver.state(turn) for turn in (safe, lost_first, lost_second)] == ["trained", "sampled", "sampled"]
    with pytest.raises(CommitRefused, match="is revoked: the actor died"):
        await driver.commit(lease)
    with pytest.raises(CommitRefused, match="version 3 is lost"):
        await ledger.durable(3)
    assert await ledger.lose_undurable("again") is None
    # Serving old weights again is no commit: a sample of version 0 is one commit old, not two.
    assert len((await ledger.lease(trainer="a", now=True)).samples) == 3


async def test_the_durable_version_goes_on_under_a_new_number_even_if_it_serves_itself(ledger, driver):
    await driver.step()
    await driver.serve(1)
    await driver.step(durable=False)
    assert (await ledger.lose_undurable("crash")).weight_version == 3
    assert await states(ledger) == ["retired", "retired", "lost", "serving"]


async def test_an_older_version_goes_on_serving_when_later_ones_are_lost(ledger, driver):
    await driver.step()
    _, (lost,) = await driver.step(durable=False)
    await ledger.lose_undurable("crash")
    await ledger.drop(lost, DropReason.METHOD)
    assert await states(ledger) == ["serving", "candidate", "lost", "candidate"]  # what never passed the gate has to
    await driver.serve(1)
    await driver.serve(3)
    await ledger.set_version_state(1, VersionState.SERVING)  # pinned
    await driver.step(version=1, durable=False)
    await ledger.lose_undurable("crash")
    assert await states(ledger) == ["retired", "serving", "lost", "retired", "lost", "retired"]


async def test_a_durable_commit_keeps_what_was_before_it(ledger, driver):
    await driver.step(durable=False)
    await driver.step(durable=True)
    assert await ledger.lose_undurable("crash") is None


async def test_what_a_lost_version_sampled_stays_valid_until_a_rollback_goes_behind_it(ledger, driver):
    await driver.step()
    await driver.serve(1)
    _, (by_1,) = await driver.step(version=1, durable=False)
    await driver.serve(2)
    _, (by_2,) = await driver.step(version=2, durable=False)
    await driver.serve(3)
    waiting = await driver.sampled(version=3)
    unjudged, unanswered = await driver.paired(version=3), await driver.served(version=3)
    assert (await ledger.lose_undurable("crash")).weight_version == 4
    lease = await ledger.lease(trainer="a", now=True)
    assert [sample.sample_id for sample in lease.samples] == [by_1, by_2, waiting]
    await ledger.release(lease.lease_id, lease.fence, reason="x")
    assert [await driver.state(turn) for turn in (unjudged, unanswered)] == ["paired", "served"]
    await ledger.rollback(1, requeue=False)  # version 1 is before the lost ones
    assert await states(ledger) == ["retired", "serving", "rolled_back", "rolled_back", "rolled_back"]
    lease = await ledger.lease(trainer="a", now=True)
    assert [sample.sample_id for sample in lease.samples] == [by_1]
    assert [await driver.state(turn) for turn in (by_2, waiting)] == ["dropped.rolled_back"] * 2
    assert await ledger.audit() == []


async def test_the_age_of_what_a_lost_version_sampled_is_its_depth_against_the_tips(ledger, driver):
    """max_staleness is 2, and the lost version was one commit deep: its samples are good for tips of 0 to 3 commits."""
    _, (trained_by_lost,) = await driver.step(durable=False)
    await driver.serve(1)
    await ledger.lose_undurable("crash")
    waiting = [await driver.sampled(version=1) for _ in range(5)]
    for turn in (trained_by_lost, *waiting[:3]):
        lease = await ledger.lease(trainer="a", n=1)
        assert [sample.sample_id for sample in lease.samples] == [turn]
        await driver.commit(lease)
    assert await ledger.lease(trainer="a", n=1) is None
    assert [await driver.state(turn) for turn in waiting[3:]] == ["dropped.stale"] * 2


async def test_a_lost_version_on_a_rejected_one_is_rejected_with_it(ledger, driver):
    await driver.step()
    await driver.step(durable=False)
    await ledger.lose_undurable("crash")
    await ledger.reject(1, "KL")
    assert await states(ledger) == ["serving", "rejected", "rejected", "rejected"]
    assert (await ledger.version(2)).reason == "built on version 1, which was rejected: KL"
    assert await ledger.audit() == []


async def test_a_pin_on_a_lost_version_moves_to_what_serves_in_its_place(ledger, driver):
    await driver.step(durable=False)
    await driver.serve(1)
    await ledger.set_pin(1)
    await ledger.lose_undurable("crash")
    assert (await ledger.pinned(), await ledger.serving_version()) == (2, 2)


async def test_versions_that_the_trainer_holds_whole_are_durable_before_the_others_are_lost(ledger, driver):
    """The server was away when the trainer wrote its last checkpoint, so no call made the version durable."""
    fences = []
    for version in range(3):
        await driver.sampled(version=version)
        lease = await ledger.lease(trainer="a", now=True)
        fences.append(lease.fence)
        await driver.serve(await driver.commit(lease, durable=False))
    kept = await ledger.lose_undurable("crash", whole_fences=[*fences[:2], 99])
    assert (kept.weight_version, kept.same_weights_as) == (4, 2)
    assert await states(ledger) == ["retired", "retired", "retired", "lost", "serving"]
    assert [version.durable for version in await ledger.versions()] == [True, True, True, False, True]
    assert await ledger.lose_undurable("again", whole_fences=fences) is None  # what is lost stays lost
    assert not (await ledger.version(3)).durable
    assert await ledger.audit() == []


async def test_no_trainer_brings_a_version_back_that_was_rolled_back(ledger, driver):
    await driver.sampled()
    lease = await ledger.lease(trainer="a", now=True)
    await driver.serve(await driver.commit(lease, durable=False))
    await ledger.rollback(0, requeue=True)
    assert await ledger.lose_undurable("crash", whole_fences=[lease.fence]) is None
    assert (await ledger.tip()).weight_version == 0
