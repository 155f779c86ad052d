"""The hook `practise` of OPD: the sample of a practice reply under a given hint, of an anchor, and what every failure
costs."""

from dataclasses import replace

import pytest

from openclaw_combine.method import CombineSettings
from openclaw_opd import teacher
from openclaw_opd.method import METHOD
from openclaw_opd.settings import OpdSettings
from openclaw_rl.engines.base import Score
from openclaw_rl.errors import EngineGone, TeacherError
from openclaw_rl.methods.base import Dropped, can_practise
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import DropReason, Ids, Sample

WISH = "Answer in one sentence."


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "FIRST_PAUSE_S", 1e-6)


class Scorer(FakeEngine):
    """Scores by the adapter and the hint; remembers its calls."""

    is_gone = False
    is_narrow = False

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        text = "".join(map(chr, prompt_ids))
        self.calls.append((text, lora_path, extra_key, top_k))
        if self.is_gone:
            raise EngineGone("no engine")
        value = (-1.0 if lora_path is None else -1.5) + (0.25 if WISH in text else 0.0)
        width = 0 if self.is_narrow else top_k
        ids, rows = tuple(range(width)), tuple(value - k for k in range(width))
        tables = ((rows,) * len(response_ids), (ids,) * len(response_ids)) if top_k else (None, None)
        return Score((value,) * len(response_ids), *tables)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str | None, str | None, int]] = []


async def test_a_given_hint_is_scored_as_it_is_and_no_judge_is_asked(bench, judged) -> None:
    b = bench(engine=(engine := Scorer()), teacher="base", hint_source="judge")
    b.serving.switch(7, "policy-v7")
    made = await METHOD.practise(judged("hi", "a", verdict=None), f" {WISH} ", b.tools)
    assert isinstance(made, Sample)
    assert (made.teacher_log_probs, made.student_log_probs, made.scored_version) == ((-0.75,) * 3, (-1.5,) * 3, 7)
    assert made.hint is not None
    assert (made.hint.text, made.hint.source, made.reward) == (WISH, "practice", None)
    assert [WISH in text for text, *_ in engine.calls] == [False, True]
    assert b.ask.prompts == []
    # Real turns have figures of their own.
    assert b.tools.health.counts == {"practice_scored": 1}
    assert list(b.tools.health.means) == ["practice_gap_abs"]


@pytest.mark.parametrize("neutral", ["", "Thank you."])
async def test_a_given_hint_is_guided_and_an_anchor_is_not(bench, judged, neutral: str) -> None:
    b = bench(engine=(engine := Scorer()), teacher="base", guidance=1.0, neutral_hint=neutral)
    b.serving.switch(7, "policy-v7")
    made = await METHOD.practise(judged("hi", "a"), WISH, b.tools)
    assert isinstance(made, Sample)
    assert (made.teacher_log_probs, made.hint and made.hint.guidance) == ((-0.5,) * 3, 1.0)
    assert len(engine.calls) == 3
    anchor = await METHOD.practise(judged("hi", "a"), None, b.tools)
    assert isinstance(anchor, Sample)
    assert (anchor.teacher_log_probs, anchor.hint and anchor.hint.guidance) == ((-1.0,) * 3, None)
    assert len(engine.calls) == 5
    assert {*b.tools.health.means} == {"practice_gap_abs", "practice_guided_gap_abs", "anchor_gap_abs"}


@pytest.mark.parametrize("top_k", [0, 3])
async def test_an_anchor_is_held_to_the_base_without_a_hint(bench, judged, top_k: int) -> None:
    b = bench(engine=(engine := Scorer()), teacher="base", top_k=top_k)
    b.serving.switch(7, "policy-v7")
    made = await METHOD.practise(judged("hi", "a", WISH, verdict=-1), None, b.tools)
    assert isinstance(made, Sample)
    assert (made.teacher_log_probs, made.student_log_probs, made.reward) == ((-1.0,) * 3, (-1.5,) * 3, None)
    assert made.hint is not None
    assert (made.hint.text, made.hint.source) == (None, "anchor")
    assert engine.calls == [(engine.calls[0][0], "policy-v7", "v7", 0), (engine.calls[0][0], None, "v0", top_k)]
    credit = METHOD.advantages([made], OpdSettings(opd_clip=0.25), {})
    assert credit == [[0.0 if top_k else 0.25] * 3]
    heavier = METHOD.advantages([made], OpdSettings(opd_clip=0.25, anchor_weight=3.0), {})
    assert heavier == [[0.0 if top_k else 0.75] * 3]
    assert METHOD.gathered_ids(made) == (((0, 1, 2),) * 3 if top_k else None)
    assert b.tools.health.counts == {"anchor_scored": 1}


async def test_at_version_0_the_base_is_the_policy_and_is_not_scored_again(bench, judged) -> None:
    b = bench(engine=(engine := Scorer()), teacher="base")
    made = await METHOD.practise(judged("hi", "a"), None, b.tools)
    assert isinstance(made, Sample)
    assert made.teacher_log_probs == made.student_log_probs == (-1.0,) * 3
    assert len(engine.calls) == 1


async def test_another_engines_base_is_asked_even_then(bench, judged) -> None:
    b, base = bench(engine=(engine := Scorer()), teacher="base"), Scorer()
    await METHOD.practise(judged("hi", "a"), None, replace(b.tools, base_teacher=base))
    assert (len(engine.calls), len(base.calls)) == (1, 1)


@pytest.mark.parametrize("fault", ["is_gone", "is_narrow"])
@pytest.mark.parametrize("hint", [WISH, None])
async def test_an_outage_is_told_so_that_the_reply_can_be_scored_later(bench, judged, fault, hint) -> None:
    engine = Scorer()
    setattr(engine, fault, True)
    b = bench(engine=engine, teacher="base", top_k=2)
    with pytest.raises(TeacherError, match="teacher_failed"):
        await METHOD.practise(judged("hi", "a"), hint, b.tools)


@pytest.mark.parametrize(
    ("hint", "method", "context", "why"),
    [
        (WISH, {}, 20, "hint_overflows"),
        ("", {}, 8192, "no_hint"),
        ("Say: The quick brown fox jumps over the lazy dog.", {}, 8192, "hint_rejected"),
        (WISH, {"teacher": "policy"}, 8192, "practice needs a teacher that stays"),
        (None, {"teacher": "ema"}, 8192, "practice needs a teacher that stays"),
    ],
)
async def test_what_cannot_be_practised_is_dropped_by_its_reason(bench, judged, hint, method, context, why) -> None:
    b = bench(engine=Scorer(), context_length=context, **{"teacher": "base"} | method)
    made = await METHOD.practise(judged("hi", "The quick brown fox jumps over the lazy dog."), hint, b.tools)
    assert isinstance(made, Dropped)
    assert made.reason is DropReason.METHOD
    assert made.detail.startswith(why)


async def test_an_unusable_reply_costs_no_scoring(bench, judged) -> None:
    b = bench(engine=(engine := Scorer()), teacher="base")
    made = await METHOD.practise(judged("hi", "a", mask=(False, False, False)), None, b.tools)
    assert made == Dropped(DropReason.EMPTY)
    assert engine.calls == []


async def test_a_method_without_a_teacher_refuses_and_an_older_one_is_known_not_to_practise(bench, judged) -> None:
    made = await BINARY.practise(judged("hi", "a"), WISH, bench(engine=Scorer()).tools)
    assert isinstance(made, Dropped)
    assert made.reason is DropReason.METHOD

    class Older:
        name = "older"

    assert can_practise(METHOD, OpdSettings())
    assert not can_practise(METHOD, OpdSettings(teacher="policy"))
    assert not can_practise(BINARY, BinarySettings())
    assert not can_practise(Older(), OpdSettings())  # type: ignore[arg-type]


@pytest.mark.parametrize(("top_k", "guidance", "scores"), [(20, 1.0, True), (20, 0.0, False), (0, 1.0, False)])
def test_only_a_guided_top_k_scores_given_ids(top_k: int, guidance: float, scores: bool) -> None:
    assert OpdSettings(top_k=top_k, guidance=guidance).scores_given_ids is scores
    assert CombineSettings(top_k=top_k, guidance=guidance).scores_given_ids is scores
    assert not CombineSettings(top_k=top_k, guidance=guidance, opd_weight=0).scores_given_ids
    assert not BinarySettings().scores_given_ids
