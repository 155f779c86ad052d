"""The stub engine, which notes when it was asked and when it answered, and the stub judge, which knows the truth."""

import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from chaos.faults import met
from openclaw_rl.engines.base import Tap
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.testing.fake_engine import Pacing

_NEXT = "After the reply, what came next:\n"
_NOTHING = "I would rather not say."


class TimedEngine(FakeEngine):
    """One line for every reply that went well, in `times`: its id, when it was asked for, when its first and its last
    token were there (seconds of the machine's monotonic clock)."""

    def __init__(self, policy: ToyPolicy, *, tokens_per_s: float, times: Path, chance: random.Random) -> None:
        super().__init__(policy=policy, pacing=Pacing(tokens_per_s=tokens_per_s))
        self._times = times.open("a", buffering=1)
        self._chance = chance

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        asked = time.monotonic()
        first: float | None = None
        self.calls.clear()  # kept for unit tests; this runs for long
        self.aborted.clear()
        fault = met.get()
        async with aclosing(super().stream(request)) as replies:
            async for reply in replies:
                first = first or time.monotonic()
                if fault == "garbage" and self._chance.random() < 0.2:
                    yield self._garbled(reply)
                else:
                    yield reply
        if fault is None and first is not None:
            self._times.write(f"{request.rid} {asked:.6f} {first:.6f} {time.monotonic():.6f}\n")

    def _garbled(self, reply: GenerateReply) -> GenerateReply:
        """Log-probs that are not those of the ids: none, or one too many."""
        entries = reply.meta_info.output_token_logprobs or []
        wrong = [] if self._chance.random() < 0.5 else [*entries, (-1.0, 0, None)]
        return replace(reply, meta_info=replace(reply.meta_info, output_token_logprobs=wrong))


def verdict_of(said: str) -> int:
    """What a judge that understands must make of one of the people's sentences."""
    if "that is wrong" in said or "not what I asked" in said:
        return -1
    return 1 if "Thanks" in said or "Great" in said else 0


def stub_judge(chance: random.Random, *, garbage: float) -> ASGIApp:
    """An OpenAI-compatible judge: mostly right, sometimes of no use, never wrong."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if scope["path"].endswith("/models"):
            answer: Any = {"data": [{"id": "judge"}]}
        else:
            asked = str(orjson.loads(body)["messages"][-1]["content"])
            vote = f"So be it. \\boxed{{{verdict_of(asked.partition(_NEXT)[2])}}}"
            text = _NOTHING if chance.random() < garbage else vote
            answer = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
        data = orjson.dumps(answer)
        if met.get() == "garbage":
            data = data[: len(data) // 2]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    return app


async def _read(receive: Receive) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            return data
