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

    kl: Tensor  # scalar with graph, in nats
    student_tail: Tensor  # scalar, detached: the student's probability outside the K ids


def top_k_divergence(
    log_probs: Tensor, teacher_log_probs: Tensor, loss_mask: Tensor, *, forward: float = 0.0
) -> TopKDivergence:
    """Return a mix of both KLs over the teacher's K likeliest ids and a tail bucket, summed over tokens.

    D_t = (1 − α) Σ_{k ≤ K+1} p_k (log p_k − log q_k) + α Σ_{k ≤ K+1} q_k (log q_k − log p_k),  α = forward
    p student, q teacher, p_{K+1} = 1 − Σ_{k ≤ K} p_k, q_{K+1} likewise

    Divergences on the policy's own tokens: arXiv:2306.13649; top-k with a tail as in SDPO (arXiv:2601.20802). Without
    the tail's bucket a student could lower the sum by moving its mass out of the K. Merging ids never raises a KL: each
    is at least 0, at most the KL over the whole vocabulary, and equal to it at K = V. The state is one that the policy
    visited, the expectation over its next token exact: no ratio.

    The gradient of the reverse KL at an id is in proportion to the student's own probability of it. An id that the
    student has given up is never found again. The forward KL's gradient there is p_k − q_k.
    Shapes: log_probs [T, K] with graph, gathered from one log-softmax; teacher_log_probs [T, K]; loss_mask [T] bool.
    """
    student = log_probs[loss_mask]  # [M, K]
    teacher = teacher_log_probs[loss_mask].detach().clamp(min=TEACHER_FLOOR)
    student_tail = log_tail(student)  # [M]
    p = torch.cat([student, student_tail[:, None]], -1)  # [M, K + 1]
    q = torch.cat([teacher, log_tail(teacher)[:, None]], -1)
    kl = (1 - forward) * (p.exp() * (p - q)).sum()
    if forward:
        kl = kl + forward * (q.exp() * (q - p)).sum()
    return TopKDivergence(kl, student_tail.detach().exp().sum())


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
