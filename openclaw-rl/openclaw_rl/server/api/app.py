"""The HTTP application before its routes: one form for every error, `{"error": {"message", "type", "code", "param"}}`,
the check of the request's host, and paths with a slash too many.
"""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl import __version__
from openclaw_rl.errors import EngineError, LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.settings import ServerSettings
from openclaw_rl.web import host_guard


def with_plain_paths(app: ASGIApp) -> ASGIApp:
    """Return `app` behind a correction of slashes: `/v1//models` and `/v1/models/` are `/v1/models`.

    Clients join a base URL that ends in a slash with a path that begins with one. Many follow no redirect of a POST.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if "//" in path or (path.endswith("/") and path != "/"):
            scope = {**scope, "path": f"/{'/'.join(filter(None, path.split('/')))}"}
        await app(scope, receive, send)

    return serve


def with_host_guard(app: ASGIApp, server: ServerSettings) -> ASGIApp:
    """Return `app`; without API keys, behind the check that keeps web pages out."""
    return app if server.api_keys else host_guard.local_only(app, allowed_hosts=server.allowed_hosts)


def http_app() -> FastAPI:
    app = FastAPI(title="OpenClaw-RL", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> JSONResponse:
        return _error(error.status, error.message, error.code, error.param)

    @app.exception_handler(LedgerError)
    async def ledger_error(_: Request, error: LedgerError) -> JSONResponse:
        return _error(503 if isinstance(error, LedgerUnavailable) else 409, str(error), "ledger")

    @app.exception_handler(EngineError)
    async def engine_error(_: Request, error: EngineError) -> JSONResponse:
        return _error(503, str(error), "engine_unavailable")

    @app.exception_handler(StarletteHTTPException)
    async def unknown_route(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", "unknown_route")

    @app.exception_handler(RequestValidationError)
    async def bad_body(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = "; ".join(f"{'.'.join(map(str, p['loc'][1:]))}: {p['msg']}" for p in error.errors())
        return _error(422, problems, "invalid_body")

    return app


def _error(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {"retry-after": "2"} if status == 503 else None
    return JSONResponse({"error": {"message": message, "type": kind, "code": code, "param": param}}, status, headers)
