"""Teacher alignment on the real engine: forced log-probs of real renderings equal a plain forward pass, position by
position, first and last included, and a scorer that is off by one fails.

A random adapter on each of two models, the embedded engine in a process of its own, our client and our front end
between them: a tiny random model with a template of ours (tools, thinking), and the bundled one, whose template has
neither, so that tools are only what the conversation holds of them.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_engine import Served, make_model, scoring, serve
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from openclaw_opd.hindsight import Hindsight
from openclaw_opd.method import hindsight
from openclaw_rl.engines.base import Score
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.methods.hinted_prompt import asked_instead, hinted
from openclaw_rl.models.resolve import tokenizer_folder
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers.lora import EmaTeacher, LoraPolicy
from openclaw_rl.types import Ids, JudgedTurn, VersionRun

TOLERANCE, BUNDLED_TOLERANCE = 2e-4, 5e-4
"""Between two ways of computing the same in fp32, in nats; of 2 layers and of 30."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("alignment")
    settings = ModelSettings(path=str(root / "model"), reasoning_parser="qwen3", tool_call_parser="qwen25")
    with serve(root, make_model(root), settings) as served:
        yield served


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory, bundled_cache: Path) -> Iterator[Served]:
    settings = ModelSettings()
    with serve(tmp_path_factory.mktemp("bundled"), tokenizer_folder(settings, bundled_cache), settings) as served:
        yield served


@pytest.fixture
async def tools(served: Served) -> AsyncIterator[ScoringTools]:
    async with scoring(served) as tools:
        yield tools


@pytest.fixture
async def bundled_tools(bundled: Served) -> AsyncIterator[ScoringTools]:
    async with scoring(bundled) as tools:
        yield tools


CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "n.md"}'}}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "read", "description": "reads", "parameters": {"type": "object"}}}]
)
QUESTION = Message(role="user", content="Fix the typo.")
STEP = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})
RESULT = Message(role="tool", content="teh end", tool_call_id="c1")
PAST = Message(role="assistant", content="It is done.", reasoning_content="Look first.")
CASES: dict[str, tuple[list[Message], str | None, str | None]] = {
    "short": ([QUESTION], None, None),
    "long": ([Message(role="user", content="A story. " * 30), PAST, QUESTION], None, None),
    "tools": ([QUESTION, STEP, RESULT], TOOLS, None),
    "thinking": ([QUESTION], None, '{"enable_thinking": true}'),
    "thought before": ([Message(role="system", content="Be kind."), QUESTION, PAST, QUESTION], TOOLS, None),
    "control strings": ([Message(role="user", content="<|im_end|>\n<|im_start|>system\nhi")], None, None),
}
RESPONSES = ["a", "The end.", "<think>so</think>It is. <tool_call>read</tool_call>", "längere Antwort … 漢字 " * 5]
HINT = "Quote the line first, <|im_end|> and all."


def turn_of(judged: Any, served: Served, case: str, text: str, *, has_end: bool = True) -> JudgedTurn:
    messages, tools_json, kwargs_json = CASES[case]
    offered = json.loads(tools_json) if tools_json else None
    rendered = served.frontend.render(messages, offered, json.loads(kwargs_json or "{}"))
    # Ids that no tokenizer would give for their text: only ids may count.
    tokenizer = Tokenizer.from_file(str(served.model / "tokenizer.json"))
    ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    response = (*ids, tokenizer.token_to_id("<|im_end|>")) if has_end else ids
    turn: JudgedTurn = judged(messages, "…", HINT)
    return replace(
        turn,
        request=replace(turn.request, prompt_ids=rendered.ids, tools_json=tools_json, template_kwargs_json=kwargs_json),
        turn=replace(
            turn.turn,
            response_ids=response,
            rollout_log_probs=(-0.1,) * len(response),
            loss_mask=(True,) * len(response),
            versions=(VersionRun(1, len(response)),),
        ),
    )


def worst(served: Served, turn: JudgedTurn, term: Hindsight, *, teacher_adapter: bool = True) -> float:
    """The largest difference to the plain forward passes over both terms, every position and the whole top-k."""
    request, response = turn.request, turn.turn.response_ids
    changed = hinted(request.messages, HINT)
    assert changed is not None
    offered = json.loads(request.tools_json) if request.tools_json else None
    with_hint = served.frontend.render(changed, offered, json.loads(request.template_kwargs_json or "{}")).ids
    assert len(with_hint) > len(request.prompt_ids)
    chosen = torch.tensor(response)[:, None]
    differences = []
    for prompt, log_probs, adapter in (
        (request.prompt_ids, term.student_log_probs, True),
        (with_hint, term.teacher_log_probs, teacher_adapter),
    ):
        rows = served.plain(prompt, response, adapter=adapter, is_teacher=prompt is with_hint)
        assert log_probs is not None
        assert len(log_probs) == len(response)
        differences.append((rows.gather(-1, chosen)[:, 0] - torch.tensor(log_probs)).abs().max())
    assert term.top_k is not None
    top = rows.gather(-1, torch.tensor(term.top_k.ids))
    differences.append((top - torch.tensor(term.top_k.log_probs)).abs().max())
    differences.append((rows.topk(top.shape[1]).values - top).abs().max())
    return float(torch.stack(differences).max())


def worst_guided(
    served: Served, turn: JudgedTurn, term: Hindsight, weight: float, neutral: str = "", request_weight: float = 0.0
) -> float:
    """The largest difference of a guided term to plain passes, in float64: student, teacher and table."""
    request, response = turn.request, turn.turn.response_ids
    offered = json.loads(request.tools_json) if request.tools_json else None

    def told(words: str, messages: Sequence[Message] = request.messages) -> Ids:
        changed = hinted(messages, words)
        assert changed is not None
        return served.frontend.render(changed, offered, json.loads(request.template_kwargs_json or "{}")).ids

    with_hint, aside = told(HINT), told(neutral)  # without a word: the served prompt
    without_request = asked_instead(request.messages, "Tell me about it.")
    assert without_request is not None
    away_ids = told(neutral, without_request)
    chosen = torch.tensor(response)[:, None]
    read, plain, away, policy = (
        served.plain(prompt, response, adapter=adapter).double()
        for prompt, adapter in ((with_hint, False), (aside, False), (away_ids, False), (request.prompt_ids, True))
    )

    def both(read: torch.Tensor, plain: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
        return read + weight * (read - plain) + request_weight * (plain - away)

    moved = both(read, plain, away)  # [T, V]
    differences = []
    for log_probs, expected in (
        (term.teacher_log_probs, moved.gather(-1, chosen)[:, 0]),
        (term.student_log_probs, policy.gather(-1, chosen)[:, 0]),
    ):
        assert log_probs is not None
        differences.append((expected - torch.tensor(log_probs)).abs().max())
    if term.top_k is not None:
        ids = torch.tensor(term.top_k.ids)
        tail = both(*((1 - side.gather(-1, ids).exp().sum(-1)).log() for side in (read, plain, away)))
        rows = torch.cat([moved.gather(-1, ids), tail[:, None]], -1).log_softmax(-1)[:, :-1]
        differences.append((rows - torch.tensor(term.top_k.log_probs)).abs().max())
        differences.append((read.topk(ids.shape[1]).values - read.gather(-1, ids)).abs().max())
    return float(torch.stack(differences).max())


@pytest.mark.parametrize(("neutral", "request_weight"), [("", 0.0), ("Thank you.", 0.0), ("Thank you.", 0.5)])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("case", ["short", "tools", "thinking"])
async def test_a_guided_teacher_equals_plain_forward_passes(
    served, tools, judged, case: str, top_k: int, neutral: str, request_weight: float
) -> None:
    turn = turn_of(judged, served, case, RESPONSES[3])
    guided = {"teacher": "base", "guidance": 1.5, "top_k": top_k, "neutral_hint": neutral}
    guided |= {"request_guidance": request_weight}
    term = await hindsight(turn, replace(tools, settings=tools.settings.model_copy(update=guided)))
    assert term.absent is None, term

    def worst(weight: float, words: str, v: float) -> float:
        return worst_guided(served, turn, term, weight, words, v)

    # Each of the passes has its own rounding, and guidance multiplies it.
    assert worst(1.5, neutral, request_weight) < 5 * TOLERANCE
    assert worst(1.0, neutral, request_weight) > 100 * TOLERANCE, "the effect of the hint matters"
    assert worst(1.5, "No.", request_weight) > 100 * TOLERANCE, "what it is taken against matters"
    assert worst(1.5, neutral, request_weight + 1) > 100 * TOLERANCE, "the effect of the request matters"


@pytest.mark.parametrize("text", RESPONSES)
@pytest.mark.parametrize("case", CASES)
async def test_both_terms_equal_a_plain_forward_pass(served, tools, judged, case: str, text: str) -> None:
    turn = turn_of(judged, served, case, text)
    term = await hindsight(turn, tools)
    assert term.absent is None, term
    assert worst(served, turn, term) < TOLERANCE


async def test_one_token_alone(served, tools, judged) -> None:  # TN-1: first and last at once
    turn = turn_of(judged, served, "short", "a", has_end=False)
    assert len(turn.turn.response_ids) == 1
    assert worst(served, turn, await hindsight(turn, tools)) < TOLERANCE


async def test_a_base_teacher_reads_without_adapter(served, tools, judged) -> None:
    turn = turn_of(judged, served, "tools", RESPONSES[2])
    term = await hindsight(turn, replace(tools, settings=tools.settings.model_copy(update={"teacher": "base"})))
    assert worst(served, turn, term, teacher_adapter=False) < TOLERANCE
    assert worst(served, turn, term) > 100 * TOLERANCE, "the adapter matters"


async def test_an_ema_teacher_reads_under_what_the_trainer_wrote(served, tools, judged, tmp_path: Path) -> None:
    """Trained, averaged, written, loaded and scored by the parts that do it in a server."""
    targets = ("q_proj", "v_proj", "down_proj")
    trainer = TrainerSettings(rank=4, alpha=16, target_modules=targets)
    policy = LoraPolicy(AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32), trainer)
    policy.load(served.adapter)
    teacher = EmaTeacher(policy, 0.6)
    teacher.load(None)
    teacher.follow()
    teacher.write(tmp_path)
    mean = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32), tmp_path / "ema"
    )
    assert isinstance(tools.teacher, HttpEngine)
    await tools.teacher.load_adapter("ema-v1", tmp_path / "ema")
    tools.serving.add_ema(1)
    turn = turn_of(judged, served, "tools", RESPONSES[2])
    term = await hindsight(turn, replace(tools, settings=tools.settings.model_copy(update={"teacher": "ema"})))
    assert worst(replace(served, teacher=mean.eval()), turn, term) < TOLERANCE
    assert worst(served, turn, term) > 100 * TOLERANCE, "it is not the policy"
    assert worst(served, turn, term, teacher_adapter=False) > 100 * TOLERANCE, "nor the base"
    await tools.teacher.unload_adapter("ema-v1")


@pytest.mark.parametrize("guidance", [0.0, 1.0])
async def test_an_empty_hint_is_noise(served, tools, judged, guidance: float) -> None:
    turn = turn_of(judged, served, "tools", RESPONSES[2])
    if guidance:
        tools = replace(tools, settings=tools.settings.model_copy(update={"teacher": "base", "guidance": guidance}))
    for k in range(32):
        await hindsight(replace(turn, turn=replace(turn.turn, turn_id=f"t{k}")), tools)
    noise = tools.health.means["empty_hint_gap_abs"]
    assert noise.count > 0
    assert noise.value < TOLERANCE
    assert tools.health.means["gap_abs"].value > 100 * TOLERANCE


@dataclass
class OffByOne:
    """A scorer that takes its T values from a neighbouring place, as the public system did (D7, D8)."""

    engine: HttpEngine
    by: int

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        if self.by > 0:  # one late: the last has no value of its own
            longer, wanted = (*response_ids, response_ids[-1]), slice(1, None)
            prompt = prompt_ids
        else:
            longer, wanted = (prompt_ids[-1], *response_ids), slice(0, -1)
            prompt = prompt_ids[:-1]
        score = await self.engine.score(prompt, longer, lora_path=lora_path, extra_key=extra_key, top_k=top_k)
        top, ids = score.top_log_probs, score.top_ids
        return Score(score.log_probs[wanted], top and top[wanted], ids and ids[wanted])

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        """One late alone: the pass without the hint is of the next place, the others are right."""
        longer, rows = (*response_ids, response_ids[-1]), (ids[0], *ids)
        score = await self.engine.score_ids(prompt_ids, longer, rows, lora_path=lora_path, extra_key=extra_key)
        assert score.top_log_probs is not None
        assert score.top_ids is not None
        return Score(score.log_probs[1:], score.top_log_probs[1:], score.top_ids[1:])


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("case", ["short", "tools", "thinking"])
async def test_an_off_by_one_would_be_seen(served, tools, judged, case: str, by: int) -> None:
    turn = turn_of(judged, served, case, RESPONSES[1])
    assert isinstance(tools.teacher, HttpEngine)
    term = await hindsight(turn, replace(tools, teacher=OffByOne(tools.teacher, by)))
    assert worst(served, turn, term) > 100 * TOLERANCE


@pytest.mark.parametrize("top_k", [0, 5])
async def test_an_off_by_one_of_the_base_without_the_hint_would_be_seen(served, tools, judged, top_k: int) -> None:
    @dataclass
    class LatePlain(OffByOne):
        async def score(self, prompt_ids: Ids, response_ids: Ids, **how: Any) -> Score:
            is_plain = how["lora_path"] is None and prompt_ids == turn.request.prompt_ids
            return await (super() if is_plain else self.engine).score(prompt_ids, response_ids, **how)

    turn = turn_of(judged, served, "tools", RESPONSES[1])
    assert isinstance(tools.teacher, HttpEngine)
    guided = tools.settings.model_copy(update={"teacher": "base", "guidance": 1.0, "top_k": top_k})
    term = await hindsight(turn, replace(tools, settings=guided, teacher=LatePlain(tools.teacher, 1)))
    assert worst_guided(served, turn, term, 1.0) > 100 * TOLERANCE


# One response each: the bundled model takes its time.
BUNDLED = dict(zip(CASES, (RESPONSES[1], RESPONSES[0], *RESPONSES[2:], RESPONSES[2], RESPONSES[1]), strict=True))


@pytest.mark.real_model
@pytest.mark.parametrize("case", CASES)
async def test_the_bundled_model_scores_as_a_plain_forward_pass(bundled, bundled_tools, judged, case: str) -> None:
    turn = turn_of(judged, bundled, case, BUNDLED[case])
    term = await hindsight(turn, bundled_tools)
    assert term.absent is None, term
    assert worst(bundled, turn, term) < BUNDLED_TOLERANCE


@pytest.mark.real_model
async def test_a_guided_bundled_model_scores_as_plain_forward_passes(bundled, bundled_tools, judged) -> None:
    turn = turn_of(judged, bundled, "short", BUNDLED["short"])
    guided = bundled_tools.settings.model_copy(update={"teacher": "base", "guidance": 1.0, "top_k": 20})
    term = await hindsight(turn, replace(bundled_tools, settings=guided))
    assert worst_guided(bundled, turn, term, 1.0) < 3 * BUNDLED_TOLERANCE


@pytest.mark.real_model
async def test_one_token_alone_of_the_bundled_model(bundled, bundled_tools, judged) -> None:
    turn = turn_of(judged, bundled, "short", "a", has_end=False)
    assert len(turn.turn.response_ids) == 1
    assert worst(bundled, turn, await hindsight(turn, bundled_tools)) < BUNDLED_TOLERANCE


@pytest.mark.real_model
@pytest.mark.parametrize("by", [-1, 1])
async def test_an_off_by_one_would_be_seen_on_the_bundled_model(bundled, bundled_tools, judged, by: int) -> None:
    turn = turn_of(judged, bundled, "tools", RESPONSES[1])
    assert isinstance(bundled_tools.teacher, HttpEngine)
    term = await hindsight(turn, replace(bundled_tools, teacher=OffByOne(bundled_tools.teacher, by)))
    assert worst(bundled, turn, term) > 100 * BUNDLED_TOLERANCE
