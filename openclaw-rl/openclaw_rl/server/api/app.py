"""The HTTP application before its routes: one form for every error, `{"error": {"message", "type", "code", "param"}}`,
the check of the request's host, paths with a slash too many, and the answers of a server that is not ready yet.
"""

import time

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl import __version__
from openclaw_rl.errors import EngineError, EpisodeRefused, LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.proxy.model_names import model_list
from openclaw_rl.server.api.page import build_page_router
from openclaw_rl.settings import ServerSettings
from openclaw_rl.web import bodies, host_guard
from openclaw_rl.web.auth import Keys, Secret

_RETRY = {"retry-after": "2"}


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


def with_host_guard(app: ASGIApp, server: ServerSettings, keys: Keys | None = None) -> ASGIApp:
    """Return `app`; while chats need no key, behind the check that keeps web pages out.

    keys: None: those of `server`.
    """
    keys = keys or Keys(server.api_keys)
    guarded = host_guard.local_only(app, allowed_hosts=server.allowed_hosts)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if keys.are_set else guarded)(scope, receive, send)

    return app if server.api_keys else serve


def http_app() -> FastAPI:
    app = FastAPI(title="OpenClaw-RL", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> JSONResponse:
        return _error(error.status, error.message, error.code, error.param)

    @app.exception_handler(EpisodeRefused)
    async def episode_refused(_: Request, error: EpisodeRefused) -> JSONResponse:
        answer = _error(error.status, error.message, error.code, error.param)
        if error.retry_after_s is not None:
            answer.headers["retry-after"] = str(error.retry_after_s)
        return answer

    @app.exception_handler(LedgerError)
    async def ledger_error(_: Request, error: LedgerError) -> JSONResponse:
        return _error(503 if isinstance(error, LedgerUnavailable) else 409, str(error), "ledger")

    @app.exception_handler(EngineError)
    async def engine_error(_: Request, error: EngineError) -> JSONResponse:
        return _error(503, str(error), "engine_unavailable")

    @app.exception_handler(StarletteHTTPException)
    async def unknown_route(request: Request, error: StarletteHTTPException) -> Response:
        if error.status_code == 400:  # the only one of FastAPI itself: the body's text is no UTF-8, or too deep
            return _error(400, "the body is not valid JSON", "invalid_json")
        path = request.url.path
        text = bodies.error_for(
            path, f"{request.method} {path}: {error.detail}", status=error.status_code, code="unknown_route"
        )
        return Response(text, error.status_code, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def bad_body(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [(bodies.place_name(p["loc"][1:]), p["msg"], p["type"]) for p in error.errors()]
        first, said, kind = found[0]
        if kind == "json_invalid":
            return _error(422, "the body is not valid JSON", "invalid_json")
        if not first:
            return _error(422, f"the body must be a JSON object: {said}", "invalid_json")
        return _error(422, "; ".join(f"{place}: {msg}" for place, msg, _ in found), "invalid_body", first)

    return app


def _error(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = _RETRY if status == 503 else None
    return JSONResponse({"error": {"message": message, "type": kind, "code": code, "param": param}}, status, headers)


class Door:
    """The application until the server is ready, and then the server's own.

    A server that waits for its engine answers at once: 503 with Retry-After, the one model that it will serve, and to
    the admin key the part that it waits for. The page's files hold no data, and tell a browser that the server starts.
    """

    def __init__(self, server: ServerSettings, model_name: str, keys: Keys | None = None) -> None:
        self.waits_for = "the server starts"
        """The reason that it is not ready, for the operator."""
        self.admin_key: str | None = None
        """Key that may read the reason; None until it is known."""
        self._models = model_list(model_name, int(time.time()))
        self._page = http_app()
        self._page.include_router(build_page_router())
        self._app: ASGIApp = with_host_guard(with_plain_paths(self._not_ready), server, keys)

    def open(self, app: ASGIApp) -> None:
        """Answer every request with this application from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _not_ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        match scope["method"], scope["path"].removeprefix("/v1"):
            case "GET", "/models":
                await bodies.answer(send, 200, self._models)
            case "GET", "/healthz":
                body: dict[str, object] = {"status": "starting"}
                request, key = Request(scope), self.admin_key
                if key is not None and Secret(key).opens(request.headers.get("authorization")):
                    body["problems"] = [f"engine: {self.waits_for}"]
                await bodies.answer(send, 503, orjson.dumps(body), _RETRY)
            case "GET", path if path == "/" or path.startswith("/page/"):
                await self._page(scope, receive, send)
            case _:
                said = "the server is not ready yet; try again"
                text = bodies.error_for(scope["path"], said, status=503, code="starting")
                await bodies.answer_unread(receive, send, 503, text, _RETRY)
