"""The rules judge, read as its table is: what each kind of answer says of the reply before it."""

import pytest

from openclaw_rl.judge.rules import RulesJudge, rule_on
from openclaw_rl.messages import Message

REQUEST = "Give me three tips to sleep better"


def tool(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="x")


@pytest.mark.parametrize(
    "text",
    [
        "thanks!",
        "Thank you, that's perfect",
        "great, more on cheese",
        "Looks good",
        "Perfect. Now add tests for it",
        "Correct!",
        "no thanks, that's all",
        "I love it",
        "it works now",
        "Danke, super",
        "merci",
        "muchas gracias",
        "obrigada",
        "спасибо!",
        "谢谢",
        "不错",
        "ありがとう",
        # moving on
        "What is the capital of France?",
        "Give me three tips to eat better",
        "Find me a shorter way to work, since I am always late in the mornings these days",
        "I said hello to my boss yesterday and he frowned, what should I do now?",
    ],
)
def test_thanks_praise_and_moving_on(judged, text: str) -> None:
    assert rule_on(judged(REQUEST, "Sleep more.", text)).value == 1


_REMINDER = (
    "<system-reminder>\n" + "Great work so far, thanks. The todo list was not used. " * 9 + "\n</system-reminder>"
)


@pytest.mark.parametrize(
    "decorated",
    [
        f"{_REMINDER}\n\n{{}}",  # Claude Agent SDK
        "{}\n\n<environment_details>\n# Open Tabs\nperfect.md, wrong.md, no.md\n</environment_details>",  # Roo, Kilo
        "[Current time: 12:01, all is fine and perfect]\n{}",
        f"{_REMINDER}\n<user_query>\n{{}}\n</user_query>",  # Cursor
        "<p>{}</p>",
    ],
)
@pytest.mark.parametrize(
    ("text", "value"), [("No, that is wrong.", -1), ("Thanks, perfect!", 1), ("ok", 0), (f"{REQUEST}!", -1)]
)
def test_a_clients_decoration_says_nothing_of_the_reply(judged, decorated: str, text: str, value: int) -> None:
    assert rule_on(judged(decorated.format(REQUEST), "Sleep more.", decorated.format(text))).value == value


@pytest.mark.parametrize(
    "text",
    [
        "No, I meant the night train.",
        "that's wrong",
        "That is not what I asked for.",
        "not what i wanted",
        "you didn't answer my question",
        "it doesn’t work",
        "still broken",
        "wrong file",
        "shorter please",
        "Too long. One or two short sentences please, no list.",
        "Please answer in one or two short sentences, no list.",
        "Can you explain that in simpler words?",
        "Actually, use metric units instead",
        "Don't use bullet points",
        "rewrite it",
        "try again",
        "again",
        "nope",
        "What?",
        "what do you mean by that?",
        "Thanks, but please make it shorter",
        "Great start, but that's wrong.",
        "Das ist falsch",
        "zu lang, bitte kürzer",
        "c'est faux",
        "no es lo que pedí",
        "слишком длинно",
        "不对，我要的是另一个",
        "違います",
        # the request again, as it was or with words added
        REQUEST,
        REQUEST.upper() + "!!",
        "Give me three tips to sleep better, short ones",
    ],
)
def test_corrections_complaints_and_repeats(judged, text: str) -> None:
    assert rule_on(judged(REQUEST, "Sleep more.", text)).value == -1


@pytest.mark.parametrize(
    "text", ["ok", "yes", "the second", "2", "/compact", "", "> you are wrong", "```\nthat's wrong\n```"]
)
def test_what_says_nothing_is_neutral(judged, text: str) -> None:
    assert rule_on(judged(REQUEST, "Sleep more.", text)).value == 0


def test_praise_inside_a_repeated_request_is_no_praise(judged) -> None:
    request = "Perfect answer wanted: give me a great recipe for bread"
    assert rule_on(judged(request, "Bread is nice.", request)).value == -1


@pytest.mark.parametrize("text", ["Thanks!", "Great, exactly what I wanted.", "thank you"])
def test_the_same_praise_twice_is_praise_twice(judged, text: str) -> None:
    assert rule_on(judged(text, "You are welcome.", text)).value == 1


def test_openclaws_wrapping_says_nothing(judged) -> None:
    wrapped = (
        "[Fri 2026-11-27 22:18 UTC] thanks\n\nRuntime: agent=main | session=agent:main:a | sessionId=s | host=wrong"
    )
    assert rule_on(judged(f"[Fri 2026-11-27 22:17 UTC] {REQUEST}", "Sleep.", wrapped)).rule == "thanks: thanks"


def test_a_command_to_the_client_is_passed_over(judged) -> None:
    assert rule_on(judged(REQUEST, "Sleep.", "/compact", "thanks")).value == 1


@pytest.mark.parametrize(
    ("reactions", "text", "value"),
    [
        (("👍",), "shorter please", 1),  # the plainest word wins
        (("👎",), "thanks", -1),
        (("👍🏽",), "ok", 1),
        (("❤️",), "ok", 1),
        ((":thumbsdown:",), "ok", -1),
        (("👍", "👎"), "thanks", 1),  # of two minds: the text decides
        (("🦄",), "thanks", 1),
        (("removed 👍",), "ok", 0),
    ],
)
def test_reactions_come_first(judged, reactions, text, value) -> None:
    assert rule_on(judged(REQUEST, "Sleep.", text, reactions=reactions)).value == value


def test_a_reaction_alone_is_enough(judged) -> None:
    assert rule_on(judged(REQUEST, "Sleep.", reactions=("🔥",))).rule == "reaction: 🔥"
    assert rule_on(judged(REQUEST, "Sleep.")).value == 0


@pytest.mark.parametrize(
    "result",
    [
        "permission denied",
        "Traceback (most recent call last):\n  File x",
        "ok so far\n(Command exited with code 1)",
        "exit code: 127",
        '{"exitCode": 2, "output": ""}',
        "bash: foo: command not found",
        "cat: x: No such file or directory",
        '{"error": {"message": "x"}}',
        '{"success": false}',
        '{"status": "error"}',
        "ValueError: bad",
        "npm ERR! code E404",
        "x" * 100_000 + "\nError: boom",
    ],
)
def test_failed_tools(judged, result: str) -> None:
    assert rule_on(judged(REQUEST, "On it.", tool(result))).value == -1
    assert rule_on(judged(REQUEST, "On it.", tool("3 files"), tool(result))).value == -1  # SP-4: any of them


@pytest.mark.parametrize(
    "result",
    [
        "tool-says-hi",
        "",
        '{"error": null, "data": 1}',
        '{"errors": []}',
        "log: error: old\nexit code 0",
        "I found no errors",
    ],
)
def test_tools_that_did_it(judged, result: str) -> None:
    assert rule_on(judged(REQUEST, "On it.", tool(result))).value == 1


def test_a_user_who_speaks_beside_tools_is_heard(judged) -> None:
    assert rule_on(judged(REQUEST, "On it.", tool("done"), "stop, that's wrong")).value == -1
    assert rule_on(judged(REQUEST, "On it.", tool("Error: x"), "ok")).value == -1
    assert rule_on(judged(REQUEST, "On it.", tool("Error: x"), "thanks")).value == 1


def test_huge_texts_are_read_at_their_ends_only(judged) -> None:
    word, lines = "x" * 1_000_000, "not what i " * 100_000
    assert rule_on(judged(lines, "Sleep.", word)).value == 0
    assert rule_on(judged(word, "Sleep.", "wrong " + lines)).value == -1
    assert rule_on(judged(word, "Sleep.", tool(word + "\n" + lines))).value == 1


async def test_the_verdict_names_its_rule(judged) -> None:
    verdict = await RulesJudge().verdict(judged(REQUEST, "Sleep.", "No, I meant the night train."))
    assert (verdict.value, verdict.votes, verdict.source) == (-1, (-1,), "rules")
    assert verdict.rationale == "correction: i meant"


@pytest.mark.parametrize(
    "said",
    [
        "That is far too long. Please answer in one or two short sentences.",
        "Too long for me. Just say it in one or two short sentences.",
        "I don't like lists. Please write plain sentences, in one short paragraph.",
        "This is way too technical for me, could you explain it as you would to somebody who never saw a computer?",
        "I do not want numbered lists in an answer like that one, please write it as you would say it to a friend.",
    ],
)
def test_a_complaint_of_many_words_is_no_moving_on(judged, said: str) -> None:
    assert rule_on(judged(REQUEST, "Sleep more.", said)).value == -1
