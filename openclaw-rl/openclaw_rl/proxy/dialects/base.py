"""A dialect: the JSON of one chat API, for the request, the whole reply, the stream's events and the errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import Message, ToolCall
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.types import SamplingParams


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


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts that a reply repeats to its client."""

    reply_id: str
    model: str
    created: int
    """Unix seconds."""
    prompt_tokens: int
    sampling: SamplingParams
    """As the engine got them."""
    body: ParsedBody


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reply that is complete."""

    message: Message
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    usage: Usage
    log_probs: tuple[TokenLogProb, ...] | None = None
    stop: str | None = None
    """The stop string that ended the reply."""


class Events(Protocol):
    """Server-sent events of one reply, each call a run of bytes on the wire."""

    def opening(self) -> bytes:
        """Return the events before the first token."""
        ...

    def delta(self, delta: Delta | None, log_probs: Sequence[TokenLogProb] | None = None) -> bytes:
        """Return the events of newly visible parts; no bytes for an empty delta."""
        ...

    def end(self, outcome: Outcome) -> bytes:
        """Return the last events of a complete reply."""
        ...

    def failure(self, fault: RequestError) -> bytes:
        """Return the event of an error in a stream that has begun. The client must not take the reply for complete."""
        ...


class Dialect(Protocol):
    """One chat API."""

    path: str
    """Its route below `/v1`."""
    id_prefix: str
    """Beginning of the ids of replies, which are the ids of turns too."""
    key_header: str | None
    """Header of this API that may hold the key in place of Authorization."""
    keep_alive: bytes
    """Event of a stream that is silent."""

    def read(self, data: bytes) -> ParsedBody:
        """Return the request. Raises RequestError in the client's own terms, RecursionError for a deep body."""
        ...

    def events(self, asked: Asked) -> Events: ...

    def whole(self, asked: Asked, outcome: Outcome) -> bytes:
        """Return the body of a reply that is not streamed."""
        ...

    def error(self, fault: RequestError, request_id: str) -> bytes:
        """Return the body of an error."""
        ...

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Return headers of every answer."""
        ...


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as a JSON text."""
    arguments = call.function.arguments
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _entry(token: str, log_prob: float) -> dict[str, Any]:
    return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}
