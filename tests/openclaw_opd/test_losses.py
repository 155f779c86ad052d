"""The distillation losses: hand-worked numbers, properties, finite differences, and slow references in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import rel
from torch import Tensor

from openclaw_opd import losses

VOCABULARY = 7


def tensor(values: object, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


@dataclass
class Tokens:
    """T tokens of a vocabulary of seven; the teacher's K likeliest ids."""

    student: Tensor  # [T, V] logits, with graph
    teacher: Tensor  # [T, V] logits
    ids: Tensor  # [T, K]
    mask: Tensor  # [T]

    def gathered(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.log_softmax(side, -1).gather(-1, self.ids) for side in (self.student, self.teacher))  # type: ignore[return-value]


@st.composite
def tokens(draw: st.DrawFn, widest: int = VOCABULARY) -> Tokens:
    t, k = draw(st.integers(1, 5)), draw(st.integers(1, widest))
    logits = st.lists(st.floats(-5.0, 5.0), min_size=t * VOCABULARY, max_size=t * VOCABULARY)
    student, teacher = (tensor(draw(logits)).reshape(t, VOCABULARY) for _ in range(2))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=t, max_size=t)))
    return Tokens(student.requires_grad_(), teacher, teacher.topk(k, -1).indices, mask)


def softmax(logits: Sequence[float]) -> list[float]:
    total = math.fsum(map(math.exp, logits))
    return [math.exp(value) / total for value in logits]


def slow_kl(case: Tokens) -> float:
    """The definition, one token and one id at a time."""
    sums = []
    for student, teacher, ids, is_trained in zip(
        case.student.tolist(), case.teacher.tolist(), case.ids.tolist(), case.mask.tolist(), strict=True
    ):
        if not is_trained:
            continue
        p, q = softmax(student), softmax(teacher)
        outside = [i for i in range(VOCABULARY) if i not in ids]
        buckets = [(p[i], q[i]) for i in ids]
        if outside:
            buckets.append((math.fsum(p[i] for i in outside), math.fsum(q[i] for i in outside)))
        sums.append(math.fsum(a * math.log(a / b) for a, b in buckets))
    return math.fsum(sums)


# -- token level -------------------------------------------------------------------------------------------------------


def test_the_gap_by_hand() -> None:
    teacher = tensor([-1.0, -0.1, -9.0, -2.0], grad=True)
    student = tensor([-1.5, -4.1, -1.0, -2.0], grad=True)
    credit = losses.distillation_advantages(teacher, student, clip=2.0)
    assert credit.tolist() == pytest.approx([0.5, 2.0, -2.0, 0.0])  # 4 and -8 are cut to the clip
    assert not credit.requires_grad


@given(st.lists(st.tuples(st.floats(-200, 0), st.floats(-200, 0)), min_size=1, max_size=8), st.floats(0.1, 10))
def test_the_clip_acts_where_it_must_and_nowhere_else(pairs: list[tuple[float, float]], clip: float) -> None:  # D22
    teacher, student = tensor([a for a, _ in pairs]), tensor([b for _, b in pairs])
    for (a, b), credit in zip(pairs, losses.distillation_advantages(teacher, student, clip=clip).tolist(), strict=True):
        assert credit == pytest.approx(a - b if abs(a - b) <= clip else math.copysign(clip, a - b))


# -- top-k and tail ----------------------------------------------------------------------------------------------------


def test_top_k_by_hand() -> None:
    student = tensor([[math.log(0.5), math.log(0.3)], [math.log(0.1), math.log(0.1)], [-1.0, -1.0]], grad=True)
    teacher = tensor([[math.log(0.4), math.log(0.4)], [math.log(0.6), math.log(0.3)], [-1.0, -1.0]])
    found = losses.top_k_divergence(student, teacher, torch.tensor([True, True, False]))
    first = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)  # both tails 0.2
    second = 0.1 * math.log(0.1 / 0.6) + 0.1 * math.log(0.1 / 0.3) + 0.8 * math.log(0.8 / 0.1)
    assert found.kl.item() == pytest.approx(first + second)
    assert found.student_tail.item() == pytest.approx(0.2 + 0.8)
    found.kl.backward()
    assert student.grad is not None
    # d/d log p_k = p_k (log p_k/q_k + 1) - p_k (log tail_p/tail_q + 1)
    assert student.grad[0].tolist() == pytest.approx([0.5 * math.log(1.25), 0.3 * math.log(0.75)])
    assert student.grad[1, 0].item() == pytest.approx(0.1 * (math.log(1 / 6) - math.log(8)))
    assert student.grad[2].tolist() == [0.0, 0.0]


@given(tokens())
def test_top_k_equals_the_slow_reference(case: Tokens) -> None:
    found = losses.top_k_divergence(*case.gathered(), case.mask)
    assert found.kl.item() == pytest.approx(slow_kl(case), rel=1e-7, abs=1e-5)  # a tail under the floor: 1e-6 nats


def test_the_forward_share_by_hand() -> None:
    student = tensor([[math.log(0.5), math.log(0.3)]], grad=True)
    teacher = tensor([[math.log(0.4), math.log(0.4)]])
    found = losses.top_k_divergence(student, teacher, torch.tensor([True]), forward=0.25).kl
    reverse = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)  # both tails 0.2
    forward = 0.4 * math.log(0.4 / 0.5) + 0.4 * math.log(0.4 / 0.3)
    assert found.item() == pytest.approx(0.75 * reverse + 0.25 * forward)


def test_only_the_forward_share_finds_an_id_that_the_student_gave_up() -> None:
    """The teacher wants an id of which the student has a millionth: of the reverse KL it gets next to no gradient."""
    logits = tensor([[0.0, math.log(1e-6), -1.0]], grad=True)
    teacher = torch.log(tensor([[0.1, 0.8]]))

    def pull(forward: float) -> float:
        logits.grad = None
        log_probs = torch.log_softmax(logits, -1)[:, :2]
        losses.top_k_divergence(log_probs, teacher, torch.tensor([True]), forward=forward).kl.backward()
        assert logits.grad is not None
        return -logits.grad[0, 1].item()

    assert 0 < pull(0.0) < 1e-4
    assert pull(1.0) == pytest.approx(0.8, rel=1e-4)  # q - p


@given(tokens(), st.floats(0, 1))
def test_a_mix_lies_between_its_ends(case: Tokens, share: float) -> None:
    ends = [losses.top_k_divergence(*case.gathered(), case.mask, forward=alpha).kl.item() for alpha in (0.0, 1.0)]
    found = losses.top_k_divergence(*case.gathered(), case.mask, forward=share).kl.item()
    assert found == pytest.approx((1 - share) * ends[0] + share * ends[1], rel=1e-9, abs=1e-9)
    assert ends[1] >= -1e-5  # a tail under the floor


@given(tokens())
def test_it_lies_between_nothing_and_the_whole_divergence(case: Tokens) -> None:
    found = losses.top_k_divergence(*case.gathered(), case.mask).kl
    p, q = (torch.log_softmax(side, -1) for side in (case.student, case.teacher))
    whole = (p.exp() * (p - q)).sum(-1)[case.mask].sum()
    assert -1e-9 <= found.item() <= whole.item() + 1e-5
    if case.ids.shape[1] == VOCABULARY:
        assert found.item() == pytest.approx(whole.item(), abs=1e-9)


@given(tokens())
def test_a_student_that_is_the_teacher_stays(case: Tokens) -> None:
    student = case.teacher.clone().requires_grad_()
    log_probs = torch.log_softmax(student, -1).gather(-1, case.ids)
    found = losses.top_k_divergence(log_probs, log_probs, case.mask).kl
    found.backward()
    assert found.item() == pytest.approx(0, abs=1e-9)
    assert student.grad is not None
    torch.testing.assert_close(student.grad, torch.zeros_like(student), rtol=0, atol=rel(torch.float64, 4096))


@given(tokens(), st.data())
def test_order_changes_nothing(case: Tokens, data: st.DataObject) -> None:
    student, teacher = case.gathered()
    rows = torch.tensor(data.draw(st.permutations(range(len(case.mask)))))
    columns = torch.tensor(data.draw(st.permutations(range(case.ids.shape[1]))))
    one = losses.top_k_divergence(student, teacher, case.mask).kl
    other = losses.top_k_divergence(student[rows][:, columns], teacher[rows][:, columns], case.mask[rows]).kl
    assert other.item() == pytest.approx(one.item(), rel=1e-9, abs=1e-9)


@given(tokens(), st.sampled_from([0.0, 1e30, math.nan, math.inf, -math.inf]))
def test_masked_tokens_get_no_gradient_whatever_stands_there(case: Tokens, junk: float) -> None:
    student, teacher = (values.detach().masked_fill(~case.mask[:, None], junk) for values in case.gathered())
    student.requires_grad_()
    found = losses.top_k_divergence(student, teacher, case.mask).kl
    found.backward()
    assert found.item() == pytest.approx(
        losses.top_k_divergence(*case.gathered(), case.mask).kl.item(), rel=rel(torch.float64)
    )
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert (student.grad[~case.mask] == 0).all()


@given(tokens(widest=VOCABULARY - 2))
@settings(max_examples=25)
def test_gradients_by_finite_differences(case: Tokens) -> None:
    teacher = torch.log_softmax(case.teacher, -1).gather(-1, case.ids)

    def loss(logits: Tensor) -> Tensor:
        return losses.top_k_divergence(torch.log_softmax(logits, -1).gather(-1, case.ids), teacher, case.mask).kl

    assert torch.autograd.gradcheck(loss, (case.student,), eps=1e-6, atol=1e-6)


def test_the_tail_holds_what_leaves_the_k_ids() -> None:
    """Without its bucket Σ p log p/q falls as the student drains out of the k ids; with it the divergence grows."""
    teacher = torch.log(tensor([[0.6, 0.39]]))
    mask = torch.tensor([True])

    def divergence(share: float) -> tuple[float, float]:
        student = torch.log(tensor([[0.6 * share, 0.39 * share]]))
        without = (student.exp() * (student - teacher)).sum()
        return without.item(), losses.top_k_divergence(student, teacher, mask).kl.item()

    without, with_tail = zip(*map(divergence, (1.0, 0.8, 0.5)), strict=True)
    assert without[0] > without[1]
    assert with_tail[0] < with_tail[1] < with_tail[2]


def test_an_empty_mask_gives_a_zero_with_a_graph() -> None:
    student = tensor([[-1.0, -2.0]], grad=True)
    found = losses.top_k_divergence(student, tensor([[-1.0, -1.5]]), torch.tensor([False]))
    found.kl.backward()
    assert (found.kl.item(), found.student_tail.item()) == (0, 0)
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("teacher", [[0.0, -40.0], [-math.inf, -1e-7], [-90.0, -0.1], [1e-4, -30.0]])
@pytest.mark.parametrize("student", [[-1e-8, -30.0], [0.0, -90.0], [-90.0, -80.0], [1e-7, -15.0]])
def test_certain_and_impossible_ids_stay_finite(dtype: torch.dtype, teacher: list[float], student: list[float]) -> None:
    """Case TN-2 for a top-k: sums that round to 1 or above, ids that the teacher rules out."""
    log_probs = torch.tensor([student], dtype=dtype, requires_grad=True)
    found = losses.top_k_divergence(log_probs, torch.tensor([teacher], dtype=dtype), torch.tensor([True]))
    found.kl.backward()
    assert torch.isfinite(found.kl)
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


@given(st.floats(-200.0, -1e-12))
def test_log1mexp_has_all_its_digits(x: float) -> None:
    exact = Context(prec=120)
    expected = float(exact.ln(exact.subtract(Decimal(1), exact.exp(Decimal(x)))))
    point = tensor(x, grad=True)
    found = losses.log1mexp(point)
    assert found.item() == pytest.approx(expected, rel=rel(torch.float64, 512))
    (slope,) = torch.autograd.grad(found, point)
    assert slope.item() == pytest.approx(-1 / math.expm1(-x), rel=rel(torch.float64, 4096))
