"""Binary RL: what becomes a sample, the credit it gets, and the loss of it."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms, load_method
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import (
    DropReason,
    JudgedTurn,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    Verdict,
    VersionRun,
)


def judged(verdict: int | None = 1, *, tool: bool = False, **turn: object) -> JudgedTurn:
    request = Request(
        request_id="r1",
        scope=Scope("user", "s"),
        received_at=0.0,
        messages=(Message(role="user", content="hi"),),
        tools_json=None,
        template_kwargs_json=None,
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(max_new_tokens=8, temperature=0.7),
    )
    fields: dict[str, object] = {
        "turn_id": "t1",
        "request_id": "r1",
        "finished_at": 1.0,
        "response_ids": (4, 5),
        "rollout_log_probs": (-0.5, -0.25),
        "loss_mask": (True, False),
        "versions": (VersionRun(3, 2),),
        "finish_reason": "stop",
        "reply": Message(role="assistant", content="hello"),
    }
    answer = Message(role="tool" if tool else "user", content="ok")
    return JudgedTurn(
        request,
        Turn(**(fields | turn)),  # type: ignore[arg-type]
        NextState((answer,)),
        None if verdict is None else Verdict(verdict, (verdict,), "rules"),
    )


def sample(reward: float | None, *, tool: bool = False, n: int = 2) -> Sample:
    return Sample(
        sample_id=f"{reward}{tool}",
        prompt_ids=(1,),
        response_ids=(2,) * n,
        loss_mask=(True,) * n,
        rollout_log_probs=(-1.0,) * n,
        versions=(VersionRun(0, n),),
        temperature=1.0,
        is_tool_turn=tool,
        reward=reward,
    )


async def score(turn: JudgedTurn) -> Sample | Dropped:
    return await METHOD.score(turn, ScoringTools())


# -- score -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [1, -1])
async def test_a_judged_turn_becomes_a_sample(verdict: int) -> None:
    made = await score(judged(verdict, tool=True))
    assert isinstance(made, Sample)
    assert (made.sample_id, made.prompt_ids, made.response_ids) == ("t1", (1, 2, 3), (4, 5))
    assert (made.loss_mask, made.rollout_log_probs, made.temperature) == ((True, False), (-0.5, -0.25), 0.7)
    assert (made.reward, made.is_tool_turn, made.oldest_version) == (float(verdict), True, 3)
    assert made.teacher_log_probs is None


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (judged(0), DropReason.NEUTRAL),
        (judged(None), DropReason.UNJUDGED),
        # also where the user rated it: the thought that the limit cut is no answer
        (judged(1, reply=Message(role="assistant", content="", reasoning_content="hm")), DropReason.NEUTRAL),
        (judged(1, reply=Message(role="assistant", content="<think>hm")), DropReason.NEUTRAL),
        (judged(1, drop=DropReason.CANCELLED), DropReason.CANCELLED),
        (judged(0, drop=DropReason.OPTED_OUT), DropReason.OPTED_OUT),
        (judged(1, loss_mask=(False, False)), DropReason.EMPTY),
        (judged(1, response_ids=(), rollout_log_probs=(), loss_mask=(), versions=()), DropReason.EMPTY),
        (judged(1, rollout_log_probs=(math.nan, -1.0)), DropReason.NON_FINITE),
        (judged(1, rollout_log_probs=(-1.0, -math.inf)), DropReason.NON_FINITE),
    ],
)
async def test_what_cannot_be_trained_on_is_dropped_with_its_reason(turn: JudgedTurn, reason: DropReason) -> None:
    made = await score(turn)
    assert isinstance(made, Dropped)
    assert made.reason is reason


async def test_greedy_and_reshaped_sampling_are_not_trainable() -> None:
    turn = judged(1)
    for sampling in (
        SamplingParams(max_new_tokens=8, temperature=0.0),
        SamplingParams(max_new_tokens=8, min_p=0.1),
        SamplingParams(max_new_tokens=8, reshapes_logits=True),
    ):
        made = await score(replace(turn, request=replace(turn.request, sampling=sampling)))
        assert isinstance(made, Dropped)
        assert made.reason is DropReason.NOT_TRAINABLE_SAMPLING


# -- advantages --------------------------------------------------------------------------------------------------------


def test_without_baseline_the_reward_is_the_advantage_of_every_token() -> None:
    """Case TN-3: single samples, all rewards equal: bounded, and not zero."""
    state: dict[str, float] = {}
    settings = BinarySettings(baseline="none")
    credit = METHOD.advantages([sample(1.0, n=3), sample(1.0), sample(-1.0)], settings, state)
    assert credit == [[1.0] * 3, [1.0] * 2, [-1.0] * 2]


def test_ema_baseline_by_hand() -> None:
    method_settings, state = BinarySettings(baseline="ema", baseline_decay=0.5, baseline_limit=0.5), {}
    first = METHOD.advantages([sample(1.0), sample(1.0), sample(-1.0, tool=True)], method_settings, state)
    assert [values[0] for values in first] == [1.0, 1.0, -1.0]  # the baseline does not know this batch yet
    assert state == {"baseline_user": 0.75, "baseline_tool": -0.5}
    second = METHOD.advantages([sample(1.0), sample(-1.0), sample(1.0, tool=True)], method_settings, state)
    assert [values[0] for values in second] == [0.5, -1.5, 1.5]  # 0.75 is clamped to 0.5
    assert state["baseline_user"] == pytest.approx(0.75 + 0.75 * (0.0 - 0.75))


def test_the_mean_of_the_others_by_hand() -> None:
    settings, state = BinarySettings(baseline="others", baseline_decay=0.5), {}
    batch = [sample(1.0), sample(-1.0), sample(-1.0), sample(-1.0, tool=True)]
    first = METHOD.advantages(batch, settings, state)
    assert [values[0] for values in first] == [2.0, -1.0, -1.0, -1.0]  # a kind's only turn has no others
    assert state == {
        "baseline_user": pytest.approx(7 / 8 * -1 / 3),
        "baseline_user_mass": 7 / 8,
        "baseline_tool": -0.5,
        "baseline_tool_mass": 0.5,
    }
    second = METHOD.advantages([sample(1.0), sample(1.0, tool=True)], settings, state)
    # Three turns, faded to 7/4 of one together, with the mean -1/3; one turn with -1.
    assert [values[0] for values in second] == [pytest.approx(1 + 1 / 3), 2.0]
    assert state["baseline_user_mass"] == 15 / 16


def test_while_all_rewards_are_the_same_the_mean_of_the_others_credits_nothing() -> None:
    """Nothing tells one reply from another: what raw rewards would do here is noise. The first that differs gets it
    all."""
    settings, state = BinarySettings(baseline="others"), {}
    for _ in range(3):
        assert METHOD.advantages([sample(-1.0)] * 4, settings, state) == [[0.0, 0.0]] * 4
    credit = METHOD.advantages([sample(1.0), sample(-1.0)], settings, state)
    assert credit[0] == pytest.approx([2.0, 2.0])
    assert -0.25 < credit[1][0] < 0


def test_a_run_may_go_over_to_the_mean_of_the_others() -> None:
    """What `ema` left stands for a long past."""
    state = {"baseline_user": -0.5}
    credit = METHOD.advantages([sample(1.0)], BinarySettings(baseline="others"), state)
    assert credit[0][0] == pytest.approx(1.5)


def test_no_reward_is_in_its_own_baseline() -> None:
    """Whatever the reward had been, its baseline is the same: it cannot lessen what the reward says."""
    settings = BinarySettings(baseline="others")
    taken_off = []
    for reward in (1.0, -1.0):
        state = {"baseline_user": 0.2, "baseline_user_mass": 0.6}
        credit = METHOD.advantages([sample(reward), sample(1.0), sample(-1.0)], settings, state)
        taken_off.append(reward - credit[0][0])
    assert taken_off[0] == pytest.approx(taken_off[1])


@given(
    st.lists(st.tuples(st.sampled_from([1.0, -1.0]), st.booleans()), min_size=1, max_size=12),
    st.data(),
    st.sampled_from(["none", "ema", "others"]),
    st.sampled_from([0.5, 1.0]),
)
def test_order_changes_nothing_and_advantages_are_bounded(
    kinds: list[tuple[float, bool]], data: st.DataObject, baseline: str, limit: float
) -> None:
    method_settings = BinarySettings(baseline=baseline, baseline_limit=limit)  # type: ignore[arg-type]
    batch = [sample(reward, tool=tool) for reward, tool in kinds]
    order = data.draw(st.permutations(range(len(batch))))
    start = {"baseline_user": 0.9, "baseline_tool": -0.2}
    state, moved_state = dict(start), dict(start)
    credit = METHOD.advantages(batch, method_settings, state)
    moved = METHOD.advantages([batch[i] for i in order], method_settings, moved_state)
    for i, values in zip(order, moved, strict=True):
        assert credit[i] == pytest.approx(values)
    assert state == pytest.approx(moved_state)
    for one, values in zip(batch, credit, strict=True):
        assert len(values) == len(one.response_ids)
        assert all(1 - limit - 1e-9 <= abs(value) <= 1 + limit + 1e-9 for value in values)
        assert all(value * one.reward >= -1e-9 for value in values)  # never blame for praise


@pytest.mark.parametrize(("baseline", "moves"), [("none", True), ("others", False)])
def test_complaints_alone_ask_for_longer_replies_unless_they_are_taken_off(baseline: str, moves: bool) -> None:
    """A policy that ends a reply at each of 6 tokens with probability p, and a user who likes none. The expected step
    over all replies, by the mean over a reply's tokens that every step takes: A ∇E[1/T], so -1 alone lengthens them."""
    settings, trainer = BinarySettings(baseline=baseline), TrainerSettings()  # type: ignore[arg-type]
    logit = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    go, end = torch.nn.functional.logsigmoid(-logit), torch.nn.functional.logsigmoid(logit)
    replies = [torch.stack([go] * n + [end]) for n in range(6)] + [torch.stack([go] * 6)]
    assert sum(log_probs.sum().exp().item() for log_probs in replies) == pytest.approx(1.0)
    samples = [sample(-1.0, n=len(log_probs)) for log_probs in replies]
    credit = METHOD.advantages(samples, settings, {})
    expected = torch.zeros((), dtype=torch.float64)
    for one, log_probs, advantages in zip(samples, replies, credit, strict=True):
        terms = TokenTerms(
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),
            rollout_log_probs=log_probs.detach(),
            ref_log_probs=None,
            advantages=torch.tensor(advantages, dtype=torch.float64),
            loss_mask=torch.ones(len(advantages), dtype=torch.bool),
        )
        loss = METHOD.loss(one, terms, trainer, settings)
        expected = expected + log_probs.sum().exp().detach() * loss.loss_sum / loss.token_count
    expected.backward()
    assert logit.grad is not None
    assert (float(logit.grad) > 1e-3) == moves  # downhill the policy ends less often
    assert moves or float(logit.grad) == 0.0


def test_a_sample_without_reward_is_a_bug_not_a_zero() -> None:
    with pytest.raises(ValueError, match="reward"):
        METHOD.advantages([sample(None)], BinarySettings(), {})


# -- loss --------------------------------------------------------------------------------------------------------------


def loss_of(settings: TrainerSettings, *, reference: bool = False) -> tuple[SampleLoss, torch.Tensor]:
    log_probs = torch.tensor([-1.0, -0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-1.0, -1.5, -6.0, -9.0], dtype=torch.float64)
    terms = TokenTerms(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if settings.old_log_probs == "recompute" else rollout,
        rollout_log_probs=rollout,
        ref_log_probs=torch.tensor([-1.0, -0.5, -2.5, 0.0], dtype=torch.float64) if reference else None,
        advantages=torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, True, False]),
    )
    one = Sample(
        sample_id="s",
        prompt_ids=(1,),
        response_ids=(1, 2, 3, 4),
        loss_mask=(True, True, True, False),
        rollout_log_probs=tuple(rollout.tolist()),
        versions=(VersionRun(0, 4),),
        temperature=1.0,
        reward=1.0,
    )
    return METHOD.loss(one, terms, settings, BinarySettings()), log_probs


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_the_kl_on_tokens_of_an_older_version_is_that_of_the_policy_now(old: str) -> None:
    """Every token of a vocabulary of three, as often as the older version samples it."""
    before, now = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.4, 0.35, 0.25]))
    base, flat = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), TrainerSettings(kl_coef=1.0, old_log_probs=old)  # type: ignore[arg-type]
    found = 0.0
    for token, share in enumerate(before.tolist()):
        log_prob = now.log()[token : token + 1]
        terms = TokenTerms(
            log_probs=log_prob,
            old_log_probs=log_prob if old == "recompute" else before.log()[token : token + 1],
            rollout_log_probs=before.log()[token : token + 1],
            ref_log_probs=base.log()[token : token + 1],
            advantages=torch.zeros(1, dtype=torch.float64),
            loss_mask=torch.tensor([True]),
        )
        found += share * METHOD.loss(sample(1.0, n=1), terms, flat, BinarySettings()).loss_sum.item()
    assert found == pytest.approx((now * (now / base).log()).sum().item())


def test_recompute_weighs_by_the_engine_and_masks_what_it_cannot_explain() -> None:
    loss, log_probs = loss_of(TrainerSettings())
    loss.loss_sum.backward()
    # ratio 1 everywhere; weights 1 and min(e, 2); the third token's weight e^4 is outside [1/8, 8]
    assert loss.loss_sum.item() == pytest.approx(-(1.0 + 2.0))
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.0, -2.0, 0.0, 0.0])
    assert loss.token_count == 3  # the divisor is known before any forward pass
    assert loss.tallies["masked_share"] == (1, 3)
    assert loss.tallies["abs_log_ratio"].total == pytest.approx(0 + 1 + 4)
    assert loss.tallies["clip_share"].total == 0
    assert loss.tallies["neg_log_prob"].total == pytest.approx(3.5)


def test_rollout_clips_and_never_weighs() -> None:
    loss, log_probs = loss_of(TrainerSettings(old_log_probs="rollout"))
    loss.loss_sum.backward()
    # ratios 1, e, e^4: clipped to 1.28; dual clip bounds the third at 3
    assert loss.loss_sum.item() == pytest.approx(-(1.0 + 1.28 - 3.0))
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0, 0.0])
    assert (loss.tallies["masked_share"].total, loss.tallies["clip_share"].total) == (0, 2)


def test_kl_to_the_reference_is_added_by_its_coefficient() -> None:
    plain, _ = loss_of(TrainerSettings())
    with_kl, log_probs = loss_of(TrainerSettings(kl_coef=0.1), reference=True)
    k3 = 2 * (math.exp(-0.5) + 0.5 - 1)  # the third token's weight e^4, cut
    assert with_kl.loss_sum.item() == pytest.approx(plain.loss_sum.item() + 0.1 * k3)
    assert with_kl.tallies["ref_kl"].total == pytest.approx(k3)
    with_kl.loss_sum.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[2].item() == pytest.approx(0.1 * 2 * (1 - math.exp(-0.5)))


def test_it_is_found_by_its_entry_point_without_torch() -> None:
    assert load_method("binary_rl") is METHOD
    code = (
        "import sys; from openclaw_rl.methods.base import load_method; "
        "load_method('binary_rl'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
