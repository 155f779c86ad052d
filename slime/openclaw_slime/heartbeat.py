"""Heartbeat of a step: tells a long step from one that hangs.

Each rank beats when it makes progress, and the driver reads the count. A collective that waits for a rank that is gone
blocks silently, on every rank.

One small Ray actor, found by its name: the name travels with `NodeConfig`, so slime's args hold no handle.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"

import secrets
from contextlib import suppress
from typing import Any


class Heartbeat:
    """The actor: counts beats. The driver interprets the count."""

    def __init__(self) -> None:
        self._beats = 0

    def beat(self) -> None:
        self._beats += 1

    def count(self) -> int:
        return self._beats


def new_name() -> str:
    return f"openclaw-heartbeat-{secrets.token_hex(4)}"


def start(name: str) -> Any:
    """Start the actor and return its handle. The actor lives as long as the handle, and reserves no CPU."""
    import ray

    return ray.remote(num_cpus=0)(Heartbeat).options(name=name).remote()


def beat(name: str | None) -> None:
    """Send a beat without waiting; a failure is ignored, so that no step fails for it."""
    if name is None:
        return
    import ray

    with suppress(Exception):
        ray.get_actor(name).beat.remote()
