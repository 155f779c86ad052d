"""Pairing of histories that a client changed between two requests: what is evidence, and what is not.

The forms are those of real clients; all texts are made up.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.sessions import pairing as pairing_module
from openclaw_rl.sessions.conversation_key import turn_key
from openclaw_rl.sessions.pairing import Pairing
from openclaw_rl.types import OpenTurn, Scope

S = Scope("uma", "s")
ANON = Scope("uma", None)
SCOPES = pytest.mark.parametrize("scope", [S, ANON], ids=["session", "no session"])
ASKED, REPLY = "Name a tree that lives long.", "A yew."


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def parts(*texts: str) -> Message:
    return Message(role="user", content=[ContentPart(type="text", text=text) for text in texts])


DECORATIONS = {
    "a line behind": lambda text, n: f"{text}\n\n[Current time: 12:0{n}]",
    "on the same line": lambda text, n: f"[12:0{n} UTC] {text}",
    "a comment": lambda text, n: f"{text} [seen {n} times]",
    # Claude Agent SDK: reminders are content parts of the newest message, and gone when it is history
    "reminder parts": lambda text, n: parts(
        f"<system-reminder>\nSkills: a, b{n}\n</system-reminder>",
        f"<system-reminder>\nThe todo list has {n} items.\n</system-reminder>",
        text,
    ),
    # Roo, Kilo, Cline: a block behind the text, as a part of its own
    "environment part": lambda text, n: parts(
        text, f"<environment_details>\n# Open Tabs\nnotes{n}.md\n\n# Current Time\n12:0{n}\n</environment_details>"
    ),
    "a task and its environment": lambda text, n: (
        f"<environment_details>\n# Todo\n- item {n}\n</environment_details>\n{text}\n<time>{n}</time>"
    ),
    "plain words before": lambda text, n: f"It is 12:0{n} o'clock.\n\n{text}",
    "plain words behind": lambda text, n: f"{text}\n\nKeep in mind: the user's name is Uma, and she has {n} cats",
    "plain words, many lines": lambda text, n: f"Memory:\n- likes trees\n- asked {n} times\n\n{text}\n\nBe brief.",
    "plain words, one line": lambda text, n: f"{text} The time is 12:0{n}.",
}


@SCOPES
@pytest.mark.parametrize("how", DECORATIONS)
def test_the_newest_message_is_decorated_and_bare_in_the_next_request(play, scope: Scope, how: str) -> None:
    def newest(text: str, n: int) -> Message:
        made = DECORATIONS[how](text, n)
        return user(made) if isinstance(made, str) else made

    bare: list[Message] = []
    for n, (asked, reply) in enumerate([(ASKED, REPLY), ("And a short one?", "A birch."), ("Why?", "It is quick.")]):
        paired = play.ask(scope, [*bare, newest(asked, n)])
        assert (paired and paired.turn_id) == (f"t{n - 1}" if n else None)
        play.serve(scope, [*bare, newest(asked, n)], reply)
        bare += [user(asked), assistant(reply)]


@SCOPES
def test_of_several_user_messages_only_the_last_is_decorated(play, scope: Scope) -> None:
    before = [user("Two questions about trees."), user("They are short.")]
    play.serve(scope, [*before, user(f"{ASKED}\n\n[Current time: 12:01]")], REPLY, "t")
    assert play.ask(scope, [*before, user(ASKED), assistant(REPLY), user("Thanks!")]).turn_id == "t"


@SCOPES
def test_an_injected_message_that_moves_with_the_end_of_the_chat(play, scope: Scope) -> None:
    """An author's note stands at the end of each request, before the newest message or behind it."""
    note = user("Author's note: write like a gardener.")
    for n, order in enumerate([(note, user(ASKED)), (user(ASKED), note)]):
        opening = [user(f"Chat {n}"), assistant(f"Ready for chat {n}.")]
        play.serve(scope, [*opening, *order], REPLY, f"t{n}")
        assert play.ask(scope, [*opening, user(ASKED), assistant(REPLY), user("Thanks!")]).turn_id == f"t{n}"


@SCOPES
def test_tags_that_change_in_each_request_and_stay(play, scope: Scope) -> None:
    now = "<context>\nopen: {}.md\n</context>\n"
    play.serve(scope, [user(now.format("a") + ASKED)], REPLY, "t")
    history = [user(now.format("b") + ASKED), assistant(REPLY), user(now.format("c") + "Thanks!")]
    assert play.ask(scope, history).turn_id == "t"


@SCOPES
def test_plain_words_that_change_in_each_request_and_stay(play, scope: Scope) -> None:
    now = "It is 12:0{0} o'clock, and {0} files are open.\n\n{1}\n\nBe brief."
    play.serve(scope, [user(now.format(1, ASKED))], REPLY, "t")
    history = [user(now.format(2, ASKED)), assistant(REPLY), user(now.format(2, "Thanks!"))]
    assert play.ask(scope, history).turn_id == "t"


def test_other_numbers_in_a_question_make_another_question(play, chat) -> None:
    play.serve(ANON, chat("What is 17 plus 4, please?"), "That is easy.", "t")
    assert play.ask(ANON, chat("What is 18 plus 5, please?", "That is easy.", "thanks")) is None


def test_in_a_session_one_reply_that_occurs_once_is_evidence(play, chat) -> None:
    play.serve(S, chat("the client rewrites what was asked"), REPLY, "t")
    assert play.ask(S, chat("as a summary of the question", REPLY, "thanks")).turn_id == "t"
    play.serve(S, chat("one wording"), REPLY, "a")
    play.serve(S, chat("two wordings"), REPLY, "b")
    assert play.ask(S, chat("a third way to say it", REPLY, "thanks")) is None  # it occurs twice
    assert play.ask(S, chat("other", "reply", "a third way to say it", REPLY, "thanks")) is None  # elsewhere


def test_without_a_session_an_edited_question_is_no_decorated_one(play, chat) -> None:
    for other in ("Name a bush that lives long.", "Name", "hi", "Name a tree that lives long, please", "long."):
        play.serve(ANON, chat(ASKED), REPLY, "t")
        assert play.ask(ANON, chat(other, REPLY, "thanks")) is None
        play.pairing.remove(["t"])


def test_a_short_text_in_a_longer_one_is_no_evidence(play, chat) -> None:
    play.serve(ANON, chat("Run it.\nyes"), "Done.", "t")
    assert play.ask(ANON, chat("yes", "Done.", "thanks")) is None
    assert play.ask(ANON, chat("Run it.\nyes", "Done.", "thanks")).turn_id == "t"


def test_two_decorated_chats_that_cannot_be_told_apart(play, chat) -> None:
    for name in ("first", "second"):
        play.serve(ANON, chat(f"{ASKED}\n\n[Current time: of {name}]"), REPLY, name)
    assert play.ask(ANON, chat(ASKED, REPLY, "No!")).turn_id == "first"  # asked alike, as "hi" in two chats
    assert play.ask(ANON, chat(ASKED, REPLY, "Yes!")).turn_id == "second"
    play.serve(ANON, chat(f"{ASKED}\nAbout oaks and yews."), REPLY, "third")
    play.serve(ANON, chat(f"Look at my garden.\n{ASKED}"), REPLY, "fourth")
    assert play.ask(ANON, chat(ASKED, REPLY, "Hm.")) is None


def test_a_branch_of_a_decorated_chat_takes_no_other_turn(play, chat) -> None:
    play.serve(ANON, chat(ASKED), REPLY, "bare")
    play.serve(ANON, chat(f"{ASKED}\n\n[Current time: 12:01]"), REPLY, "decorated")
    assert play.ask(ANON, chat(ASKED, REPLY, "thanks")).turn_id == "bare"
    assert play.ask(ANON, chat(ASKED, REPLY, "another try")) is None
    play.pairing.remove(["decorated"])
    assert play.ask(ANON, chat(ASKED, REPLY, "a third")) is None


# Windows


def talk(count: int, topic: str = "rivers") -> list[Message]:
    made = []
    for n in range(count):
        made += [user(f"Question {n} about {topic} of the world?"), assistant(f"Answer {n}: the {topic} know it.")]
    return made


@pytest.mark.parametrize("kept", range(3, 14))
def test_the_last_messages_alone(play, kept: int) -> None:
    whole = talk(8)
    for n in range(8):
        asked = whole[: 2 * n + 1][-kept:]
        paired = play.ask(ANON, asked)
        assert (paired and paired.turn_id) == (f"t{n - 1}" if n else None)
        play.serve(ANON, asked, whole[2 * n + 1])


@pytest.mark.parametrize("chars", [110, 150, 200, 300, 1000])
def test_a_window_by_length(play, chars: int) -> None:
    whole = talk(8)

    def window(messages: list[Message]) -> list[Message]:
        start = len(messages) - 1
        while start and sum(len(message.text()) for message in messages[start - 1 :]) <= chars:
            start -= 1
        return messages[start:]

    found = []
    for n in range(8):
        asked = window(whole[: 2 * n + 1])
        if paired := play.ask(ANON, asked):
            assert paired.turn_id == f"t{n - 1}"
            found.append(paired.turn_id)
        play.serve(ANON, asked, whole[2 * n + 1])
    assert found == [f"t{n}" for n in range(7)]


def test_a_window_of_a_long_reply_and_its_answer(play, chat) -> None:
    long = "The Nile is longer than the Amazon by a little, as far as anybody knows."
    play.serve(ANON, talk(2)[:3], long, "t")
    assert play.ask(ANON, [assistant(long), user("Thanks!")]).turn_id == "t"
    assert play.ask(ANON, [assistant(long), user("Thanks!")]) is None
    play.serve(ANON, talk(2)[:3], long, "a")
    play.serve(ANON, talk(2, "lakes")[:3], long, "b")
    assert play.ask(ANON, [assistant(long), user("Thanks!")]) is None


def test_windows_of_two_chats_never_mix(play) -> None:
    chats = {topic: talk(6, topic) for topic in ("rivers", "lakes", "seas")}
    for n in range(6):
        for topic, whole in chats.items():
            asked = whole[: 2 * n + 1][-4:]
            paired = play.ask(ANON, asked)
            assert (paired and paired.turn_id) == (f"{topic} {n - 1}" if n else None)
            play.serve(ANON, asked, whole[2 * n + 1], f"{topic} {n}")


def test_a_window_with_another_reply_is_of_another_chat(play) -> None:
    play.serve(ANON, talk(3)[:5], "The answer is the sea.", "t")
    other = [assistant("Other answer."), *talk(3)[4:5], assistant("The answer is the sea."), user("Thanks!")]
    assert play.ask(ANON, other) is None
    longer = [*talk(1, "lakes"), *talk(3)[:5], assistant("The answer is the sea."), user("Thanks!")]
    assert play.ask(ANON, longer) is None
    short = [user("yes"), assistant("Done."), user("Thanks!")]
    play.serve(ANON, [*talk(2), user("yes")], "Done.", "yes")
    assert play.ask(ANON, short) is None


# Everything at once


SENDS_BACK = (
    lambda text: text,
    lambda text: f"<think>\nhm\n</think>\n\n{text}",
    lambda text: f"> hm\n\n{text}",
    lambda text: unicodedata.normalize("NFD", text).replace(" ", "\xa0") + "\r\n",
    lambda text: f'<details type="reasoning" done="true">\n<summary>Thought</summary>\n> hm\n</details>\n{text}',
)


@dataclass
class Client:
    """One chat of a client with its habits."""

    scope: Scope
    kept: int
    decorate: Callable[[str, int], str | Message]
    back: Callable[[str], str]
    history: list[Message] = field(default_factory=list)
    last: str | None = None
    count: int = 0

    def request(self, text: str) -> list[Message]:
        made = self.decorate(text, self.count)
        newest = user(made) if isinstance(made, str) else made
        self.count += 1
        return [*self.history, newest][-self.kept :]


CLIENTS = st.tuples(
    st.booleans(),
    st.sampled_from([3, 4, 5, 6, 1000]),
    st.sampled_from([lambda text, _: text, *DECORATIONS.values()]),
    st.sampled_from(SENDS_BACK),
)


@given(
    st.lists(CLIENTS, min_size=2, max_size=4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40)
)
@settings(max_examples=200, deadline=None)
def test_clients_with_habits_pair_right(clients: list[tuple], steps: list[tuple[int, int]]) -> None:
    """Chats of one user on other subjects, with the same few replies: each turn pairs, and with its own answer."""
    pairing = Pairing(1000)
    chats = [
        Client(Scope("uma", f"s{n}" if named else None), kept, decorate, back)
        for n, (named, kept, decorate, back) in enumerate(clients)
    ]
    for number, (n, reply) in enumerate(steps):
        chat = chats[n % len(chats)]
        text = f"Is café {number} of subject {n % len(chats)} good? Tell me."
        request = chat.request(text)
        paired = pairing.observe(chat.scope, request)
        assert (paired and paired.turn_id) == chat.last
        said = ("Oui, très bon.", "No.", "It is fine, as far as I know: the café has been there for years.")[reply]
        chat.last = f"t{number}"
        key = turn_key(request, Message(role="assistant", content=said, reasoning_content="hm"))
        pairing.add(OpenTurn(chat.last, chat.scope, key, float(number)))
        chat.history += [user(text), assistant(chat.back(said))]


# Groups


def test_a_group_narrows_and_does_not_identify(play, chat) -> None:
    """`prompt_cache_key`: one key for all chats of an application, as gateways (LiteLLM) and clients send it."""
    play.serve(ANON, chat("hi"), "Hello!", "one", group="my-app")
    play.serve(ANON, chat("hi"), "Hello!", "two", group="my-app")
    assert play.ask(ANON, chat("hi", "Hello!", "No."), "other-app") is None
    assert play.ask(ANON, chat("hi", "Hello!", "No.")) is None
    first, second = (play.ask(ANON, chat("hi", "Hello!", text), "my-app") for text in ("No.", "Thanks!"))
    assert (first.turn_id, first.superseded, second.turn_id) == ("one", (), "two")


def test_a_sub_agent_under_the_key_of_its_session(play, chat) -> None:
    play.serve(ANON, chat("Plan the trip, with a helper."), "I ask my helper.", "main", group="k")
    play.serve(ANON, chat("Find a train to Oslo."), "There is one at nine.", "helper", group="k")
    assert (
        play.ask(ANON, chat("Find a train to Oslo.", "There is one at nine.", "And at ten?"), "k").turn_id == "helper"
    )
    paired = play.ask(ANON, chat("Plan the trip, with a helper.", "I ask my helper.", "And?"), "k")
    assert (paired.turn_id, paired.superseded) == ("main", ())


# Bounds


def test_what_is_remembered_is_bounded(chat, monkeypatch: pytest.MonkeyPatch, play) -> None:
    monkeypatch.setattr(pairing_module, "_MOST_ENDED", 3)
    play.pairing = Pairing(2)
    for n in range(20):
        play.serve(S, chat(f"question {n}"), "ok")
    assert len(play.pairing) == 2
    play.pairing.close(S)
    assert sum(map(len, play.pairing._index.values())) == 3 * 2  # three ended turns, each under two keys
    monkeypatch.setattr(pairing_module, "_MOST_ENDED", 0)
    play.serve(S, chat("last"), "ok")
    play.pairing.close(S)
    assert play.pairing._index == {}


def test_a_question_asked_again_later_in_a_session(play, chat) -> None:
    play.serve(S, chat("go on"), "Done.", "first")
    assert play.ask(S, chat("go on", "Done.", "go on")).turn_id == "first"
    play.serve(S, chat("go on", "Done.", "go on\n\n[Current time: 12:01]"), "Done.", "second")
    assert play.ask(S, chat("go on", "Done.", "go on", "Done.", "thanks")).turn_id == "second"
    assert play.ask(S, chat("go on", "Done.", "no")) is None


def test_a_huge_message_is_a_small_place(play) -> None:
    lines = [f"line {n} of a log." for n in range(5000)]
    play.serve(ANON, [user("\n".join(["It is noon.", *lines]))], "A long log.", "t")
    (turn,) = play.pairing._turns.values()
    assert len(turn.key.place.parts) == 64 * 12
    assert play.ask(ANON, [user("\n".join(lines)), assistant("A long log."), user("Yes.")]).turn_id == "t"
