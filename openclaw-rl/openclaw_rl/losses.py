"""Losses: pure functions of tensors and numbers, shared by every method and every trainer.

They read no settings and no environment, log no line, and know no framework's batch. A call takes one sample; all its
tensors are at the T response positions. Values are *sums* over trained tokens. The caller divides, per sample by its
token count and then by the batch's number of samples. Both are known before the first micro-batch, so the cut into
micro-batches does not change the value. Masked entries are selected away before any `exp` (a product would make
inf * 0 = nan). An empty mask gives a zero that still has a graph, because every rank must run backward.

The caller supplies log-probs and advantages, and owns the optimizer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped here before `exp`: a sampled token at log-prob -90 must not become infinity."""
KL_LIMIT = 10.0
"""Largest k3 estimate of one token (slime's bound): beyond it the token adds a constant and no gradient."""


def log_probs_of(logits: Tensor, ids: Tensor, temperature: float | Tensor) -> Tensor:
    """log softmax(logits / temperature)[ids], in fp32 at least: one log-sum-exp and one gather, never a one-hot.

    Shapes: logits [N, V], ids [N], temperature a number or [N]; gives [N].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = logits / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)  # [N, V]
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Result of one pass over the logits of N tokens."""

    log_probs: Tensor  # [N], at each token's own temperature
    unscaled: Tensor | None = None  # [N], at temperature 1, detached
    gathered: Tensor | None = None  # [N, K], of other ids in the tokens' places, at temperature 1


def selected_log_probs(
    hidden: Tensor,
    ids: Tensor,
    temperature: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    gather: Tensor | None = None,
    unscaled: bool = False,
    chunk: int = 256,
) -> TokenLogProbs:
    """Return `log_probs_of(head(hidden), ids, temperature)`, computed `chunk` positions at a time.

    The same logits give, on request, the log-probs at temperature 1 of the same ids (`unscaled`) and of K ids at each
    position (`gather`).

    Under gradient each chunk's logits are computed again in backward instead of kept, so that memory is chunk * V and
    not N * V (a vocabulary of 150k and 32k positions would be 20 GB of fp32).
    Shapes: hidden [N, H], ids [N], temperature [N], gather [N, K]; head maps [n, H] to [n, V].
    """
    empty = ids.new_empty((len(ids), 0)) if gather is None else gather

    def one(h: Tensor, i: Tensor, t: Tensor, more: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = log_probs_of(logits, i, t)
        if gather is None and not unscaled:
            return scaled, None, None
        shared = logits.detach() if gather is None else logits
        normaliser = shared.logsumexp(-1, keepdim=True)  # at temperature 1
        at_one = shared.gather(-1, i.unsqueeze(-1)).sub(normaliser).squeeze(-1).detach() if unscaled else None
        return scaled, at_one, None if gather is None else shared.gather(-1, more) - normaliser

    chunks = zip(*(values.split(chunk) for values in (hidden, ids, temperature, empty)), strict=True)
    parts = [
        checkpoint(one, *c, use_reentrant=False, preserve_rng_state=False) if hidden.requires_grad else one(*c)
        for c in chunks
    ]
    log_probs, at_one, gathered = zip(*parts, strict=True)
    return TokenLogProbs(
        torch.cat(log_probs),
        torch.cat(at_one) if unscaled else None,
        torch.cat(gathered) if gather is not None else None,
    )


def ratio(log_probs: Tensor, other_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """exp(log_probs - other_log_probs) where the mask holds, 1 elsewhere; clamped, so never infinite. All [T]."""
    difference = (log_probs - other_log_probs).masked_fill(~loss_mask, 0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """PPO clipped surrogate of one sample, summed over trained tokens (arXiv:1707.06347, eq. 7).

    L = -Σ_t m_t w_t s_t,  s_t = min(r_t A_t, clip(r_t, 1-clip_low, 1+clip_high) A_t),  r_t = exp(log_probs_t - old_t)
    Dual clip c (arXiv:1912.09729), for A_t < 0: s_t = max(s_t, c A_t), so the loss of a token is at most c |A_t|.
    `weights` w_t (detached, 1 when None) correct for the engine that sampled: `importance_weights`.
    Shapes: all [T], loss_mask bool; gives a scalar.
    """
    advantages = advantages.masked_fill(~loss_mask, 0)
    r = ratio(log_probs, old_log_probs, loss_mask)
    surrogate = torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    if weights is not None:
        surrogate = surrogate * weights.masked_fill(~loss_mask, 0)
    return -surrogate.masked_fill(~loss_mask, 0).sum()


def is_clipped(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return True at tokens without a gradient in `clipped_policy_loss` because a clip acts. All [T], result bool."""
    r = ratio(log_probs.detach(), old_log_probs, loss_mask)
    clipped = ((r > 1 + clip_high) & (advantages > 0)) | ((r < 1 - clip_low) & (advantages < 0))
    if dual_clip is not None:
        clipped |= (r > dual_clip) & (advantages < 0)
    return clipped & loss_mask


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    weights: Tensor  # [T], detached, at most the ceiling; 1 where the loss mask does not hold
    keep: Tensor  # [T] bool: the loss mask without the tokens on which trainer and engine disagree too much


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, *, ceiling: float, mask_outside: float
) -> ImportanceWeights:
    """Compute truncated importance weights of trainer over sampling engine (TIS; LlamaRL, arXiv:2505.24034).

    w_t = min(exp(old_log_probs_t - rollout_log_probs_t), ceiling), detached. Tokens whose untruncated weight is outside
    [1/mask_outside, mask_outside] are masked (IcePop, arXiv:2510.18855): there trainer and engine do not describe the
    same policy. Masked tokens still count in the divisor, which must be known before any forward pass. Shapes: all [T].
    """
    w = ratio(old_log_probs.detach(), rollout_log_probs, loss_mask)
    keep = loss_mask & (w >= 1 / mask_outside) & (w <= mask_outside)  # nan compares false
    return ImportanceWeights(weights=w.clamp(max=ceiling), keep=keep)


def k3_kl(log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """KL(policy || reference) by the low-variance k3 estimator (Schulman, "Approximating KL divergence", 2020).

    k3_t = exp(d_t) - d_t - 1 ≥ 0,  d_t = ref_log_probs_t - log_probs_t; clamped to `KL_LIMIT`.
    Shapes: all [T]; gives [T], 0 where the mask does not hold.
    """
    d = (ref_log_probs - log_probs).masked_fill(~loss_mask, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (d.exp() - d - 1).clamp(max=KL_LIMIT)


def supervised_loss(log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Negative log-likelihood of a reply that is to be imitated, summed over trained tokens: L = -Σ_t m_t log_probs_t.

    For demonstrations: no policy sampled them, so there is no ratio to correct by. Shapes: all [T]; gives a scalar.
    """
    return -log_probs.masked_fill(~loss_mask, 0).sum()
