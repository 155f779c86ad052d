"""Routes for the operator and for liveness: `/healthz`, `/v1/admin/*`, `/v1/turns*`, `/metrics`.

`/healthz` answers anyone with a word, and with the admin key says what is wrong; everything else needs that key,
compared in constant time. Nothing here prints a secret.
"""

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from openclaw_rl.admin.ports import AdminDeps, problems
from openclaw_rl.admin.show import add_looks
from openclaw_rl.admin.steer import add_commands
from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.auth import Secret


def build_admin_router(deps: AdminDeps) -> APIRouter:
    router = APIRouter()

    key = Secret(deps.admin_key)

    def is_admin(request: Request) -> bool:
        return key.opens(request.headers.get("authorization"))

    async def admin(request: Request) -> None:
        if not is_admin(request):
            raise RequestError(
                "this route needs the admin key (keys/admin.key in the data directory)",
                status=401,
                code="invalid_api_key",
            )

    guarded = APIRouter(dependencies=[Depends(admin)])

    @router.get("/healthz")
    async def healthz(request: Request) -> JSONResponse:
        """`ok`, or `degraded` while a part is down; chats are held, not refused, meanwhile. With the admin key also
        which part, and why."""
        found = problems(deps)
        body: dict[str, Any] = {
            "status": "degraded" if found else "ok",
            "weight_version": deps.serving.current,
        }
        if is_admin(request):
            body["problems"] = found
        return JSONResponse(body)

    add_looks(guarded, deps)
    add_commands(guarded, deps)
    router.include_router(guarded)
    return router
