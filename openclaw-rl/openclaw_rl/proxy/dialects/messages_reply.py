"""Anthropic's Messages, the reply: one message object, or the events that build it block by block.

A thought is a block of type `thinking` with an empty signature, because nobody signed it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import ToolCall
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.dialects import messages_request
from openclaw_rl.proxy.dialects.base import Asked, Outcome, TokenLogProb, Usage
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.web import bodies

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THOUGHT, _TEXT = "thinking", "text"
_BESIDE: Mapping[str, Mapping[str, Any]] = {_THOUGHT: {"signature": ""}, _TEXT: {"citations": None}}
"""Fields that a block has beside its text."""


class AnthropicMessages:
    """The dialect."""

    path, id_prefix = "/messages", "msg_"
    key_header: str | None = "x-api-key"
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def read(self, data: bytes) -> ParsedBody:
        return messages_request.read(data)

    def events(self, asked: Asked) -> "MessageEvents":
        return MessageEvents(asked)

    def whole(self, asked: Asked, outcome: Outcome) -> bytes:
        message = outcome.message
        blocks: list[dict[str, Any]] = []
        if message.reasoning_content:
            blocks.append({"type": _THOUGHT, "thinking": message.reasoning_content, **_BESIDE[_THOUGHT]})
        if text := message.text():
            blocks.append({"type": _TEXT, "text": text, **_BESIDE[_TEXT]})
        blocks += [{**_tool_use(call), "input": call.function.as_object()} for call in message.tool_calls or ()]
        return orjson.dumps(_message(asked, blocks, _usage(outcome.usage)) | _stop(outcome))

    def error(self, fault: RequestError, request_id: str) -> bytes:
        return bodies.anthropic_error(_words(fault), status=fault.status, request_id=request_id)

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {"request-id": request_id}


def _words(fault: RequestError) -> str:
    """Return the message of a fault; Anthropic's clients know a long prompt by its first words."""
    return f"prompt is too long: {fault.message}" if fault.code == "context_length_exceeded" else fault.message


class MessageEvents:
    """Server-sent events of one message."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._index = -1
        self._open: str | None = None
        """Type of the open block."""
        self._delta = b""
        """Beginning of the open block's delta events."""

    def opening(self) -> bytes:
        usage = _usage(Usage(self._asked.prompt_tokens, 0))
        return _event("message_start", message=_message(self._asked, [], usage))

    def delta(self, delta: Delta | None, log_probs: Sequence[TokenLogProb] | None = None) -> bytes:
        if delta is None:
            return b""
        out = b""
        if delta.reasoning:
            out += self._add(_THOUGHT, delta.reasoning)
        if delta.content:
            out += self._add(_TEXT, delta.content)
        for call in delta.calls:
            out += self._call(call)
        return out

    def end(self, outcome: Outcome) -> bytes:
        delta = _event("message_delta", delta=_stop(outcome), usage=_usage(outcome.usage))
        return self._close() + delta + _event("message_stop")

    def failure(self, fault: RequestError) -> bytes:
        data = bodies.anthropic_error(_words(fault), status=fault.status, request_id=self._asked.reply_id)
        return b"event: error\ndata: " + data + b"\n\n"

    def _add(self, kind: str, text: str) -> bytes:
        out = b"" if self._open == kind else self._begin(kind, {"type": kind, kind: "", **_BESIDE[kind]})
        return out + self._delta + orjson.dumps(text) + b"}}\n\n"

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        out = self._close()
        self._open, self._index = kind, self._index + 1
        head = {"type": "content_block_delta", "index": self._index, "delta": {"type": f"{kind}_delta"}}
        self._delta = b"event: content_block_delta\ndata: " + orjson.dumps(head)[:-2] + f',"{kind}":'.encode()
        return out + _event("content_block_start", index=self._index, content_block=block)

    def _call(self, call: ToolCall) -> bytes:
        out = self._begin("tool_use", {**_tool_use(call), "input": {}})
        json = orjson.dumps(call.function.as_object()).decode()
        delta = {"type": "input_json_delta", "partial_json": json}
        return out + _event("content_block_delta", index=self._index, delta=delta) + self._close()

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _message(asked: Asked, blocks: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": asked.reply_id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": usage | {"cache_creation": None, "inference_geo": None, "service_tier": "standard"},
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    name = str(call.id or "")
    made = {"type": "tool_use", "id": f"toolu_{name.removeprefix('call_')}", "name": call.function.name}
    return made | {"caller": {"type": "direct"}}


def _stop(outcome: Outcome) -> dict[str, Any]:
    if outcome.stop is not None and outcome.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": outcome.stop}
    return {"stop_reason": _STOP_REASONS.get(outcome.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the counts; the tokens that came from the cache are no input tokens here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }
