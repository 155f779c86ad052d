"""Fake of the server's episodes, at our own protocol: it keeps what a runner sent, and a script answers its chats."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

Script = Callable[[str, list[dict[str, Any]]], "str | JSONResponse"]
"""From an episode's task and its messages to the policy's text, or another answer."""


@dataclass
class Kept:
    """One episode."""

    body: dict[str, Any]
    chats: list[list[dict[str, Any]]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    posts: int = 0
    """Outcomes that were posted, repeated ones too."""
    aborted: dict[str, Any] | None = None


class FakeEpisodes:
    """The routes of one server."""

    def __init__(self, script: Script = lambda task, messages: "ok", *, max_ahead: int = 1000) -> None:
        self.script, self.max_ahead = script, max_ahead
        self.episodes: dict[str, Kept] = {}
        self.version, self.refused = 0, 0
        self.keys: set[str | None] = set()
        self.refuses: tuple[int, str, str] | None = None
        """Status, message and code of every refused episode."""
        self.hears_aborts = True
        """False: an abort never arrives."""
        self.trained: set[str] = set()
        """Groups that a trainer took."""
        self.app = FastAPI()
        self.app.add_api_route("/healthz", self._healthz)
        self.app.add_api_route("/v1/episodes", self._open, methods=["POST"], status_code=201)
        self.app.add_api_route("/v1/episodes/{name}/outcome", self._outcome, methods=["POST"])
        self.app.add_api_route("/v1/episodes/{name}/abort", self._abort, methods=["POST"])
        self.app.add_api_route("/v1/episodes/{name}/v1/chat/completions", self._chat, methods=["POST"])
        self.app.add_api_route("/v1/episodes/{name}/v1/models", self._models)

    def of_split(self, split: str) -> dict[str, Kept]:
        return {name: kept for name, kept in self.episodes.items() if kept.body["split"] == split}

    def groups(self) -> dict[str, list[Kept]]:
        found: dict[str, list[Kept]] = {}
        for kept in self.episodes.values():
            if kept.body.get("group"):
                found.setdefault(kept.body["group"], []).append(kept)
        return found

    async def _healthz(self) -> dict[str, Any]:
        return {"status": "ok", "weight_version": self.version}

    async def _open(self, request: Request) -> Any:
        body = await request.json()
        self.keys.add(request.headers.get("authorization"))
        if self.refuses is not None:
            return _error(*self.refuses[:2], code=self.refuses[2])
        name, group = body["episode_id"], body.get("group")
        if name not in self.episodes:
            groups = self.groups()
            if group and group not in groups and len(set(groups) - self.trained) >= self.max_ahead:
                self.refused += 1
                return _error(429, "too many groups", {"retry-after": "0.1"})
            members = [kept for kept in groups.get(group, ()) if not (kept.aborted or {}).get("retry")]
            if group and len(members) >= body["group_size"]:
                return _error(409, f"group {group!r} has its episodes already")
            self.episodes[name] = Kept(body)
        url = str(request.base_url).rstrip("/")
        return {**body, "base_url": f"{url}/v1/episodes/{name}/v1", "state": "running"}

    async def _outcome(self, name: str, request: Request) -> Any:
        body, kept = await request.json(), self.episodes.get(name)
        if kept is None:
            return _error(404, f"no episode {name!r}")
        kept.posts += 1
        if kept.aborted is not None or kept.outcome not in (None, body):
            return _error(409, f"episode {name!r} is over")
        kept.outcome = body
        return {"episode_id": name, "state": "ended"}

    async def _abort(self, name: str, request: Request) -> Any:
        if not self.hears_aborts:
            return _error(503, "not now")
        kept = self.episodes.get(name)
        if kept is None:
            return _error(404, f"no episode {name!r}")
        if kept.outcome is not None:
            return _error(409, f"episode {name!r} has ended")
        kept.aborted = kept.aborted or await request.json()
        return {"episode_id": name, "state": "aborted"}

    async def _chat(self, name: str, request: Request) -> Any:
        kept = self.episodes[name]
        try:
            body = await request.json()
        except ClientDisconnect:  # the runner was killed
            return _error(400, "no body")
        if kept.outcome is not None or kept.aborted is not None:
            return _error(409, f"episode {name!r} is over")
        kept.chats.append(body["messages"])
        said = self.script(kept.body["task"], body["messages"])
        if isinstance(said, JSONResponse):
            return said
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": 1, "completion_tokens": len(said.split()), "total_tokens": 1}
        return {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }

    async def _models(self, name: str) -> Any:
        return {"object": "list", "data": [{"id": "m", "object": "model"}]}


def _error(status: int, message: str, headers: dict[str, str] | None = None, code: str = "") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": code}}, status, headers)


def context_full() -> JSONResponse:
    return _error(400, "the context is full", code="context_length_exceeded")


def calling(*calls: tuple[str, object]) -> JSONResponse:
    """Return a reply with tool calls; arguments that are no text are JSON."""
    made = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    return JSONResponse({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]})


def script(*replies: "str | JSONResponse") -> Callable[[list[dict[str, Any]]], "str | JSONResponse"]:
    """Return a script for `play` that says these replies, one after the other."""
    left = iter(replies)
    return lambda messages: next(left)


@contextmanager
def served(fake: FakeEpisodes) -> Iterator[str]:
    """Serve the fake on a port of the loopback, for clients of other processes; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(fake.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
