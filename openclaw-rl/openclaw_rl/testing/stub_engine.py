"""Serve `FakeEngine` over HTTP in the engine dialect, for kill tests and proxy benchmarks without a model."""

# Raw ASGI, because the stub's own cost must stay small beside the measured proxy.

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import orjson
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.engines.dialect import (
    Abort,
    GenerateRequest,
    LoadAdapter,
    ModelCard,
    ModelList,
    Pause,
    UnloadAdapter,
    UpdateWeights,
    error_body,
)
from openclaw_rl.errors import EngineGone, EngineRefused
from openclaw_rl.testing.fake_engine import FakeEngine


def stub_app(engine: FakeEngine) -> ASGIApp:
    """Return an ASGI app that serves `engine`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await _read(receive)
        try:
            if scope["path"] == "/generate":
                request = GenerateRequest.model_validate_json(body)
                if request.stream:
                    await _stream(engine, request, receive, send)
                    return
                answer: object = msgspec.to_builtins(await engine.generate(request))
            else:
                answer = await _control(engine, scope["path"], body)
        except ValidationError as error:
            await _answer(send, 400, error_body(str(error)))
        except EngineRefused as error:
            await _answer(send, error.status, error_body(error.message))
        except EngineGone as error:
            await _answer(send, 503, error_body(str(error)))
        else:
            await _answer(send, 200 if answer is not None else 404, answer)

    return app


async def _control(engine: FakeEngine, path: str, body: bytes) -> object:
    match path:
        case "/health":
            if not await engine.is_healthy():
                raise EngineGone("down")
            return {}
        case "/model_info":
            return (await engine.model_info()).model_dump()
        case "/server_info":
            return engine.server_info
        case "/v1/models":
            loaded = (await engine.adapter_folders() or {}).items()
            cards = [ModelCard(id="stub"), *(ModelCard(id=name, root=root, parent="stub") for name, root in loaded)]
            return ModelList(data=cards).model_dump()
        case "/load_lora_adapter":
            load = LoadAdapter.model_validate_json(body)
            await engine.load_adapter(load.lora_name, Path(load.lora_path))
        case "/unload_lora_adapter":
            await engine.unload_adapter(UnloadAdapter.model_validate_json(body).lora_name)
        case "/pause_generation":
            await engine.pause(Pause.model_validate_json(body or b"{}").mode)
        case "/continue_generation":
            await engine.resume()
        case "/abort_request":
            abort = Abort.model_validate_json(body)
            await (engine.abort_all() if abort.abort_all else engine.abort(abort.rid))
        case "/flush_cache":
            await engine.flush_cache()
        case "/update_weights_from_disk":
            update = UpdateWeights.model_validate_json(body)
            await engine.update_weights(Path(update.model_path), int(update.weight_version or 0))
        case _:
            return None
    return {"success": True}


async def _stream(engine: FakeEngine, request: GenerateRequest, receive: Receive, send: Send) -> None:
    async with aclosing(engine.stream(request)) as replies:
        # The first event decides the status, because a refusal must be a real 4xx.
        first = await anext(replies, None)
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def relay() -> None:
            if first is not None:
                await _event(send, msgspec.json.encode(first))
            async for reply in replies:
                await _event(send, msgspec.json.encode(reply))
            await _event(send, b"[DONE]")

        work, gone = asyncio.ensure_future(relay()), asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                with suppress(EngineGone, OSError):
                    work.result()  # the engine broke off: the body ends without an error
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
    await send({"type": "http.response.body", "body": b""})


async def _event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def _answer(send: Send, status: int, body: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(body)})


async def _read(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    message: dict[str, Any] = {}
    while message.get("type") != "http.disconnect":
        message = dict(await receive())


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
