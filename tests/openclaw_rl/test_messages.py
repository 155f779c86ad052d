"""Order of tool results: by their calls, where ids say so."""

import pytest

from openclaw_rl.messages import Message, in_call_order


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
