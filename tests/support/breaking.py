"""What a server depends on, as ASGI apps that break on command: an engine, a judge, a webhook; and a port that goes
away and comes back."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from harness.model import Vocabulary
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.testing import FakeEngine, ToyPolicy, stub_app


class BrokenEngine:
    """The stub engine over HTTP; `how` says what becomes of `/generate`, `left` how often (None: for good)."""

    def __init__(self, policy: ToyPolicy) -> None:
        self.fake = FakeEngine(policy=policy)
        self._stub = stub_app(self.fake)
        self.how = ""
        self.left: int | None = None
        self.at = 2
        self.asked = 0

    def breaks(self, how: str, times: int | None = None, *, at: int = 2) -> None:
        """at: in which event, where it is one event that is broken."""
        self.how, self.left, self.at, self.asked = how, times, at, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/generate" or not self.how or self.left == 0:
            await self._stub(scope, receive, send)
            return
        self.asked += 1
        if self.left is not None:
            self.left -= 1
        if self.how == "5xx":
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"boom"})
        elif self.how == "silent":
            await asyncio.sleep(3600)
        else:
            await self._stub(scope, receive, self._garbling(send))

    def _garbling(self, send: Send) -> Send:
        how, at, pieces = self.how, self.at, 0

        async def garbled(message: Any) -> None:
            nonlocal pieces
            body = message.get("body", b"")
            if body.startswith(b"data: {"):
                pieces += 1
                if how == "half" and pieces == at:
                    await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
                    raise ConnectionResetError("half a piece, and no more")
                if how == "bad_json" and pieces == at:
                    body = b"data: {,}\n\n"
                elif how == "slow":
                    for start in range(0, len(body), 60):
                        await send({"type": "http.response.body", "body": body[start : start + 60], "more_body": True})
                        await asyncio.sleep(0.002)
                    return
                elif how in _GARBLE and pieces == at:
                    event = json.loads(body[6:])
                    _GARBLE[how](event)
                    body = b"data: " + json.dumps(event).encode() + b"\n\n"
            elif body.startswith(b"{") and how in SPOILT_SCORES:
                answer = json.loads(body)
                SPOILT_SCORES[how](answer["meta_info"]["input_token_logprobs"])
                body = json.dumps(answer).encode()
            elif body.startswith(b"{") and how == "bad_json":
                body = b"{,}"
            await send({**message, **({"body": body} if "body" in message else {})})

        return garbled


def _garble(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda event: change(event, event["meta_info"])


_GARBLE = {
    "nan": _garble(lambda event, meta: meta["output_token_logprobs"][0].__setitem__(0, float("nan"))),
    "infinite": _garble(lambda event, meta: meta["output_token_logprobs"][0].__setitem__(0, float("-inf"))),
    "beyond_float32": _garble(lambda event, meta: meta["output_token_logprobs"][0].__setitem__(0, -1e308)),
    "impossible_counts": _garble(lambda event, meta: meta.update(cached_tokens=10**30, prompt_tokens=-(10**30))),
    "half_a_character": _garble(lambda event, meta: meta.update(weight_version="\ud800")),
    "ids_of_another_type": _garble(lambda event, meta: event.update(output_ids={})),
    "too_few_log_probs": _garble(lambda event, meta: meta.__setitem__("output_token_logprobs", [])),
    "too_many_log_probs": _garble(lambda event, meta: meta["output_token_logprobs"].append([-1.0, 5, None])),
    "log_probs_of_others": _garble(lambda event, meta: meta["output_token_logprobs"][0].__setitem__(1, 1)),
    "beyond_the_vocabulary": _garble(
        lambda event, meta: (
            event.__setitem__("output_ids", [90_000]),
            meta["output_token_logprobs"][0].__setitem__(1, 90_000),
        )[0]
    ),
    "negative_id": _garble(lambda event, meta: event.__setitem__("output_ids", [-7])),
    "enormous_id": _garble(lambda event, meta: event.__setitem__("output_ids", [2**40])),
}


SPOILT_SCORES: dict[str, Callable[[list[Any]], None]] = {
    "scores_nan": lambda entries: entries[-1].__setitem__(0, float("nan")),
    "scores_missing": lambda entries: entries[-1].__setitem__(0, None),
    "scores_of_others": lambda entries: entries[-1].__setitem__(1, entries[-1][1] + 1),
    "too_few_scores": lambda entries: entries.pop(),
}
"""Of prompts that a teacher, or the gate, has the engine score."""


def words_of(vocabulary: Vocabulary) -> ToyPolicy:
    """A policy that says words of this vocabulary."""
    (end_id,) = vocabulary.ids(["<eos>"])
    (low_id,) = vocabulary.ids([" the"])[:1]
    return ToyPolicy(low_id=low_id, high_id=low_id + 40, end_id=end_id)


class BrokenJudge:
    """An OpenAI-compatible judge that knows what people mean; `how` as the engine's, or the way it lies: `praises`
    everything, `inverts` what was said."""

    def __init__(self) -> None:
        self.how = ""
        self.asked = 0
        self.raw: tuple[int, bytes] | None = None
        """Status and body of every answer, where it is not the judge's own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if scope["path"].endswith("/models"):
            await _answer(send, 200, b'{"data": [{"id": "judge"}]}')
            return
        self.asked += 1
        if self.raw is not None:
            await _answer(send, *self.raw)
            return
        if self.how == "slow":
            await asyncio.sleep(3600)
        said = str(json.loads(body)["messages"][-1]["content"]).partition("what came next")[2]
        is_good = self.how == "praises" or ("Thanks" in said) is not (self.how == "inverts")
        vote = f"\\boxed{{{1 if is_good else -1}}}"
        text = "no idea" if self.how == "no_vote" else vote
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice]}).encode()
        match self.how:
            case "5xx":
                await _answer(send, 500, b"{}")
            case "bad_json":
                await _answer(send, 200, data[:20])
            case "other_json":
                await _answer(send, 200, b'[["?"]]')
            case _:
                await _answer(send, 200, data)


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


class Webhook:
    """Takes alerts, and keeps them."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        self.alerts.append(json.loads(body))
        await _answer(send, 200, b"{}")


class Port:
    """A listener that goes away and comes back on the same port, which is nobody else's meanwhile."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._runner: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._held = socket.socket()  # bound, and never listening: who calls while we are away is refused
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.number: int = self._held.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number}"

    async def up(self) -> None:
        config = uvicorn.Config(
            self._app, log_level="critical", lifespan="off", access_log=False, timeout_graceful_shutdown=0
        )
        self._runner = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", self.number), reuse_port=True)
        self._task = asyncio.create_task(self._runner.serve(sockets=[listener]))
        while not self._runner.started:
            await asyncio.sleep(0.005)

    async def down(self) -> None:
        if self._runner is not None and self._task is not None:
            self._runner.should_exit = self._runner.force_exit = True
            await self._task
            self._runner = None

    def let_go(self) -> None:
        """Of the port: nobody will come back to it."""
        self._held.close()
