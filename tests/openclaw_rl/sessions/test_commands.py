"""Commands in a chat: which messages are one, and histories without them."""

import pytest

from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.sessions.commands import Command, command_of, without_commands


def user(text: str) -> Message:
    return Message(role="user", content=text)


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/rl good", Command("good")),
        ("  /RL  Good \n", Command("good")),
        ("/Rl bad", Command("bad")),  # a phone's keyboard
        ("/rl bad", Command("bad")),
        ("/rl bad too long, and in German", Command("bad", "too long, and in German")),
        ("/rl undo", Command("undo")),
        ("/rl status", Command("status")),
        ("/rl wishes", Command("wishes")),
        ("/rl", Command("help")),
        ("/rl help", Command("help")),
        ("/rl godo", Command("help")),  # a slip of the finger is no message to the model
        ("/rl good job", Command("help")),
        ("[Sun 2026-11-29 20:26 UTC] /rl good", Command("good")),  # OpenClaw's time stamp
        ("/rl good\n\nRuntime: agent=main | session=agent:main:a | sessionId=s | host=h", Command("good")),
        ("<system-reminder>\nToday.\n</system-reminder>\n/rl good", Command("good")),
        ("/rlhf is a method", None),
        ("What does /rl good do?", None),
        ("/rl bad\nIt is too long.", None),  # more than one line
        ("Say this:\n/rl good", None),
        ("", None),
    ],
)
def test_a_command_is_a_message_of_one_line_alone(text: str, command: Command | None) -> None:
    assert command_of(user(text)) == command


def test_only_a_user_gives_commands_and_parts_are_read_together() -> None:
    assert command_of(reply("/rl good")) is None
    assert command_of(Message(role="tool", content="/rl good")) is None
    reminder = ContentPart(type="text", text="<system-reminder>x</system-reminder>")
    parts = [reminder, ContentPart(type="text", text="/rl bad why")]
    assert command_of(Message(role="user", content=parts)) == Command("bad", "why")


def test_a_history_is_without_commands_and_their_answers() -> None:
    a, b, c = user("hi"), reply("hello"), user("and now?")
    assert without_commands([a, b, user("/rl good"), reply("noted"), c]) == [a, b, c]
    assert without_commands([a, b, user("/rl good"), user("/rl undo"), reply("undone"), c]) == [a, b, c]
    assert without_commands([user("/rl status"), reply("fine"), a, b]) == [a, b]
    assert without_commands([a, b, user("/rl good"), c]) == [a, b, c]  # a client that kept no answer


def test_a_history_without_commands_is_the_same_object() -> None:
    history = [user("hi"), reply("/rl good is a command"), user("/rl good and more\nlines")]
    assert without_commands(history) is history
