"""A secret is in no file, neither as text nor as tokens; its turn is recorded and never trained on."""

from typing import Any

import pytest
from turns import make_request, make_turn

from openclaw_rl.ledger import Ledger, reports
from openclaw_rl.ledger.records import Effect
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.messages import Message
from openclaw_rl.settings import RedactionSettings
from openclaw_rl.types import DropReason, Feedback, NextState, Request, Turn, TurnKey, Verdict

KEY = "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12"
IDS = tuple(ord(char) for char in KEY)
"""Ids of the key from a tokenizer of characters."""


def request(name: str, *messages: Message, **fields: Any) -> Request:
    return make_request(name, *messages, **{"prompt": IDS, **fields})


def turn(name: str, reply: Message, ids: tuple[int, ...] = (1, 2)) -> Turn:
    return make_turn(f"turn-{name}", request=name, reply=reply, ids=ids)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def reply(text: str = "sure") -> Message:
    return Message(role="assistant", content=text)


@pytest.fixture(autouse=True)
async def audited(ledger, ledger_path):
    yield
    assert await ledger.audit(is_deep=True) == []
    content = b"".join(file.read_bytes() for file in ledger_path.parent.glob("ledger.sqlite*"))
    assert KEY.encode() not in content
    assert bytes(IDS) not in content
    assert b"".join(token.to_bytes(2, "little") for token in IDS) not in content


async def test_a_secret_in_a_prompt_costs_the_prompts_tokens_and_the_turn_is_not_trained(ledger):
    await ledger.begin(request("r", user(f"my key is {KEY}")))
    assert await ledger.finish(turn("r", reply()), TurnKey("r", "b", "h")) is DropReason.REDACTED
    record = await ledger.turn("turn-r")
    assert record.reason is DropReason.REDACTED
    assert record.request.messages[0].content == "my key is [redacted:api_key]"
    assert (record.request.prompt_ids, record.turn.response_ids) == ((), (1, 2))
    assert (await ledger.turns())[0].prompt_tokens == len(IDS)
    await ledger.pair("turn-r", NextState((user("thanks"),)), by_request_id="next")  # for the record
    assert (await ledger.turn("turn-r")).next_state is not None
    assert await ledger.to_judge(10) == []
    assert await ledger.recent_replies(sampled_by=None, limit=10) == []
    assert await ledger.recent_prompts(10) == []
    assert (await ledger.counts())["dropped.redacted"] == 1


async def test_a_secret_in_a_reply_costs_the_replys_tokens(ledger):
    await ledger.begin(request("r", user("what is my key?"), prompt=(7, 8)))
    said = turn("r", reply(f"It is {KEY}."), IDS)
    assert await ledger.finish(said, TurnKey("r", "b", "h")) is DropReason.REDACTED
    record = await ledger.turn("turn-r")
    assert record.turn.reply.content == "It is [redacted:api_key]."
    assert (record.request.prompt_ids, record.turn.response_ids, record.turn.versions) == ((7, 8), (), ())


@pytest.mark.parametrize(
    "fields",
    [
        {"tools_json": f'[{{"function":{{"name":"f","description":"with {KEY}"}}}}]'},
        {"template_kwargs_json": f'{{"note":"{KEY}"}}'},
    ],
)
async def test_tools_and_template_arguments_are_looked_at(ledger, fields):
    await ledger.begin(request("r", user("hello"), **fields))
    assert await ledger.finish(turn("r", reply()), TurnKey("r", "b", "h")) is DropReason.REDACTED
    kept = (await ledger.turn("turn-r")).request
    assert "[redacted:api_key]" in (kept.tools_json or "") + (kept.template_kwargs_json or "")


@pytest.mark.parametrize(
    "message",
    [
        Message(role="user", content=[{"type": "text", "text": f"key {KEY}"}]),
        Message(role="assistant", tool_calls=[{"function": {"name": "login", "arguments": f'{{"key": "{KEY}"}}'}}]),
        Message(role="assistant", tool_calls=[{"function": {"name": "login", "arguments": {"a": [KEY]}}}]),
        Message(role="assistant", content="x", reasoning_content=f"the key {KEY}"),
        Message(role="tool", content=f"OPENAI_API_KEY={KEY}", tool_call_id="1"),
        Message(role="user", content="x", metadata={"deep": [{"key": KEY}]}),
    ],
)
async def test_every_part_of_a_message_is_looked_at(ledger, message):
    await ledger.begin(request("r", message))
    assert await ledger.finish(turn("r", reply()), TurnKey("r", "b", "h")) is DropReason.REDACTED
    kept = (await ledger.turn("turn-r")).request.messages[0]
    assert "[redacted:" in kept.model_dump_json()
    assert kept.role == message.role


async def test_a_secret_that_came_next_is_masked_and_the_turn_before_it_is_trained_on(ledger, driver):
    turn_id = await driver.served()
    await ledger.pair(turn_id, NextState((user(f"no! use {KEY}"),)), by_request_id="next")
    (judged,) = await ledger.to_judge(10)
    assert judged.next_state.messages[0].content == "no! use [redacted:api_key]"
    await ledger.record_verdict(turn_id, Verdict(-1, (-1,), "llm", f"the user gave {KEY}"))
    assert (await ledger.turn(turn_id)).verdict.rationale == "the user gave [redacted:api_key]"
    assert [row.turn.turn_id for row in await ledger.to_score(10)] == [turn_id]


async def test_feedback_is_masked_and_a_demonstration_with_a_secret_is_no_target(ledger, driver):
    turn_id = await driver.served()
    said = Feedback("f", turn_id, 1.0, 1.0, f"like {KEY}", f"Your key is {KEY}")
    for _ in range(2):  # the same again is the same
        outcome = await ledger.record_feedback(said, user="ann", demonstration=IDS)
        assert (outcome.effect, outcome.demonstration_id) == (Effect.JUDGED, None)
    (kept,) = (await ledger.turn(turn_id)).feedback
    assert (kept.comment, kept.demonstration) == ("like [redacted:api_key]", "Your key is [redacted:api_key]")


async def test_what_an_engine_said_of_a_failure_is_masked(ledger):
    await ledger.begin(request("r", user("hello"), prompt=(1,)))
    await ledger.abandon("r", DropReason.ENGINE_FAILED, f"refused: {KEY}")


async def test_a_demonstration_for_a_turn_whose_prompt_is_not_kept_is_no_target(ledger):
    await ledger.begin(request("r", user(KEY)))
    await ledger.finish(turn("r", reply()), TurnKey("r", "b", "h"))
    said = Feedback("f", "turn-r", 1.0, None, None, "another reply")
    assert (await ledger.record_feedback(said, user="ann", demonstration=(5, 6))).demonstration_id is None


def system(text: str) -> Message:
    return Message(role="system", content=text)


REAL = "https://deploy:fAk3-n0t-r34l-Pw7@git.corp.invalid/x.git"
TOOL = '[{"type":"function","function":{"name":"push","description":"pushes to %s"}}]'


@pytest.mark.parametrize(
    ("fields", "is_standing"),
    [
        ({"messages": [system(f"Push to {REAL}"), user("hi")]}, True),
        ({"messages": [Message(role="developer", content=f"Push to {REAL}"), user("hi")]}, True),
        ({"messages": [user("hi")], "tools_json": TOOL % REAL}, True),
        ({"messages": [system("Push to https://user:password@example.com"), user(f"or to {REAL}")]}, False),
        ({"messages": [user("hi")], "tools_json": TOOL % "https://user:password@example.com"}, False),
        ({"messages": [system("Be brief."), user("hi")]}, False),
    ],
)
def test_a_secret_in_what_a_client_always_sends_is_told(fields, is_standing):
    redactor = NounRedactor(RedactionSettings())
    messages = fields.pop("messages")
    for n in range(3):
        redactor.request(request(f"r{n}", *messages, **fields))
    told = redactor.standing_secrets
    assert (told is not None) is is_standing
    assert told is None or told.startswith("3 of the last 3 chats have a system prompt or tools")
    for n in range(50):
        redactor.request(request(f"s{n}", user("hi")))
    assert redactor.standing_secrets is None  # the owner has mended it


def test_switched_off_everything_is_kept_and_on_a_clean_turn_is_the_same_object():
    said, answered = request("r", user(KEY)), turn("r", reply("a clean one"))
    assert NounRedactor(RedactionSettings(secrets=False)).request(said) is said
    clean = request("r", user("hello"), Message(role="assistant", content=None, tool_calls=[]))
    redactor = NounRedactor(RedactionSettings(pii=True))
    for _ in range(2):  # the second time it is remembered
        assert redactor.request(clean) is clean
        assert redactor.turn(answered) is answered
    assert redactor.request(request("r", user("write to ann@mail.org"))).prompt_ids == ()


def test_gates_and_prewarming_know_of_it():
    assert DropReason.REDACTED in reports._NOT_A_REPLY_OF_THE_POLICY
    assert Ledger.open.__kwdefaults__["redaction"] == RedactionSettings(secrets=True, pii=False)


def test_it_remembers_so_many_clean_texts_and_no_more():
    redactor = NounRedactor(RedactionSettings(), remembered=10)
    for number in range(25):
        assert redactor.text(f"plain words {number}") == f"plain words {number}"
        assert len(redactor._clean) <= 10
