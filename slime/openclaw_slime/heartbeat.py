"""Tells a step that is long from one that hangs: whoever gets on in it says so, and the driver looks whether anybody
does. A collective that waits for a rank that is gone says nothing, on any rank.

One small Ray actor, found by its name: the name travels with `NodeConfig`, and no handle in slime's args.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"

import secrets
from contextlib import suppress
from typing import Any


class Heartbeat:
    """The actor's class. It counts; what the count means is the driver's to say."""

    def __init__(self) -> None:
        self._beats = 0

    def beat(self) -> None:
        self._beats += 1

    def count(self) -> int:
        return self._beats


def new_name() -> str:
    return f"openclaw-pulse-{secrets.token_hex(4)}"


def start(name: str) -> Any:
    """Its handle: the actor lives as long as that. It takes no CPU of the cluster's."""
    import ray

    return ray.remote(num_cpus=0)(Heartbeat).options(name=name).remote()


def beat(name: str | None) -> None:
    """Sent, not waited for; a step never fails for it."""
    if name is None:
        return
    import ray

    with suppress(Exception):
        ray.get_actor(name).beat.remote()
