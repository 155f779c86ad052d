"""Load of streamed chats with time stamps of this process, shared by the benchmarks and the GPU checks."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson


@dataclass
class Reply:
    """One streamed reply, with the times of its tokens."""

    started: float
    text: str = ""
    finish_reason: str | None = None
    weight_version: int | None = None
    turn_id: str | None = None
    token_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


async def chat(
    client: httpx.AsyncClient,
    messages: list[dict[str, Any]],
    *,
    session: str,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> Reply:
    """Stream one chat completion; a bad answer does not raise, it is in `error`."""
    reply = Reply(time.perf_counter())
    body = {
        "model": "policy",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-Session-Id": session, **(headers or {})}
        ) as answer:
            if answer.status_code != 200:
                reply.error = f"{answer.status_code}: {(await answer.aread())[:300]!r}"
                return reply
            if (version := answer.headers.get("x-weight-version")) is not None:  # a held chat begins without one
                reply.weight_version = int(version)
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    reply.error = str(event["error"])
                    continue
                reply.turn_id = event.get("id", reply.turn_id)
                reply.usage = event.get("usage") or reply.usage
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        reply.token_times.append(time.perf_counter())
                        reply.text += choice["delta"]["content"]
                    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    except httpx.HTTPError as error:
        reply.error = repr(error)
    if reply.error is None and reply.finish_reason is None:
        reply.error = "cut: no finish_reason"
    return reply


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile (nearest rank) of values; nan if empty."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(q * (len(ranked) - 1)))]


async def loop_delay(stop: asyncio.Event, every_s: float = 0.01) -> list[float]:
    """Return the lateness of this process's own event loop: the load generator's share of every figure."""
    late = []
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(every_s)
        late.append(time.perf_counter() - before - every_s)
    return late
