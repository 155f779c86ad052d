"""A plain tool loop over the chat API: ask with `tools`, make the calls, show the results, until a reply calls none."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.agents.episode import Episode, Reply

_MOST_CALLS = 16
"""Calls of one reply that are made; the others get an error."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a reply."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    """None: the policy's text is no JSON object."""


async def tool_loop(
    episode: Episode,
    messages: list[dict[str, object]],
    tools: Sequence[Mapping[str, object]],
    make: Callable[[Call], Awaitable[str]],
) -> Reply:
    """Ask until a reply calls no tool, and return that reply. `messages` grows by all replies and results.

    make: makes one call and returns its result, for the policy to read. A call without readable arguments never
    reaches it.
    """
    while True:
        reply = await episode.ask(messages, tools=list(tools))
        messages.append(said(reply))
        calls = calls_of(reply)
        if not calls:
            return reply
        for number, call in enumerate(calls):
            if number >= _MOST_CALLS:
                result = f"Error: a reply may make {_MOST_CALLS} calls"
            elif call.arguments is None:
                result = "Error: the arguments are no JSON object"
            else:
                result = await make(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def said(reply: Reply) -> dict[str, object]:
    """Return a reply as a message of the next request."""
    kept = ("content", "reasoning_content", "tool_calls")
    found = {name: reply.message[name] for name in kept if reply.message.get(name) is not None}
    return {"role": "assistant", "content": None, **found}


def calls_of(reply: Reply) -> list[Call]:
    """Return the calls of a reply, in their order."""
    found = []
    for number, call in enumerate(reply.message.get("tool_calls") or ()):
        function = call.get("function") or {}
        found.append(Call(str(call.get("id") or number), str(function.get("name")), _object(function.get("arguments"))))
    return found


def tool(name: str, description: str, parameters: Mapping[str, object]) -> dict[str, object]:
    """Return a tool of a request. parameters: a JSON schema."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def tool_reward(calls: int, *, right: bool) -> float:
    """Return 1 for a right answer, else min(−0.6, −1 + 0.05 · (calls − 2)), at least −1.

    A wrong answer after calls is less bad than one without them.
    """
    return 1.0 if right else max(-1.0, min(-0.6, -1 + 0.05 * (calls - 2)))


def _object(text: object) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
