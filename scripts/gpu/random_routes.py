"""`openclaw-rl` whose pool places each call at random: to compare prefix-cache hits with those of affinity.

python -m gpu.random_routes serve …     as `openclaw-rl serve …`
"""

import random
from collections.abc import Container

from openclaw_rl.cli.main import main
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_member import Member
from openclaw_rl.errors import EngineGone

_choose = PooledEngine._choose


class AllBut:
    """Engines that a call may not meet: all but one, and those that it has met."""

    def __init__(self, one: Member, tried: Container[Member]) -> None:
        self._one, self._tried = one, tried

    def __contains__(self, member: object) -> bool:
        return member is not self._one or member in self._tried


def at_random(self: PooledEngine, affinity: str | None, extra_key: str | None, tried: Container[Member]) -> Member:
    """Return an engine drawn at random; the least loaded one if that may not be asked. Raises EngineGone."""
    try:
        return _choose(self, None, extra_key, AllBut(random.choice(self._members), tried))
    except EngineGone:
        return _choose(self, None, extra_key, tried)


if __name__ == "__main__":
    PooledEngine._choose = at_random  # type: ignore[method-assign]
    main()
