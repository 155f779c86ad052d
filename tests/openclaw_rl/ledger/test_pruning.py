"""Weights that may be pruned, and calls that are refused after it."""

import pytest

from openclaw_rl.errors import LedgerError


async def steps(driver, count, *, served=True, durable=True):
    numbers = []
    for _ in range(count):
        number, _ = await driver.step(version=(await driver.ledger.tip()).weight_version, durable=durable)
        if served:
            await driver.serve(number)
        numbers.append(number)
    return numbers


async def test_what_serves_is_pinned_is_trained_from_or_is_among_the_newest_is_needed(ledger, driver):
    await steps(driver, 6)
    await steps(driver, 2, served=False)
    await ledger.set_pin(2)
    assert await ledger.needed_versions(2) == {2, 5, 6, 7, 8}
    assert await ledger.needed_versions(0) == {2, 6, 7, 8}
    assert (await ledger.tip()).needed == [(await ledger.version(n)).folder for n in (2, 6, 7, 8)]


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
    assert await ledger.needed_versions(1) == {2, 3, 4, 5}
    with pytest.raises(LedgerError, match="version 2 is needed"):
        await ledger.prune_weights(2, 1)
    assert (await ledger.lose_undurable("crash")).weight_version == 6
    assert (await ledger.tip()).folder == (await ledger.version(2)).folder


async def test_dead_versions_are_not_needed(ledger, driver):
    await steps(driver, 3)
    await ledger.rollback(1, requeue=False)
    assert await ledger.needed_versions(9) == {0, 1}


async def test_a_pruned_version_cannot_serve_again(ledger, driver):
    await steps(driver, 4)
    folder = (await ledger.version(1)).folder
    assert await ledger.prune_weights(1, 2) == folder
    assert (await ledger.version(1)).folder is None
    assert await ledger.prune_weights(1, 2) is None
    for refused in (ledger.rollback(1, requeue=False), ledger.set_pin(1)):
        with pytest.raises(LedgerError, match="weights of version 1 were deleted"):
            await refused
    assert await ledger.needed_versions(9) == {0, 2, 3, 4}
    await ledger.rollback(0, requeue=False)  # the base is in no folder, and is never gone


async def test_a_folder_that_two_versions_name_stays_until_both_are_pruned(ledger, driver):
    await steps(driver, 1)
    await steps(driver, 1, durable=False)
    again = (await ledger.lose_undurable("crash")).weight_version
    assert (await ledger.version(1)).folder == (await ledger.version(again)).folder
    await driver.serve(await driver.commit(await ledger.lease(trainer="a", now=True)))  # what the lost one trained on
    await steps(driver, 1)
    assert await ledger.prune_weights(1, 1) is None
    assert await ledger.prune_weights(again, 1) is not None
