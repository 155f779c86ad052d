"""Variants of corrected prompts: where a prompt is cut, what is no request, words of one request; the bundled model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from turns import make_request

from openclaw_rl.engines.base import Score
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, GenerateRequest, MetaInfo
from openclaw_rl.errors import AlignmentError, EngineRefused
from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.models.resolve import load_model, resolve
from openclaw_rl.practice.variants import BOUND, OTHERS, Variants
from openclaw_rl.settings import ModelSettings
from openclaw_rl.types import Ids, Request, SamplingParams

END = 0


class Letters:
    """A front end of letters."""

    end_ids = frozenset({END})
    vocab_size = 0x110000

    def decode(self, ids: Any) -> str:
        return "".join(chr(one) for one in ids if one != END)


class Base:
    """A base that writes the given texts, one a call, and says how likely words are behind a request."""

    def __init__(self, *texts: str, finish: str = "stop", likely: Callable[[str], float] = lambda _: -2.0) -> None:
        self.texts, self.finish, self.likely = list(texts), finish, likely
        self.asked: list[GenerateRequest] = []
        self.scored: list[str] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.asked.append(request)
        ids = [*map(ord, self.texts.pop(0)), END]
        return GenerateReply(output_ids=ids, meta_info=MetaInfo(finish_reason=FinishReason(type=self.finish)))  # type: ignore[arg-type]

    async def score(self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None) -> Score:
        assert (lora_path, extra_key) == (None, "v0")
        self.scored.append(prompt := "".join(map(chr, prompt_ids)))
        return Score((self.likely(prompt),) * len(response_ids))


def render(messages: Any, tools_json: str | None, template_kwargs_json: str | None) -> Ids:
    told = "".join(f"[{message.role}]{message.text()}[end]" for message in messages)
    return tuple(map(ord, f"{told}[assistant]"))


def variants(base: Base) -> Variants:
    return Variants(base, Letters(), render, lambda text: tuple(map(ord, text)))  # type: ignore[arg-type]


def asked(*messages: Message) -> Request:
    return make_request("r", *messages, prompt=render(messages, None, None), sampling=SamplingParams(4))


def user(text: Any) -> Message:
    return Message(role="user", content=text)


BREAD = user("How do I keep bread fresh?")


async def test_a_variant_begins_with_the_first_words_behind_the_same_conversation():
    base = Base(" bake a cake? ")
    system, earlier = (
        Message(role="system", content="Be kind."),
        (user("Hi"), Message(role="assistant", content="Yes?")),
    )
    source = asked(system, *earlier, BREAD)
    found = await variants(base).of("turn-1", source, "shorter")
    assert found is not None
    assert found.messages == (system, *earlier, user("How do I bake a cake?"))
    assert found.prompt_ids == render(found.messages, None, None)
    assert (found.scope, found.sampling, found.tools_json) == (source.scope, source.sampling, source.tools_json)
    (call,) = base.asked
    assert "".join(map(chr, call.input_ids)).endswith("[assistant]Yes?[end][user]How do I")
    assert (call.lora_path, call.extra_key, call.priority) == (None, "v0", 0)
    assert call.sampling_params.temperature > 0


@pytest.mark.parametrize(
    ("text", "start"), [("Is tea good?", "Is"), ("Write a poem about the sea.", "Write a poem"), ("a b c d", "a b")]
)
async def test_the_shared_words_are_half_of_the_request_at_most(text, start):
    base = Base(" something else of it")
    await variants(base).of("turn-1", asked(user(text)), "shorter")
    assert "".join(map(chr, base.asked[0].input_ids)) == f"[user]{start}"


async def test_a_clients_wrapping_stays_where_it_stands():
    wrapped = "[Mon 2026-11-30 10:00 UTC] How do I keep bread fresh?"
    found = await variants(Base(" bake a cake?")).of("turn-1", asked(user(wrapped)), "shorter")
    assert found is not None
    assert found.messages[-1].text() == "[Mon 2026-11-30 10:00 UTC] How do I bake a cake?"


@pytest.mark.parametrize(
    "last",
    [
        user("Hi"),
        user(""),
        Message(role="tool", content="three results were found", tool_call_id="1"),
        user([ContentPart(type="text", text="What do I see here?"), ContentPart(type="image_url")]),
    ],
    ids=["one word", "nothing", "a tool's result", "an image"],
)
async def test_what_is_no_request_in_words_has_no_variant(last):
    base = Base()
    assert await variants(base).of("turn-1", asked(last), "shorter") is None
    assert base.asked == base.scored == []


async def test_a_text_in_parts_has_variants():
    parts = user([ContentPart(type="text", text="How do I keep bread fresh?")])
    found = await variants(Base(" bake a cake?")).of("turn-1", asked(parts), "shorter")
    assert found is not None
    assert found.messages[-1].text() == "How do I bake a cake?"


@pytest.mark.parametrize("bad", ["", "\nTo do this, …", " " + "very " * 80 + "long?"], ids=["nothing", "lines", "long"])
async def test_another_is_written_in_place_of_what_is_no_request(bad):
    base = Base(bad, " bake a cake?")
    found = await variants(base).of("turn-1", asked(BREAD), "shorter")
    assert found is not None
    assert found.messages[-1].text() == "How do I bake a cake?"
    assert len(base.asked) == 2


async def test_without_a_fit_one_in_three_there_is_none():
    base = Base(*["\n"] * 3)
    assert await variants(base).of("turn-1", asked(BREAD), "shorter") is None
    assert len(base.asked) == 3


async def test_a_message_that_does_not_end_is_no_request():
    base = Base(*[" bake a"] * 3, finish="length")
    assert await variants(base).of("turn-1", asked(BREAD), "shorter") is None


@pytest.mark.parametrize("part", ["generate", "score"])
@pytest.mark.parametrize("error", [EngineRefused("no room", status=400), AlignmentError("not a number")])
async def test_a_prompt_that_the_engine_refuses_has_no_variant(part, error, monkeypatch):
    async def refuse(*_: Any, **__: Any) -> Any:
        raise error

    base = Base()
    monkeypatch.setattr(base, part, refuse)
    assert await variants(base).of("turn-1", asked(BREAD), "shorter") is None


@pytest.mark.parametrize(("more", "has"), [(BOUND - 0.01, True), (BOUND + 0.01, False)])
async def test_words_that_are_likelier_behind_their_own_request_are_bound_to_it(more, has):
    base = Base(" bake a cake?", " bake a cake?", likely=lambda prompt: -2.0 + more * ("bread" in prompt))
    found = variants(base)
    assert (await found.of("turn-1", asked(BREAD), "not in the fridge") is not None) is has
    assert base.scored[-1] == "[user]How do I keep bread fresh?[end][assistant]Here is my answer.[end][user]"
    assert len(base.scored) == len(OTHERS) + 1
    await found.of("turn-1", asked(BREAD), "not in the fridge")
    assert len(base.scored) == len(OTHERS) + 1, "it is asked once"


async def test_words_of_turns_that_are_practised_no_more_are_forgotten():
    base = Base(*[" bake a cake?"] * 4)
    found = variants(base)
    for turn_id, words in (("turn-1", "shorter"), ("turn-2", "shorter"), ("turn-2", "kinder")):
        await found.of(turn_id, asked(BREAD), words)
    found.forget_all_but({"turn-1"})
    assert set(found._is_bound) == {("turn-1", "shorter")}
    assert set(found._said) == {"shorter"}
    found.forget_all_but(())
    assert not found._is_bound
    assert not found._said


@pytest.mark.real_model
async def test_the_bundled_model_writes_requests_and_tells_manner_from_content(bundled_cache: Path):
    resolved = resolve(ModelSettings(), bundled_cache)
    model: Any = load_model(resolved)
    tokenizer = AutoTokenizer.from_pretrained(resolved.folder, local_files_only=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    class Plain:
        async def score(self, prompt_ids: Ids, response_ids: Ids, **_: Any) -> Score:
            ids = torch.tensor([prompt_ids + response_ids])
            with torch.inference_mode():
                rows = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
            return Score(tuple(rows.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()))

        async def generate(self, request: GenerateRequest) -> GenerateReply:
            prompt = torch.tensor([request.input_ids])
            with torch.inference_mode():  # the likeliest: the same on every machine but for rounding
                out = model.generate(prompt, do_sample=False, max_new_tokens=48, eos_token_id=end, pad_token_id=end)
            ids = out[0, prompt.shape[1] :].tolist()
            kind: Any = "stop" if ids[-1] == end else "length"
            return GenerateReply(output_ids=ids, meta_info=MetaInfo(finish_reason=FinishReason(type=kind)))

    class Frontend:
        end_ids = frozenset({end})
        vocab_size = len(tokenizer)

        def decode(self, ids: Any) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

    def tokens(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def chat(messages: Any, tools_json: str | None, template_kwargs_json: str | None) -> Ids:
        told = [{"role": message.role, "content": message.text()} for message in messages]
        return tokens(tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True))

    def request(text: str) -> Request:
        return make_request("r", user(text), prompt=chat((user(text),), None, None), sampling=SamplingParams(4))

    found = Variants(Plain(), Frontend(), chat, tokens)  # type: ignore[arg-type]
    manner = "No, that is far too long. Please answer in one or two short sentences."
    varied = await found.of("turn-1", request("How do I keep bread fresh?"), manner)
    assert varied is not None
    assert varied.messages[-1].text().startswith("How do I ")
    assert varied.messages[-1].text() != "How do I keep bread fresh?"
    content = "No, the capital of Australia is Canberra, not Sydney."
    assert await found.of("turn-2", request("What is the capital of Australia?"), content) is None
