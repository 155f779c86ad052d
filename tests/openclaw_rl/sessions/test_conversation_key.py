"""Canonical messages: a client's own changes on the way back are ignored, all others count."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.messages import ContentPart, FunctionCall, Message, ToolCall
from openclaw_rl.sessions.conversation_key import Known, canonical_arguments, conversation, digest, turn_key


def call(name: str, arguments: object, call_id: str = "call_1") -> Message:
    text = arguments if isinstance(arguments, str | dict) else json.dumps(arguments)
    return Message(
        role="assistant",
        content=None,
        tool_calls=[ToolCall(id=call_id, function=FunctionCall(name=name, arguments=text))],
    )


def test_a_list_of_text_is_the_text() -> None:
    parts = [ContentPart(type="text", text="one"), ContentPart(type="text", text="two")]
    assert digest(Message(role="user", content=parts)) == digest(Message(role="user", content="one\ntwo"))


def test_what_clients_change_on_the_way_back() -> None:
    sent = call("exec", '{"command": "echo \\u00e9", "n": 1.0}', "call_ab12").model_copy(
        update={"content": "", "reasoning_content": "I should run it."}
    )
    back = call("exec", {"n": 1, "command": "echo é"}, "callab12").model_copy(
        update={"reasoning_content": "I should run it. "}
    )
    assert digest(sent) == digest(back)
    assert digest(Message(role="assistant", content="Fine. \n")) == digest(Message(role="assistant", content="Fine."))


def test_a_stamp_that_a_reply_repeats_is_lost_on_the_way_back() -> None:
    """Seen with the real client and the bundled model: the reply began with the repeated time stamp of the question."""
    stamp = "[Sat 2026-11-28 17:21 UTC] "
    said = "And what helps me to wake up early?\n\nTo some extent, it's about your own circadian rhythms."

    def of(content: str, role: str = "assistant") -> str:
        return digest(Message(role=role, content=content))

    assert of(stamp + said) == of(stamp + stamp + said) == of(said)
    for other in ("[Sat] " + said, said + f" {stamp}", said.replace("\n\n", f"\n\n{stamp}")):
        assert of(other) != of(said)
    assert of(stamp + said, "tool") != of(said, "tool")


def test_what_makes_another_message() -> None:
    messages = [
        Message(role="assistant", content="a"),
        Message(role="user", content="a"),
        Message(role="tool", content="a", tool_call_id="x"),
        Message(role="assistant", content="a b"),
        call("a", "{}"),
        call("a", '{"b": 1}'),
        call("a", '{"b": [1]}'),
        Message(role="assistant", content="a{}"),
    ]
    assert len({digest(message) for message in messages}) == len(messages)


def test_arguments_that_are_no_json_stay() -> None:
    assert canonical_arguments(' {"cut": "of') == '{"cut": "of'
    assert canonical_arguments("") == "{}"
    assert canonical_arguments("[" * 100_000) == "[" * 100_000


def test_arguments_of_any_depth_have_a_form() -> None:
    """Between two limits a reader of JSON takes a depth that the writer does not take."""
    for levels in (101, 320, 480, *range(900, 1000, 5)):
        for opening, ending in (('{"a":', "}"), ("[", "]")):
            text = f"{opening * levels}1{ending * levels}"
            assert canonical_arguments(text) == text


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.integers(0, 4))
def test_arguments_are_one_whatever_their_spelling(arguments: dict, indent: int) -> None:
    spelled = json.dumps(arguments, indent=indent, ensure_ascii=bool(indent % 2))
    shuffled = dict(reversed(arguments.items()))
    assert canonical_arguments(spelled) == canonical_arguments(arguments) == canonical_arguments(shuffled)


LOOK_ALIKE = {
    "line ends": lambda text: text.replace("\n", "\r\n"),
    "old line ends": lambda text: text.replace("\n", "\r"),
    "line separators": lambda text: text.replace("\n", "\u2028"),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "blanks at line ends": lambda text: text.replace("\n", "  \n") + "\t",
    "blank lines behind": lambda text: text + "\n\n \n",
    "non-breaking blanks": lambda text: text.replace(" ", "\xa0"),
    "narrow blanks": lambda text: text.replace(" ", "\u202f"),
    "a byte order mark": lambda text: "\ufeff" + text,
    "hyphens at which no line breaks": lambda text: text.replace("-", "\u2011"),
    "zero-width blanks": lambda text: text.replace("G", "\u200bG"),
    # a rich-text editor's copy: all at once
    "an editor": lambda text: unicodedata.normalize("NFD", text).replace(" ", "\xa0").replace("\n", " \r\n") + "\r\n",
}


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize("how", LOOK_ALIKE)
def test_what_looks_equal_is_equal(role: str, how: str) -> None:
    text = "Gr\xfc\xdfe aus K\xf6ln : 50 \u20ac\n\n  - caf\xe9\n  - na\xefve"
    changed = LOOK_ALIKE[how](text)
    assert digest(Message(role=role, content=changed)) == digest(Message(role=role, content=text))
    made = (call("write", {"text": said, "n": 1}) for said in (text, changed))
    assert len({digest(message) for message in made}) == 1


@pytest.mark.parametrize("other", ["a  b", "a\n b", "a\n\nb", "ab", "A b", "\xe0 b", "a b.", "a\tb"])
def test_what_looks_different_is_different(other: str) -> None:
    assert digest(Message(role="assistant", content=other)) != digest(Message(role="assistant", content="a b"))


def test_arguments_that_were_encoded_twice() -> None:
    assert canonical_arguments(json.dumps('{"b": 1.0, "a": "é"}')) == canonical_arguments({"a": "é", "b": 1})


def test_results_in_another_order_are_the_same_history() -> None:
    calls = [ToolCall(id=name, function=FunctionCall(name="f")) for name in "ab"]
    asked = [Message(role="user", content="?"), Message(role="assistant", tool_calls=calls)]
    results = [Message(role="tool", content=f"of {name}", tool_call_id=name) for name in "ab"]
    reply = Message(role="assistant", content="done")
    assert turn_key([*asked, *results], reply) == turn_key([*asked, *reversed(results)], reply)


def test_lone_surrogates_are_no_trouble() -> None:
    assert digest(Message.model_construct(role="assistant", content="\ud800")) != digest(
        Message(role="assistant", content="")
    )


def test_turn_key_ignores_system_and_ephemeral_messages() -> None:
    reply = Message(role="assistant", content="hello")
    hi = Message(role="user", content="hi")
    context = Message(
        role="user", content="<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    system = [Message(role=role, content=f"of {role}") for role in ("system", "developer")]
    assert conversation([*system, hi, context]) == [hi]
    assert turn_key([*system, hi, context], reply) == turn_key([hi], reply)
    assert turn_key(system, reply).before_hash == ""
    assert turn_key([hi], reply) != turn_key([hi, reply, hi], reply)


def test_keys_of_known_messages_are_those_of_new_ones() -> None:
    known, reply = Known(), Message(role="assistant", content="hello")
    parts = Message(role="user", content=[ContentPart(type="text", text="hi")])
    messages = [Message(role="user", content="hi"), reply, call("f", {"a": 1}), call("f", {"a": 2}), parts]
    messages += [Message(role="assistant", content="hi"), Message(role="user", content="[1] hi\n\nthere. Now?")]
    for _ in range(2):
        for size in range(len(messages) + 1):
            assert turn_key(messages[:size], reply, known=known) == turn_key(messages[:size], reply)


def test_known_messages_are_bounded_and_those_used_last_stay() -> None:
    known, reply, hi = Known(), Message(role="assistant", content="hello"), Message(role="user", content="hi")
    first = turn_key([hi], reply, known=known)
    for n in range(12_000):
        known.digest(Message(role="user", content=str(n)))
        turn_key([hi], reply, known=known)
    assert (len(known._digests), len(known._places)) == (10_000, 1)
    keys = set(known._digests)
    assert turn_key([hi], reply, known=known) == first
    assert set(known._digests) == keys, "it was computed again"


def test_known_messages_hold_no_text_and_can_be_forgotten() -> None:
    known, word = Known(), "quokka"
    messages = [Message(role="user", content=f"{word} {n}. {word}!") for n in range(50)]
    turn_key(messages, Message(role="assistant", content=word), known=known)
    assert (len(known._digests), len(known._places)) == (50, 1)
    assert word not in repr((known._digests, known._places))
    known.clear()
    assert (len(known._digests), len(known._places)) == (0, 0)
