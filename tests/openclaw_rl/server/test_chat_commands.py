"""Commands of a chat over a real ledger, each about the reply that the chat shows last, and each carried out once."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.server.api.feedback import FeedbackDeps
from openclaw_rl.server.chat_commands import ChatCommands
from openclaw_rl.sessions.commands import CommandedChat, command_of
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import Feedback, WrittenReply
from openclaw_rl.web.auth import Caller, Keys


class NoTokens:
    """A command has no demonstration."""

    context_length = 20

    def written_reply(self, text: str) -> WrittenReply:
        raise AssertionError(text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


@dataclass
class Chats:
    ledger: Ledger
    commands: ChatCommands

    async def served(self, name: str, said: str) -> str:
        return await serve_turn(self.ledger, make_request(name, session="s"), make_turn(name, reply=said))

    async def say(self, line: str, before: Sequence[Message], *, session: str | None = "s") -> str:
        """Give a command in a chat whose turns are no longer open."""
        command = command_of(user(line))
        assert command is not None
        return await self.commands.answer(
            command, Caller("ann", True), CommandedChat.of(session, None, [*before, user(line)])
        )

    async def feedback(self, turn_id: str) -> list[Feedback]:
        record = await self.ledger.turn(turn_id)
        assert record is not None
        return [*record.feedback]


@pytest.fixture
async def chats(tmp_path: Path) -> AsyncIterator[Chats]:
    training = TrainingSettings()
    ledger = await Ledger.open(tmp_path / "l.sqlite", identity=Identity("base", "tokenizer", "tiny"), training=training)
    feedback = FeedbackDeps(ledger, Keys([]), NoTokens(), lambda: None, lambda: None)
    yield Chats(ledger, ChatCommands(ledger, feedback, lambda _: 0, training, 1.0))
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


async def test_the_sessions_newest_reply_is_rated_if_the_chat_shows_it_last(chats: Chats) -> None:
    await chats.served("old", "one")
    await chats.served("new", "two")
    asked = [user("q"), reply("one"), user("q")]
    assert "rated good" in await chats.say("/rl good", [*asked, reply("two")])
    assert [said.value for said in await chats.feedback("new")] == [1.0]


@pytest.mark.parametrize(
    "before",
    [[user("q"), reply("one")], [user("q"), reply("of the client's own request")], [user("q")], []],
    ids=["taken back to an older reply", "another reply", "no reply", "alone"],
)
async def test_a_chat_that_shows_another_reply_rates_none(chats: Chats, before: list[Message]) -> None:
    await chats.served("old", "one")
    await chats.served("new", "two")
    for line in ("/rl bad", "/rl undo"):
        assert "no recorded reply" in await chats.say(line, before)
    assert "The reply before" not in await chats.say("/rl status", before)
    assert await chats.feedback("old") == await chats.feedback("new") == []


async def test_a_request_that_is_sent_again_has_no_second_effect(chats: Chats) -> None:
    turn_id, chat = await chats.served("t", "one"), [user("q"), reply("one")]

    async def say(line: str) -> str:
        answer = await chats.say(line, chat)
        await chats.say(line, chat)  # once more, from the same place
        chat.extend((user(line), reply(answer)))
        return answer

    await say("/rl good")
    await say("/rl bad too long")
    assert [said.value for said in await chats.feedback(turn_id)] == [1.0, -1.0]
    assert "taken back" in await say("/rl undo")
    assert [said.value for said in await chats.feedback(turn_id)] == [1.0]
    await say("/rl bad too long")  # the same words at a later place are another command
    assert [said.value for said in await chats.feedback(turn_id)] == [1.0, -1.0]
    await say("/rl undo")
    await say("/rl undo")
    assert await chats.feedback(turn_id) == []
    assert "No `/rl good`" in await say("/rl undo")
