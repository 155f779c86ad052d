"""Prompts of a tool and the form of its calls, in the bundled model's template and in one that renders tools."""

import copy
from pathlib import Path

import pytest

from benchmarks.learning.scopes import tool
from benchmarks.learning.subject import Subject
from benchmarks.learning.tool_form import ToolForm
from openclaw_rl.settings import ModelSettings

RENDERS = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture(scope="module")
def subject(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(ModelSettings(path=str(short_model)), tmp_path_factory.mktemp("cache"), "cpu")


def test_without_tools_in_the_template_the_system_prompt_has_them(subject: Subject) -> None:
    form = ToolForm(subject, tool())
    prompt, call = (subject.tokenizer.decode(list(ids)) for ids in _both(form, "Remember: be brief."))
    assert prompt.startswith("<|im_start|>system\nRemember: be brief.")
    assert prompt.index('"get_weather"') < prompt.index('{"city": "Athens"}') < prompt.index("weather in Rome?")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert call == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert form.is_call(call)


def test_a_template_that_renders_tools_shows_them_and_calls_in_its_own_form(subject: Subject) -> None:
    other = copy.copy(subject)
    other.tokenizer = copy.deepcopy(subject.tokenizer)
    other.tokenizer.chat_template = RENDERS
    prompt, call = (subject.tokenizer.decode(list(ids)) for ids in _both(ToolForm(other, tool()), None))
    assert prompt.startswith("TOOLS [{")
    assert "tool_call>" not in prompt
    assert prompt.endswith("weather in Rome?<|im_end|><|im_start|>assistant ")
    assert call.startswith("CALL {")
    assert "Rome" in call
    assert call.endswith("}")


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('Sure. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>', True),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}', True),
        ('{"name": "get_weather", "parameters": {"city": "Oslo"}}', True),
        ('<tool_call>{"name": "Oslo", "arguments": {"city": "Oslo"}}</tool_call>', False),
        ('<tool_call>{"name": "get_weather", "arguments": {"town": "Oslo"}}</tool_call>', False),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": ', False),
        ('{"name": "get_weather", "arguments": 3}', False),
        ("[1]", False),
        ("It is warm in Oslo.", False),
    ],
)
def test_a_call_names_the_tool_and_its_argument(subject: Subject, text: str, is_call: bool) -> None:
    assert ToolForm(subject, tool()).is_call(text) is is_call


def _both(form: ToolForm, system: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return form.prompt("Rome", system=system), form.call("Rome", system=system)
