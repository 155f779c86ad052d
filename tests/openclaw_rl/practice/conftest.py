"""Wishes as the planner and the stop rules see them."""

from collections.abc import Callable
from typing import Any

import pytest

from openclaw_rl.types import Wish, WishSource, WishState


def make_wish(wish_id: int, *practised: int, user: str = "ann", over: tuple[int, ...] = (), **more: Any) -> Wish:
    """A wish with a source for each number in `practised`; `over`: places of sources on which a newer wish holds."""
    sources = tuple(
        WishSource(f"turn-{wish_id}-{place}", f"words {wish_id}-{place}", "verbatim", n, place in over)
        for place, n in enumerate(practised or (0,))
    )
    return Wish(wish_id, user, "policy", 1.0, WishState.ACTIVE, sources, **more)


@pytest.fixture
def wish() -> Callable[..., Wish]:
    return make_wish
