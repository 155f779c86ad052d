"""OpenAI's Chat Completions. The bytes that all events of a reply share are made once per reply."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import ToolCall
from openclaw_rl.proxy.body import ParsedBody, parse_body
from openclaw_rl.proxy.dialects.base import Asked, Outcome, TokenLogProb, Usage, arguments_text
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.web import bodies
from openclaw_rl.web.sse import KEEP_ALIVE

_DONE = b"data: [DONE]\n\n"


class ChatCompletions:
    """The dialect."""

    path, id_prefix = "/chat/completions", "chatcmpl-"
    key_header: str | None = None
    keep_alive = KEEP_ALIVE

    def read(self, data: bytes) -> ParsedBody:
        return parse_body(data)

    def events(self, asked: Asked) -> "Chunks":
        return Chunks(asked)

    def whole(self, asked: Asked, outcome: Outcome) -> bytes:
        message = outcome.message
        fields: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning_content:
            fields["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            fields["tool_calls"] = [_call(call, None) for call in message.tool_calls]
        choice = {
            "index": 0,
            "message": fields,
            "logprobs": _log_probs(outcome.log_probs),
            "finish_reason": outcome.finish_reason,
        }
        return orjson.dumps(
            {
                "id": asked.reply_id,
                "object": "chat.completion",
                "created": asked.created,
                "model": asked.model,
                "choices": [choice],
                "usage": _usage(outcome.usage),
            }
        )

    def error(self, fault: RequestError, request_id: str) -> bytes:
        return bodies.error(fault.message, status=fault.status, code=fault.code, param=fault.param)

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {}


class Chunks:
    """Server-sent events of one reply."""

    __slots__ = ("_calls", "_head", "_includes_usage", "_plain_end", "_text")

    def __init__(self, asked: Asked) -> None:
        head = orjson.dumps(
            {
                "id": asked.reply_id,
                "object": "chat.completion.chunk",
                "created": asked.created,
                "model": asked.model,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._text = self._head + b'{"index":0,"delta":{"content":'
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        self._calls = 0
        self._includes_usage = asked.body.chat.includes_usage

    def opening(self) -> bytes:
        return self._text + b'"","role":"assistant"' + self._plain_end

    def delta(self, delta: Delta | None, log_probs: Sequence[TokenLogProb] | None = None) -> bytes:
        """Return one event, or no bytes for an empty delta."""
        if delta is not None and log_probs is None and not delta.reasoning and not delta.calls:
            return self._text + orjson.dumps(delta.content) + self._plain_end
        fields: dict[str, Any] = {}
        if delta is not None:
            if delta.reasoning:
                fields["reasoning_content"] = delta.reasoning
            if delta.content:
                fields["content"] = delta.content
            if delta.calls:
                fields["tool_calls"] = [_call(call, self._calls + i) for i, call in enumerate(delta.calls)]
                self._calls += len(delta.calls)
        if not fields and not log_probs:
            return b""
        return self._event(fields, log_probs, None)

    def end(self, outcome: Outcome) -> bytes:
        last = self._event({}, None, outcome.finish_reason)
        if self._includes_usage:
            last += self._head + b'],"usage":' + orjson.dumps(_usage(outcome.usage)) + b"}\n\n"
        return last + _DONE

    def failure(self, fault: RequestError) -> bytes:
        return bodies.error_event(fault.message, status=fault.status, code=fault.code, param=fault.param)

    def _event(self, fields: Mapping[str, Any], log_probs: Sequence[TokenLogProb] | None, reason: str | None) -> bytes:
        choice = {"index": 0, "delta": fields, "logprobs": _log_probs(log_probs), "finish_reason": reason}
        return self._head + orjson.dumps(choice) + b"]}\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _log_probs(log_probs: Sequence[TokenLogProb] | None) -> dict[str, Any] | None:
    return None if log_probs is None else {"content": [entry.json() for entry in log_probs], "refusal": None}


def _call(call: ToolCall, index: int | None) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_text(call)}
    fields = {"id": call.id, "type": "function", "function": function}
    return fields if index is None else {"index": index, **fields}
