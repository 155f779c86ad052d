"""The scripted engine, judge and teacher of a case, on one port: the dialect under `/`, the judge under `/v1`.

Replies are used in order, or the first unused one whose `match` is in the last user message. After the last reply, that
one repeats. A piece is one event. `calls` keeps requests and replies.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from harness.model import CONTEXT, Vocabulary


@dataclass
class EngineCall:
    input_ids: list[int]
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    made_at: list[float] = field(default_factory=list)
    """Time of each piece (monotonic)."""
    is_aborted: bool = False
    extra_key: str | None = None


@dataclass
class JudgeCall:
    prompt: str


@dataclass
class TeacherCall:
    input_ids: list[int]
    text: str


class Stubs:
    """An ASGI app."""

    def __init__(self, case: Mapping[str, Any], vocabulary: Vocabulary, *, pace: float) -> None:
        """pace: seconds of this run for a second of the case."""
        self._engine = _Script(case.get("engine", []))
        self._judge, self._teacher = _Script(case.get("judge", [])), case.get("teacher", [])
        self._vocabulary, self._pace = vocabulary, pace
        self.calls: list[EngineCall] = []
        self.judged: list[JudgeCall] = []
        self.scored: list[TeacherCall] = []
        self.running = 0
        self._adapters: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        match scope["path"]:
            case "/generate":
                await self._generate(json.loads(body), receive, send)
            case "/health" | "/abort_request" | "/flush_cache":
                await _answer(send, 200, {})
            case "/model_info":
                await _answer(send, 200, {"model_path": "stub", "base_hash": "stub", "context_length": CONTEXT})
            case "/load_lora_adapter":
                load = json.loads(body)
                self._adapters[load["lora_name"]] = load["lora_path"]
                await _answer(send, 200, {})
            case "/unload_lora_adapter":
                del self._adapters[json.loads(body)["lora_name"]]
                await _answer(send, 200, {})
            case "/v1/models":
                held = [{"id": name, "root": root, "parent": "judge"} for name, root in self._adapters.items()]
                await _answer(send, 200, {"data": [{"id": "judge"}, *held]})
            case "/v1/chat/completions":
                await self._vote(json.loads(body), send)
            case _:
                await _answer(send, 404, {"error": {"message": "no such route"}})

    async def _generate(self, body: Any, receive: Receive, send: Send) -> None:
        if body.get("logprob_start_len", -1) >= 0:
            await _answer(send, 200, self._scores(body))
            return
        text = self._vocabulary.text(body["input_ids"])
        reply = self._engine.next(text.rpartition("<|im_start|>user\n")[2])
        call = EngineCall(body["input_ids"], body["sampling_params"]["max_new_tokens"], extra_key=body.get("extra_key"))
        self.calls.append(call)
        if "http_status" in reply:
            await _answer(send, reply["http_status"], reply["body"], reply.get("headers", {}))
            return
        self.running += 1
        work = asyncio.ensure_future(self._stream(call, reply, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                call.is_aborted = True
        finally:
            self.running -= 1
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _stream(self, call: EngineCall, reply: Mapping[str, Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await asyncio.sleep(self._pace * reply.get("delay_s", 0))
        if reply.get("endless"):
            (token, *_) = self._vocabulary.ids([" na"])
            while True:
                await self._event(send, call, [token], [-0.5], None)
                await asyncio.sleep(self._pace * reply.get("chunk_delay_s", 0.05))
        ids = self._vocabulary.ids(reply["pieces"] if "pieces" in reply else [reply["text"]])
        cut = ids[: call.max_new_tokens]
        log_probs = _log_probs(reply.get("logprobs"), len(cut))
        finish = {"type": "length" if len(cut) < len(ids) else reply.get("finish", "stop")}
        if "output_ids" in reply.get("omit", ()):
            await self._event(send, call, [], None, finish, text=reply["text"])
        else:
            for at, token in enumerate(cut):
                is_last = at + 1 == len(cut)
                await self._event(
                    send,
                    call,
                    [token],
                    log_probs[at:] if is_last else log_probs[at : at + 1],
                    finish if is_last else None,
                )
                await asyncio.sleep(self._pace * reply.get("chunk_delay_s", 0))
            if not cut:
                await self._event(send, call, [], [], finish)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _event(
        self, send: Send, call: EngineCall, ids: list[int], log_probs: list[Any] | None, finish: object, text: str = ""
    ) -> None:
        call.made_at.append(time.monotonic())
        call.output_ids += ids
        call.output_logprobs += [value for value in log_probs or () if value is not None]
        meta: dict[str, Any] = {"finish_reason": finish, "completion_tokens": len(call.output_ids)}
        if log_probs is not None:
            padded = ids + [0] * (len(log_probs) - len(ids))
            meta["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(log_probs, padded, strict=False)
            ]
        data = json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    def _scores(self, body: Any) -> Any:
        ids, start = body["input_ids"], body["logprob_start_len"]
        self.scored.append(TeacherCall(ids, self._vocabulary.text(ids)))
        script = self._teacher[0] if self._teacher else {"value_for_last_token": -0.5, "others": -0.5}
        values = [script["others"]] * (len(ids) - start)
        values[0], values[-1] = None, script["value_for_last_token"]
        entries = [[value, token, None] for value, token in zip(values, ids[start:], strict=True)]
        return {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": entries}}

    async def _vote(self, body: Any, send: Send) -> None:
        self.judged.append(JudgeCall("\n".join(str(message["content"]) for message in body["messages"])))
        said = self._judge.next("")
        reply = {"text": said} if isinstance(said, str) else said
        if "http_status" in reply:
            await _answer(send, reply["http_status"], {})
            return
        await asyncio.sleep(3600 if reply.get("timeout") else self._pace * reply.get("delay_s", 0))
        choice = {"message": {"role": "assistant", "content": reply["text"]}, "finish_reason": "stop"}
        await _answer(send, 200, {"choices": [choice]})


class _Script:
    def __init__(self, replies: Sequence[Any]) -> None:
        self._left, self._last = list(replies), replies[-1] if replies else {"text": "unscripted"}

    def next(self, asked: str) -> Any:
        for at, reply in enumerate(self._left):
            wanted = reply.get("match") if isinstance(reply, dict) else None
            if wanted is None or wanted in asked:
                return self._left.pop(at)
        return self._last


def _log_probs(form: Any, count: int) -> list[Any]:
    if isinstance(form, list):
        return [float(value) if isinstance(value, str) else value for value in form]
    values: list[Any] = [-0.01 * (i + 1) for i in range(count)]
    return values[: count - form["drop_last"]] if isinstance(form, dict) else values


async def _read(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: object, headers: Mapping[str, str] = {}) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json"), *pairs],
    }
    await send(start)
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
