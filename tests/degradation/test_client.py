"""A client that stops reading in the middle of its stream and stays connected."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

LONG = {"max_tokens": 9000, "ignore_eos": True, "model": "m" * 2000, "stream": True}
"""18 MB of events, as each names the model: more than the buffers between server and client hold."""


@contextmanager
def frozen_reader(url: str) -> Iterator[None]:
    """Ask for a long stream, read its beginning, and take nothing more."""
    at = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": "tell me all"}], **LONG}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(60)
        client.connect((at.hostname, at.port))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(64).startswith(b"HTTP/1.1 200")
        yield


async def test_its_place_is_free_after_a_while_and_its_turn_is_recorded(place: Any) -> None:
    settings = {"server.max_streams": 1, "server.stall_s": 0.5, "model.context_length": 20_000}
    async with place(**settings) as here:

        async def is_served() -> bool:
            return (await here.chat(session="next")).status_code == 200

        with frozen_reader(here.server.url):
            assert (await here.chat(session="next")).status_code == 503
            await here.until(is_served)
            assert here.lines["client_stalled"] == 1
        told = await here.admin("/v1/admin/status")
        assert told["counts"]["dropped.cancelled"] == 1


async def test_a_stop_beside_it_is_no_fault(place: Any) -> None:
    async with place(**{"server.drain_s": 1, "model.context_length": 20_000}) as here:
        with frozen_reader(here.server.url):
            os.kill(here.server.pid, signal.SIGTERM)

            async def is_cut() -> bool:
                return here.lines["reply_cut_by_stop"] == 1

            await here.until(is_cut)
    assert "Traceback" not in here.server.log
