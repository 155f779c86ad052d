"""Outer end of a harness that lives inside a sandbox: a Unix socket that leads to one episode's model.

It passes `POST …/chat/completions` and `GET …/models` of its episode and refuses everything else: with the server in
reach an agent would post its own outcome. Inside, `http://127.0.0.1:30000/v1` is the base URL, and no key is needed.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import h11
import httpx

_PASSED = {("POST", "/v1/chat/completions"): "/chat/completions", ("GET", "/v1/models"): "/models"}
_KEPT_HEADERS = frozenset({"content-type", "accept"})
_MOST_BYTES = 32 << 20
_READ_S = 600.0
_MOST_CONNECTIONS = 16


@asynccontextmanager
async def gateway(
    folder: Path,
    base_url: str,
    headers: Mapping[str, str],
    client: httpx.AsyncClient,
    admit: Callable[[bytes], bytes | None] = lambda body: body,
) -> AsyncIterator[None]:
    """Serve the socket `folder/socket` until the block ends.

    base_url: of the episode's API, without a slash at its end. headers: added to each request, for the key. admit:
    returns the body of a chat as it goes on, or None when the episode takes no more chats.
    """
    open_now: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(open_now) >= _MOST_CONNECTIONS:
            writer.close()
            return
        open_now.add(task)
        try:
            await _Connection(reader, writer, base_url, headers, client, admit).run()
        except (OSError, TimeoutError, h11.ProtocolError, httpx.HTTPError):
            pass  # the agent's own connection broke off, or it does not speak HTTP
        finally:
            open_now.discard(task)
            writer.close()

    _open_to_others(folder)
    server = await asyncio.start_unix_server(serve, folder / "socket")
    os.chmod(folder / "socket", 0o666)
    try:
        yield
    finally:
        server.close()
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)


def _open_to_others(folder: Path) -> None:
    """Make the folder; the user of the sandbox passes through it."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)


class _Connection:
    """One connection: a request, its answer, and the end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        base_url: str,
        headers: Mapping[str, str],
        client: httpx.AsyncClient,
        admit: Callable[[bytes], bytes | None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._base_url, self._headers, self._client, self._admit = base_url, headers, client, admit
        self._http = h11.Connection(h11.SERVER)

    async def run(self) -> None:
        request = await self._event()
        if not isinstance(request, h11.Request):
            return
        path = _PASSED.get((request.method.decode(), request.target.decode("latin-1").partition("?")[0]))
        body = await self._body()
        if body is None:
            await self._answer(413, b'{"error": {"message": "the request is too large"}}')
        elif path is None:
            await self._answer(403, b'{"error": {"message": "only chat/completions and models are here"}}')
        elif request.method == b"POST" and (body := self._admit(body)) is None:
            await self._answer(403, b'{"error": {"message": "the episode is at its limit of steps"}}')
        else:
            await self._pass(request, path, body)

    async def _pass(self, request: h11.Request, path: str, body: bytes) -> None:
        kept = {
            key.decode(): value.decode("latin-1") for key, value in request.headers if key.decode() in _KEPT_HEADERS
        }
        url = self._base_url + path
        method = request.method.decode()
        async with self._client.stream(method, url, content=body, headers={**kept, **self._headers}) as answer:
            kind = answer.headers.get("content-type", "application/json")
            await self._send(
                h11.Response(
                    status_code=answer.status_code,
                    headers=[("content-type", kind), ("connection", "close"), ("transfer-encoding", "chunked")],
                )
            )
            async for piece in answer.aiter_bytes():
                await self._send(h11.Data(data=piece))
            await self._send(h11.EndOfMessage())

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(_READ_S):
                self._http.receive_data(await self._reader.read(1 << 16))
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        return event

    async def _body(self) -> bytes | None:
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > _MOST_BYTES:
                return None
        return bytes(body)

    async def _answer(self, status: int, body: bytes) -> None:
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        await self._send(h11.Response(status_code=status, headers=headers))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(_READ_S):
                    await self._writer.drain()
