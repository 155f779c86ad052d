"""Replies of the two converted dialects, as objects and as events: the stream builds what the whole reply says.

Every event of the Responses API is held against the published types of Open Responses.
"""

import json
from collections.abc import Sequence
from typing import Any

import openresponses_types as published
import pytest

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import FunctionCall, Message, ToolCall
from openclaw_rl.proxy.dialects.base import Asked, Outcome, TokenLogProb, Usage
from openclaw_rl.proxy.dialects.messages_reply import AnthropicMessages
from openclaw_rl.proxy.dialects.responses_reply import OpenAIResponses
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.types import SamplingParams

CALLS = tuple(ToolCall(id=f"call_{n}", function=FunctionCall(name="f", arguments=f'{{"a": {n}}}')) for n in (1, 2))
DELTAS = (Delta("I "), Delta("think."), None, Delta("", "Hel"), Delta("", "lo", CALLS[:1]), Delta("", "", CALLS[1:]))
REPLY = Message(role="assistant", content="Hello", reasoning_content="I think.", tool_calls=list(CALLS))
USAGE = Usage(20, 9, cached_tokens=5, reasoning_tokens=3)
OUTCOME = Outcome(REPLY, "tool_calls", USAGE)
KINDS = {name: getattr(published, name) for name in dir(published) if name.endswith("StreamingEvent")}


def asked(dialect: Any, **body: Any) -> Asked:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 99, "input": "a", **body}
    if isinstance(dialect, OpenAIResponses):
        del body["messages"], body["max_tokens"]
    parsed = dialect.read(json.dumps(body).encode())
    return Asked(f"{dialect.id_prefix}0a1b", "m", 1_700_000_000, 20, SamplingParams(max_new_tokens=99), parsed)


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def stream(dialect: Any, deltas: Sequence[Delta | None], outcome: Outcome, **body: Any) -> list[dict[str, Any]]:
    made = dialect.events(asked(dialect, **body))
    return events(made.opening() + b"".join(made.delta(delta) for delta in deltas) + made.end(outcome))


def check_published(event: dict[str, Any]) -> None:
    """Hold an event against the type of its name."""
    if event["type"].startswith("response.reasoning_text."):
        return  # OpenAI's name, which its clients read; Open Responses has another
    name = "".join(part.capitalize() for part in event["type"].replace("_", ".").split("."))
    KINDS[f"{name.replace('SummaryText', 'Summary')}StreamingEvent"].model_validate(event)


def test_a_stream_of_responses_builds_the_whole_response() -> None:
    dialect = OpenAIResponses()
    found = stream(dialect, DELTAS, OUTCOME)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        check_published(event)
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    whole = json.loads(dialect.whole(asked(dialect), OUTCOME))
    assert found[-1]["response"] == whole
    assert whole["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "function_call"]
    assert done[1]["content"][0]["text"] == "Hello"
    assert [item["call_id"] for item in done[2:]] == ["call_1", "call_2"]
    assert len({item["id"] for item in done}) == 4
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 5
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    published.ResponseResource.model_validate(whole)


def test_a_thought_is_a_summary_for_a_client_that_asked_for_one() -> None:
    found = stream(OpenAIResponses(), DELTAS[:4], OUTCOME, reasoning={"summary": "auto"})
    for event in found:
        check_published(event)
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_summary_text.delta"]
    assert deltas == ["I ", "think."]
    (item,) = [item for item in found[-1]["response"]["output"] if item["type"] == "reasoning"]
    assert item["summary"] == [{"type": "summary_text", "text": "I think."}]
    assert not item.get("content")
    assert "encrypted_content" not in item


def test_a_reply_at_its_limit_is_incomplete() -> None:
    outcome = Outcome(Message(role="assistant", content="Hel"), "length", USAGE)
    *_, done, last = stream(OpenAIResponses(), [Delta("", "Hel")], outcome)
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"] == [done["item"]]
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    whole = json.loads(OpenAIResponses().whole(asked(OpenAIResponses()), outcome))
    assert whole["output"][0]["status"] == "incomplete"
    last = stream(AnthropicMessages(), [Delta("", "Hel")], outcome)[-2]
    assert last["delta"]["stop_reason"] == "max_tokens"


def test_log_probs_of_all_tokens_stand_in_the_text_of_the_complete_response_and_in_no_event() -> None:
    tokens = [TokenLogProb("I think.", -0.1), TokenLogProb("Hi", -0.5), TokenLogProb("<tool_call>", -0.2)]
    made = OpenAIResponses().events(asked(OpenAIResponses(), include=["message.output_text.logprobs"]))
    outcome = Outcome(REPLY, "tool_calls", USAGE, tuple(tokens))
    steps = (Delta("I think."), Delta("", "Hi"), Delta("", "", CALLS[:1]))
    data = made.opening() + b"".join(made.delta(step, [token]) for step, token in zip(steps, tokens, strict=True))
    *before, last = events(data + made.end(outcome))
    assert all(event["logprobs"] == [] for event in before if event["type"].startswith("response.output_text."))
    (text,) = [item for item in last["response"]["output"] if item["type"] == "message"]
    assert [entry["token"] for entry in text["content"][0]["logprobs"]] == [token.token for token in tokens]


def test_log_probs_stand_in_the_text() -> None:
    outcome = Outcome(
        Message(role="assistant", content="Hi"), "stop", USAGE, (TokenLogProb("Hi", -0.5, (("a", -1.0),)),)
    )
    whole = json.loads(OpenAIResponses().whole(asked(OpenAIResponses()), outcome))
    (entry,) = whole["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"][0]["token"]) == ("Hi", -0.5, "a")


def test_a_response_that_fails_in_its_stream_says_so() -> None:
    dialect = OpenAIResponses()
    made = dialect.events(asked(dialect))
    made.opening(), made.delta(Delta("", "Hel"))
    found = events(made.failure(RequestError("gone", status=503, code="engine_unavailable")))
    assert [event["type"] for event in found][-2:] == ["response.output_item.done", "response.failed"]
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert found[-1]["response"]["status"] == "failed"


def test_a_stream_of_messages_builds_the_whole_message() -> None:
    dialect = AnthropicMessages()
    found = stream(dialect, DELTAS, OUTCOME)
    assert [event["type"] for event in found] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop") * 2,
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    blocks: list[dict[str, Any]] = []
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                kind = event["delta"].pop("type")
                (text,) = event["delta"].values()
                if kind == "input_json_delta":
                    blocks[-1]["input"] = json.loads(text)
                else:
                    blocks[-1][kind.removesuffix("_delta")] += text
    whole = json.loads(dialect.whole(asked(dialect), OUTCOME))
    assert whole["content"] == blocks
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"], blocks[2]["id"]) == ("I think.", "Hello", "toolu_1")
    assert whole["stop_reason"] == found[-2]["delta"]["stop_reason"] == "tool_use"
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (15, 5)
    assert found[-2]["usage"]["output_tokens"] == 9
    assert found[0]["message"]["usage"]["input_tokens"] == 20


def test_a_stop_string_is_named() -> None:
    outcome = Outcome(Message(role="assistant", content="Hi"), "stop", USAGE, stop="END")
    whole = json.loads(AnthropicMessages().whole(asked(AnthropicMessages()), outcome))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_json", "invalid_request_error"),
        (401, "invalid_api_key", "authentication_error"),
        (404, "model_not_found", "not_found_error"),
        (413, "request_too_large", "request_too_large"),
        (429, "engine_refused", "rate_limit_error"),
        (500, "x", "api_error"),
        (503, "overloaded", "overloaded_error"),
    ],
)
def test_errors_of_messages_have_anthropics_names(status: int, code: str, kind: str) -> None:
    body = json.loads(AnthropicMessages().error(RequestError("no", status=status, code=code), "req_1"))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_1"}


def test_a_long_prompt_is_named_as_each_client_knows_it() -> None:
    fault = RequestError("9 tokens", code="context_length_exceeded", param="messages")
    assert json.loads(AnthropicMessages().error(fault, "r"))["error"]["message"].startswith("prompt is too long: ")
    error = json.loads(OpenAIResponses().error(fault, "r"))["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_an_error_in_a_stream_of_messages_is_an_event() -> None:
    made = AnthropicMessages().events(asked(AnthropicMessages()))
    (event,) = events(made.failure(RequestError("gone", status=503, code="engine_unavailable")))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")
