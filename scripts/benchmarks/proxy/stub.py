"""Stub engine of both dialects over one `FakeEngine`: `/generate` for ours and the relay, OpenAI's for forwarders.

`GET /pace/N` sets the tokens a second of each stream; 0 is as fast as it goes. Both dialects have the same pace and the
same number of tokens, and the first token comes at once. The text of OpenAI's dialect is invented: it has no prompt.
"""

import argparse
import json
import os
import random
import socket
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.testing.fake_engine import FakeEngine, Pacing
from openclaw_rl.testing.stub_engine import stub_app
from openclaw_rl.testing.toy_policy import ToyPolicy

_PROMPT = [300 + i % 1500 for i in range(2000)]
_SYLLABLES = ["ti", "me", "wa", "ter", "lig", "ht", "hou", "se", "sto", "ry", "poi", "nt"]
_PIECES = [" " + "".join(random.Random(i).choices(_SYLLABLES, k=2)) for i in range(2048)]
_CONTEXT = 1 << 20
"""Tokens of a prompt and its reply: the longest history of `growth` fits."""
_KEEP_ALIVE_S = 600
"""A forwarder that meets a connection that the stub has just closed would answer 500."""


class Stub:
    """ASGI application of both dialects."""

    def __init__(self) -> None:
        pacing = Pacing(tokens_per_s=25.0)
        self._engine = FakeEngine(policy=ToyPolicy(mean_tokens=0), context_length=_CONTEXT, pacing=pacing)
        self._native = stub_app(self._engine)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == "/v1/chat/completions":
            await self._chat(receive, send)
        elif path.startswith("/pace/"):
            self._engine.pacing.tokens_per_s = float(path.rpartition("/")[2])
            self._engine.calls.clear()
            self._engine.aborted.clear()
            await _answer(send, {})
        elif path in ("/server_info", "/get_server_info", "/get_model_info"):  # sglang-router asks for these
            await _answer(send, {"model_path": "policy", "served_model_name": "policy", "is_generation": True})
        else:
            await self._native(scope, receive, send)

    async def _chat(self, receive: Receive, send: Send) -> None:
        body = orjson.loads(await _read(receive))
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        sampling = EngineSampling(max_new_tokens=limit)
        request = GenerateRequest(input_ids=_PROMPT, sampling_params=sampling, stream=True, return_logprob=True)
        head = {
            "id": f"chatcmpl-{random.getrandbits(64):016x}",
            "object": "chat.completion.chunk",
            "created": 1764000000,
            "model": body["model"],
        }

        async def event(delta: dict[str, str], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            data = b"data: " + orjson.dumps({**head, "choices": [choice]}) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})

        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await event({"role": "assistant", "content": ""})
        async with aclosing(self._engine.stream(request)) as replies:
            async for reply in replies:
                await event({"content": _PIECES[reply.output_ids[0] % len(_PIECES)]})
        await event({}, "length")
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _answer(send: Send, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(body)})


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    message: Message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        pieces.append(message.get("body", b""))
    return b"".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description="The stub engine of proxy_overhead.")
    parser.add_argument("port_file", type=Path)
    where = parser.parse_args().port_file
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    fresh = where.with_suffix(".tmp")
    fresh.write_text(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}))
    fresh.rename(where)
    config = uvicorn.Config(
        Stub(), log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=_KEEP_ALIVE_S
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
