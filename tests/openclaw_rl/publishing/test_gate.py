"""The gate's tests: bounds of KL, canaries, the engine's numbers. Over the real ledger and a fake engine."""

import pytest
from publishing import PROMPT, Speechless, World, publish, until

from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.publishing.canary import Canary
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.trainer_protocol import Report
from openclaw_rl.types import VersionState


@pytest.mark.parametrize("world", [{"max_step_kl": 1e-9, "max_base_kl": 10.0}, {"max_base_kl": 1e-9}], indirect=True)
async def test_a_step_beyond_a_kl_bound_is_rejected_and_the_old_versionis_served(world: World) -> None:
    async def decided() -> bool:
        return await world.state(number) in (VersionState.REJECTED, VersionState.SERVING)

    # The toy policy's KL is of either sign: take steps until one is beyond the bound.
    for _ in range(60):
        number = await world.commit(sampled_by=world.serving.current)
        world.publisher.wake()
        await until(decided)
        if await world.state(number) is VersionState.REJECTED:
            break
    assert await world.state(number) is VersionState.REJECTED
    assert "KL(" in ((await world.ledger.version(number)).reason or "")
    assert (await world.ledger.tip()).weight_version == (await world.ledger.version(number)).parent
    assert world.serving.current != number
    assert adapter_name(number) not in world.engine.adapters


async def test_an_engine_that_disagrees_with_the_trainer_never_serves_the_version(world: World) -> None:
    number = await world.commit(sampled_by=0, probe_error=0.2)
    world.publisher.wake()

    async def rejected() -> bool:
        return await world.state(number) is VersionState.REJECTED

    await until(rejected)
    assert "self-test" in ((await world.ledger.version(number)).reason or "")
    assert world.serving.current == 0


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_version_under_which_canaries_are_lost_is_refused(world: World, is_lost: bool) -> None:
    number = await world.commit(sampled_by=0)
    version = await world.ledger.version(number)
    assert version.folder is not None
    seeds = {0: BASE_SEED, number: adapter_seed(world.folder / version.folder)}

    async def score(n: int, prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
        return world.engine.policy.log_probs((*prompt, *reply), len(prompt), seeds[n])

    async def drop(reply: tuple[int, ...]) -> float:
        base, new = await score(0, PROMPT, reply), await score(number, PROMPT, reply)
        return (sum(base) - sum(new)) / len(reply)

    replies = [(token, token + 1) for token in range(400, 420)]
    drops = {reply: await drop(reply) for reply in replies}
    reply = max(replies, key=lambda r: drops[r] if is_lost else -drops[r])
    assert (drops[reply] > 0) is is_lost
    settings = PublisherSettings(max_canary_drop=1e-6)
    gate = Gate(world.ledger, world.serving, score, settings, canaries=[Canary(PROMPT, reply)])
    result = await gate.check(version, Report(metrics={"loss": 0.1}, probes=[]))
    assert result.canary_drop == pytest.approx(drops[reply])
    assert result.refusal == (f"canaries lost {drops[reply]:.3f} nats per token > 1e-06" if is_lost else None)


@pytest.mark.parametrize("has_probe", [True, False])
@pytest.mark.parametrize("sampled", [True, False], ids=["on a reply", "on none of the parent"])
async def test_a_version_that_the_engine_has_no_numbers_for_is_refused(
    world: World, has_probe: bool, sampled: bool
) -> None:
    """Finite weights overflow, too; with or without probes, or replies of the parent."""
    if not sampled:
        await publish(world, await world.commit(sampled_by=0))
    number = await world.commit(sampled_by=0, has_probe=has_probe)
    folder = (await world.ledger.version(number)).folder
    assert folder is not None
    world.engine.policy = Speechless(seeds=frozenset({adapter_seed(world.folder / folder)}))
    world.publisher.wake()

    async def rejected() -> bool:
        return await world.state(number) is VersionState.REJECTED

    await until(rejected)
    assert f"the engine has no numbers for version {number}" in ((await world.ledger.version(number)).reason or "")
    assert world.serving.current == number - 1
