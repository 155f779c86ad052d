"""`parallel_tool_calls` and `tool_choice`: what the client asks of calls is done, or refused in clear words."""

import json
from typing import Any

import pytest
import structlog
from chats import CALL, HI, TOOLS, finishes, ids_of, joined

from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.sessions.conversation_key import turn_key
from openclaw_rl.sessions.pairing import Pairing
from openclaw_rl.settings import ModelSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.types import DropReason, OpenTurn, Scope

ONE = {**HI, "tools": TOOLS, "parallel_tool_calls": False}
TWO_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "exec"}}
AGENT = {  # the form in which agents with one tool at a time ask, by the API's reference
    "model": "the-policy",
    "messages": [{"role": "system", "content": "Work in steps."}, {"role": "user", "content": "hello"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "exec",
                "description": "run",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
    "max_completion_tokens": 900,
}


def calls_of(reply: Any) -> list[str]:
    message = reply.json()["choices"][0]["message"]
    return [json.loads(call["function"]["arguments"])["command"] for call in message.get("tool_calls") or []]


def streamed_calls(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [
        (call["index"], json.loads(call["function"]["arguments"])["command"])
        for event in events
        if event.get("choices")
        for call in event["choices"][0]["delta"].get("tool_calls") or []
    ]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (CALL % "a" + "\n" + CALL % "b", None),
        (CALL % "a" + CALL % "a", None),  # the same name and arguments
        (CALL % "a" + "\nThat is all.", "That is all."),
        (CALL % "a" + "\nAnd the other:\n" + CALL % "b" + "\nBoth run.", "And the other:"),
        ("First this.\n" + CALL % "a" + CALL % "b" + CALL % "c", "First this."),
        (CALL % "a" + '\n<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>', None),
        (CALL % "a" + "\n<tool_call>\nhalf of", None),
    ],
)
@pytest.mark.parametrize("body", [ONE, AGENT], ids=["one", "agent"])
async def test_one_call_reaches_a_client_that_wants_one(qwen: FrontEnd, proxy_over, text, content, body) -> None:
    ids = ids_of(qwen, text)
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids))
        reply = await proxy.post(body)
        choice = reply.json()["choices"][0]
        assert calls_of(reply) == ["a"]
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == "tool_calls"
        proxy.fake.script(Scripted(ids=ids))
        events = await proxy.events(body)
        assert streamed_calls(events) == [(0, "a")]
        assert joined(events) == (content or "")
        assert finishes(events) == ["tool_calls"]
        for turn in proxy.book.turns:
            assert turn.response_ids == ids  # the record keeps all tokens
            assert turn.drop is None
            assert len(turn.reply.tool_calls or ()) == 1


async def test_without_the_wish_all_calls_reach_the_client(qwen: FrontEnd, proxy_over) -> None:
    text = CALL % "a" + "\n" + CALL % "b"
    async with proxy_over(qwen) as proxy:
        for body in (
            {**HI, "tools": TOOLS},
            {**ONE, "parallel_tool_calls": True},
            {**ONE, "parallel_tool_calls": None},
        ):
            proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
            assert calls_of(await proxy.post(body)) == ["a", "b"]
        assert all(all(turn.loss_mask) for turn in proxy.book.turns)


async def test_tokens_that_the_client_did_not_get_earn_nothing(qwen: FrontEnd, proxy_over) -> None:
    first, rest = CALL % "a", "\n" + CALL % "b"
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, first + rest)))
        await proxy.post(ONE)
        kept = len(ids_of(qwen, first, end=False))
        (turn,) = proxy.book.turns
        assert turn.loss_mask == (True,) * kept + (False,) * (len(turn.response_ids) - kept)


async def test_a_reply_of_two_calls_pairs_with_the_history_of_one(qwen: FrontEnd, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, CALL % "a" + "\n" + CALL % "b")))
        message = (await proxy.post(ONE)).json()["choices"][0]["message"]
        (turn,), asked = proxy.book.turns, Message(role="user", content="hello")
    pairing, scope = Pairing(10), Scope("user", None)
    pairing.add(OpenTurn(turn.turn_id, scope, turn_key([asked], turn.reply), 1.0))
    answer = Message(role="tool", content="done", tool_call_id=message["tool_calls"][0]["id"])
    paired = pairing.observe(scope, [asked, Message.model_validate(message), answer])
    assert paired is not None
    assert paired.turn_id == turn.turn_id


async def test_a_block_of_several_calls_gives_its_first(qwen_folder, proxy_over) -> None:
    frontend = FrontEnd(ModelSettings(tool_call_parser="mistral"), qwen_folder)  # `[TOOL_CALLS] [{…}, {…}]`
    listed = [{"name": "exec", "arguments": {"command": name}} for name in "ab"]
    async with proxy_over(frontend) as proxy:
        for body, wanted in ((ONE, ["a"]), ({**HI, "tools": TOOLS}, ["a", "b"])):
            proxy.fake.script(Scripted(ids=ids_of(frontend, f"[TOOL_CALLS] {json.dumps(listed)}")))
            assert calls_of(await proxy.post(body)) == wanted


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "exec"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "exec"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {}, "tools": TOOLS}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [NAMED, {"function": {"name": "x"}}]},
                },
                "tools": TOOLS,
            },
            "tool_choice",
        ),
        ({"functions": [TOOLS[0]["function"]], "function_call": {"name": "exec"}}, "functions"),
        ({"functions": [TOOLS[0]["function"]]}, "functions"),
        ({"function_call": {"name": "exec"}, "tools": TOOLS}, "function_call"),
        (
            {
                "messages": [
                    *HI["messages"],
                    {"role": "assistant", "function_call": {"name": "exec", "arguments": "{}"}},
                ]
            },
            "messages[1].function_call",
        ),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_choice": ["yes", "no"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)
async def test_a_demand_that_cannot_be_met_is_refused_by_its_name(qwen: FrontEnd, proxy_over, more, param) -> None:
    async with proxy_over(qwen) as proxy:
        reply = await proxy.post({**HI, **more})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        assert proxy.fake.calls == []


@pytest.mark.parametrize(
    "more",
    [
        {"functions": [], "function_call": "none"},
        {"functions": None, "function_call": None},
        {"function_call": "auto"},
        {"guided_json": None, "regex": ""},
        {"tool_choice": "none", "tools": TOOLS},
        {"tool_choice": "auto"},
        {"tool_choice": None, "tools": TOOLS, "parallel_tool_calls": False},
        {
            "messages": [
                *HI["messages"],
                {"role": "assistant", "content": "hi", "function_call": None},
                HI["messages"][0],
            ]
        },
    ],
)
async def test_a_field_that_demands_nothing_is_served(qwen: FrontEnd, proxy_over, more) -> None:
    async with proxy_over(qwen) as proxy:
        assert (await proxy.post({**HI, **more})).status_code == 200


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
DEMANDS = ["required", NAMED, {"type": "function", "name": "exec"}, ALLOWED]


@pytest.mark.parametrize("choice", DEMANDS)
async def test_a_demanded_call_that_the_model_makes_is_sent(qwen: FrontEnd, proxy_over, choice) -> None:
    body = {**HI, "tools": TOOLS, "tool_choice": choice}
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Let me see.\n" + CALL % "a")))
        reply = await proxy.post(body)
        assert calls_of(reply) == ["a"]
        assert reply.json()["choices"][0]["message"]["content"] == "Let me see."
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Let me see.\n" + CALL % "a")))
        events = await proxy.events(body)
        assert streamed_calls(events) == [(0, "a")]
        assert joined(events) == "Let me see."
        assert finishes(events) == ["tool_calls"]
        assert [turn.drop for turn in proxy.book.turns] == [None, None]  # as sampled, so trained on


@pytest.mark.parametrize("choice", DEMANDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_demand_that_the_model_does_not_meet_is_an_error(qwen: FrontEnd, proxy_over, choice, stream) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "No call from me.")))
        reply = await proxy.post({**HI, "tools": TOOLS, "tool_choice": choice, "stream": stream})
        assert "No call" not in reply.text
        if reply.headers["content-type"].startswith("text/event-stream"):  # the head was sent before the end was known
            (error,) = [json.loads(line[6:])["error"] for line in reply.text.splitlines() if '"error"' in line]
        else:
            assert reply.status_code == 400
            error = reply.json()["error"]
        assert error["code"] == "tool_choice_not_met"
        assert error["message"].startswith("tool_choice: the model answered without a call")
        assert proxy.book.turns == []
        assert [reason for _, reason, _ in proxy.book.abandoned] == [DropReason.REFUSED]


async def test_a_call_of_another_tool_does_not_meet_a_named_demand(qwen: FrontEnd, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, CALL % "a")))
        look = {"type": "function", "function": {"name": "look"}}
        reply = await proxy.post({**HI, "tools": TWO_TOOLS, "tool_choice": look})
        assert reply.status_code == 400
        prompt = qwen.decode(proxy.fake.calls[0].input_ids)
        assert "look" in prompt
        assert "exec" not in prompt  # the model sees the tools that it may call


async def test_a_demand_cut_by_the_limit_says_so(qwen: FrontEnd, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, CALL % "a", end=False)[:5], finish="length"))
        reply = await proxy.post({**HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 5})
        assert "raise max_tokens" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[{"name": "exec", "parameters": {"command": "a"}}]', ["a"]),
        ('[{"name": "exec", "parameters": {"command": "a"}}, {"name": "exec", "parameters": {"command": "b"}}]', "ab"),
        ("No call from me.", None),
        ('[{"name": "nobody", "parameters": {}}]', None),
        ('[{"name": "exec", "parameters": "a"}]', None),
        ('{"name": "exec"}', None),
        ("[]", None),
    ],
)
@pytest.mark.parametrize("one", [False, True])
async def test_an_engine_with_grammars_is_held_to_a_call(qwen: FrontEnd, proxy_over, text, wanted, one) -> None:
    body = {**HI, "tools": TOOLS, "tool_choice": "required", **({"parallel_tool_calls": False} if one else {})}
    async with proxy_over(qwen, has_grammars=True) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
        reply = await proxy.post(body)
        schema = json.loads(proxy.fake.calls[0].sampling_params.json_schema)
        assert schema["type"] == "array"
        assert schema["minItems"] == 1
        assert schema.get("maxItems") == (1 if one else None)
        if wanted is None:
            assert reply.status_code == 400
            assert "cannot be enforced here" in reply.json()["error"]["message"]
        else:
            assert calls_of(reply) == list(wanted)[: 1 if one else None]
            assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
            assert proxy.book.turns[0].drop is DropReason.NOT_TRAINABLE_SAMPLING


async def test_tools_of_which_no_grammar_can_be_made_are_refused_by_their_name(qwen: FrontEnd, proxy_over) -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}}
        parameters["$defs"] = {"Place": {"type": kind}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    async with proxy_over(qwen, has_grammars=True) as proxy:
        body = {**HI, "tools": [tool("go", "string"), tool("look", "object")], "tool_choice": "required"}
        reply = await proxy.post(body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tools"
        look = {"type": "function", "function": {"name": "look"}}
        assert (await proxy.post({**body, "tool_choice": look})).json()["error"]["code"] == "tool_choice_not_met"


async def test_a_model_that_sees_no_tools_cannot_be_made_to_call(qwen_folder, tmp_path, proxy_over) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    frontend = FrontEnd(ModelSettings(chat_template=str(tmp_path / "plain.jinja")), qwen_folder)
    async with proxy_over(frontend) as proxy:
        reply = await proxy.post({**HI, "tools": TOOLS, "tool_choice": "required"})
        assert reply.status_code == 400
        assert "shows it no tools" in reply.json()["error"]["message"]


async def test_a_wish_that_is_not_served_is_logged_once(qwen: FrontEnd, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                await proxy.post({**AGENT, "verbosity": "low", "min_tokens": 4, "modalities": None})
        told = [line["field"] for line in lines if line["event"] == "field_not_served"]
        assert sorted(told) == ["min_tokens", "tools[].function.strict", "verbosity"]
