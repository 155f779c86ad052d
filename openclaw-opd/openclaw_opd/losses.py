"""The losses of on-policy distillation: pure functions of tensors and numbers, beside the core's `openclaw_rl.losses`.

Promises: each loss is a sum over one sample's trained tokens. Masked entries are selected away before any `exp`. An
empty mask gives a zero that still has a graph. Teacher and student are compared at temperature 1, also where the reply
was sampled at another one.

Leaves to others: the source of the log-probs, the clipped objective of the advantages, every division.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TAIL_FLOOR = 1e-6
"""Least probability of the tail. Below it, 1 − Σ p of fp32 numbers is rounding. With a floor on both sides, a tail that
neither teacher nor student has adds 0 to the loss and to the gradient."""
TEACHER_FLOOR = -20.0
"""Least log-prob of the teacher (2e-9): an id it rules out must not make the loss infinite."""


def distillation_advantages(teacher_log_probs: Tensor, student_log_probs: Tensor, *, clip: float) -> Tensor:
    """Return the token-level credit of on-policy distillation: the teacher's log-prob less the student's.

    A_t = clip(gap_t, ±clip),  gap_t = log π_teacher(a_t | s_t, hint) − log π_student(a_t | s_t), in nats, detached

    The sampled-token estimate of the gradient of KL(student ‖ teacher): arXiv:2306.13649 (on-policy, reverse KL),
    arXiv:2603.10165 (hindsight hints). The clip keeps a few tokens from deciding the update. It goes through the
    clipped objective like any advantage; the policy's drift since it was measured is the ratio's, not the gap's.
    Shapes: all [T], both at temperature 1.
    """
    return (teacher_log_probs - student_log_probs).detach().clamp(-clip, clip)


@dataclass(frozen=True, slots=True)
class TopKDivergence:
    """Sums over one sample's trained tokens."""

    kl: Tensor  # scalar with graph
    student_tail: Tensor  # scalar, detached: the student's probability outside the K ids


def top_k_reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, loss_mask: Tensor) -> TopKDivergence:
    """Return KL(student ‖ teacher) over the teacher's K likeliest ids and a tail bucket, summed over tokens.

    KL_t = Σ_{k ≤ K+1} p_k (log p_k − log q_k),  p student, q teacher, p_{K+1} = 1 − Σ_{k ≤ K} p_k, q_{K+1} likewise

    Reverse KL on the policy's own tokens: arXiv:2306.13649; top-k with a tail as in SDPO (arXiv:2601.20802). Without
    the tail's bucket a student could lower the sum by moving its mass out of the K. Merging ids never raises a KL: this
    is at least 0, at most the KL over the whole vocabulary, and equal to it at K = V. The state is one that the policy
    visited, the expectation over its next token exact: no ratio.
    Shapes: log_probs [T, K] with graph, gathered from one log-softmax; teacher_log_probs [T, K]; loss_mask [T] bool.
    """
    student = log_probs[loss_mask]  # [M, K]
    teacher = teacher_log_probs[loss_mask].detach().clamp(min=TEACHER_FLOOR)
    student_tail, teacher_tail = log_tail(student), log_tail(teacher)  # [M]
    kl = (student.exp() * (student - teacher)).sum(-1) + student_tail.exp() * (student_tail - teacher_tail)
    return TopKDivergence(kl.sum(), student_tail.detach().exp().sum())


def log_tail(log_probs: Tensor) -> Tensor:
    """Return log(1 − Σ_k exp(log_probs_k)), at least log(TAIL_FLOOR). Shapes: [..., K] to [...]."""
    return log1mexp(log_probs.logsumexp(-1).clamp(max=math.log1p(-TAIL_FLOOR)))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 − exp(x)) for x < 0, without cancellation on either side of −log 2 (Mächler, 2012).

    Each branch sees only numbers of its own side: the gradient of the other would be inf · 0.
    """
    near = x > -math.log(2)
    of_near = torch.log(-torch.expm1(x.masked_fill(~near, -math.log(2))))
    of_far = torch.log1p(-torch.exp(x.masked_fill(near, -math.log(2))))
    return torch.where(near, of_near, of_far)
