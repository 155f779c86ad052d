"""Order of tool results: by their calls, where ids say so. Depth of JSON values."""

import json

import pytest

from openclaw_rl.messages import FunctionCall, Message, in_call_order, is_deeper


def messages(shape: str) -> list[Message]:
    """`u` is a user's message, `A(a,b)` a reply with these calls, `a` the result of one."""
    made: list[Message] = []
    for word in shape.split():
        if word == "u":
            made.append(Message(role="user", content="u"))
        elif word.startswith("A"):
            ids = [name if name != "-" else None for name in word[2:-1].split(",") if name]
            calls = [{"id": name, "function": {"name": "f"}} for name in ids]
            made.append(Message.model_validate({"role": "assistant", "tool_calls": calls or None}))
        else:
            made.append(Message(role="tool", content=word, tool_call_id=None if word == "-" else word))
    return made


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ("u A(a,b,c) c a b u", [0, 1, 3, 4, 2, 5]),
        ("u A(a,b) b a A(c,d) d c", [0, 1, 3, 2, 4, 6, 5]),
        ("u A(a) A(b) b a u", [0, 1, 2, 4, 3, 5]),  # calls in two messages
        ("A(a,b) b x a", [0, 3, 2, 1]),  # an unknown result keeps its place
        ("A(a,b) b a b", [0, 2, 1, 3]),  # a result that was sent twice
        ("A(a,b) b u a", [0, 1, 2, 3]),
        ("A(a,a) a a", [0, 1, 2]),
        ("A(-,-) - -", [0, 1, 2]),
        ("A(a,b) - a", [0, 1, 2]),
        ("A() b a u", [0, 1, 2, 3]),
        ("b a", [0, 1]),
        ("A(a,b)", [0]),
        ("u u", [0, 1]),
    ],
)
def test_results_follow_their_calls(shape: str, order: list[int]) -> None:
    assert in_call_order(messages(shape)) == order


def test_no_message_at_all() -> None:
    assert in_call_order([]) == []


@pytest.mark.parametrize(("opening", "ending"), [('{"a":', "}"), ("[1,", "]"), ('[{"b":0,"a":', "}]")])
@pytest.mark.parametrize("times", [1, 7, 60, 400])
def test_the_depth_of_a_value(opening: str, ending: str, times: int) -> None:
    value, levels = json.loads(opening * times + "1" + ending * times), times * len(ending)
    assert not is_deeper(value, levels)
    assert is_deeper(value, levels - 1)


@pytest.mark.parametrize("value", ["[[[", 1, None, {}, [], {"a": "b"}, [1, 2]])
def test_a_plain_value_is_not_deep(value: object) -> None:
    assert not is_deeper(value, 1)


@pytest.mark.parametrize("levels", [101, 600, 1020])
def test_a_deep_text_is_the_only_argument(levels: int) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    assert FunctionCall(name="f", arguments=text).as_object() == {"arguments": text}
    shallow = text.replace('{"a":' * levels, '{"a":' * 99).replace("}" * levels, "}" * 99)
    assert FunctionCall(name="f", arguments=shallow).as_object() == json.loads(shallow)
