"""Response bodies in OpenAI's JSON. The bytes that all events of a reply share are made once per reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from openclaw_rl.messages import Message, ToolCall
from openclaw_rl.proxy.parser import Delta

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one reply, of what the client gets. The ledger has all tokens that were sampled."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of which the client gets a part, thoughts, marks of calls and the end token included. Tokens that a stop
    string cut, or that belong to calls which the client does not want, do not count."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Tokens of the thought, among the `completion_tokens`."""

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """One sampled token with its log-prob, for a client that asked. Non-finite values become null in JSON."""

    token: str
    log_prob: float
    top: tuple[tuple[str, float], ...] = ()

    def json(self) -> dict[str, Any]:
        return {
            **_entry(self.token, self.log_prob),
            "top_logprobs": [_entry(token, log_prob) for token, log_prob in self.top],
        }


class Chunks:
    """Server-sent events of one reply."""

    __slots__ = ("_calls", "_head", "_plain_end", "_text")

    def __init__(self, *, reply_id: str, model: str, created: int) -> None:
        head = orjson.dumps({"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._text = self._head + b'{"index":0,"delta":{"content":'
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        self._calls = 0

    def role(self) -> bytes:
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

    def finish(self, reason: str) -> bytes:
        return self._event({}, None, reason)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + orjson.dumps(usage.json()) + b"}\n\n"

    def _event(self, fields: Mapping[str, Any], log_probs: Sequence[TokenLogProb] | None, reason: str | None) -> bytes:
        choice = {"index": 0, "delta": fields, "logprobs": log_probs_json(log_probs), "finish_reason": reason}
        return self._head + orjson.dumps(choice) + b"]}\n\n"


def completion(
    *,
    reply_id: str,
    model: str,
    created: int,
    message: Message,
    finish_reason: str,
    usage: Usage,
    log_probs: Sequence[TokenLogProb] | None,
) -> bytes:
    """Return the body of a whole reply (not streamed)."""
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, None) for call in message.tool_calls]
    choice = {"index": 0, "message": fields, "logprobs": log_probs_json(log_probs), "finish_reason": finish_reason}
    return orjson.dumps(
        {
            "id": reply_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": usage.json(),
        }
    )


def models(name: str, context_length: int, created: int) -> bytes:
    """Return the body of `/v1/models`."""
    return orjson.dumps({"object": "list", "data": [_card(name, name, context_length, created)]})


def model(asked: str, name: str, context_length: int, created: int) -> bytes:
    """Return the body of `/v1/models/{asked}`: the served model under the name that the client asked for."""
    return orjson.dumps(_card(asked, name, context_length, created))


def _card(asked: str, name: str, context_length: int, created: int) -> dict[str, Any]:
    return {
        "id": asked,
        "object": "model",
        "created": created,
        "owned_by": "openclaw-rl",
        "root": name,
        "max_model_len": context_length,
        "context_length": context_length,
    }


def log_probs_json(log_probs: Sequence[TokenLogProb] | None) -> dict[str, Any] | None:
    return None if log_probs is None else {"content": [entry.json() for entry in log_probs], "refusal": None}


def _entry(token: str, log_prob: float) -> dict[str, Any]:
    return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}


def _call(call: ToolCall, index: int | None) -> dict[str, Any]:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    fields = {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": text}}
    return fields if index is None else {"index": index, **fields}
