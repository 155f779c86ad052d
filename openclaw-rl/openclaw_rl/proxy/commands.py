"""Answers to commands in a chat (`/rl good` …): replies in the client's dialect, by no model and in no ledger."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from openclaw_rl.messages import Message
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.dialects.base import Asked, Dialect, Outcome, Usage
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.sessions.classify import OTHER, classify, group_of, identify
from openclaw_rl.sessions.commands import Command, CommandedChat, command_of, without_commands
from openclaw_rl.types import SamplingParams, Scope, TurnType
from openclaw_rl.web.auth import Caller


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command, the chat that it stands in, and who gave it."""

    command: Command
    caller: Caller
    scope: Scope
    messages: tuple[Message, ...]
    """The whole chat; the last message is the command."""
    group: str | None


def commanded(deps: ProxyDeps, caller: Caller, headers: Mapping[str, str], body: ParsedBody) -> Commanded | None:
    """Return the command that the last message is; None for a message to the model, and for a client's own request.

    A side request of no kind (`sessions.turn_type_default = "side"`, say) may be a user's: its command is answered.
    """
    if deps.commands is None or not caller.has_commands:
        return None
    messages = body.chat.messages
    command = command_of(messages[-1])
    if command is None:
        return None
    kind = classify(
        headers, body.raw, messages, bool(body.chat.offered_tools), TurnType(deps.session.turn_type_default)
    )
    if kind.type is not TurnType.MAIN and kind.kind != OTHER:
        return None
    session_id = identify(headers, body.raw, messages)
    group = group_of(body.raw) if session_id is None else None
    return Commanded(
        command, caller, Scope(caller.user, session_id, deps.policy_of(caller.user)), tuple(messages), group
    )


async def answer_of(deps: ProxyDeps, asked: Commanded) -> Outcome:
    """Carry out the command; return the reply to it."""
    assert deps.commands is not None
    turn = deps.sessions.last_turn(asked.scope, without_commands(asked.messages[:-1]), asked.group)
    chat = CommandedChat.of(asked.scope.session_id, turn, asked.messages)
    text = await deps.commands.answer(asked.command, asked.caller, chat)
    return Outcome(Message(role="assistant", content=text), "stop", Usage(0, 0))


def written(dialect: Dialect, outcome: Outcome, body: ParsedBody, *, model: str, created: int) -> bytes:
    """Return the reply as the client asked for it: its whole stream, or its body."""
    reply_id = f"{dialect.id_prefix}{uuid.uuid4().hex}"
    asked = Asked(reply_id, model, created, 0, SamplingParams(max_new_tokens=1), body)
    if not body.chat.stream:
        return dialect.whole(asked, outcome)
    events = dialect.events(asked)
    return events.opening() + events.delta(Delta(content=outcome.message.text())) + events.end(outcome)
