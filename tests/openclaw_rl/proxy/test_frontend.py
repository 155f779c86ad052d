"""Messages in the prompt, and model folders that the front end refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ModelSettings

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_developer_is_system(qwen: FrontEnd, smollm: FrontEnd) -> None:
    for frontend in (qwen, smollm):
        ids = {
            frontend.render([Message(role=role, content="Be brief."), user("Which river?")]).ids
            for role in ("developer", "system")
        }
        assert len(ids) == 1


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_text_parts_are_the_string_joined_by_newlines(qwen: FrontEnd, role: str) -> None:
    def with_content(content: object) -> tuple[int, ...]:
        message = Message.model_validate({"role": role, "content": content})
        return qwen.render([message, user("x")]).ids

    one, two = {"type": "text", "text": "one"}, {"type": "text", "text": "two"}
    assert with_content([one]) == with_content("one")
    assert with_content([one, two]) == with_content("one\ntwo")


def test_arguments_as_string_and_as_object_give_one_prompt_without_doubled_quotes(qwen: FrontEnd) -> None:
    prompts = []
    for arguments in ('{"city": "Oslo", "days": [1, 2]}', {"city": "Oslo", "days": [1, 2]}):
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
        answer = Message(role="tool", content="11 C", tool_call_id="c1")
        prompts.append(qwen.render([user("?"), message, answer], TOOLS).ids)
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == arguments  # the client's own message is not edited
    assert prompts[0] == prompts[1]
    assert '\\"city' not in qwen.decode(prompts[0])


@pytest.mark.parametrize(
    "part", [{"type": "thinking", "thinking": "hm hm", "signature": "s"}, {"type": "reasoning", "text": "hm hm"}]
)
def test_thoughts_in_a_part_are_the_replys_reasoning(qwen: FrontEnd, part: dict[str, str]) -> None:
    """A gateway (LiteLLM) sends the parts of Anthropic's dialect back."""
    parts = [part, {"type": "text", "text": "Blue."}]
    back = Message.model_validate({"role": "assistant", "content": parts})
    plain = Message(role="assistant", content="Blue.", reasoning_content="hm hm")
    assert qwen.render([user("?"), back, user("x")]).ids == qwen.render([user("?"), plain, user("x")]).ids
    hidden = Message.model_validate({"role": "assistant", "content": [{"type": "redacted_thinking"}, parts[1]]})
    bare = Message(role="assistant", content="Blue.")
    assert qwen.render([user("?"), hidden, user("x")]).ids == qwen.render([user("?"), bare, user("x")]).ids
    with pytest.raises(RequestError):
        qwen.render([Message.model_validate({"role": "user", "content": parts})])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        (json.dumps('{"city": "Oslo"}'), '{"city": "Oslo"}'),  # encoded twice, as some agents do
        ('{"text": "two\nlines"}', '{"text": "two\\nlines"}'),  # a line end that is no JSON
        ("", "{}"),
        ("  ", "{}"),
        (None, "{}"),
        ("null", '{"arguments": null}'),
        ("[1, 2]", '{"arguments": [1, 2]}'),
        ([1, 2], '{"arguments": [1, 2]}'),
        ('{"city": "Os', '{"arguments": "{\\"city\\": \\"Os"}'),  # cut by the token limit
        ("Oslo", '{"arguments": "Oslo"}'),
        ('"Oslo"', '{"arguments": "Oslo"}'),
    ],
)
def test_arguments_that_are_no_object_are_shown(qwen: FrontEnd, arguments: object, shown: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    answer = Message(role="tool", content="no such city", tool_call_id="c1")
    text = qwen.decode(qwen.render([user("?"), message, answer], TOOLS).ids)
    assert f'{{"name": "weather", "arguments": {shown}}}' in text


def calls(*ids: str | None) -> Message:
    made = [{"id": name, "function": {"name": "weather", "arguments": "{}"}} for name in ids]
    return Message.model_validate({"role": "assistant", "content": None, "tool_calls": made})


def results(*ids: str | None) -> list[Message]:
    return [Message(role="tool", content=f"result of {name}", tool_call_id=name) for name in ids]


@pytest.mark.parametrize("arrived", ["abc", "cab", "cba", "bca"])
def test_results_are_shown_in_the_order_of_their_calls(qwen: FrontEnd, arrived: str) -> None:
    """Agents run parallel calls at once (OpenAI's, LiteLLM's) and send each result as it arrives."""
    told = [user("?"), calls(*"abc"), *results(*arrived), user("And?")]
    in_order = [user("?"), calls(*"abc"), *results(*"abc"), user("And?")]
    assert qwen.render(told, TOOLS).ids == qwen.render(in_order, TOOLS).ids


def test_an_error_names_the_place_in_the_request(qwen: FrontEnd) -> None:
    image = Message.model_validate({"role": "tool", "tool_call_id": "b", "content": [{"type": "image_url"}]})
    with pytest.raises(RequestError) as refused:
        qwen.render([user("?"), calls("a", "b"), image, *results("a")], TOOLS)
    assert refused.value.param == "messages[2].content[0]"


def test_an_open_think_block_is_read_off_the_prompt(qwen: FrontEnd) -> None:
    assert not qwen.render([user("x")]).reasoning_open
    assert qwen.render([user("x")], None, {"open_thinking": True}).reasoning_open
    assert not qwen.render([user("x")], None, {"enable_thinking": False}).reasoning_open
    assert not qwen.render([user("x <think>")]).reasoning_open


def test_a_part_that_would_not_reach_the_model_is_named(qwen: FrontEnd) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(RequestError, match="image_url") as caught:
        qwen.render([user("x"), Message.model_validate({"role": "user", "content": parts})])
    assert caught.value.param == "messages[1].content[1]"


async def test_long_and_short_conversations_render_alike(smollm: FrontEnd) -> None:
    for size in (3, 3000, 60_000):
        messages = [user("word " * size)]
        assert (await smollm.render_async(messages)).ids == smollm.render(messages).ids


def test_the_context_is_the_models_or_the_setting(smollm_folder: Path, smollm: FrontEnd) -> None:
    assert smollm.context_length == 8192
    assert FrontEnd(ModelSettings(context_length=512), smollm_folder).context_length == 512


def test_end_tokens_come_from_every_config(qwen_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert {3, 4} < FrontEnd(ModelSettings(), folder).end_ids


def test_without_a_template_it_does_not_start_and_says_what_to_do(qwen_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen_folder, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=r"model\.chat_template"):
        FrontEnd(ModelSettings(), folder)
    (tmp_path / "my.jinja").write_text(template)
    frontend = FrontEnd(ModelSettings(chat_template=str(tmp_path / "my.jinja")), folder)
    assert "<|im_start|>" in frontend._tokenizer.decode(frontend.render([user("x")]).ids)
    with pytest.raises(SettingsError, match=r"model\.chat_template"):
        FrontEnd(ModelSettings(chat_template=str(tmp_path / "absent.jinja")), folder)


@pytest.mark.parametrize("key", ["reasoning_parser", "tool_call_parser"])
def test_a_parser_that_does_not_exist_is_named(qwen_folder: Path, key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        FrontEnd(ModelSettings.model_validate({key: "telepathy"}), qwen_folder)


def test_another_template_is_another_tokenizer_hash(qwen: FrontEnd, qwen_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    other = FrontEnd(ModelSettings(chat_template=str(tmp_path / "t.jinja")), qwen_folder)
    assert other.tokenizer_hash != qwen.tokenizer_hash


def test_the_proxy_loads_without_torch(qwen_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from openclaw_rl.proxy.routes import build_router\n"
        "from openclaw_rl.proxy.frontend import FrontEnd\n"
        "from openclaw_rl.messages import Message\n"
        "from openclaw_rl.settings import ModelSettings\n"
        "FrontEnd(ModelSettings(), Path(sys.argv[1])).render([Message(role='user', content='x')])\n"
        "sys.exit('torch' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-P", "-c", code, str(qwen_folder)], check=False)
    assert child.returncode == 0


@pytest.mark.parametrize(
    "text", ["Sleep early.", "Two\nlines, 漢字 🙂", " leading", "no <|im_end|> from a client", "0"]
)
def test_the_tokens_of_a_written_reply_stand_where_a_sampled_one_would(
    qwen: FrontEnd, smollm: FrontEnd, text: str
) -> None:
    for frontend in (qwen, smollm):
        reply = frontend.reply_ids(text)
        assert [token in frontend.end_ids for token in reply] == [False] * (len(reply) - 1) + [True]
        history = [user("How?"), Message(role="assistant", content=text), user("And?")]
        prompt, whole = frontend.render([user("How?")]).ids, frontend.render(history).ids
        assert whole[: len(prompt) + len(reply)] == prompt + reply


def test_an_open_think_block_is_closed_before_a_written_reply(open_thinker: FrontEnd) -> None:
    *body, end = open_thinker.reply_ids("Sleep early.")
    assert end in open_thinker.end_ids
    assert "".join(map(open_thinker.token_text, body)) == "</think>\n\nSleep early."


@pytest.mark.parametrize("text", ["Sleep early.", "\n\nSleep early.", "</think> Sleep early.", ""])
def test_the_end_of_an_empty_thought_is_not_a_target(open_thinker: FrontEnd, qwen: FrontEnd, text: str) -> None:
    """A user who writes a reply does not ask the model to think nothing."""
    written = open_thinker.written_reply(text)
    given, target = written.ids[: written.given], written.ids[written.given :]
    assert "".join(map(open_thinker.token_text, given)).rstrip() == "</think>"
    assert "".join(map(open_thinker.token_text, target[:-1])).strip() == text.strip()
    assert target[-1] in open_thinker.end_ids  # its end is the user's
    assert written.loss_mask == (False,) * written.given + (True,) * len(target)
    assert qwen.written_reply(text).given == 0  # no thought is open
