"""Play a case's requests, in order or together, and keep the clients' answers."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx

_TIMEOUT_S = 60.0


@dataclass
class Seen:
    """One request and its answer."""

    request: Mapping[str, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    elapsed_s: float = 0.0
    heard_at: list[float] = field(default_factory=list)
    """Times at which a part of the answer came, and of its end (monotonic)."""
    left_at: float | None = None
    """Time at which the client left (monotonic)."""

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def is_stream(self) -> bool:
        return bool((self.request.get("body") or {}).get("stream"))


async def play(url: str, requests: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """Play all requests; those of one `parallel_group` together."""
    seen: list[Seen] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client:
        for group, some in groupby(_copies(requests), key=lambda request: request.get("parallel_group")):
            if group is None:
                seen += [await _send(client, request) for request in some]
            else:
                seen += await asyncio.gather(*(_send(client, request) for request in some))
    return seen


def _copies(requests: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for request in requests:
        for number in range(request.get("repeat", 1)):
            yield json.loads(json.dumps(_written_out(request)).replace("{n}", str(number)))


def _written_out(value: Any) -> Any:
    if isinstance(value, dict):
        if "$repeat" in value:
            text, times = value["$repeat"]
            return text * times
        return {key: _written_out(item) for key, item in value.items()}
    return [_written_out(item) for item in value] if isinstance(value, list) else value


async def _send(client: httpx.AsyncClient, request: Mapping[str, Any]) -> Seen:
    seen, leaves = Seen(request), request.get("client", {})
    content = request["raw_body"].encode() if "raw_body" in request else None
    body = request.get("body") if content is None else None
    began = time.monotonic()
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(leaves.get("disconnect_after_s")):
            async with client.stream(
                request["method"], request["path"], headers=request.get("headers"), json=body, content=content
            ) as reply:
                seen.status, seen.headers = reply.status_code, dict(reply.headers)
                async for chunk in reply.aiter_raw():
                    seen.heard_at.append(time.monotonic())
                    chunks.append(chunk)
                    if len(chunks) == leaves.get("disconnect_after_chunks"):
                        break
    except TimeoutError:
        pass
    if leaves:
        seen.left_at = time.monotonic()
    seen.heard_at.append(time.monotonic())
    seen.body, seen.elapsed_s = b"".join(chunks).decode(), seen.heard_at[-1] - began
    return seen
