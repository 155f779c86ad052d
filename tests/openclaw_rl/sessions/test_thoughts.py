"""Thoughts in a reply's text: what clients and parsers put before the answer is no part of it."""

import pytest

from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.proxy.sglang import ReasoningParser
from openclaw_rl.sessions.thoughts import without_quote, without_thoughts
from openclaw_rl.types import Scope

TEXT = "It is blue.\n\nMostly."
ASKED = Message(role="user", content="What colour?")
CALL = {"id": "c1", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
WAYS = {
    "think": f"<think>\nhm hm\n</think>\n\n{TEXT}",
    "think, one line": f"<think>hm</think>{TEXT}",
    "the start stood in the prompt": f"hm hm\n</think>\n\n{TEXT}",
    "thinking": f"<thinking>\nhm\n\nhm\n</thinking>\n{TEXT}",
    "with an attribute, in capitals": f'<Thinking time="3">hm</Thinking>\n{TEXT}',
    "a name space": f"<seed:think>hm</seed:think>{TEXT}",
    "two thoughts": f"<think>hm</think>\n<think>hm hm</think>\n{TEXT}",
    "shortened": f"<think>h…</think>\n\n{TEXT}",
    "empty": f"<think>\n\n</think>\n\n{TEXT}",
    # Open WebUI: the quote is escaped, and the block has an attribute for its kind
    "details": (
        '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds</summary>\n'
        f"&gt; hm hm\n&gt; hm\n</details>\n{TEXT}"
    ),
    "details without a kind": f"<details>\n<summary>Reasoning</summary>\n\nhm\n\n</details>\n\n{TEXT}",
    "details, summary last": f'<details type="reasoning" open><div>\nhm\n</div><summary>s</summary></details>\n{TEXT}',
    "a directive": f":::thinking\nhm\n:::\n{TEXT}",  # LibreChat
    "a fence": f"```thinking\nhm\n```\n{TEXT}",
}
QUOTES = {
    "a quote": f"> hm hm\n> hm\n\n{TEXT}",
    "a quote under a line": f"**Thought for 2 seconds**\n\n> hm hm\n\n{TEXT}",
}


@pytest.mark.parametrize("scope", [Scope("uma", "s"), Scope("uma", None)], ids=["session", "no session"])
@pytest.mark.parametrize("way", WAYS | QUOTES)
def test_a_reply_pairs_with_its_thoughts_in_the_text(play, scope: Scope, way: str) -> None:
    back = Message(role="assistant", content=(WAYS | QUOTES)[way])
    play.serve(scope, [ASKED], Message(role="assistant", content=TEXT, reasoning_content="hm hm"), "t")
    said = Message(role="user", content="Thanks!")
    assert play.ask(scope, [ASKED, back, said]).turn_id == "t"
    assert play.ask(scope, [ASKED, back, said]) is None


@pytest.mark.parametrize("way", WAYS)
def test_a_server_without_a_parser_gave_the_thoughts_as_text(play, way: str) -> None:
    """The client drops them, or moves them to a field."""
    play.serve(Scope("uma", None), [ASKED], Message(role="assistant", content=WAYS[way]), "t")
    back = Message(role="assistant", content=TEXT, reasoning_content="hm hm")
    assert play.ask(Scope("uma", None), [ASKED, back, Message(role="user", content="Thanks!")]).turn_id == "t"


@pytest.mark.parametrize("before", ["<think>hm</think>", "<think>hm</think>\n\n", ""])
def test_thoughts_before_a_call(play, before: str) -> None:
    sent = Message.model_validate({"role": "assistant", "reasoning_content": "hm", "tool_calls": [CALL]})
    back = Message.model_validate({"role": "assistant", "content": before, "tool_calls": [CALL]})
    play.serve(Scope("uma", None), [ASKED], sent, "t")
    result = Message(role="tool", content="blue", tool_call_id="c1")
    assert play.ask(Scope("uma", None), [ASKED, back, result]).turn_id == "t"


@pytest.mark.parametrize("thought", ["<think>hm hm</think>", "", None])
def test_thoughts_in_a_message_of_their_own(play, thought: str | None) -> None:
    play.serve(Scope("uma", None), [ASKED], TEXT, "t")
    apart = Message(role="assistant", content=thought, reasoning_content="hm hm")
    back = [ASKED, apart, Message(role="assistant", content=TEXT), Message(role="user", content="Thanks!")]
    assert play.ask(Scope("uma", None), back).turn_id == "t"


def test_a_reply_of_thoughts_alone_pairs_too(play) -> None:
    cut = Message(role="assistant", content="", reasoning_content="hm hm")
    play.serve(Scope("uma", None), [ASKED], cut, "t")
    back = Message(role="assistant", content="<think>\nhm hm\n</think>")
    assert play.ask(Scope("uma", None), [ASKED, back, Message(role="user", content="Well?")]).turn_id == "t"


def test_a_part_of_its_own(play) -> None:
    play.serve(Scope("uma", None), [ASKED], TEXT, "t")
    thought = ContentPart.model_validate({"type": "thinking", "thinking": "hm hm"})
    back = Message(role="assistant", content=[thought, ContentPart(type="text", text=TEXT)])
    assert play.ask(Scope("uma", None), [ASKED, back, Message(role="user", content="Thanks!")]).turn_id == "t"


@pytest.mark.parametrize("parser", sorted(ReasoningParser.DetectorMap))
def test_the_marks_of_every_parser_that_the_settings_know(parser: str) -> None:
    detector = ReasoningParser(parser).detector
    start, end = detector.think_start_token, detector.think_end_token
    label = detector.think_start_self_label
    assert without_thoughts(f"{start}{label}hm hm\nhm{end}{TEXT}".strip()) == TEXT
    for other in getattr(detector, "request_selectable_think_end_tokens", ()):
        assert without_thoughts(f"{start}hm{other}\n{TEXT}".strip()) == TEXT


def test_the_channels_of_gpt_oss() -> None:
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}"
    assert without_thoughts(text) == TEXT


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"{TEXT} <think>hm</think>",
        "<think> is the mark before a thought.",
        "Write `<think>hm</think>` first.\nThen the answer.",
        "Close it with `</think>`, always.",
        "<details><summary>More about the sky</summary>long</details>",
        "<thinker>hm</thinker> is no tag.",
        "```python\nthink()\n```\nrun it",
        "",
    ],
)
def test_what_is_the_answer_stays(text: str) -> None:
    assert without_thoughts(text) == text


def test_a_quote_is_the_answers_own_until_nothing_else_fits(play) -> None:
    scope = Scope("uma", None)
    quoted = f"> To be or not to be\n\n{TEXT}"
    play.serve(scope, [ASKED], quoted, "quoted")
    play.serve(scope, [ASKED], TEXT, "bare")
    back = [ASKED, Message(role="assistant", content=quoted), Message(role="user", content="Thanks!")]
    assert play.ask(scope, back).turn_id == "quoted"
    assert without_quote("> all of it") is None
    assert without_quote(f"As you wrote:\n> a\n\n{TEXT}") is None


@pytest.mark.parametrize("text", ["<think>" * 50_000, "<details " * 50_000, "> a\n" * 50_000, "</think" * 50_000])
def test_hostile_marks_take_no_time(text: str) -> None:
    without_quote(without_thoughts(text))  # a quadratic search would take minutes
