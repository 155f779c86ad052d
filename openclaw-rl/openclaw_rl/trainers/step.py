"""One optimizer step on one batch: forward by micro-batches, loss, gradients, clipping, AdamW, finite checks.

Promises: the divisors (a sample's trained tokens, the batch's samples) are known before the first micro-batch, so that
how the batch is cut changes nothing. A sample without finite log-probs is left out and named, and the rest are scaled
as if it had never come. Weights that are not finite are never reported as a step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Method, TokenTerms
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.batches import MicroBatch, Row, micro_batches, rows_of
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.types import Sample


class NotFinite(TrainerError):
    """The batch gave numbers that must not reach the weights."""


@dataclass(slots=True)
class Accumulated:
    """What one pass over the batch gave; the gradients are in the parameters."""

    loss: float = 0.0
    trained_tokens: int = 0
    computed_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)
    """Indices of samples left out."""
    reference_s: float = 0.0


def train_step(
    policy: LoraPolicy,
    optimizer: PolicyOptimizer,
    method: Method,
    samples: Sequence[Sample],
    advantages: Sequence[Sequence[float]],
    settings: TrainerSettings,
) -> tuple[dict[str, float], list[int]]:
    """Step once; the step's metrics (flat, finite) and the indices of samples left out because they are not finite.

    Raises NotFinite when nothing was left, or when gradients or new weights are not: then load the policy again.
    """
    started = time.perf_counter()
    optimizer.zero_grad()
    done = accumulate(policy, method, samples, advantages, settings)
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
    if not policy.is_finite():
        raise NotFinite("the new weights are not finite")
    flat = [value for index, values in enumerate(advantages) for value in values if index not in done.not_finite]
    metrics = {
        "loss": done.loss / kept,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "samples": float(kept),
        "trained_tokens": float(done.trained_tokens),
        "computed_tokens": float(done.computed_tokens),
        "advantage_min": min(flat),
        "advantage_max": max(flat),
        "advantage_mean": math.fsum(flat) / len(flat),
        "gradient_s": computed - started,
        "reference_s": done.reference_s,
        "optimizer_s": time.perf_counter() - computed,
    }
    metrics |= {name: total / done.trained_tokens for name, total in done.sums.items()}
    return metrics, done.not_finite


def accumulate(
    policy: LoraPolicy,
    method: Method,
    samples: Sequence[Sample],
    advantages: Sequence[Sequence[float]],
    settings: TrainerSettings,
    *,
    share_prefixes: bool = True,
) -> Accumulated:
    """Add the gradient of (1/B) Σ_samples loss_i / T_i to the parameters. The result's `loss` is the sum before 1/B."""
    done = Accumulated()
    for batch in micro_batches(rows_of(samples, share_prefixes=share_prefixes), settings.micro_batch_tokens):
        found = _finite(policy, batch, settings, done)
        if found is None:
            continue
        batch, log_probs = found
        reference = _reference(policy, batch, settings, done)
        total = torch.zeros((), device=policy.device)
        for piece in batch.pieces:
            sample, current = samples[piece.index], log_probs[piece.index]
            terms = _terms(sample, current, reference.get(piece.index), advantages[piece.index], settings)
            loss = method.loss(sample, terms, settings)
            mean = loss.loss_sum / loss.token_count
            total = total + mean / len(samples)
            done.loss += float(mean.detach())
            done.trained_tokens += loss.token_count
            for name, value in loss.sums.items():
                done.sums[name] = done.sums.get(name, 0.0) + value
        total.backward()
        done.computed_tokens += batch.tokens
    return done


def _finite(
    policy: LoraPolicy, batch: MicroBatch, settings: TrainerSettings, done: Accumulated
) -> tuple[MicroBatch, dict[int, Tensor]] | None:
    """The micro-batch without samples that are not finite, and its log-probs. They must not even be part of the graph:
    their zero gradient times their nan would be nan."""
    while True:
        # A row over the budget came alone; its activations would not fit in the memory that the budget stands for.
        log_probs = policy.log_probs(batch, recompute=batch.tokens > settings.micro_batch_tokens)
        bad = {index for index, values in log_probs.items() if not bool(torch.isfinite(values.detach()).all())}
        if not bad:
            return batch, log_probs
        done.not_finite.extend(sorted(bad))
        rows = [Row(row.ids, tuple(p for p in row.pieces if p.index not in bad)) for row in batch.rows]
        rows = [row for row in rows if row.pieces]
        if not rows:
            return None
        batch = MicroBatch(tuple(rows))


def _reference(
    policy: LoraPolicy, batch: MicroBatch, settings: TrainerSettings, done: Accumulated
) -> dict[int, Tensor]:
    if settings.kl_coef == 0:
        return {}
    started = time.perf_counter()
    with policy.reference():
        log_probs = policy.log_probs(batch)
    done.reference_s += time.perf_counter() - started
    return log_probs


def _terms(
    sample: Sample, log_probs: Tensor, reference: Tensor | None, advantages: Sequence[float], settings: TrainerSettings
) -> TokenTerms:
    if len(advantages) != len(sample.response_ids):
        raise ValueError(
            f"sample {sample.sample_id}: {len(advantages)} advantages for {len(sample.response_ids)} tokens"
        )
    rollout = torch.tensor(sample.rollout_log_probs, dtype=log_probs.dtype, device=log_probs.device)
    return TokenTerms(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if settings.old_log_probs == "recompute" else rollout,
        rollout_log_probs=rollout,
        ref_log_probs=reference,
        advantages=torch.tensor(list(advantages), dtype=log_probs.dtype, device=log_probs.device),
        loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool, device=log_probs.device),
    )
