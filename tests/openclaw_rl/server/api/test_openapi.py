"""The OpenAPI document, for tools and fuzzers."""

from fastapi import FastAPI

from openclaw_rl.server.api import openapi
from openclaw_rl.server.api.trainer import LeaseWait, build_push_router, build_trainer_router


def test_the_routes_that_hide_from_fastapi_are_all_in_it() -> None:
    hidden = (
        build_trainer_router(None, token="t", lease_wait=LeaseWait(), on_commit=lambda _: None),
        build_push_router(None, token="t", pushes=None, on_start=None),
    )
    paths = openapi.document(FastAPI())["paths"]
    for router in hidden:
        assert {route.path for route in router.routes} <= paths.keys()
    assert {"/v1/chat/completions", "/v1/models", "/v1/models/{name}"} <= paths.keys()
