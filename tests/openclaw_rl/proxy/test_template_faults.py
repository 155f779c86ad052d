"""Model folders whose template and files disagree, or whose template serves no chat: small inputs of each form."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from openclaw_rl.errors import SettingsError
from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.server.startup import tell_of_template
from openclaw_rl.settings import ModelSettings
from openclaw_rl.telemetry.health import Health

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
CHATML_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
GLM = (
    "{{ '[gMASK]' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HARMONY = (  # a reply is closed by one token where it is the last, and by another inside a chat
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]",
    "[/INST]", "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|start|>", "<|message|>", "<|end|>",
    "<|return|>",
)  # fmt: skip

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["hello there"], trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    def make(template: str, eos: str | None = None, **files: dict[str, Any]) -> Path:
        """files: more of config.json (`config`), and generation_config.json (`generation`)."""
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(words | ({"eos_token": eos} if eos else {})))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | files.get("config", {})))
        if "generation" in files:
            (folder / "generation_config.json").write_text(json.dumps(files["generation"]))
        return folder

    return make


def ends(frontend: FrontEnd) -> set[str]:
    return {frontend.token_text(token) for token in frontend.end_ids}


@pytest.mark.parametrize(
    ("template", "eos", "wanted"),
    [
        (CHATML + CHATML_OPEN, "<|endoftext|>", {"<|endoftext|>", "<|im_end|>"}),
        (LLAMA3, "<|end_of_text|>", {"<|end_of_text|>", "<|eot_id|>"}),
        (GEMMA, "<eos>", {"<eos>", "<end_of_turn>"}),
        (GLM, "<|endoftext|>", {"<|endoftext|>", "<|user|>"}),  # the next message begins where the reply ends
        (CHATML + CHATML_OPEN, None, {"<|im_end|>"}),
        (LLAMA3, None, {"<|eot_id|>"}),
    ],
)
def test_the_token_that_the_template_writes_behind_a_reply_ends_it(make: Make, template, eos, wanted) -> None:
    frontend = FrontEnd(ModelSettings(), make(template, eos))
    assert ends(frontend) == wanted
    assert frontend.problems == ()
    (remark,) = frontend.remarks
    assert "the template ends a reply with" in remark
    (end,) = {frontend.token_text(token) for token in frontend.reply_ids("hello")[-1:]}
    assert end in wanted - {eos}  # a written reply ends as the template's do


@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (CHATML + CHATML_OPEN, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>"),
        (MISTRAL, "</s>"),
        (GLM, "<|user|>"),
        (HARMONY, "<|return|>"),  # `<|end|>` closes a thought there, not a reply
    ],
)
def test_files_that_agree_are_left_as_they_are(make: Make, template: str, eos: str) -> None:
    frontend = FrontEnd(ModelSettings(), make(template, eos))
    assert ends(frontend) == {eos}
    assert frontend.problems == frontend.remarks == ()


def test_a_list_that_holds_the_templates_token_is_left_as_it_is(make: Make, tokenizer: Tokenizer) -> None:
    listed = [tokenizer.token_to_id(text) for text in ("<|end_of_text|>", "<|eot_id|>")]
    frontend = FrontEnd(ModelSettings(), make(LLAMA3, generation={"eos_token_id": listed}))
    assert sorted(frontend.end_ids) == sorted(listed)
    assert frontend.remarks == ()


def test_without_any_end_token_the_server_says_so(make: Make) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' }}"
    frontend = FrontEnd(ModelSettings(), make(template))
    (problem,) = frontend.problems
    assert problem.startswith("no end token: ")
    assert not frontend.end_ids
    assert frontend.decode(frontend.reply_ids("hello")) == "hello"


def test_a_listed_end_token_that_the_template_never_writes_is_remarked(make: Make) -> None:
    # A template for other tokens than the model has: its marks are plain text here.
    turns = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + ' [stop] ' }}{% endfor %}"
    template = turns + "{{ '[assistant] ' }}"
    frontend = FrontEnd(ModelSettings(), make(template, "<eos>"))
    assert ends(frontend) == {"<eos>"}
    assert frontend.remarks == ("the template never ends a reply with '<eos>': replies may run to their limit",)


@pytest.mark.parametrize(
    ("template", "is_open"),
    [
        (CHATML, False),
        (LLAMA3.partition("{% if")[0], False),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '</s>\n' }}{% endfor %}", False),
        (CHATML + CHATML_OPEN, True),
        (CHATML + "{{ '<|im_start|>assistant\n' }}", True),  # it always opens one
        (MISTRAL, True),  # behind [/INST] a reply begins
        ("{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}", True),  # it marks no message
    ],
)
def test_a_template_that_opens_no_reply_is_a_problem(make: Make, template: str, *, is_open: bool) -> None:
    frontend = FrontEnd(ModelSettings(), make(template, "<|im_end|>"))
    assert ("add_generation_prompt" in "".join(frontend.problems)) is not is_open


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}{{ m.content }}{% endif %}", "endif"),
        (CHATML.replace("m.content", "m['contents']"), "no attribute 'contents'"),
        ("{{ raise_exception('for training only') }}", "for training only"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ messages | length // 0 }}", "ZeroDivisionError"),
        ("{{ messages.pop(7) }}", "pop"),
        ("{{ 'x'.format(messages) % 5 }}", "not all arguments"),
        ("{{ messages | tojason }}", "tojason"),
    ],
)
def test_a_template_that_serves_no_chat_is_refused_in_one_line(make: Make, template: str, says: str) -> None:
    with pytest.raises(SettingsError, match=r"^model\.path '[^\n]*': its chat template can serve no chat: ") as refused:
        FrontEnd(ModelSettings(path="/models/mine"), make(template, "<|im_end|>"))
    assert says in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_the_setting_of_a_template_is_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "torn.jinja").write_text("{% if %}")
    named = ModelSettings(chat_template=str(tmp_path / "torn.jinja"))
    with pytest.raises(SettingsError, match=r"^model\.chat_template '[^']*torn\.jinja' can serve no chat: "):
        FrontEnd(named, make(CHATML + CHATML_OPEN, "<|im_end|>"))


@pytest.mark.parametrize("place", ["vocab_size", "text_config"])
def test_a_token_beyond_the_embeddings_rows_is_refused(make: Make, tokenizer: Tokenizer, place: str) -> None:
    rows = tokenizer.token_to_id("<|im_end|>")
    config = {"vocab_size": rows} if place == "vocab_size" else {"text_config": {"vocab_size": rows}}
    folder = make(CHATML + CHATML_OPEN, "<|im_end|>", config=config)
    says = rf"it writes token {rows} \('<\|im_end\|>'\); the model's embedding has {rows} rows"
    with pytest.raises(SettingsError, match=says):
        FrontEnd(ModelSettings(), folder)


def test_as_many_rows_as_tokens_are_enough(make: Make, tokenizer: Tokenizer) -> None:
    rows = tokenizer.get_vocab_size()
    frontend = FrontEnd(ModelSettings(), make(CHATML + CHATML_OPEN, "<|im_end|>", config={"vocab_size": rows}))
    assert frontend.problems == ()


def test_a_template_that_fails_behind_a_reply_is_a_problem_of_the_server(make: Make) -> None:
    fails = "{% if messages | length > 1 and messages[1].role == 'assistant' %}{{ messages[1].parts[0] }}{% endif %}"
    frontend = FrontEnd(ModelSettings(), make(fails + CHATML + CHATML_OPEN, "<|im_end|>"))
    assert frontend.render([Message(role="user", content="hello")]).ids
    health = Health()
    tell_of_template(frontend, health)
    (problem,) = health.problems()
    assert problem.startswith("chat template: ")
    assert "cannot render a chat that has a reply" in problem


@pytest.mark.parametrize(
    "refusal",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}",
        "{% if messages[0].role not in ['user', 'assistant'] %}{{ messages[0]['role_name'] + '' }}{% endif %}",
    ],
)
def test_a_template_without_a_system_role_serves_chats_and_is_remarked(make: Make, refusal: str) -> None:
    frontend = FrontEnd(ModelSettings(), make(refusal + CHATML + CHATML_OPEN, "<|im_end|>"))
    assert frontend.problems == ()
    health = Health()
    with structlog.testing.capture_logs() as lines:
        tell_of_template(frontend, health)
    assert health.problems() == []
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("chat_template", "warning")
    assert line["says"].startswith("the template cannot render a system message: ")


def test_a_template_that_fails_over_tools_is_a_problem(make: Make) -> None:
    short_ids = (  # as templates of Mistral's v3 tokenizer ask for
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}"
        "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    )
    template = short_ids + CHATML.replace("m.content", "(m.content or '')") + CHATML_OPEN
    frontend = FrontEnd(ModelSettings(tool_call_parser="mistral"), make(template, "<|im_end|>"))
    (problem,) = frontend.problems
    assert problem.startswith("the template cannot render tools, calls and their results: Tool call IDs")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_a_torn_file_of_the_folder_is_refused_in_one_line(make: Make, name: str) -> None:
    folder = make(CHATML + CHATML_OPEN, "<|im_end|>", generation={})
    (folder / name).write_text('{"half": ')
    with pytest.raises(
        SettingsError, match=r"^model\.path '[^\n]*': its tokenizer and configs cannot be read: [^\n]+$"
    ):
        FrontEnd(ModelSettings(), folder)
