"""`/v1/admin/users`: the users of a server in numbers, and the wishes of one user, for the operator.

The list holds no content. The words of a user come only where the operator names the user.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from openclaw_rl.ledger import Ledger
from openclaw_rl.ledger.users import UserUse
from openclaw_rl.server.api.status import plain
from openclaw_rl.server.api.wishes import row
from openclaw_rl.web.auth import Keys

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class UsersDeps:
    ledger: Ledger
    keys: Keys
    aim: float
    """The learned share at which a wish is learned."""
    clock: Callable[[], float] = time.time


def add_users_routes(guarded: APIRouter, deps: UsersDeps) -> None:
    @guarded.get("/v1/admin/users")
    async def users() -> JSONResponse:
        """Return each user with a key, with a request today (UTC), with turns that wait or with wishes, by name."""
        used = await deps.ledger.users(deps.clock() // _DAY_S * _DAY_S)
        known = deps.keys.users()
        rows = []
        for name in sorted({*used, *known}):
            numbers = plain(used.get(name, UserUse()))
            caller = known.get(name)
            limits = deps.keys.limits_of(name).model_dump()
            about = {"user": name, "has_key": caller is not None, "train": caller is None or caller.train}
            rows.append(about | numbers | {"limits": limits})
        return JSONResponse({"users": rows})

    @guarded.get("/v1/admin/users/{user}/wishes")
    async def wishes(user: str) -> JSONResponse:
        """Return the wishes of one user, oldest first; an unknown user has none."""
        return JSONResponse({"wishes": [row(wish, deps.aim) for wish in await deps.ledger.wishes(user=user)]})
