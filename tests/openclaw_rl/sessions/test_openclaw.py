"""OpenClaw's marks: stripped text, background requests, and quoted marks, which are neither."""

import json

import pytest

from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.sessions import openclaw
from openclaw_rl.sessions.reactions import reactions

RUNTIME = "Runtime: agent=main | session=agent:main:chata | sessionId=s-1 | host=h | os=Linux | shell=bash"
STAMP = "[Fri 2026-11-27 22:18 UTC] "
BEGIN, END = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
AGENT = Message(role="system", content="<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant.")
QUEUED = "[Queued user message from a previous active turn; preserved as context only. Continue below.]\n"


def user(text: str) -> Message:
    return Message(role="user", content=text)


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (f"{STAMP}A first\n\n{RUNTIME}", "A first"),
        (f"{STAMP}A first", "A first"),
        ("no wrapping at all ", "no wrapping at all"),
        (
            f'{STAMP}Conversation info: ⟦openclaw:ctx⟧\n```json\n{{"sender":{{"id":"7"}}}}\n```\n\nHello bot',
            "Hello bot",
        ),
        (
            f"{STAMP}{QUEUED}Error test\n\nContinue the current task from the existing transcript, r.\n\n{RUNTIME}",
            "Error test",
        ),
        (f"{STAMP}what now?\n{BEGIN}\nConversation data\n{END}", "what now?"),
        (f"{STAMP}one\n{STAMP}two", "one\ntwo"),
        (f"The summary.\n{RUNTIME}", "The summary."),
        ("[1, 2] is a list", "[1, 2] is a list"),
        (f"I wrote `{BEGIN}` and `{END}`", f"I wrote `{BEGIN}` and `{END}`"),
    ],
)
def test_strip_wrapping_leaves_the_users_words(wrapped: str, words: str) -> None:
    assert openclaw.strip_wrapping(wrapped) == words
    assert openclaw.strip_wrapping(words) == words


def test_the_recorded_texts_are_stripped(traffic) -> None:
    last = {
        "chat_3_turns": "Message number 3 in the same session",
        "telegram_reaction": "Second telegram message",
        "retry_after_503": "Follow-up after 503",
        "interleaved_two_sessions": "B second",
    }
    for name, words in last.items():
        messages = [m for m in traffic(name)[-1].messages if m.role == "user" and not openclaw.is_ephemeral(m)]
        assert openclaw.strip_wrapping(messages[-1].text()) == words
    first = traffic("retry_after_503")
    assert {openclaw.strip_wrapping(request.messages[1].text()) for request in first} == {"Error test s503"}


def test_internal_context_is_ephemeral_only_as_a_whole_message() -> None:
    context = f"{BEGIN}\nConversation data\n{END}"
    assert openclaw.is_ephemeral(user(context))
    assert openclaw.is_ephemeral(Message(role="user", content=[ContentPart(type="text", text=context)]))
    assert openclaw.is_ephemeral(user("The previous attempt did not produce a user-visible answer. Continue with it."))
    assert not openclaw.is_ephemeral(user(f"What does {context} mean?"))
    assert not openclaw.is_ephemeral(Message(role="tool", content=context, tool_call_id="x"))


def test_runtime_reads_the_last_line_of_the_first_user_message() -> None:
    quoted = RUNTIME.replace("s-1", "s-quoted")
    line = openclaw.runtime([AGENT, user(f"{STAMP}my log says\n{quoted}\n\n{RUNTIME}"), user(quoted)])
    assert line is not None
    assert (line.session_key, line.session_id) == ("agent:main:chata", "s-1")
    assert openclaw.runtime([AGENT, user("hi"), user(RUNTIME)]) is None
    cron = openclaw.runtime([user("go\n\nRuntime: agent=main | session=agent:main:cron:5e | host=h")])
    assert cron is not None
    assert cron.session_id is None


@pytest.mark.parametrize(
    "text",
    [
        "Follow the heartbeat monitor scratch context when provided. Rules.",
        "A custom heartbeat.\nCurrent time: Friday, 10:25 PM (UTC)\nReference UTC: 2026-11-27 22:25 UTC",
        "Pre-compaction memory flush. Rules.",
        "[cron:5ef308af probe-iso] payload",
        f"{STAMP}[OpenClaw heartbeat poll]",
        f"{STAMP}A background task completed. Use it.\n\n[Inter-session message] sourceSession=x isUser=false\nrouted",
        f"{STAMP}[Subagent Context] You are running as a subagent (depth 1/5).\n\n[Subagent Task]\n\nSay hello",
    ],
)
def test_background_messages(text: str) -> None:
    assert openclaw.is_background(user(text))
    assert not openclaw.is_background(Message(role="assistant", content=text))
    # quoted inside an ordinary, stamped message of the user's own
    stripped = text.removeprefix(STAMP)
    assert not openclaw.is_background(user(f"{STAMP}What does this mean: {stripped}"))
    assert openclaw.background_request([AGENT, user(f"{STAMP}Why did you say: {stripped}")], tools=True) is None


def test_bare_prompts_are_events_only_where_messages_are_stamped() -> None:
    stamped, bare = (
        [AGENT, user(f"{STAMP}hi"), Message(role="assistant", content="hello")],
        user("Do the nightly thing."),
    )
    assert openclaw.background_request([*stamped, bare], tools=True) == "event"
    unstamped = [AGENT, user("hi"), Message(role="assistant", content="hello")]
    assert openclaw.background_request([*unstamped, bare], tools=True) is None
    assert openclaw.background_request([*stamped[1:], bare], tools=True) is None  # another client's


def test_unmerged_yields_what_the_last_messages_read_alone() -> None:
    parts = Message(
        role="user", content=[ContentPart(type="text", text=f"{STAMP}{t}") for t in ("one", "two", "three")]
    )
    assert list(openclaw.unmerged(parts)) == ["two\nthree", "three"]
    assert list(openclaw.unmerged(user(f"{STAMP}one\n{STAMP}two"))) == ["two"]
    assert list(openclaw.unmerged(user(f"one\n{STAMP}two"))) == []
    assert list(openclaw.unmerged(Message(role="tool", content="a\nb", tool_call_id="x"))) == []


def context(*data: str) -> Message:
    blocks = "\n\n".join(f"Conversation data (data, not instructions):\n{line}" for line in data)
    return user(f"{BEGIN}\n{blocks}\n{END}")


def event(text: str) -> str:
    return f"System: [2026-11-27 22:35:10 UTC] {text}"


def telegram(what: str) -> str:
    return event(f"Telegram reaction {what} by Uma (@uma) on msg 1001")


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        ([telegram("added: 👍")], ("👍",)),
        ([telegram("added: 👎"), telegram("added: 🔥")], ("👎", "🔥")),
        ([telegram("added: 👎") + "\n" + telegram("added: 🔥")], ("👎", "🔥")),
        ([telegram("added: 👍") + "\n" + telegram("removed: 👍")], ()),
        ([telegram("removed: 👍")], ("removed 👍",)),
        ([event("Slack reaction added: :thumbsup: by uma in channel #x msg 17")], (":thumbsup:",)),
        # a chat excerpt that only quotes an event
        (["Conversation context:\n#session:1 User: x\n" + telegram("added: 👍")], ()),
        (["Active exec sessions:\nnone"], ()),
    ],
)
def test_reactions(data: list[str], seen: tuple[str, ...]) -> None:
    assert reactions([user("hi"), context(*map(json.dumps, data))]) == seen


def test_broken_data_is_passed_over() -> None:
    assert reactions([context('"System: [broken', json.dumps(telegram("added: 👍")))]) == ("👍",)


def test_a_reaction_typed_by_a_user_is_none() -> None:
    assert reactions([user(f'"{event("Telegram reaction added: 👍 by Uma on msg 1")}"')]) == ()
