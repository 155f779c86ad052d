"""An engine's client, and servers for it: the stub engine, and one that answers with any bytes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import uvicorn

from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import EngineSampling, GenerateReply, GenerateRequest
from openclaw_rl.settings import EngineSettings
from openclaw_rl.testing import FakeEngine, stub_app

SETTINGS = EngineSettings(kind="url", url="http://unused", connect_timeout_s=30, token_timeout_s=120)


@asynccontextmanager
async def served(fake: FakeEngine, *, loses_adapter_count: bool = True) -> AsyncIterator[HttpEngine]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(stub_app(fake), log_level="error", lifespan="off", access_log=False))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = HttpEngine(url, settings=SETTINGS, loses_adapter_count=loses_adapter_count)
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield engine
        finally:
            await engine.aclose()
            server.should_exit = True


@asynccontextmanager
async def raw_server(answer: bytes, *, then_hang: bool = False) -> AsyncIterator[HttpEngine]:
    """Answers every connection with fixed bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if then_hang:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = SETTINGS.model_copy(update={"token_timeout_s": 0.2} if then_hang else {})
    engine = HttpEngine(f"http://127.0.0.1:{port}", settings=settings)
    try:
        yield engine
    finally:
        await engine.aclose()
        server.close()


def request(ids: list[int], n: int = 32, **fields: object) -> GenerateRequest:
    sampling = EngineSampling(max_new_tokens=n, temperature=0.7)
    return GenerateRequest.model_validate(
        {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": "r1", **fields}
    )


async def collect(engine: HttpEngine, body: GenerateRequest) -> list[GenerateReply]:
    async with aclosing(engine.stream(body)) as events:
        return [event async for event in events]
