"""Objectives that methods share: the clipped one on advantages, and the supervised one on demonstrations.

Each reads one sample's `TokenTerms` and the settings, and calls the pure functions of `losses`. This module imports
torch: `Method.loss` may import it, `Method.score` may not.
"""

from dataclasses import dataclass

from torch import Tensor

from openclaw_rl import losses
from openclaw_rl.methods.base import SampleLoss, Tally, TokenTerms
from openclaw_rl.settings import MethodSettings, TrainerSettings

DUAL_CLIP = 3.0
"""With `old_log_probs = "rollout"`: the loss of a token with A < 0 is at most 3 |A|."""


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    loss_sum: Tensor  # scalar with graph
    keep: Tensor  # [T] bool: trained tokens on which trainer and engine agree well enough
    tallies: dict[str, Tally]


def clipped_objective(terms: TokenTerms, settings: TrainerSettings) -> PolicyTerm:
    """Return the clipped objective on `terms.advantages`, plus β_KL times the weighted k3 KL to the frozen reference.

    `old_log_probs = "recompute"`: old is this forward pass, detached, and truncated importance weights correct for the
    engine. `"rollout"`: old is what the engine measured, no weights, dual clip. Never both.
    """
    if settings.old_log_probs == "recompute":
        importance = losses.importance_weights(
            terms.old_log_probs,
            terms.rollout_log_probs,
            terms.loss_mask,
            ceiling=settings.tis_clip,
            mask_outside=settings.tis_mask,
        )
        keep, weights, dual_clip = importance.keep, importance.weights, None
    else:
        keep, weights, dual_clip = terms.loss_mask, None, DUAL_CLIP
    tensors = (terms.log_probs, terms.old_log_probs, terms.advantages, keep)
    low, high = settings.clip_low, settings.clip_high
    loss = losses.clipped_policy_loss(*tensors, clip_low=low, clip_high=high, dual_clip=dual_clip, weights=weights)
    clipped = losses.is_clipped(*tensors, clip_low=low, clip_high=high, dual_clip=dual_clip)
    current = terms.log_probs.detach().masked_fill(~terms.loss_mask, 0)
    disagreement = (current - terms.rollout_log_probs).masked_fill(~terms.loss_mask, 0)
    count = int(terms.loss_mask.sum())
    tallies = {
        "abs_log_ratio": Tally(float(disagreement.abs().sum()), count),
        "masked_share": Tally(float((terms.loss_mask & ~keep).sum()), count),
        "clip_share": Tally(float(clipped.sum()), count),
        "neg_log_prob": Tally(float(-current.sum()), count),
    }
    if terms.ref_log_probs is not None:
        # k3 holds for tokens of the current policy. The weights correct for the version that sampled them, up to their
        # ceiling; on fresh tokens they are 1.
        since = losses.ratio(terms.log_probs.detach(), terms.rollout_log_probs, terms.loss_mask)
        k3 = losses.k3_kl(terms.log_probs, terms.ref_log_probs, terms.loss_mask)
        kl = (since.clamp(max=settings.tis_clip) * k3).sum()
        loss = loss + settings.kl_coef * kl
        tallies["ref_kl"] = Tally(float(kl.detach()), count)
    return PolicyTerm(loss, keep, tallies)


def demonstration_loss(terms: TokenTerms, settings: MethodSettings) -> SampleLoss:
    """Return `demonstration_weight` times the negative log-likelihood."""
    # The policy did not sample these tokens. So they have no rollout log-probs, and the k3 estimate of a KL, which
    # needs the policy's own samples, does not hold for them.
    nll = losses.supervised_loss(terms.log_probs, terms.loss_mask)
    count = int(terms.loss_mask.sum())
    return SampleLoss(
        settings.demonstration_weight * nll, count, {"demonstration_nll": Tally(float(nll.detach()), count)}
    )
