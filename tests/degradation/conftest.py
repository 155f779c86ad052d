"""The real server in a process of its own, over an engine and a judge that break on command."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from harness.host import Host, Server
from harness.model import Vocabulary, make_folder
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.testing import FakeEngine, ToyPolicy, stub_app

THANKS, WRONG = "Thanks, that is perfect!", "No, that is wrong."


class BrokenEngine:
    """The stub engine over HTTP; `how` says what becomes of `/generate`, `left` how often (None: for good)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        (end_id,) = vocabulary.ids(["<eos>"])
        (low_id,) = vocabulary.ids([" the"])[:1]
        self._stub = stub_app(FakeEngine(policy=ToyPolicy(low_id=low_id, high_id=low_id + 40, end_id=end_id)))
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
            await send({**message, **({"body": body} if "body" in message else {})})

        return garbled


def _garble(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda event: change(event, event["meta_info"])


_GARBLE = {
    "nan": _garble(lambda event, meta: meta["output_token_logprobs"][0].__setitem__(0, float("nan"))),
    "infinite": _garble(lambda event, meta: meta["output_token_logprobs"][0].__setitem__(0, float("-inf"))),
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


class BrokenJudge:
    """An OpenAI-compatible judge that knows what people mean; `how` as the engine's."""

    def __init__(self) -> None:
        self.how = ""
        self.asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"].endswith("/models"):
            await _answer(send, 200, b'{"data": [{"id": "judge"}]}')
            return
        self.asked += 1
        if self.how == "slow":
            await asyncio.sleep(3600)
        said = str(json.loads(body)["messages"][-1]["content"]).partition("what came next")[2]
        vote = f"\\boxed{{{1 if 'Thanks' in said else -1}}}"
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


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


class Port:
    """A listener that goes away and comes back on the same port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._runner: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.number: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number}"

    async def up(self) -> None:
        config = uvicorn.Config(
            self._app, log_level="critical", lifespan="off", access_log=False, timeout_graceful_shutdown=0
        )
        self._runner = uvicorn.Server(config)
        self._task = asyncio.create_task(self._runner.serve(sockets=[socket.create_server(("127.0.0.1", self.number))]))
        while not self._runner.started:
            await asyncio.sleep(0.005)

    async def down(self) -> None:
        if self._runner is not None and self._task is not None:
            self._runner.should_exit = self._runner.force_exit = True
            await self._task
            self._runner = None


@dataclass
class Place:
    """One server, and what it depends on."""

    server: Server
    engine: BrokenEngine
    judge: BrokenJudge
    engine_port: Port
    judge_port: Port
    http: httpx.AsyncClient
    said: int = field(default=0)

    async def chat(self, *more: dict[str, str], session: str = "s", **body: Any) -> httpx.Response:
        self.said += 1
        messages = [{"role": "user", "content": f"hello {self.said}"}, *more]
        sent = {"messages": messages, "max_tokens": 12, **body}
        return await self.http.post("/v1/chat/completions", json=sent, headers={"X-Session-Id": session})

    async def turn(self, following: str, session: str) -> str:
        """A reply and what its user said to it; the turn's id."""
        asked = {"role": "user", "content": f"hello {session}"}
        sent = {"messages": [asked], "max_tokens": 12}
        headers = {"X-Session-Id": session}
        first = (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).json()
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        sent["messages"] = [asked, reply, {"role": "user", "content": following}]
        assert (await self.http.post("/v1/chat/completions", json=sent, headers=headers)).status_code == 200
        return str(first["id"])

    async def admin(self, path: str) -> Any:
        return await asyncio.to_thread(self.server.admin, path)

    async def state(self, turn_id: str) -> tuple[str, str | None]:
        turn = await self.admin(f"/v1/turns/{turn_id}")
        return turn["state"], turn["reason"]

    async def health(self) -> str:
        """The word that anyone may read; it says nothing else."""
        told = (await self.http.get("/healthz")).json()
        assert set(told) == {"status", "weight_version"}
        return str(told["status"])

    async def problems(self) -> list[str]:
        """The detail, for who has the admin key."""
        return list((await self.admin("/healthz"))["problems"])

    async def until(self, what: Callable[[], Any], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not await what():
                await asyncio.sleep(0.05)

    async def until_well(self) -> None:
        async def is_well() -> bool:
            return await self.health() == "ok"

        await self.until(is_well)

    @property
    def lines(self) -> Counter[str]:
        """Events of the server's log, at warning or above and those that tell of recovery, by name."""
        events: Counter[str] = Counter()
        for row in self.server.log.splitlines():
            if row.startswith("{"):
                events[json.loads(row)["event"]] += 1
            else:
                events["not an event"] += 1
        return events


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("degradation-model")
    make_folder(folder)
    return folder


@pytest.fixture(scope="session")
def host(model_folder: Path) -> Iterator[Host]:
    with Host(model_folder) as host:
        yield host


@pytest.fixture
def place(host: Host, model_folder: Path, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Place]]:
    """`async with place(settings…) as here`."""

    @asynccontextmanager
    async def start(folder: Path = tmp_path, **settings: Any) -> AsyncIterator[Place]:
        engine, judge = BrokenEngine(Vocabulary.of(model_folder)), BrokenJudge()
        engine_port, judge_port = Port(engine), Port(judge)
        await engine_port.up()
        await judge_port.up()
        given = {
            "log_format": "json",
            "engine.kind": "url",
            "engine.url": engine_port.url,
            "engine.hold_s": 1.0,
            "engine.token_timeout_s": 1.0,
            "trainer.kind": "external",
            "judge.kind": "llm",
            "judge.url": f"{judge_port.url}/v1",
            "judge.timeout_s": 1.0,
        }
        given |= {name.replace("__", "."): value for name, value in settings.items()}
        try:
            async with host.server(folder, given) as server:
                async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
                    yield Place(server, engine, judge, engine_port, judge_port, http)
        finally:
            await engine_port.down()
            await judge_port.down()

    return start
