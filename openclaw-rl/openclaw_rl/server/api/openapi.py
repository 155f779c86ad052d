"""The OpenAPI document: FastAPI's own routes, and the routes that bypass FastAPI (chats, models) or read their own
bodies (the trainer's).
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from openclaw_rl.proxy.body import ChatBody
from openclaw_rl.proxy.dialects.messages_request import CountBody, MessagesBody
from openclaw_rl.proxy.dialects.responses_request import ResponsesBody
from openclaw_rl.server.api.feedback import FeedbackBody
from openclaw_rl.trainer_protocol import (
    Commit,
    Durable,
    Failed,
    Leased,
    LeaseRef,
    LeaseRequest,
    PushBegin,
    PushEnd,
    Release,
    Start,
)

_BODIES: dict[str, type[BaseModel] | None] = {
    "/v1/chat/completions": ChatBody,
    "/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/messages/count_tokens": CountBody,
    "/v1/feedback": FeedbackBody,
    "/v1/trainer/tip": None,
    "/v1/trainer/lease": LeaseRequest,
    "/v1/trainer/renew": LeaseRef,
    "/v1/trainer/release": Release,
    "/v1/trainer/commit": Commit,
    "/v1/trainer/durable": Durable,
    "/v1/trainer/failed": Failed,
    "/v1/trainer/start": Start,
    "/v1/trainer/leased": Leased,
    "/v1/trainer/push/begin": PushBegin,
    "/v1/trainer/push/end": PushEnd,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "code", "param")},
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of every route of `app`, with its body."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["security"] = [{"key": []}]
    for path, body in _BODIES.items():
        operation: dict[str, Any] = {"responses": {"200": {"description": "Done."}}}
        if body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": _schema(body, schemas)}},
            }
        found["paths"].setdefault(path, {})["post"] = operation
    for path in ("/v1/models", "/models"):
        found["paths"][path] = {"get": {"responses": {"200": {"description": "The model's name."}}}}
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        one = {"responses": {"200": {"description": "The model of this name."}}, "parameters": [name]}
        found["paths"][f"{path}/{{name}}"] = {"get": one}
    failed = {"description": "The error.", "content": {"application/json": {"schema": _reference("Error")}}}
    for operations in found["paths"].values():
        for operation in operations.values():
            operation["responses"] |= {"4XX": failed, "503": failed}
            operation["responses"].pop("422", None)
    return found


def _schema(body: type[BaseModel], schemas: dict[str, Any]) -> dict[str, str]:
    whole = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= whole.pop("$defs", {})
    schemas[body.__name__] = whole
    return _reference(body.__name__)


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
