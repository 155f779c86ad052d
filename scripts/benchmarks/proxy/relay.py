"""Bare asyncio relay: it opens a connection upstream for each of its clients, and copies bytes both ways.

It is the limit of a proxy in Python: no HTTP, no JSON, no ledger.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import cast

import uvloop


class _Side(asyncio.Protocol):
    """One side of a relayed connection. It writes what it gets to the other side."""

    def __init__(self, upstream: tuple[str, int] | None = None) -> None:
        """upstream: the address that a client's side connects to; None for the upstream side."""
        self._upstream = upstream
        self._waiting: list[bytes] = []
        self.other: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._upstream is not None:
            self._opening = asyncio.get_running_loop().create_task(self._open(*self._upstream))

    async def _open(self, host: str, port: int) -> None:
        transport, side = await asyncio.get_running_loop().create_connection(_Side, host, port)
        self.other, side.other = transport, self.transport
        for data in self._waiting:
            transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._waiting.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self.other is not None:
            self.other.close()


async def serve(port_file: Path, upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Side(("127.0.0.1", upstream_port)), "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    fresh = port_file.with_suffix(".tmp")
    fresh.write_text(json.dumps({"port": port, "pid": os.getpid()}))
    fresh.rename(port_file)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="The bare relay of proxy_overhead.")
    parser.add_argument("port_file", type=Path)
    parser.add_argument("upstream_port", type=int)
    args = parser.parse_args()
    uvloop.run(serve(args.port_file, args.upstream_port))


if __name__ == "__main__":
    main()
