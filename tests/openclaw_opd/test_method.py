"""OPD's hooks: which turns become samples, the credit of their tokens, the loss of them, and what is reported."""

import asyncio
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openclaw_opd import teacher
from openclaw_opd.hindsight import TopK, top_k_of
from openclaw_opd.method import METHOD
from openclaw_opd.settings import OpdSettings
from openclaw_rl.engines.base import Score
from openclaw_rl.errors import AlignmentError, EngineGone, TeacherError
from openclaw_rl.methods.base import Dropped, SampleLoss, TokenTerms, load_method
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import DropReason, HintTerm, Sample, SamplingParams, VersionRun

HINT = "Answer in one sentence."


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "FIRST_PAUSE_S", 1e-6)


class Scorer(FakeEngine):
    """Scores hinted prompts by `hinted`, others by -1; `broken` says how it fails."""

    hinted = (-0.5, -4.0, -1.0)
    broken: str = ""

    async def score(self, prompt_ids: Any, response_ids: Any, *, top_k: int = 0, **_: Any) -> Score:
        if self.broken == "gone":
            raise EngineGone("no engine")
        if self.broken == "slow":
            await asyncio.Event().wait()
        is_hinted = HINT in "".join(map(chr, prompt_ids))
        values = self.hinted if is_hinted else (-1.0,) * len(response_ids)
        width = 1 if self.broken == "narrow" and top_k else top_k
        rows = tuple(tuple(-1.0 - k for k in range(width if t == 0 else top_k)) for t in range(len(response_ids)))
        ids = tuple(tuple(range(len(row))) for row in rows)
        return Score(values, rows if top_k else None, ids if top_k else None)


# -- score -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [-1, 0, 1, None])
async def test_a_turn_with_a_hint_becomes_a_sample_whatever_the_verdict(bench, judged, verdict) -> None:
    turn = judged("hi", "a", verdict=verdict, comment=HINT, mask=(True, True, False))
    made = await METHOD.score(turn, bench(engine=Scorer()).tools)
    assert isinstance(made, Sample)
    assert (made.teacher_log_probs, made.student_log_probs, made.scored_version) == ((-0.5, -4.0, -1.0), (-1.0,) * 3, 0)
    assert made.reward is None, "a verdict is no part of OPD: nothing may reinforce what was corrected"  # D1, D3
    assert (made.response_ids, made.loss_mask) == (turn.turn.response_ids, (True, True, False))
    assert made.hint is not None
    assert made.hint.text == HINT


async def test_the_trainers_student_and_a_top_k_travel_with_the_sample(bench, judged) -> None:
    turn = judged("hi", "a", comment=HINT)
    made = await METHOD.score(turn, bench(engine=Scorer(), student_term="trainer", top_k=3).tools)
    assert isinstance(made, Sample)
    assert made.student_log_probs is None
    assert METHOD.gathered_ids(made) == ((0, 1, 2),) * 3
    assert top_k_of(made) == TopK(((0, 1, 2),) * 3, ((-1.0, -2.0, -3.0),) * 3)


@pytest.mark.parametrize(
    ("turn", "context", "why"),
    [
        ({}, 8192, "no_hint"),
        ({"comment": HINT}, 20, "hint_overflows"),
        ({"comment": HINT, "request": []}, 8192, "no_user_message"),
    ],
)
async def test_a_turn_without_the_term_is_dropped_by_its_reason(bench, judged, turn, context, why) -> None:
    turn = judged(turn.pop("request", "hi"), "a", **turn)
    made = await METHOD.score(turn, bench(engine=Scorer(), context_length=context).tools)
    assert isinstance(made, Dropped)
    assert made.reason is DropReason.METHOD
    assert made.detail.split(":")[0] == why


@pytest.mark.parametrize("broken", ["gone", "slow", "narrow"])
async def test_a_teacher_that_fails_is_tried_again_later(bench, judged, broken) -> None:
    engine = Scorer()
    engine.broken = broken
    tools = bench(engine=engine, top_k=2, score_timeout_s=0.01).tools
    with pytest.raises(TeacherError, match="teacher_failed"):
        await METHOD.score(judged("hi", "a", comment=HINT), tools)


async def test_an_unusable_turn_costs_no_scoring(bench, judged) -> None:
    turn, engine = judged("hi", "a", comment=HINT), Scorer()
    engine.broken = "slow"
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    for changed, reason in (
        (replace(turn, turn=replace(turn.turn, drop=DropReason.CANCELLED)), DropReason.CANCELLED),
        (replace(turn, turn=replace(turn.turn, loss_mask=(False,) * 3)), DropReason.EMPTY),
        (replace(turn, turn=replace(turn.turn, rollout_log_probs=(math.nan,) * 3)), DropReason.NON_FINITE),
        (replace(turn, request=replace(turn.request, sampling=greedy)), DropReason.NOT_TRAINABLE_SAMPLING),
    ):
        assert await METHOD.score(changed, bench(engine=engine).tools) == Dropped(reason)


@pytest.mark.parametrize(
    ("ids", "log_probs"),
    [
        (((0, 1), (0, 1)), ((-1.0, -2.0), (-1.0, -2.0))),  # a row short
        (((0, 1),) * 3, ((-1.0, -2.0), (-1.0, -2.0), (-1.0,))),
        (((0, 1),) * 3, ((-1.0, -2.0),) * 4),
        (((),) * 3, ((),) * 3),
        (((5, 5),) * 3, ((-1.0, -2.0),) * 3),
        (((0, 1),) * 3, ((-1.0, math.nan),) * 3),
        (((0, 1),) * 3, ((0.0, 0.0), (-1.0, -2.0), (-1.0, -2.0))),  # front-padded with zeros: a mass of two
    ],
)
def test_a_table_that_is_none_is_refused(ids: Any, log_probs: Any) -> None:  # D7
    with pytest.raises(AlignmentError):
        TopK(ids, log_probs).check(3)


def test_an_impossible_id_survives_json() -> None:
    made = sample(top_k=(((3, 4),), ((-0.1, -math.inf),)), n=1)
    assert made.hint is not None
    text = made.hint.to_json()
    parsed = [replace(made, hint=HintTerm.of_json(sent)) for sent in (text, text.replace("-Infinity", "null"))]
    assert top_k_of(made) == top_k_of(parsed[0]) == top_k_of(parsed[1]) == TopK(((3, 4),), ((-0.1, -math.inf),))


# -- advantages --------------------------------------------------------------------------------------------------------


def sample(
    teacher: tuple[float, ...] | None = None,
    student: tuple[float, ...] | None = None,
    *,
    n: int = 4,
    reward: float | None = None,
    top_k: tuple[Any, Any] | None = None,
    demonstration: bool = False,
    mask: tuple[bool, ...] | None = None,
) -> Sample:
    return Sample(
        sample_id="s",
        prompt_ids=(1,),
        response_ids=tuple(range(2, 2 + n)),
        loss_mask=mask or (True,) * n,
        rollout_log_probs=(0.0,) * n if demonstration else (-1.0,) * n,
        versions=(VersionRun(0, n),),
        temperature=0.5,
        reward=reward,
        teacher_log_probs=teacher if top_k is None else teacher or (-1.0,) * n,
        student_log_probs=student if top_k is None else student or (-1.0,) * n,
        hint=None if top_k is None else HintTerm(top_k=TopK(*top_k)),
        is_demonstration=demonstration,
    )


def test_the_credit_is_the_clipped_gap() -> None:
    batch = [
        sample((-0.5, -4.0, -1.0, -1.5), (-1.0, -1.0, -1.0, -1.0)),
        sample((-0.5, -4.0, -1.0, -1.5)),  # the trainer's own student: not known yet
        sample(top_k=(((1, 2),) * 4, ((-1.0, -2.0),) * 4)),
        sample(demonstration=True),
    ]
    credit = METHOD.advantages(batch, OpdSettings(opd_clip=2.0), {})
    assert credit[0] == pytest.approx([0.5, -2.0, 0.0, -0.5])
    assert credit[1:] == [[0.0] * 4] * 3


def test_a_sample_of_another_method_is_never_a_zero() -> None:
    assert not METHOD.can_train(sample(reward=1.0))
    assert METHOD.can_train(sample(demonstration=True))
    with pytest.raises(ValueError, match="teacher"):
        METHOD.advantages([sample(reward=1.0)], OpdSettings(), {})


# -- loss --------------------------------------------------------------------------------------------------------------


def terms(one: Sample, advantages: list[float], **more: Any) -> TokenTerms:
    log_probs = torch.tensor([-1.0, -1.5, -0.5, -1.0], dtype=torch.float64, requires_grad=True)
    return TokenTerms(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        rollout_log_probs=torch.tensor([-1.0, -1.0, -1.0, -9.0], dtype=torch.float64),
        ref_log_probs=None,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(one.loss_mask),
        **more,
    )


def run(one: Sample, given: TokenTerms, **method: Any) -> tuple[SampleLoss, Tensor]:
    loss = METHOD.loss(one, given, TrainerSettings(), OpdSettings(**method))
    loss.loss_sum.backward()
    assert given.log_probs.grad is not None
    return loss, given.log_probs.grad


def test_the_credit_goes_through_the_clipped_objective_with_its_weights() -> None:
    one = sample((-0.5, -4.0, -1.0, -1.0), (-1.0, -1.0, -1.0, -1.0), mask=(True, True, True, False))
    (credit,) = METHOD.advantages([one], OpdSettings(opd_clip=2.0), {})
    loss, slopes = run(one, terms(one, credit))
    # ratio 1; weights 1, e^-0.5, e^0.5 of trainer over engine; credit 0.5, -2, 0
    assert loss.loss_sum.item() == pytest.approx(-(0.5 - 2 * math.exp(-0.5)))
    assert slopes.tolist() == pytest.approx([-0.5, 2 * math.exp(-0.5), 0.0, 0.0])
    assert loss.token_count == 3
    found = {name: tally.total / tally.over for name, tally in loss.tallies.items()}
    assert found["gap"] == pytest.approx((0.5 - 3.0 + 0.0) / 3)
    assert found["gap_abs"] == pytest.approx(3.5 / 3)
    assert found["gap_clip_share"] == pytest.approx(1 / 3)
    assert (found["hint_share"], found["reward_share"], found["hint_and_reward_share"]) == (1, 0, 0)
    assert found["neg_log_prob"] == pytest.approx(1.0)


def test_the_trainers_student_is_taken_at_temperature_1_and_detached() -> None:  # D23
    scored = sample((-0.5, -4.0, -1.0, -1.0))
    own = torch.tensor([-1.0, -1.0, -1.0, -0.5], dtype=torch.float64, requires_grad=True)
    by_trainer, slopes = run(scored, terms(scored, [0.0] * 4, unscaled_log_probs=own), opd_clip=2.0)
    paired = sample((-0.5, -4.0, -1.0, -1.0), (-1.0, -1.0, -1.0, -0.5))
    (credit,) = METHOD.advantages([paired], OpdSettings(opd_clip=2.0), {})
    by_engine, same = run(paired, terms(paired, credit), opd_clip=2.0)
    assert by_trainer.loss_sum.item() == by_engine.loss_sum.item()
    assert slopes.tolist() == same.tolist()
    assert own.grad is None
    assert by_trainer.tallies == by_engine.tallies
    with pytest.raises(ValueError, match="student"):
        run(scored, terms(scored, [0.0] * 4))


def test_with_a_top_k_the_divergence_is_all() -> None:
    table = (((1, 2),) * 4, ((math.log(0.4), math.log(0.4)),) * 4)
    one = sample(top_k=table, mask=(True, True, False, True))
    assert METHOD.advantages([one], OpdSettings(), {}) == [[0.0] * 4]
    gathered = torch.tensor([[0.5, 0.3], [0.4, 0.4], [0.9, 0.1], [0.1, 0.1]], dtype=torch.float64).log()
    gathered.requires_grad_()
    loss, slopes = run(one, terms(one, [0.0] * 4, gathered_log_probs=gathered))
    # the last token is masked: trainer and engine are e^8 apart there
    expected = 0.5 * math.log(1.25) + 0.3 * math.log(0.75)
    assert loss.loss_sum.item() == pytest.approx(expected)
    assert slopes.tolist() == [0.0] * 4
    assert gathered.grad is not None
    assert gathered.grad[2:].tolist() == [[0.0, 0.0]] * 2
    assert loss.token_count == 3
    assert loss.tallies["top_k_kl"] == pytest.approx((expected, 2))
    assert loss.tallies["student_tail"] == pytest.approx((0.4, 2))


@pytest.mark.parametrize("method", [METHOD, BINARY], ids=["opd", "binary_rl"])
def test_a_demonstration_is_its_likelihood_whatever_its_rollout_says(method: Any) -> None:
    one = sample(demonstration=True, mask=(True, False, True, True))
    assert method.advantages([one], OpdSettings(), state := {}) == [[0.0] * 4]
    assert state == {}
    given = terms(one, [0.0] * 4)
    given = replace(given, rollout_log_probs=torch.full((4,), torch.nan, dtype=torch.float64))
    loss = method.loss(one, given, TrainerSettings(kl_coef=0.1), OpdSettings(demonstration_weight=0.5))
    loss.loss_sum.backward()
    assert loss.loss_sum.item() == pytest.approx(0.5 * (1.0 + 0.5 + 1.0))
    assert given.log_probs.grad is not None
    assert given.log_probs.grad.tolist() == [-0.5, 0.0, -0.5, -0.5]
    assert loss.tallies == {"demonstration_nll": (2.5, 3)}


def test_it_is_found_by_its_entry_point_without_torch() -> None:
    assert load_method("opd") is METHOD
    code = (
        "import sys; from openclaw_rl.methods.base import load_method; "
        "load_method('opd'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
