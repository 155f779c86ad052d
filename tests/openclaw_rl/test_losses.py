"""The losses: hand-worked numbers, properties, and a slow reference that spells every formula out token by token."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import rel
from torch import Tensor

from openclaw_rl import losses

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
EXACT = rel(torch.float64, 4096)


@dataclass
class Tokens:
    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor


def tensor(values: list[float], *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


@st.composite
def tokens(draw: st.DrawFn, extreme: bool = False) -> Tokens:
    n = draw(st.integers(1, 8))
    low = -200.0 if extreme else -6.0
    values = st.lists(st.floats(low, 0.0), min_size=n, max_size=n)
    advantages = st.lists(st.sampled_from([-1.5, -1.0, 0.0, 0.5, 1.0]), min_size=n, max_size=n)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return Tokens(tensor(draw(values), grad=True), tensor(draw(values)), tensor(draw(advantages)), mask)


def slow_loss(t: Tokens, dual_clip: float | None, weights: list[float]) -> float:
    total = 0.0
    for lp, old, a, m, w in zip(
        t.log_probs.tolist(), t.old.tolist(), t.advantages.tolist(), t.mask.tolist(), weights, strict=True
    ):
        if not m:
            continue
        r = math.exp(lp - old)
        s = min(r * a, min(max(r, 0.8), 1.28) * a)
        if dual_clip is not None and a < 0:
            s = max(s, dual_clip * a)
        total -= w * s
    return total


# -- the clipped objective ---------------------------------------------------------------------------------------------


def test_clipped_loss_by_hand() -> None:
    log_probs = tensor([math.log(0.5), math.log(0.6), math.log(0.1), math.log(0.9)], grad=True)
    old = tensor([math.log(0.5), math.log(0.3), math.log(0.4), math.log(0.3)])
    advantages = tensor([1.0, 1.0, -1.0, -1.0])
    mask = torch.tensor([True, True, True, True])
    loss = losses.clipped_policy_loss(log_probs, old, advantages, mask, **CLIPS)
    # ratios 1, 2, 1/4, 3: taken 1, clipped to 1.28, clipped to 0.8 (min of -0.25 and -0.8), -3 kept
    assert loss.item() == pytest.approx(-(1.0 + 1.28 - 0.8 - 3.0))
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0, 3.0])
    dual = losses.clipped_policy_loss(log_probs, old, advantages, mask, **CLIPS, dual_clip=2.0)
    assert dual.item() == pytest.approx(-(1.0 + 1.28 - 0.8 - 2.0))
    assert losses.is_clipped(log_probs, old, advantages, mask, **CLIPS).tolist() == [False, True, True, False]
    assert losses.is_clipped(log_probs, old, advantages, mask, **CLIPS, dual_clip=2.0).tolist() == [
        False,
        True,
        True,
        True,
    ]


@given(tokens(), st.sampled_from([None, 3.0]), st.data())
def test_clipped_loss_equals_the_slow_reference(t: Tokens, dual_clip: float | None, data: st.DataObject) -> None:
    n = len(t.mask)
    weights = data.draw(st.lists(st.floats(0.0, 2.0), min_size=n, max_size=n))
    loss = losses.clipped_policy_loss(
        t.log_probs, t.old, t.advantages, t.mask, **CLIPS, dual_clip=dual_clip, weights=tensor(weights)
    )
    assert loss.item() == pytest.approx(slow_loss(t, dual_clip, weights), rel=1e-9, abs=1e-9)


@given(tokens(extreme=True))
def test_masked_tokens_get_no_gradient(t: Tokens) -> None:
    losses.clipped_policy_loss(t.log_probs, t.old, t.advantages, t.mask, **CLIPS).backward()
    assert t.log_probs.grad is not None
    assert torch.isfinite(t.log_probs.grad).all()
    assert (t.log_probs.grad[~t.mask] == 0).all()


@given(tokens(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_in_masked_entries_changes_nothing(t: Tokens, junk: float) -> None:
    def run(fill: float) -> tuple[float, list[float]]:
        log_probs = t.log_probs.detach().masked_fill(~t.mask, fill).requires_grad_()
        old, advantages = t.old.masked_fill(~t.mask, fill), t.advantages.masked_fill(~t.mask, fill)
        weights = torch.ones_like(old).masked_fill(~t.mask, fill)
        loss = losses.clipped_policy_loss(log_probs, old, advantages, t.mask, **CLIPS, weights=weights)
        loss = loss + losses.k3_kl(log_probs, old, t.mask).sum()
        loss.backward()
        assert log_probs.grad is not None
        return loss.item(), log_probs.grad.tolist()

    assert run(junk) == run(-1.0)


@given(tokens())
def test_zero_advantage_gives_zero_gradient(t: Tokens) -> None:
    losses.clipped_policy_loss(t.log_probs, t.old, torch.zeros_like(t.advantages), t.mask, **CLIPS).backward()
    assert t.log_probs.grad is not None
    assert (t.log_probs.grad == 0).all()


@given(tokens())
def test_the_clip_acts_where_it_must(t: Tokens) -> None:
    losses.clipped_policy_loss(t.log_probs, t.old, t.advantages, t.mask, **CLIPS).backward()
    assert t.log_probs.grad is not None
    clipped = losses.is_clipped(t.log_probs, t.old, t.advantages, t.mask, **CLIPS)
    r = torch.exp(t.log_probs.detach() - t.old)
    boundary = ((r - 0.8).abs() < 1e-9) | ((r - 1.28).abs() < 1e-9)
    live = t.mask & (t.advantages != 0) & ~boundary
    assert ((t.log_probs.grad == 0) == clipped)[live].all()


@given(tokens(), st.data())
def test_permuting_tokens_changes_nothing(t: Tokens, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(t.mask)))))
    loss = losses.clipped_policy_loss(t.log_probs, t.old, t.advantages, t.mask, **CLIPS)
    moved = losses.clipped_policy_loss(t.log_probs[order], t.old[order], t.advantages[order], t.mask[order], **CLIPS)
    assert moved.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)


def test_an_empty_mask_gives_a_zero_with_a_graph() -> None:
    log_probs = tensor([-1.0, -2.0], grad=True)
    mask = torch.tensor([False, False])
    loss = losses.clipped_policy_loss(log_probs, tensor([-1.0, -1.0]), tensor([1.0, 1.0]), mask, **CLIPS)
    loss.backward()
    assert loss.item() == 0
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_very_unlikely_sampled_token_stays_finite(dtype: torch.dtype) -> None:
    """Case TN-2: a log-prob near -90 against one near 0 would be exp(90), which is infinite in fp32."""
    log_probs = torch.tensor([-0.1, -90.0, -0.5], dtype=dtype, requires_grad=True)
    other = torch.tensor([-90.0, -0.1, -0.5], dtype=dtype)
    mask = torch.tensor([True, True, True])
    advantages = torch.tensor([-1.0, 1.0, 1.0], dtype=dtype)
    importance = losses.importance_weights(log_probs, other, mask, ceiling=2.0, mask_outside=8.0)
    loss = losses.clipped_policy_loss(log_probs, other, advantages, mask, **CLIPS, weights=importance.weights)
    loss = loss + losses.k3_kl(log_probs, other, mask).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()
    assert importance.keep.tolist() == [False, False, True]


@given(tokens(), st.sampled_from([None, 3.0]))
@settings(max_examples=25)
def test_gradients_by_finite_differences(t: Tokens, dual_clip: float | None) -> None:
    r = torch.exp(t.log_probs.detach() - t.old)
    kinks = torch.stack([(r - kink).abs() for kink in (0.8, 1.28, 3.0)]).amin(0)
    mask = t.mask & (kinks > 1e-3) & (r < 50)  # there the loss has no derivative, or differences lose their digits

    def loss(log_probs: Tensor) -> Tensor:
        clipped = losses.clipped_policy_loss(log_probs, t.old, t.advantages, mask, **CLIPS, dual_clip=dual_clip)
        return clipped + losses.k3_kl(log_probs, t.old, mask & (r > 0.2)).sum()

    assert torch.autograd.gradcheck(loss, (t.log_probs,), eps=1e-7, atol=1e-5)


# -- importance weights and KL -----------------------------------------------------------------------------------------


def test_importance_weights_by_hand() -> None:
    old = tensor([0.0, math.log(1.5), math.log(3.0), math.log(9.0), -math.log(7.9), -math.log(8.1), 1.0], grad=True)
    mask = torch.tensor([True] * 6 + [False])
    importance = losses.importance_weights(old, torch.zeros_like(old), mask, ceiling=2.0, mask_outside=8.0)
    assert importance.weights.tolist()[:5] == pytest.approx([1.0, 1.5, 2.0, 2.0, 1 / 7.9])
    assert importance.keep.tolist() == [True, True, True, False, True, False, False]
    assert not importance.weights.requires_grad


def test_a_token_without_number_is_not_kept() -> None:
    mask = torch.tensor([True, True])
    importance = losses.importance_weights(
        tensor([math.nan, -1.0]), tensor([-1.0, -1.0]), mask, ceiling=2.0, mask_outside=8.0
    )
    assert importance.keep.tolist() == [False, True]


def test_k3_by_hand_and_its_bound() -> None:
    mask = torch.tensor([True, True, True, False])
    log_probs = tensor([math.log(0.5), math.log(0.25), -90.0, -1.0])
    reference = tensor([math.log(0.25), math.log(0.5), -0.1, -50.0])
    kl = losses.k3_kl(log_probs, reference, mask)
    expected = [0.5 - math.log(0.5) - 1, 2 - math.log(2) - 1, losses.KL_LIMIT, 0.0]
    assert kl.tolist() == pytest.approx(expected)


def test_k3_is_the_kl_in_the_mean() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    mean = (p * losses.k3_kl(p.log(), q.log(), torch.tensor([True] * 3))).sum()
    assert mean.item() == pytest.approx((p * (p / q).log()).sum().item())


# -- demonstrations ----------------------------------------------------------------------------------------------------


def test_the_supervised_loss_by_hand() -> None:
    log_probs = tensor([-1.0, -0.25, math.nan, -2.0], grad=True)
    loss = losses.supervised_loss(log_probs, torch.tensor([True, True, False, True]))
    loss.backward()
    assert loss.item() == pytest.approx(3.25)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-1.0, -1.0, 0.0, -1.0]
    mask, point = torch.tensor([True, False, True]), tensor([-1.0, -2.0, -3.0], grad=True)
    assert torch.autograd.gradcheck(lambda values: losses.supervised_loss(values, mask), (point,))


# -- log-probs ---------------------------------------------------------------------------------------------------------


def test_log_probs_are_of_the_scaled_softmax_and_fp32_at_least() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(5, 11) * 4, torch.tensor([0, 3, 10, 7, 7])
    temperatures = torch.tensor([1.0, 0.7, 0.3, 1.3, 2.0])
    ours = losses.log_probs_of(logits, ids, temperatures)
    for row in range(5):
        scaled = logits[row].double() / temperatures[row].double()
        expected = torch.log_softmax(scaled, -1)[ids[row]]
        assert ours[row].item() == pytest.approx(expected.item(), abs=rel() * scaled.abs().max().item())
    assert losses.log_probs_of(logits.bfloat16(), ids, 0.7).dtype == torch.float32
    assert losses.log_probs_of(logits.double(), ids, 0.7).dtype == torch.float64


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunked_log_probs_have_the_same_values_and_gradients(chunk: int) -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(6, 17, bias=False, dtype=torch.float64).requires_grad_(False)
    ids, temperatures = torch.randint(0, 17, (10,)), torch.rand(10, dtype=torch.float64) + 0.5
    whole = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    cut = whole.detach().clone().requires_grad_()
    upstream = torch.randn(10, dtype=torch.float64)
    plain = torch.log_softmax(head(whole) / temperatures[:, None], -1).gather(-1, ids[:, None]).squeeze(-1)
    ours = losses.selected_log_probs(cut, ids, temperatures, head, chunk=chunk).log_probs
    plain.backward(upstream)
    ours.backward(upstream)
    torch.testing.assert_close(ours, plain, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(cut.grad, whole.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_both_temperatures_and_other_ids_come_from_one_pass(chunk: int) -> None:  # D23, D32
    torch.manual_seed(1)
    project = torch.nn.Linear(6, 17, bias=False, dtype=torch.float64).requires_grad_(False)
    ids, temperatures = torch.randint(0, 17, (10,)), torch.rand(10, dtype=torch.float64) + 0.5
    others = torch.stack([torch.randperm(17)[:5] for _ in range(10)])
    whole = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    cut = whole.detach().clone().requires_grad_()
    calls: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        calls.append(len(hidden))
        return project(hidden)

    found = losses.selected_log_probs(cut, ids, temperatures, head, gather=others, unscaled=True, chunk=chunk)
    assert sum(calls) == 10  # each position's logits once, not once more for every id
    at_one = torch.log_softmax(project(whole), -1)
    scaled = torch.log_softmax(project(whole) / temperatures[:, None], -1).gather(-1, ids[:, None]).squeeze(-1)
    gathered = at_one.gather(-1, others)
    assert found.unscaled is not None
    assert found.gathered is not None
    assert not found.unscaled.requires_grad
    torch.testing.assert_close(found.log_probs, scaled, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.unscaled, at_one.gather(-1, ids[:, None]).squeeze(-1), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.gathered, gathered, rtol=EXACT, atol=EXACT)
    upstream, more = torch.randn(10, dtype=torch.float64), torch.randn(10, 5, dtype=torch.float64)
    ((scaled * upstream).sum() + (gathered * more).sum()).backward()
    ((found.log_probs * upstream).sum() + (found.gathered * more).sum()).backward()
    torch.testing.assert_close(cut.grad, whole.grad, rtol=EXACT, atol=EXACT)
    assert sum(calls) == 20  # and once more in backward, instead of being kept


def test_all_log_probs_are_fp32_under_bf16() -> None:  # D31
    head = torch.nn.Linear(6, 17, bias=False, dtype=torch.bfloat16)
    hidden, ids = torch.randn(4, 6, dtype=torch.bfloat16), torch.tensor([0, 3, 16, 5])
    temperatures = torch.tensor([0.7, 1.0, 0.3, 1.5])
    with torch.no_grad():
        found = losses.selected_log_probs(hidden, ids, temperatures, head, gather=ids[:, None], unscaled=True)
        logits = head(hidden).double()
    assert found.unscaled is not None
    assert found.gathered is not None
    for values, t in (
        (found.log_probs, temperatures),
        (found.unscaled, torch.ones(4)),
        (found.gathered[:, 0], torch.ones(4)),
    ):
        assert values.dtype == torch.float32
        expected = torch.log_softmax(logits / t[:, None], -1).gather(-1, ids[:, None]).squeeze(-1)
        largest = float((logits / t[:, None]).abs().max())
        assert rel() * largest < 1e-3  # bf16 would be off by 1e-2
        torch.testing.assert_close(values.double(), expected, rtol=rel(), atol=rel() * largest)


def test_chunked_log_probs_never_hold_all_logits() -> None:
    """The largest tensor kept for backward is a chunk's hidden states, not N * V logits."""
    head = torch.nn.Linear(4, 1000, bias=False).requires_grad_(False)
    hidden = torch.randn(50, 4, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        ids, others = torch.zeros(50, dtype=torch.long), torch.zeros(50, 20, dtype=torch.long)
        losses.selected_log_probs(hidden, ids, torch.ones(50), head, gather=others, unscaled=True, chunk=10)
    assert max(kept, default=0) < 1000
