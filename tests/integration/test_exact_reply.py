"""The client's reply equals the recorded turn, on the real server and the bundled model.

The cases are the end token, the token limit, stop strings, reasoning and tool calls, streamed and whole. Each reply is
without randomness (`temperature: 0`) and is asked for twice. The recorded ids are read back and parsed by our own front
end. The bundled model's template has neither tools nor thinking, so a second server runs with a template of ours. That
one has an open think block, and calls that the model copies from the conversation.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.messages import Message
from openclaw_rl.models.resolve import tokenizer_folder
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ModelSettings
from openclaw_rl.testing.running_server import RunningServer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

SHORT = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
TEMPLATE = """\
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}{%- if thinking %}{{- '<think>\\n' }}{% endif %}
"""
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@dataclass(frozen=True)
class Served:
    server: RunningServer
    frontend: FrontEnd


@dataclass(frozen=True)
class Got:
    """One reply as the client has it, and as the ledger has it."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, str]]
    finish: str
    tokens: tuple[int, int]
    ids: list[int]
    mask: list[bool]


@pytest.fixture(scope="module")
def plain(server: RunningServer) -> Served:
    return Served(server, FrontEnd(ModelSettings(), tokenizer_folder(ModelSettings(), server.data_dir / "cache")))


@pytest.fixture(scope="module")
def tooled(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("tooled")
    (folder / "data").mkdir()
    (folder / "data" / "cache").symlink_to(server.data_dir / "cache")  # the model is converted once
    (folder / "template.jinja").write_text(TEMPLATE)
    model = ModelSettings(
        chat_template=str(folder / "template.jinja"), reasoning_parser="qwen3", tool_call_parser="qwen25"
    )
    flags = [f"model.{name}={value}" for name, value in model.model_dump(exclude_defaults=True).items()]
    flags.append("trainer.kind=external")
    with RunningServer(folder / "data", [part for flag in flags for part in ("--set", flag)]) as server:
        yield Served(server, FrontEnd(model, tokenizer_folder(model, server.data_dir / "cache")))


def ask(served: Served, body: dict[str, Any], *, stream: bool) -> Got:
    server = served.server
    body = {"temperature": 0, "max_tokens": 48, **body}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer sk-test"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    if stream:
        assert reply.text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        said = {
            name: "".join(choice["delta"].get(name) or "" for choice in choices) or None
            for name in ("content", "reasoning_content")
        }
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        (finish,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        turn_id, usage = chunks[0]["id"], chunks[-1]["usage"]
    else:
        whole = reply.json()
        said, finish = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
        calls, turn_id, usage = said.get("tool_calls") or [], whole["id"], whole["usage"]
    record = server.admin("GET", f"/v1/turns/{turn_id}")
    turn = record["turn"]
    assert turn["finish_reason"] == finish
    assert usage["prompt_tokens"] == len(record["request"]["prompt_ids"])
    assert usage["completion_tokens"] <= len(turn["response_ids"]) == len(turn["rollout_log_probs"])
    ids, mask = turn["response_ids"], turn["loss_mask"]
    if stop := body.get("stop"):
        # On a busy machine the engine sends more tokens before it is told to stop: recorded, and outside the mask.
        ends = next((k for k in range(1, len(ids)) if stop in served.frontend.decode(ids[:k])), len(ids))
        assert not any(mask[ends:])
        ids, mask = ids[:ends], mask[:ends]
    return Got(
        content=said.get("content") or None,
        reasoning=said.get("reasoning_content"),
        calls=[(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        finish=finish,
        tokens=(usage["prompt_tokens"], usage["completion_tokens"]),
        ids=ids,
        mask=mask,
    )


def check(served: Served, *, messages: Sequence[Any] = SHORT, stop: str | None = None, **fields: Any) -> Got:
    """Check that the streamed reply, the whole one and the parsed recorded ids are equal; return it."""
    body = {"messages": messages, **fields} | ({"stop": stop} if stop else {})
    got = ask(served, body, stream=True)
    assert ask(served, body, stream=False) == got
    assert len(got.mask) == len(got.ids)
    rendered = served.frontend.render(
        [Message.model_validate(message) for message in messages],
        fields.get("tools"),
        fields.get("chat_template_kwargs", {}),
    )
    parser = served.frontend.parser(rendered, stop=[stop] if stop else [])
    for token in got.ids:
        parser.feed(token)
    parser.finish(is_complete=got.finish != "length")
    reply = parser.reply()
    assert got.tokens[1] == parser.delivered  # a stop string cuts tokens that the record has
    assert got.tokens[1] == len(got.ids) or stop is not None
    assert (got.content, got.reasoning) == (reply.content or None, reply.reasoning_content)
    assert got.calls == [(call.function.name, call.function.arguments) for call in reply.tool_calls or ()]
    return got


def test_a_sampled_end_token_is_recorded_trained_on_and_shown_to_nobody(plain: Served) -> None:
    got = check(plain)
    assert (got.content, got.finish) == ("The capital of France is Paris.", "stop")
    assert got.ids[-1] in plain.frontend.end_ids
    assert plain.frontend.end_ids.isdisjoint(got.ids[:-1])
    assert all(got.mask)


@pytest.mark.parametrize("limit", [1, 7])
def test_nothing_is_added_behind_the_token_limit(plain: Served, limit: int) -> None:
    whole = check(plain)
    assert len(whole.ids) == 8  # at 7 only the end token is missing
    got = check(plain, max_tokens=limit)
    assert (got.ids, got.finish, got.mask) == (whole.ids[:limit], "length", [True] * limit)


@pytest.mark.parametrize(
    ("stop", "shown", "kept"),
    [
        ("ance is", "The capital of Fr", 3),  # begins inside a token, ends with another
        (" France", "The capital of", 3),  # is one token
        ("The", None, 0),
    ],
)
def test_tokens_cut_by_a_stop_string_are_recorded_outside_the_mask(
    plain: Served, stop: str, shown: str | None, kept: int
) -> None:
    whole = check(plain)
    got = check(plain, stop=stop)
    assert (got.content, got.finish) == (shown, "stop")
    assert got.ids == whole.ids[: len(got.ids)]
    assert stop in plain.frontend.decode(got.ids)
    assert stop not in plain.frontend.decode(got.ids[:-1])
    assert got.mask == [True] * kept + [False] * (len(got.ids) - kept)


def test_an_open_think_block_is_reasoning(tooled: Served) -> None:
    got = check(tooled, chat_template_kwargs={"thinking": True})
    assert got.reasoning
    assert got.calls == []


def test_a_call_is_a_call(tooled: Served) -> None:
    messages: list[Any] = []
    for city in ("Paris", "Rome", "Oslo"):
        call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        messages += [
            {"role": "user", "content": f"weather {city}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    messages.append({"role": "user", "content": "weather Berlin"})
    got = check(tooled, messages=messages, tools=[TOOL])
    assert got.finish == "tool_calls"
    assert [(name, json.loads(arguments)) for name, arguments in got.calls] == [("weather", {"city": "Berlin"})]
    assert got.content is None
    assert "<tool_call>" in tooled.frontend.decode(got.ids)
