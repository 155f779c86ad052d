"""The recorded traffic of a real OpenClaw, and a conversation that is played through `Pairing`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.messages import Message
from openclaw_rl.sessions.classify import Classified, classify, identify
from openclaw_rl.sessions.conversation_key import turn_key
from openclaw_rl.sessions.pairing import Paired, Pairing
from openclaw_rl.types import OpenTurn, Scope, TurnType

TRAFFIC = Path(__file__).parents[2] / "data" / "openclaw_traffic"


@dataclass(frozen=True)
class Recorded:
    """One recorded request, as the proxy parses it."""

    headers: dict[str, str]
    body: dict[str, Any]
    messages: list[Message]
    classified: Classified
    scope: Scope
    reply: Message | None
    """Reply of the server; None for an error."""


def _recorded(request: dict[str, Any]) -> Recorded:
    headers = {name.lower(): value for name, value in request["headers"].items()}
    body = request["body"]
    messages = [Message.model_validate(message) for message in body["messages"]]
    answer = request["server_reply"]
    calls = [
        {"id": f"call_{n:024x}", "function": {"name": call["name"], "arguments": json.dumps(call["args"])}}
        for n, call in enumerate(answer.get("tool_calls", ()))
    ]
    reply = {
        "role": "assistant",
        "content": answer.get("text"),
        "reasoning_content": answer.get("reasoning"),
        "tool_calls": calls or None,
    }
    return Recorded(
        headers=headers,
        body=body,
        messages=messages,
        classified=classify(headers, body, messages, bool(body.get("tools")), TurnType.MAIN),
        scope=Scope("uma", identify(headers, body, messages)),
        reply=Message.model_validate(reply) if "status" not in answer else None,
    )


@pytest.fixture
def traffic() -> Callable[[str], list[Recorded]]:
    """The requests of one recording, in order."""

    def load(name: str) -> list[Recorded]:
        recording = json.loads((TRAFFIC / f"{name}.json").read_text())
        return [_recorded(request) for request in recording["requests"]]

    return load


@dataclass
class Play:
    """Requests against one `Pairing`; turns are named by the caller, or t0, t1 …"""

    pairing: Pairing = field(default_factory=lambda: Pairing(1000))
    count: int = 0

    def serve(
        self,
        scope: Scope,
        messages: list[Message],
        reply: str | Message,
        name: str | None = None,
        *,
        group: str | None = None,
    ) -> str:
        """Add the complete reply to these messages."""
        reply = Message(role="assistant", content=reply) if isinstance(reply, str) else reply
        name = name or f"t{self.count}"
        self.count += 1
        self.pairing.add(OpenTurn(name, scope, turn_key(messages, reply, group), float(self.count)))
        return name

    def ask(self, scope: Scope, messages: list[Message], group: str | None = None) -> Paired | None:
        return self.pairing.observe(scope, messages, group)


@pytest.fixture
def play() -> Play:
    return Play()


@pytest.fixture
def chat() -> Callable[..., list[Message]]:
    """Messages from alternating texts: `chat("hi", "hello", "and?")` is user, assistant, user."""

    def make(*texts: str, system: str | None = None) -> list[Message]:
        messages = [Message(role=("user", "assistant")[k % 2], content=text) for k, text in enumerate(texts)]
        return ([Message(role="system", content=system)] if system else []) + messages

    return make
