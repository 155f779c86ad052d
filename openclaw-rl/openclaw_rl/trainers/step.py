"""One optimizer step on one batch: forward by micro-batches, loss, gradients, clipping, AdamW, finite checks.

Promises: the divisors (a sample's trained tokens, the batch's samples) are known before the first micro-batch, so the
cut of the batch changes no gradient. A sample without finite log-probs is left out and named, and the rest are scaled
as in a batch without it. Weights that are not finite are never reported as a step.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from openclaw_rl.errors import TrainerError
from openclaw_rl.losses import TokenLogProbs
from openclaw_rl.methods.base import Method, Tally, TokenTerms
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.trainers.batches import MicroBatch, rows_of
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.types import Ids, Sample


class NotFinite(TrainerError):
    """The batch gave numbers that must not reach the weights."""


@dataclass(slots=True)
class Accumulated:
    """Figures of one pass over the batch; the gradients are in the parameters."""

    loss: float = 0.0
    trained_tokens: int = 0
    computed_tokens: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)
    """Indices of samples left out."""
    reference_s: float = 0.0


def train_step(
    policy: Policy,
    optimizer: PolicyOptimizer,
    method: Method,
    samples: Sequence[Sample],
    advantages: Sequence[Sequence[float]],
    settings: TrainerSettings,
    method_settings: MethodSettings,
    *,
    parent: int | None = None,
) -> tuple[dict[str, float], list[int]]:
    """Step once. Return the metrics (flat, finite) and the indices of samples left out because they are not finite.

    parent: the version that the policy holds; the metric `fresh_abs_log_ratio` is of the tokens that it sampled.
    Raises NotFinite when no sample is left, or when gradients or new weights are not finite. The policy must then be
    loaded again.
    """
    started = time.perf_counter()
    optimizer.zero_grad()
    done = accumulate(policy, method, samples, advantages, settings, method_settings, parent=parent)
    kept = len(samples) - len(done.not_finite)
    if kept == 0:
        raise NotFinite("no sample of the batch has finite log-probs")
    if done.not_finite:
        optimizer.scale_gradients(len(samples) / kept)
    computed = time.perf_counter()
    learning_rate, grad_norm = optimizer.learning_rate, optimizer.clip_gradients()
    if not math.isfinite(grad_norm):
        raise NotFinite("the gradient is not finite")
    optimizer.step()
    optimizer.zero_grad()
    policy.updated()
    if not policy.is_finite():
        raise NotFinite("the new weights are not finite")
    trained = [k for k in range(len(samples)) if k not in done.not_finite]
    metrics = {
        "loss": done.loss / kept,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "samples": float(kept),
        "demonstrations": float(sum(samples[k].is_demonstration for k in trained)),
        "trained_tokens": float(done.trained_tokens),
        "computed_tokens": float(done.computed_tokens),
        "gradient_s": computed - started,
        "reference_s": done.reference_s,
        "optimizer_s": time.perf_counter() - computed,
    }
    credit = [value for k in trained for value in _trained_credit(samples[k], advantages[k])]
    if credit:
        mean = math.fsum(credit) / len(credit)
        metrics |= {"advantage_min": min(credit), "advantage_max": max(credit), "advantage_mean": mean}
    metrics |= {name: tally.total / tally.over for name, tally in done.tallies.items() if tally.over}
    return metrics, done.not_finite


def accumulate(
    policy: Policy,
    method: Method,
    samples: Sequence[Sample],
    advantages: Sequence[Sequence[float]],
    settings: TrainerSettings,
    method_settings: MethodSettings,
    *,
    share_prefixes: bool = True,
    parent: int | None = None,
) -> Accumulated:
    """Add the gradient of (1/B) Σ_samples loss_i / T_i to the parameters. `Accumulated.loss` is the sum before 1/B."""
    done = Accumulated()
    wanted = _Wanted(
        {k: ids for k, sample in enumerate(samples) if (ids := method.gathered_ids(sample)) is not None},
        any(sample.teacher_log_probs is not None and sample.student_log_probs is None for sample in samples),
    )
    for batch in policy.cut(rows_of(samples, share_prefixes=share_prefixes), settings.token_budget):
        found = _finite(policy, batch, settings, wanted, done)
        if found is None:
            continue
        batch, current = found
        reference = _reference(policy, batch, current, settings, done)
        total = torch.zeros((), device=policy.device)
        for piece in batch.pieces:
            k, sample = piece.index, samples[piece.index]
            terms = _terms(sample, current[k], reference.get(k), advantages[k], settings)
            loss = method.loss(sample, terms, settings, method_settings)
            mean = loss.loss_sum / loss.token_count
            total = total + mean / len(samples)
            done.loss += float(mean.detach())
            done.trained_tokens += loss.token_count
            for name, (value, over) in {**loss.tallies, **_fresh(sample, terms, parent)}.items():
                before = done.tallies.get(name, Tally(0.0, 0.0))
                done.tallies[name] = Tally(before.total + value, before.over + over)
        total.backward()
        done.computed_tokens += batch.tokens
    return done


def _fresh(sample: Sample, terms: TokenTerms, parent: int | None) -> dict[str, Tally]:
    """Return the distance of trainer and engine on tokens of the same version: no learning is part of it."""
    fresh = [] if parent is None else sample.sampled_by(parent)
    if not any(fresh):
        return {}
    gap = (terms.log_probs.detach() - terms.rollout_log_probs)[torch.tensor(fresh, device=terms.log_probs.device)]
    return {"fresh_abs_log_ratio": Tally(float(gap.abs().sum()), len(gap))}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Log-probs that the losses need besides those of the sampled tokens."""

    gather: Mapping[int, Sequence[Ids]]
    """Sample index → [T, K]."""
    unscaled: bool
    """Also at temperature 1: a sample has the teacher's side of its gap, and the trainer gives the student's."""


def _finite(
    policy: Policy, batch: MicroBatch, settings: TrainerSettings, wanted: _Wanted, done: Accumulated
) -> tuple[MicroBatch, dict[int, TokenLogProbs]] | None:
    """Return the micro-batch without samples that are not finite, and its log-probs; None if no sample is left."""
    # They must not even be part of the graph: their zero gradient times their nan would be nan.
    while True:
        recompute = policy.recomputes(batch, settings.token_budget)
        found = policy.token_log_probs(batch, recompute=recompute, gather=wanted.gather, unscaled=wanted.unscaled)
        bad = {index for index, values in found.items() if not _is_finite(values)}
        if not bad:
            return batch, found
        done.not_finite.extend(sorted(bad))
        rows = [replace(row, pieces=tuple(p for p in row.pieces if p.index not in bad)) for row in batch.rows]
        rows = [row for row in rows if row.pieces]
        if not rows:
            return None
        batch = replace(batch, rows=tuple(rows))


def _is_finite(found: TokenLogProbs) -> bool:
    tensors = (found.log_probs, found.unscaled, found.gathered)
    return all(bool(torch.isfinite(values.detach()).all()) for values in tensors if values is not None)


def _trained_credit(sample: Sample, advantages: Sequence[float]) -> list[float]:
    if sample.is_demonstration:
        return []
    return [value for value, is_trained in zip(advantages, sample.loss_mask, strict=True) if is_trained]


def _reference(
    policy: Policy,
    batch: MicroBatch,
    current: Mapping[int, TokenLogProbs],
    settings: TrainerSettings,
    done: Accumulated,
) -> dict[int, Tensor]:
    if settings.kl_coef == 0:
        return {}
    if policy.is_base:  # as in the first step: its own log-probs are the reference's
        return {index: found.log_probs.detach() for index, found in current.items()}
    started = time.perf_counter()
    with policy.reference():
        log_probs = policy.log_probs(batch)
    done.reference_s += time.perf_counter() - started
    return log_probs


def _terms(
    sample: Sample,
    current: TokenLogProbs,
    reference: Tensor | None,
    advantages: Sequence[float],
    settings: TrainerSettings,
) -> TokenTerms:
    if len(advantages) != len(sample.response_ids):
        raise ValueError(
            f"sample {sample.sample_id}: {len(advantages)} advantages for {len(sample.response_ids)} tokens"
        )
    log_probs = current.log_probs
    rollout = torch.tensor(sample.rollout_log_probs, dtype=log_probs.dtype, device=log_probs.device)
    return TokenTerms(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if settings.old_log_probs == "recompute" else rollout,
        rollout_log_probs=rollout,
        ref_log_probs=reference,
        advantages=torch.tensor(list(advantages), dtype=log_probs.dtype, device=log_probs.device),
        loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool, device=log_probs.device),
        unscaled_log_probs=current.unscaled,
        gathered_log_probs=current.gathered,
    )
