"""The engine, or the engines of a pool: their client, and the processes of those that the server starts.

Promises:

- A process that ended starts again at a new port: another one may have taken the old port, and every restart would fail
  alike.
- While the only engine is away, chats are held. An engine of a pool leaves it at once, and comes back by the pool's own
  rules.

Leaves to others: the restart itself, and the end with the server (`processes.supervisor`).
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.kind import EngineKind, OnExit, load_kind
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_drains import EngineDrains
from openclaw_rl.engines.pool_member import Member
from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.server.child_commands import engine_child, replica_child
from openclaw_rl.server.lifecycle import Lifetime
from openclaw_rl.settings import Settings

_ENDED = "its process ended"


async def open_engine(
    settings: Settings, data: DataDir, serving: VersionAdmission, *, life: Lifetime, engine_exited: asyncio.Event
) -> HttpEngine | PooledEngine:
    """Start the engine where its kind has a child process, or each of its replicas; return the client of all.

    The end of an engine that is alone sets `engine_exited`. Raises SettingsError.
    """
    kind = load_kind(settings.engine.kind)
    client = partial(HttpEngine, settings=settings.engine, loses_adapter_count=kind.loses_adapter_count)
    if settings.engine.urls:
        return _pool([client(url) for url in settings.engine.urls], settings)
    if settings.engine.replicas > 1:
        return await _replicas(kind, client, settings, data, life)
    engine, child = await _started(
        partial(engine_child, kind, settings, data), client, ends=serving.hold, moved=engine_exited.set
    )
    if child is not None:
        life.start(child)
    return engine


def drains_of(engine: HttpEngine | PooledEngine, settings: Settings, data: DataDir) -> EngineDrains | None:
    """Return the operator's choice of a pool's engines; None for one engine."""
    if not isinstance(engine, PooledEngine):
        return None
    return EngineDrains(engine, data.drained, wait_s=settings.publisher.call_timeout_s)


def _pool(engines: list[HttpEngine], settings: Settings) -> PooledEngine:
    # One engine that hangs must not use up the time of a call to all.
    change_s = settings.publisher.call_timeout_s / 3
    return PooledEngine(engines, change_s=change_s, is_full=settings.training.weights == "full")


async def _replicas(
    kind: EngineKind, client: Callable[[str], HttpEngine], settings: Settings, data: DataDir, life: Lifetime
) -> PooledEngine:
    members, made = list[Member](), []

    def left(place: int) -> None:
        members[place].leave(_ENDED)

    for number in range(1, settings.engine.replicas + 1):
        make = partial(replica_child, kind, settings, data, number)
        made.append(await _started(make, client, ends=partial(left, number - 1)))
    pool = _pool([engine for engine, _ in made], settings)
    members += pool.every
    for member, (_, child) in zip(members, made, strict=True):
        if child is not None:
            member.own_name = child.name
            life.start(child)
    return pool


async def _started(
    make: Callable[[OnExit], tuple[str, Child | None]],
    client: Callable[[str], HttpEngine],
    *,
    ends: Callable[[], None],
    moved: Callable[[], None] = lambda: None,
) -> tuple[HttpEngine, Child | None]:
    """Return an engine's client and its process, which the caller has to run.

    ends: called whenever the process ended. moved: called after it, once the client knows the next URL.
    """

    async def on_exit() -> None:
        ends()
        with contextlib.suppress(SettingsError):
            url, again = await asyncio.to_thread(make, on_exit)
            if child is not None and again is not None:
                child.command = again.command
                engine.move(url)
        moved()

    url, child = await asyncio.to_thread(make, on_exit)
    engine = client(url)
    return engine, child
