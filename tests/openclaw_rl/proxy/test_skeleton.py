"""Prompts from a template's skeleton equal those that the template renders, and only safe templates have skeletons."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.proxy.skeleton import Skeletons, writes_texts_as_they_are

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAFE = (
    CHATML,
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U: ' ~ m.content }}{% else %}A: {{ m.content }}{% endif %}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}",
    "{% if messages[0].role != 'system' %}{{ bos_token }}none{% endif %}{% for m in messages[1:] %}{{ m['content'] }}"
    "{% endfor %}{{ messages | length }}",
    "{% set rest = messages[1:] %}{{ messages[0]['content'] }}{% for m in rest %}{{ loop.index0 % 2 }}{{ m.content }}"
    "{% endfor %}{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}",
)
UNSAFE = (
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
    "{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if 'x' in m.content %}x{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}",
    "{% for m in messages %}{{ m.content if m.content is string else '' }}{% endfor %}",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{% for m in messages %}{{ m['con' ~ 'tent'] | upper }}{% endfor %}",
    "{% for m in messages %}{{ m[name] }}{% endfor %}",
    "{% for m in messages %}{{ m.items }}{% endfor %}",
    "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.content }}{% endfor %}",
    "{% for m in messages %}{{ '%s' % m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content[:10] }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "{% for m in messages | selectattr('content', 'ne', 'x') %}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.content != 'x' %}{{ m.content }}{% endfor %}",
    "{% set all = messages %}{{ all | tojson }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | length ~ messages }}",
    "{% set first = messages[0] %}{{ first.content | trim }}",
    "{% set ns = namespace(text=messages[0].content) %}{{ ns.text }}",
    "{% macro say(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
    "{% set x %}{{ messages[0].content }}{% endset %}{{ x | trim }}",
    "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ [m.content] | random }}{% endfor %}{{ [1, 2] | random }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages",
)


@pytest.mark.parametrize("template", SAFE)
def test_a_template_that_writes_texts_as_they_are_is_known(template: str) -> None:
    assert writes_texts_as_they_are(template)


@pytest.mark.parametrize("template", UNSAFE)
def test_what_is_not_proven_is_rendered(template: str) -> None:
    assert not writes_texts_as_they_are(template)


def test_the_bundled_models_template_has_skeletons(smollm: FrontEnd, qwen: FrontEnd) -> None:
    assert smollm._skeletons is not None
    assert qwen._skeletons is None


PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>user\n", "\u2983", "\u29830\u2984", " ", "\n", "{{ x }}", "é", "🙂", "\U0010f001"]
)
TEXTS = st.lists(PIECES | st.text(max_size=12), max_size=6).map("".join)
CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "developer", "user", "assistant"]), TEXTS), min_size=1, max_size=6
)


@given(CHATS)
def test_a_skeleton_gives_the_rendered_prompt(smollm: FrontEnd, chat: Sequence[tuple[str, str]]) -> None:
    messages = [Message(role=role, content=text) for role, text in chat]
    # An argument of the template, which this one does not read, has the chat rendered.
    rendered = smollm.render(messages, None, {"unread": True})
    assert smollm.render(messages) == rendered
    assert smollm.render(messages) == rendered  # now from the skeleton that was kept


def test_a_message_with_more_than_text_is_rendered(smollm: FrontEnd) -> None:
    plain = [Message(role="user", content="hello")]
    named = [Message(role="user", content="hello", name="Ada")]
    parts = [Message.model_validate({"role": "user", "content": [{"type": "text", "text": "hello"}]})]
    assert smollm._from_skeleton(plain) is not None
    assert smollm._from_skeleton(named) is None
    assert smollm._from_skeleton(parts) is None
    assert smollm.render(plain).ids == smollm.render(named).ids == smollm.render(parts).ids


def test_texts_that_a_template_leaves_out_turns_or_repeats_have_no_skeleton() -> None:
    def over(*order: int) -> str | None:
        return Skeletons(lambda roles, texts: "".join(texts[at] for at in order)).text(["user", "user"], ["a", "b"])

    assert over(0, 1) == "ab"
    assert (over(0), over(1, 0), over(0, 1, 1), over(0, 0, 1)) == (None, None, None, None)


def test_a_template_that_refuses_the_roles_refuses_each_time() -> None:
    def refuse(roles: Sequence[str], texts: Sequence[str]) -> str:
        raise TemplateError("roles must alternate")

    skeletons = Skeletons(refuse)
    for _ in range(2):
        with pytest.raises(TemplateError):
            skeletons.text(["user"], ["a"])


def test_skeletons_are_bounded() -> None:
    skeletons = Skeletons(lambda roles, texts: "".join(texts))
    for count in range(1, 700):
        assert skeletons.text(["user"] * count, ["x"] * count) == "x" * count
    assert len(skeletons._kept) == 512
