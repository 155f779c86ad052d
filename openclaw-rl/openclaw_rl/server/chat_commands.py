"""The commands of a chat, carried out: `/rl good`, `/rl bad why`, `/rl undo`, `/rl status`, `/rl wishes`.

A rating goes to the reply that this chat showed last, and to a reply of the same user alone. It is the same feedback as
that of `POST /v1/feedback`. SDKs send a request again that got no answer in time: a repeated command has no effect.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import structlog

from openclaw_rl.errors import LedgerError, RequestError
from openclaw_rl.ledger import Effect, Ledger, TurnRecord
from openclaw_rl.server.api.feedback import FeedbackBody, FeedbackDeps, record
from openclaw_rl.sessions import commands
from openclaw_rl.sessions.commands import Command, CommandedChat
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import SHARED_POLICY, TurnState, Wish
from openclaw_rl.web.auth import Caller

log = structlog.get_logger()

_MARK = "rl-"
"""Beginning of the ids of feedback that came by a command: `undo` takes back no other."""
_USAGE = (
    "Commands of OpenClaw-RL, each alone in a message: `/rl good`, `/rl bad` (with the reason behind it: "
    "`/rl bad too long`), `/rl undo`, `/rl status`, `/rl wishes`. They rate the reply before them, and the model never "
    "sees them."
)
_NO_REPLY = (
    "There is no recorded reply before this message, so nothing was rated. A reply is recorded when it is complete. "
    "After a restart it is found again only as the newest one of a session id, and only if the client sends it along."
)
_BASE = " (the base, before any training)"
_LONGEST = 200
_MOST_UNDONE = 1000
"""Requests that took a rating back and are known; an SDK repeats one within minutes."""
_EFFECTS = {
    Effect.JUDGED: "It waits for the next training step.",
    Effect.RESCORED: "It is scored again, and waits for the next training step.",
    Effect.LATE: "A trainer has it already: the rating counts only if that step is undone.",
    Effect.RECORDED: "It changes nothing: the reply has this rating already, or it is never trained on.",
}


@dataclass(frozen=True, slots=True)
class ChatCommands:
    """Implements `CommandsPort`."""

    ledger: Ledger
    feedback: FeedbackDeps
    serving: Callable[[str], int | None]
    """Version that answers a user; None before the first reply since the start."""
    training: TrainingSettings
    aim: float
    """The learned share at which a wish is learned."""
    policy_of: Callable[[str], str] = lambda _: SHARED_POLICY
    """The policy that learns from a user."""
    _undone: dict[str, None] = field(default_factory=dict)
    """Names of the newest requests that took a rating back, oldest first."""

    async def answer(self, command: Command, caller: Caller, chat: CommandedChat) -> str:
        """Carry out a command; return the words of the answer.

        It is about the chat's open turn. Without one, it is about the session's newest turn, if that reply is the last
        in the chat.
        """
        try:
            return await self._answer(command, caller, chat)
        except (LedgerError, RequestError) as error:
            log.warning("command_failed", verb=command.verb, error=str(error))
            return f"`/rl {command.verb}` failed: {error}"

    async def _answer(self, command: Command, caller: Caller, chat: CommandedChat) -> str:
        match command.verb:
            case commands.WISHES:
                return self._wishes(await self.ledger.wishes(user=caller.user))
            case commands.HELP:
                return _USAGE
        turn_id = chat.turn.turn_id if chat.turn is not None else await self._newest(caller, chat)
        if command.verb == commands.STATUS:
            return await self._status(caller, turn_id)
        if turn_id is None:
            return _NO_REPLY
        if command.verb == commands.UNDO:
            return await self._undo(caller, turn_id, chat)
        return await self._rate(command, caller, turn_id, chat)

    async def _newest(self, caller: Caller, chat: CommandedChat) -> str | None:
        if chat.session_id is None:
            return None
        found = await self.ledger.feedback_target(user=caller.user, session_id=chat.session_id)
        record = None if found is None else await self.ledger.turn(found.turn_id)
        # A branch of the chat, or a chat whose end was taken back, shows another reply than the newest.
        return record.turn.turn_id if record is not None and chat.shows(record.turn.reply) else None

    async def _rate(self, command: Command, caller: Caller, turn_id: str, chat: CommandedChat) -> str:
        is_good = command.verb == commands.GOOD
        feedback_id = _MARK + _name(turn_id, chat)
        body = FeedbackBody(turn_id=turn_id, value=is_good, comment=command.why, feedback_id=feedback_id)
        outcome = await record(self.feedback, caller, body)
        why = f" Your wish: {_short(command.why)!r}." if command.why else ""
        said = f"{'👍' if is_good else '👎'} The reply is rated {command.verb}.{why} {_EFFECTS[outcome.effect]}"
        return said + " `/rl undo` takes it back."

    async def _undo(self, caller: Caller, turn_id: str, chat: CommandedChat) -> str:
        key, name = None if chat.turn is None else chat.turn.key, _name(turn_id, chat)
        if name in self._undone:
            return "The rating was taken back already; a repeated request takes back no other."
        self._undone[name] = None  # before the write: a client that waits no longer sends its request once more
        while len(self._undone) > _MOST_UNDONE:
            del self._undone[next(iter(self._undone))]
        try:
            outcome = await self.ledger.take_back_feedback(turn_id, user=caller.user, prefix=_MARK, key=key)
        except LedgerError:
            self._undone.pop(name, None)
            raise
        if outcome is None or outcome.effect is Effect.LATE:
            self._undone.pop(name, None)
        if outcome is None:
            return "No `/rl good` or `/rl bad` of yours is on the reply before this message."
        if outcome.effect is Effect.LATE:
            return "Too late: a trainer has the rating already. A rollback of the version undoes it."
        if outcome.state is TurnState.JUDGED:
            self.feedback.on_judged()
        elif outcome.state is TurnState.PAIRED:
            self.feedback.on_paired()
        now = {
            TurnState.SERVED: "Your next message is the feedback on it again.",
            TurnState.PAIRED: "The judge rates it by the message after it.",
            TurnState.JUDGED: "Your rating before that holds again.",
        }
        return f"The rating is taken back. {now.get(outcome.state, 'The reply has no rating now.')}"

    async def _status(self, caller: Caller, turn_id: str | None) -> str:
        version = self.serving(caller.user)
        is_base = version is not None and (await self.ledger.version(version)).is_base
        lines = [] if version is None else [f"Version {version} serves{_BASE if is_base else ''}."]
        waiting = await self.ledger.samples_waiting(caller.user)  # no word of other users
        if not self.training.enabled:
            lines.append("Learning is off: replies are recorded and judged, and nothing is trained.")
        elif not await self.ledger.learning(self.policy_of(caller.user)):
            lines.append(f"Learning is paused; {waiting} rated replies wait.")
        else:
            lines.append(f"Learning is on: {waiting} of the {self.training.batch_size} replies of the next step wait.")
        if not caller.train:
            lines.append("Your key's replies are never trained on.")
        turn = None if turn_id is None else await self.ledger.turn(turn_id)
        if turn is not None:
            lines.append(f"The reply before this message: {_fate(turn)}.")
        wishes = [wish for wish in await self.ledger.wishes(user=caller.user) if wish.is_open]
        if wishes:
            lines.append(
                f"{len(wishes)} of your wishes {'is' if len(wishes) == 1 else 'are'} practised (`/rl wishes`)."
            )
        return "\n".join(lines)

    def _wishes(self, wishes: list[Wish]) -> str:
        if not wishes:
            return "No wishes yet. A correction in your own words becomes one (methods opd and combine)."
        return "\n".join(self._wish(wish) for wish in wishes)

    def _wish(self, wish: Wish) -> str:
        told = [wish.rests or "practised" if str(wish.state) == "active" else str(wish.state)]
        if wish.learned_share is not None:
            told.append(f"learned {100 * min(max(wish.learned_share / self.aim, 0.0), 1.0):.0f} %")
        return f"{wish.wish_id}. {_short(wish.text)} – {', '.join(told)}"


def _name(turn_id: str, chat: CommandedChat) -> str:
    """Return a name that the same command on the same turn, at the same place of the chat, has again."""
    return sha256(f"{chat.place} {turn_id}".encode()).hexdigest()[:32]


def _fate(record: TurnRecord) -> str:
    """Return what became of a turn."""
    verdict = "" if record.verdict is None else f" ({record.verdict.value:+d} by {record.verdict.source})"
    if record.trained_in is not None:
        return f"trained on in version {record.trained_in}{verdict}"
    if record.reason is not None:
        return f"not trained on: {record.reason}{verdict}"
    told = {
        TurnState.SERVED: "waits for your next message",
        TurnState.PAIRED: "waits for the judge",
        TurnState.JUDGED: "judged",
        TurnState.SAMPLED: "waits for the next training step",
        TurnState.LEASED: "is in a training step",
    }
    return f"{told.get(record.state, record.state)}{verdict}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
