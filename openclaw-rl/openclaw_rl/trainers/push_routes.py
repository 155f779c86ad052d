"""The part of the trainer API for a trainer of full weights that checkpoints now and then: `start`, `leased`, `push`.

On top of `trainers.routes`: the same token, the same form of errors.
"""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from openclaw_rl.ledger import Ledger
from openclaw_rl.trainers.api import Leased, PushBegin, PushEnd, Start, Started
from openclaw_rl.trainers.pushes import TrainerPushes
from openclaw_rl.trainers.routes import answer_lease, guarded_by, parse


def build_push_router(
    ledger: Ledger, *, token: str, pushes: TrainerPushes, on_start: Callable[[str], Awaitable[Started]]
) -> APIRouter:
    """`on_start` is told the name of a trainer that holds nothing."""
    router = APIRouter(prefix="/v1/trainer", route_class=guarded_by(token), include_in_schema=False)

    @router.post("/start")
    async def start(request: Request) -> Started:
        return await on_start((await parse(request, Start)).trainer)

    @router.post("/leased")
    async def leased(request: Request) -> Response:
        return await answer_lease(await ledger.leased((await parse(request, Leased)).fence))

    @router.post("/push/begin")
    async def begin(request: Request) -> dict[str, str]:
        await pushes.begin(await parse(request, PushBegin))
        return {}

    @router.post("/push/end")
    async def end(request: Request) -> dict[str, str]:
        await pushes.end(await parse(request, PushEnd))
        return {}

    return router
