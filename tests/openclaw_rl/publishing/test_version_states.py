"""States of versions that do not serve."""

from publishing import World, until

from openclaw_rl.types import VersionState


async def test_three_rejections_in_a_row_pause_learning(world: World) -> None:
    for _ in range(3):
        number = await world.commit(sampled_by=0, probe_error=0.2)
        world.publisher.wake()

        async def rejected(n: int = number) -> bool:
            return await world.state(n) is VersionState.REJECTED

        await until(rejected)

    async def paused() -> bool:
        return not await world.ledger.learning()

    await until(paused)
