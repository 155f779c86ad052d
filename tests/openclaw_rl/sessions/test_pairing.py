"""Pairing by history: cases that users of comparable servers reported, then random conversations."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.sessions.conversation_key import turn_key
from openclaw_rl.sessions.pairing import Pairing
from openclaw_rl.types import OpenTurn, Scope

S = Scope("uma", "s")
ANON = Scope("uma", None)
STAMP = "[Fri 2026-11-27 22:18 UTC] "


def texts(paired) -> list[str]:
    return [message.text() for message in paired.next_state.messages]


def test_interleaved_chats_without_ids_never_mix(play, chat) -> None:  # SP-1
    play.serve(ANON, chat("Tell me about cheese."), "Cheese is old milk.", "cheese")
    play.serve(ANON, chat("Tell me about chess."), "Chess has 64 squares.", "chess")
    more_chess = play.ask(ANON, chat("Tell me about chess.", "Chess has 64 squares.", "great, more on chess"))
    more_cheese = play.ask(ANON, chat("Tell me about cheese.", "Cheese is old milk.", "great, more on cheese"))
    assert (more_chess.turn_id, texts(more_chess)) == ("chess", ["great, more on chess"])
    assert (more_cheese.turn_id, texts(more_cheese)) == ("cheese", ["great, more on cheese"])


def test_without_an_id_the_whole_history_must_match(play, chat) -> None:
    play.serve(ANON, chat("A", "a", "yes"), "Done.", "t")
    assert play.ask(ANON, chat("B", "b", "yes", "Done.", "thanks")) is None
    assert play.ask(ANON, chat("A", "a", "yes", "Done.", "thanks")).turn_id == "t"


def test_another_users_chat_never_pairs(play, chat) -> None:
    play.serve(S, chat("hi"), "hello", "t")
    for scope in (Scope("other", "s"), Scope("uma", "s2"), ANON, Scope("uma", "s", policy="other")):
        assert play.ask(scope, chat("hi", "hello", "thanks")) is None
    assert play.ask(S, chat("hi", "hello", "thanks")).turn_id == "t"


def test_a_repeated_request_is_a_retry(play, chat) -> None:  # SP-3
    question = chat("Translate 'dog' to Norwegian.")
    play.serve(S, question, "hund", "first")
    assert play.ask(S, question) is None
    play.serve(S, question, "hund", "second")
    paired = play.ask(S, [*question, Message(role="assistant", content="hund"), *chat("thank you")])
    assert (paired.turn_id, texts(paired), paired.superseded) == ("first", ["thank you"], ("second",))
    assert len(play.pairing) == 0


def test_of_a_retry_the_continued_reply_pairs(play, chat) -> None:
    play.serve(S, chat("hi"), "hello", "first")
    play.serve(S, chat("hi"), "hey", "second")
    paired = play.ask(S, chat("hi", "hey", "thanks"))
    assert (paired.turn_id, paired.superseded) == ("second", ("first",))


def test_people_who_open_alike_are_no_retries(play, chat) -> None:
    play.serve(ANON, chat("hi"), "hello", "one")
    play.serve(ANON, chat("hi"), "hey", "two")
    play.serve(ANON, chat("hi"), "hello", "three")
    assert [play.ask(ANON, chat("hi", "hello", "x")).turn_id, play.ask(ANON, chat("hi", "hello", "y")).turn_id] == [
        "one",
        "three",
    ]
    assert play.ask(ANON, chat("hi", "hey", "z")).turn_id == "two"


def test_the_first_continuation_wins(play, chat) -> None:
    play.serve(S, chat("hi"), "hello", "t")
    assert texts(play.ask(S, chat("hi", "hello", "one"))) == ["one"]
    assert play.ask(S, chat("hi", "hello", "two")) is None


def test_all_new_messages_are_the_next_state(play, chat) -> None:  # SP-4
    calls = [
        {"id": f"x{n}", "function": {"name": name, "arguments": args}}
        for n, (name, args) in enumerate([("rm", '{"path":"a"}'), ("count", "")])
    ]
    reply = Message.model_validate({"role": "assistant", "content": "", "tool_calls": calls})
    back = Message.model_validate(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "y0", "function": {"name": "rm", "arguments": {"path": "a"}}},
                {"id": "y1", "function": {"name": "count", "arguments": "{}"}},
            ],
        }
    )
    play.serve(S, chat("Delete a and count."), reply, "t")
    results = [
        Message(role="tool", content="permission denied", tool_call_id="y0"),
        Message(role="tool", content="3 files", tool_call_id="y1"),
    ]
    paired = play.ask(S, [*chat("Delete a and count."), back, *results])
    assert paired.next_state.messages == tuple(results)
    assert paired.next_state.is_tool


def test_parallel_main_requests_of_one_session(play, chat) -> None:  # CO-1
    for colour in ("red", "blue"):
        assert play.ask(S, chat(f"{colour}?")) is None
    play.serve(S, chat("blue?"), "blue it is", "blue")
    play.serve(S, chat("red?"), "red it is", "red")
    for colour in ("red", "blue"):
        paired = play.ask(S, chat(f"{colour}?", f"{colour} it is", f"more {colour}"))
        assert (paired.turn_id, texts(paired), paired.superseded) == (colour, [f"more {colour}"], ())


def test_a_cut_reply_pairs_only_if_its_part_returns(play, chat) -> None:
    play.serve(S, chat("tell"), "Once upon", "cut")
    play.serve(S, chat("tell"), "Once upon a time.", "whole")
    assert play.ask(S, chat("tell", "Once upon a time.", "nice")).turn_id == "whole"
    play.serve(S, chat("tell"), "Once upon", "cut")
    assert play.ask(S, chat("tell", "Once upon", "go on")).turn_id == "cut"


def test_a_prefill_of_the_reply_is_no_next_state(play, chat) -> None:
    play.serve(S, chat("hi"), "hello", "t")
    assert play.ask(S, chat("hi", "hello")) is None
    assert play.ask(S, chat("hi", "hello", "thanks")).turn_id == "t"


def test_a_changed_system_prompt_does_not_matter(play, chat) -> None:
    for scope in (S, ANON):
        play.serve(scope, chat("hi", system="It is Monday."), "hello", "t")
        assert play.ask(scope, chat("hi", "hello", "thanks", system="It is Tuesday.")).turn_id == "t"


def test_the_nearer_history_decides_between_equal_keys(play, chat) -> None:
    play.serve(S, chat("A", "a", "yes"), "Done.", "of A")
    play.serve(S, chat("B", "b", "yes"), "Done.", "of B")
    assert play.ask(S, chat("A", "a", "yes", "Done.", "x")).turn_id == "of A"
    play.serve(S, chat("C", "c", "yes"), "Done.", "of C")
    assert play.ask(S, chat("rewritten", "d", "yes", "Done.", "x")).turn_id == "of C"  # the newest


def summary(text: str = "They talked.") -> Message:
    start = "The conversation history before this point was compacted into the following summary:"
    return Message(role="user", content=f"{start}\n\n<summary>{text}</summary>")


def test_a_compacted_session_still_pairs(play, chat) -> None:
    long = chat("one", "1", "two", "2", "three")
    play.serve(S, long, "3", "t")
    tail = [*long[-1:], Message(role="assistant", content="3"), *chat("four")]
    assert texts(play.ask(S, [summary(), *tail])) == ["four"]
    play.serve(S, [summary(), *tail], "4", "t2")
    cut = [
        summary("More."),
        Message(role="assistant", content="4"),
        *chat("five"),
    ]  # even the message before it is gone
    assert play.ask(ANON, cut) is None
    assert play.ask(S, cut).turn_id == "t2"


def test_a_window_that_starts_with_the_reply_pairs_within_a_session(play, chat) -> None:
    window = [Message(role="assistant", content="1"), *chat("two")]
    for scope, expected in ((ANON, None), (S, "t")):
        play.serve(scope, chat("one"), "1", "t")
        paired = play.ask(scope, window)
        assert (paired and paired.turn_id) == expected
        play.pairing.remove(["t"])


def test_a_heartbeat_in_the_history_is_passed_over(play, chat) -> None:
    play.serve(S, chat(f"{STAMP}hi"), "hello", "t")
    poll = [
        Message(role="user", content=f"{STAMP}[OpenClaw heartbeat poll]"),
        Message(role="assistant", content="Nothing due."),
    ]
    call = Message.model_validate(
        {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]}
    )
    polls = [*poll, poll[0], call, Message(role="tool", content="x", tool_call_id="c"), poll[1]]
    paired = play.ask(S, [*chat(f"{STAMP}hi", "hello"), *polls, *chat(f"{STAMP}thanks")])
    assert (paired.turn_id, texts(paired)) == ("t", [f"{STAMP}thanks"])


def test_an_unanswered_heartbeat_is_no_next_state(play, chat) -> None:
    play.serve(S, chat(f"{STAMP}hi"), "hello", "t")
    poll = Message(role="user", content=f"{STAMP}[OpenClaw heartbeat poll]")
    paired = play.ask(S, [*chat(f"{STAMP}hi", "hello"), poll, *chat(f"{STAMP}thanks")])
    assert texts(paired) == [f"{STAMP}thanks"]


def test_the_same_reply_to_another_message_is_another_turn(play, chat) -> None:
    play.serve(S, chat("Delete it."), "Done.", "t")
    assert play.ask(S, chat("Delete it.", "Sure?", "Yes.", "Done.", "thanks")) is None
    assert play.ask(S, chat("Delete it.", "Done.", "thanks")).turn_id == "t"


def test_a_strange_reply_in_between_is_not_passed_over(play, chat) -> None:
    play.serve(S, chat("hi"), "hello", "t")
    assert play.ask(S, chat("hi", "hello", "and?", "another model's words", "thanks")) is None


def test_merged_messages_pair(play, chat) -> None:
    failed = [
        *chat("one", "1"),
        Message(role="user", content=f"{STAMP}lost"),
        Message(role="user", content=f"{STAMP}two"),
    ]
    play.serve(S, failed, "2", "t")
    merged = Message(role="user", content=[ContentPart(type="text", text=f"{STAMP}{t}") for t in ("lost", "two")])
    announced = Message(role="assistant", content="2\nThe child\nis done.")  # a background reply was appended
    paired = play.ask(S, [*chat("one", "1"), merged, announced, *chat("thanks")])
    assert (paired.turn_id, texts(paired)) == ("t", ["thanks"])


def test_reactions_come_with_the_next_state_and_alone(play, chat) -> None:
    seen = '"System: [2026-11-27 22:35:10 UTC] Telegram reaction added: 👍 by Uma (@uma) on msg 1001"'
    context = Message(
        role="user", content=f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{seen}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    play.serve(S, chat("hi"), "hello", "t")
    paired = play.ask(S, [*chat("hi", "hello", "and?"), context])
    assert (texts(paired), paired.next_state.reactions) == (["and?"], ("👍",))
    play.serve(S, chat("hi"), "hello", "t2")
    heartbeat = Message(role="user", content="Follow the heartbeat monitor scratch context when provided.")
    assert play.pairing.observe_side(S, [*chat("hi", "hello"), heartbeat]) is None
    alone = play.pairing.observe_side(S, [*chat("hi", "hello"), heartbeat, context])
    assert (alone.turn_id, alone.next_state.messages, alone.next_state.reactions) == ("t2", (), ("👍",))


def test_a_reaction_repeated_behind_a_tool_result_is_not_for_the_call(play, chat) -> None:
    seen = '"System: [2026-11-27 22:35:10 UTC] Telegram reaction {} by Uma (@uma) on msg 1001"'
    edge = ("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
    added, removed = (
        Message(role="user", content="\n".join((edge[0], seen.format(what), edge[1])))
        for what in ("added: 👍", "removed: 👍")
    )
    function = {"name": "ls", "arguments": "{}"}
    call = Message.model_validate({"role": "assistant", "tool_calls": [{"id": "c", "function": function}]})
    play.serve(S, chat("hi"), call, "t")
    paired = play.ask(S, [*chat("hi"), call, Message(role="tool", content="a.txt", tool_call_id="c"), added])
    assert (paired.turn_id, paired.next_state.reactions) == ("t", ())
    play.serve(S, chat("yo"), "hello", "t2")
    assert play.pairing.observe_side(S, [*chat("yo", "hello"), removed]) is None
    assert play.pairing.observe_side(S, [*chat("yo", "hello"), added]).turn_id == "t2"


def test_the_oldest_give_way_and_sessions_end(chat) -> None:
    pairing = Pairing(2)
    reply = Message(role="assistant", content="r")
    turns = [OpenTurn(f"t{n}", Scope("u", f"s{n}"), turn_key(chat("hi"), reply), float(n)) for n in range(4)]
    assert [pairing.add(turn) for turn in turns] == [[], [], ["t0"], ["t1"]]
    assert pairing.add(turns[3]) == []
    assert pairing.close(Scope("u", "s2")) == ["t2"]
    assert pairing.close(Scope("u", None)) == []
    assert pairing.expire(3.0) == []
    assert pairing.expire(3.1) == ["t3"]
    assert len(pairing) == 0


def test_the_key_survives_a_restart(play, chat) -> None:
    key = turn_key(chat("hi"), Message(role="assistant", content="hello"))
    pairing = Pairing(10)
    pairing.add(OpenTurn("t", S, key, 0.0))
    assert pairing.observe(S, chat("hi", "hello", "thanks")).turn_id == "t"


@dataclass
class Conversation:
    """A client's view of its chat, and the turn of each reply in it."""

    scope: Scope
    messages: list[Message]
    names: list[str | None] = field(default_factory=list)
    """The turn of each message, None for the user's."""


STEPS = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["say", "say", "say", "retry", "retry same", "branch", "compact", "heartbeat"]),
    st.integers(0, 5),
)


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.lists(STEPS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_random_conversations_pair_right(named: list[bool], steps: list[tuple[int, str, int]]) -> None:
    """No pair across conversations, no turn lost, no turn paired twice; the continued turn is the one that pairs."""
    pairing, count = Pairing(10_000), 0
    owner: dict[str, int] = {}
    ended: dict[str, str] = {}
    chats = [
        Conversation(Scope("u", f"s{n}" if named[n] else None), [Message(role="user", content=f"topic {n}")], [None])
        for n in range(4)
    ]

    def serve(n: int, reply: str | None = None) -> tuple[str, Message]:
        nonlocal count
        name, text = f"t{count}", reply or f"reply {count % 3} of many"
        count += 1
        message = Message(role="assistant", content=text)
        pairing.add(OpenTurn(name, chats[n].scope, turn_key(chats[n].messages, message), float(count)))
        owner[name] = n
        return name, message

    def ask(n: int, continued: str | None, said: list[Message]) -> None:
        paired = pairing.observe(chats[n].scope, chats[n].messages)
        if continued is None or continued in ended:
            # Nothing of ours, or a later branch: at most a twin that reads the same may take it.
            assert paired is None or owner[paired.turn_id] == n
        else:
            assert paired is not None
            assert owner[paired.turn_id] == n
            assert paired.next_state.messages == tuple(said)
            assert continued in (paired.turn_id, *paired.superseded) or twins(paired.turn_id, continued)
        if paired is not None:
            for turn_id in (paired.turn_id, *paired.superseded):
                assert turn_id not in ended
                assert owner[turn_id] == n
                ended[turn_id] = "paired" if turn_id == paired.turn_id else "superseded"

    keys: dict[str, object] = {}

    def twins(one: str, other: str) -> bool:
        return keys[one] == keys[other]

    for n, step, at in steps:
        conversation = chats[n]
        if conversation.messages[-1].role == "user":  # waiting for an answer: the client accepts this one
            if step.startswith("retry"):
                name, message = serve(n)
                keys[name] = turn_key(conversation.messages, message)
                ask(n, None, [])
                name, message = serve(n, message.text() if step == "retry same" else None)
            else:
                name, message = serve(n)
            keys[name] = turn_key(conversation.messages, message)
            conversation.messages.append(message)
            conversation.names.append(name)
        if step == "branch":
            replies = [k for k, name in enumerate(conversation.names) if name is not None]
            cut = replies[at % len(replies)] + 1 if replies else len(conversation.messages)
            conversation.messages, conversation.names = conversation.messages[:cut], conversation.names[:cut]
        elif step == "compact" and conversation.scope.session_id and len(conversation.messages) > 3:
            cut = min(1 + at, len(conversation.messages) - 1)
            conversation.messages = [summary(f"{n}"), *conversation.messages[cut:]]
            conversation.names = [None, *conversation.names[cut:]]
        elif step == "heartbeat" and conversation.scope.session_id:
            poll = Message(role="user", content=f"{STAMP}[OpenClaw heartbeat poll]")
            conversation.messages += [poll, Message(role="assistant", content="HEARTBEAT_OK")]
            conversation.names += [None, None]
        continued = next((name for name in reversed(conversation.names) if name is not None), None)
        said = [Message(role="user", content=f"say {at} in {n}")]
        conversation.messages += said
        conversation.names.append(None)
        ask(n, continued, said)
    assert len(pairing) == len(owner) - len(ended), "every turn is open, paired or superseded"


def test_hostile_shapes_do_no_harm(play) -> None:
    for messages in (
        [],
        [Message(role="assistant", content="x")],
        [Message(role="tool", content="x", tool_call_id="1")],
    ):
        assert play.ask(S, messages) is None
        assert play.ask(ANON, messages) is None
    only_system = [Message(role="system", content="s")]
    play.serve(ANON, only_system, "Welcome!", "t")
    opened = [*only_system, Message(role="assistant", content="Welcome!"), Message(role="user", content="hi")]
    assert play.ask(ANON, opened).turn_id == "t"


@pytest.mark.parametrize("scope", [S, ANON])
def test_many_open_turns_in_one_scope(play, chat, scope: Scope) -> None:
    for n in range(300):
        play.serve(scope, chat(f"question {n}"), "ok", f"q{n}")
    assert play.ask(scope, chat("question 17", "ok", "thanks")).turn_id == "q17"
