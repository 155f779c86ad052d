"""A reply's relevance: by hand on a table, its bound, what cannot be told, and the bundled model as the base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from turns import make_request

from openclaw_rl.engines.base import Score
from openclaw_rl.messages import Message
from openclaw_rl.models.resolve import load_model, resolve
from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.practice.relevance import NEUTRAL, OTHERS, Relevance
from openclaw_rl.settings import ModelSettings
from openclaw_rl.types import Ids, Request, SamplingParams


class Table:
    """A base that says how likely each request is behind a text; `default` for the pairs that it does not name."""

    def __init__(self, table: Mapping[tuple[str, str], float], default: float = -3.0) -> None:
        self.table, self.default = table, default
        self.calls: list[tuple[str, str, str | None, str | None]] = []

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        text, request = ("".join(map(chr, ids)) for ids in (prompt_ids, response_ids))
        self.calls.append((text, request, lora_path, extra_key))
        found = [value for (reply, asked), value in self.table.items() if reply in text and asked == request]
        return Score((found[0] if found else self.default,) * len(response_ids))


def render(messages: Any, tools_json: str | None, template_kwargs_json: str | None) -> Ids:
    return tuple(map(ord, "".join(message.text() for message in messages)))


def encode(text: str) -> Ids:
    return tuple(map(ord, text))


def asked(text: str) -> Request:
    message = Message(role="user", content=text)
    return make_request("r", message, prompt=encode(text), sampling=SamplingParams(4))


def relevance(base: Table, **more: Any) -> Relevance:
    return Relevance(base, render, encode, **({"least": 0.5} | more))  # type: ignore[arg-type]


async def test_the_figure_by_hand():
    others = BUILT_IN[:OTHERS]
    base = Table(
        {("Plant it.", "How?"): -1.0, (NEUTRAL, "How?"): -2.5}
        | {("Plant it.", text): value for text, value in zip(others, (-2.0, -3.0, -4.0), strict=True)}
        | {(NEUTRAL, text): -3.5 for text in others}
    )
    # [-1 - -2.5] - mean([1.5, 0.5, -0.5])
    assert await relevance(base).of("How?", "Plant it.") == pytest.approx(1.5 - 0.5)
    assert {call[2:] for call in base.calls} == {(None, "v0")}, "the base alone is asked"


async def test_a_reply_that_fits_every_request_alike_has_none():
    base = Table({}, default=-1.0)
    base.table = {(NEUTRAL, text): -3.0 for text in ("How?", *BUILT_IN)}
    found = relevance(base)
    assert await found.of("How?", "I am sorry, I cannot help with that.") == 0.0
    assert not await found.answers("turn-1", asked("How?"), "I am sorry, I cannot help with that.")


async def test_it_is_compared_on_the_users_own_requests_first_and_each_is_scored_alone_once():
    base = Table({})
    found = relevance(base)
    for text in ("First one?", "Second one?", "Third one?", "Fourth one?"):
        await found.answers(text, asked(text), "reply")
    behind = [request for text, request, *_ in base.calls if "reply" in text]
    assert behind[-4:] == ["Fourth one?", "Third one?", "Second one?", "First one?"]
    alone = [request for text, request, *_ in base.calls if NEUTRAL in text and request.endswith("one?")]
    assert sorted(alone) == ["First one?", "Fourth one?", "Second one?", "Third one?"]


async def test_the_request_is_the_users_own_words():
    """OpenClaw's own context behind the user's message is no request, nor is the text that a client puts around it."""
    base = Table({})
    context = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nThe time is 9.\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    messages = (Message(role="user", content="How do I boil an egg?"), Message(role="user", content=context))
    request = make_request("r", *messages, prompt=encode("x"), sampling=SamplingParams(4))
    await relevance(base).answers("turn-1", request, "reply")
    assert "How do I boil an egg?" in {request for _, request, *_ in base.calls}
    assert not any("OPENCLAW" in request for _, request, *_ in base.calls)


@pytest.mark.parametrize("text", ["", "hi", "ok"])
async def test_of_a_request_of_few_tokens_nothing_can_be_told(text):
    base = Table({})
    assert await relevance(base).of(text, "reply") is None
    assert await relevance(base).answers("turn-1", asked(text), "reply")
    assert base.calls == []


@pytest.mark.parametrize(("value", "answers"), [(-1.0, False), (-3.0, True)])
async def test_a_request_whose_own_base_reply_is_not_told_either_is_left_alone(value, answers):
    """ "Tell me a joke." has many answers: where the base's reply has no relevance, no reply is judged by it."""
    drawn = []

    async def sample(request: Request) -> str:
        drawn.append(request)
        return "base reply"

    base = Table({("base reply", "Tell me a joke."): value}, default=-3.0)
    found = relevance(base, sample=sample)
    assert await found.answers("turn-1", asked("Tell me a joke."), "I am sorry.") is answers
    assert await found.answers("turn-1", asked("Tell me a joke."), "I am sorry too.") is answers
    assert len(drawn) == 1, "the base's reply is drawn once a request"


async def test_requests_of_turns_that_are_practised_no_more_are_forgotten():
    found = relevance(Table({}))
    for n in range(4):
        await found.answers(f"turn-{n}", asked(f"question {n}"), "reply")
    await found.answers("turn-9", asked("question 3"), "reply")
    found.forget_all_but({"turn-1", "turn-9"})
    assert set(found._turns) == {"question 1", "question 3"}
    remembered = {*found._alone, *found._can_tell} - set(BUILT_IN)
    assert remembered == {"question 1", "question 3"}
    found.forget_all_but(())
    assert not found._turns
    assert {*found._alone, *found._can_tell} <= set(BUILT_IN)


@pytest.mark.real_model
async def test_the_bundled_model_tells_an_answer_from_an_excuse(bundled_cache: Path):
    resolved = resolve(ModelSettings(), bundled_cache)
    model: Any = load_model(resolved)

    class Plain:
        async def score(self, prompt_ids: Ids, response_ids: Ids, **_: Any) -> Score:
            ids = torch.tensor([prompt_ids + response_ids])
            with torch.inference_mode():
                rows = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
            return Score(tuple(rows.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()))

    tokenizer = AutoTokenizer.from_pretrained(resolved.folder, local_files_only=True)

    def tokens(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def chat(messages: Any, tools_json: str | None, template_kwargs_json: str | None) -> Ids:
        told = [{"role": message.role, "content": message.text()} for message in messages]
        return tokens(tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True))

    found = Relevance(Plain(), chat, tokens, least=0.5)  # type: ignore[arg-type]
    pairs = {
        "How do I make pancakes?": "Mix flour, eggs and milk, and fry thin rounds of the batter in a hot pan.",
        "How do I keep cut flowers fresh?": "Cut the stems and change the water daily.",
        "How do I stop hiccups?": "Hold your breath for a while, or drink a glass of water in small sips.",
    }
    for question in pairs:
        await found.answers(question, asked(question), "x")  # each is compared on the others
    for question, answer in pairs.items():
        told = await found.of(question, answer)
        assert told is not None
        assert told > 0.5
        for other in ("I'm sorry, I cannot help with that.", *(text for text in pairs.values() if text != answer)):
            said = await found.of(question, other)
            assert said is not None
            assert said < told - 0.3
