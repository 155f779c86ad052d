"""Weights that may be pruned, and calls that are refused after it."""

import pytest

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import Identity
from openclaw_rl.types import WeightKind


async def steps(driver, count, *, served=True, durable=True):
    numbers = []
    for _ in range(count):
        number, _ = await driver.step(version=(await driver.ledger.tip()).weight_version, durable=durable)
        if served:
            await driver.serve(number)
        numbers.append(number)
    return numbers


async def test_what_serves_is_pinned_is_trained_from_is_among_the_newest_or_spaced_apart_is_needed(ledger, driver):
    await steps(driver, 10)
    await steps(driver, 2, served=False)
    await ledger.set_pin(3)
    assert await ledger.needed_versions(2) == {3} | {9, 10} | {11, 12} | {0, 1, 2, 4, 8}
    assert await ledger.needed_versions(0) == {3, 10, 11, 12}
    assert (await ledger.tip()).needed == [(await ledger.version(n)).folder for n in (3, 10, 11, 12)]


async def test_every_version_that_a_rejection_may_fall_back_to_is_needed(ledger, driver):
    await steps(driver, 2)
    *_, last = await steps(driver, 3, served=False)
    for number in sorted(set(range(1, last + 1)) - await ledger.needed_versions(1)):
        await ledger.prune_weights(number, 1)
    while (tip := await ledger.tip()).weight_version > 2:
        await ledger.reject(tip.weight_version, "KL")
        assert (await ledger.tip()).folder is not None


async def test_what_a_trainer_without_its_last_steps_goes_back_to_is_needed(ledger, driver):
    await steps(driver, 2)
    await steps(driver, 3, durable=False)
    assert await ledger.needed_versions(0) == {2, 3, 4, 5}
    with pytest.raises(LedgerError, match="version 2 is needed"):
        await ledger.prune_weights(2, 1)
    assert (await ledger.lose_undurable("crash")).weight_version == 6
    assert (await ledger.tip()).folder == (await ledger.version(2)).folder


async def test_dead_versions_are_not_needed(ledger, driver):
    await steps(driver, 3)
    await ledger.rollback(1, requeue=False)
    assert await ledger.needed_versions(9) == {0, 1}


async def test_a_pruned_version_cannot_serve_again(ledger, driver):
    await steps(driver, 6)
    folder = (await ledger.version(3)).folder
    assert await ledger.prune_weights(3, 2) == folder
    assert (await ledger.version(3)).folder is None
    assert await ledger.prune_weights(3, 2) is None
    for refused in (ledger.rollback(3, requeue=False), ledger.set_pin(3)):
        with pytest.raises(LedgerError, match="weights of version 3 were deleted"):
            await refused
    assert await ledger.needed_versions(9) == {0, 1, 2, 4, 5, 6}
    await ledger.rollback(0, requeue=False)  # the base is in no folder, and is never gone


async def test_a_folder_that_two_versions_name_stays_until_both_are_pruned(ledger, driver):
    await steps(driver, 3)
    await steps(driver, 1, durable=False)
    again = (await ledger.lose_undurable("crash")).weight_version
    assert (await ledger.version(3)).folder == (await ledger.version(again)).folder
    await driver.serve(await driver.commit(await ledger.lease(trainer="a", now=True)))  # what the lost one trained on
    await steps(driver, 1)
    assert await ledger.prune_weights(3, 1) is None
    assert await ledger.prune_weights(again, 1) is not None


async def prune(ledger, newest):
    """As the publisher does."""
    for number in set(await ledger.version_folders()) - await ledger.needed_versions(newest):
        await ledger.prune_weights(number, newest)


@pytest.mark.parametrize("identity", [Identity("base-1", "tokenizer-1", "tiny", WeightKind.FULL)])
async def test_only_versions_whose_weights_exist_count_as_the_newest(ledger, driver):
    """A trainer of full weights wrote each 20th version, and the newest 20 rows have one of them."""
    for number in range(1, 62):
        await steps(driver, 1, durable=number % 20 == 0)
        await prune(ledger, 20)
    assert [(await ledger.version(n)).folder is not None for n in (20, 40, 60)] == [True] * 3
    assert await ledger.way_back(58) == 40
    with pytest.raises(LedgerError, match="version 59 was never checkpointed"):
        await ledger.rollback(59, requeue=False)
    with pytest.raises(LedgerError, match="of the versions up to 19 only the base still has weights"):
        await ledger.roll_back_behind(19)
    assert await ledger.roll_back_behind(58) == 40
    await ledger.rollback(0, requeue=False)  # who names the base gets it


async def test_a_rollback_behind_the_newest_versions_still_finds_what_was_learned(ledger, driver):
    for _ in range(31):
        await steps(driver, 1)
        await prune(ledger, 20)
    assert sorted(await ledger.version_folders()) == [1, 2, 4, 8, *range(12, 32)]
    assert [await ledger.way_back(good) for good in (30, 11, 7, 1, 0)] == [30, 8, 4, 1, 0]


async def test_without_learned_weights_before_a_fall_nothing_is_given_up(ledger, driver):
    await steps(driver, 2, durable=False)
    await steps(driver, 1)
    with pytest.raises(LedgerError, match="name version 0 to give up all that was learned"):
        await ledger.roll_back_behind(2)
    with pytest.raises(LedgerError, match="only the base still has weights"):
        await ledger.rollback_from((3,))
    assert await ledger.serving_version() == 3
    # The first step was trained on it: before it is the base alone.
    assert await ledger.rollback_from((1, 3)) == {"policy": 0}


@pytest.mark.parametrize("identity", [Identity("base-1", "tokenizer-1", "tiny", WeightKind.FULL)])
async def test_weights_that_serve_again_under_new_numbers_after_crashes_are_kept_once(ledger, driver):
    """Else a trainer that crashes again and again leaves one checkpoint under all the numbers that are kept."""
    await steps(driver, 12)
    await steps(driver, 1, durable=False)
    for _ in range(3):
        await ledger.lose_undurable("crash")
        await prune(ledger, 3)
        await driver.serve(await driver.commit(await ledger.lease(trainer="a", now=True), durable=False))
    await ledger.lose_undurable("crash")
    await prune(ledger, 3)
    folders = await ledger.version_folders()
    assert sorted(folders) == [1, 2, 4, 8, 10, 11, 12, 14, 16, 18, 20]
    assert {folders[number] for number in (14, 16, 18, 20)} == {folders[12]}
    # Each number of one checkpoint is a way back: versions between them were sampled from, and may be the last good.
    assert [await ledger.way_back(good) for good in (20, 17, 16, 13, 12, 11)] == [20, 16, 16, 12, 12, 11]
