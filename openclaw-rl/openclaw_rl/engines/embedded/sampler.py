"""Sampler: tokens and log-probs from logits, in fp32.

A log-prob is of softmax(logits / temperature), before top-p, top-k or min-p limit the draw. The draw inverts the
cumulative distribution at a number that depends only on the request's seed and the token's position. So the other
requests of the batch do not change it, and a seeded reply goes on unchanged after a resubmission as prompt + tokens so
far.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.dialect import EngineSampling
from openclaw_rl.engines.embedded.jobs import Job, TopLogProbs

_HEAD, _BLOCK = 1024, 256


@dataclass(frozen=True, slots=True)
class Sampled:
    id: int
    log_prob: float
    top: TopLogProbs


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs at one position of a prompt."""

    log_prob: float
    top: TopLogProbs
    beside: list[float]


def sample(logits: Tensor, jobs: Sequence[Job]) -> list[Sampled]:
    """Draw one token for each row of logits [B, V]."""
    logits = _reshaped(logits, jobs)
    temperatures = torch.tensor([job.temperature for job in jobs], dtype=torch.float32, device=logits.device)
    scaled = logits / temperatures[:, None]  # [B, V]
    largest = scaled.amax(-1, keepdim=True)
    weights = (scaled - largest).exp_()  # [B, V], not normalised
    log_norm = largest[:, 0] + weights.sum(-1).log()  # [B]
    ids = torch.empty(len(jobs), dtype=torch.long, device=logits.device)
    greedy = [row for row, job in enumerate(jobs) if job.is_greedy]
    drawn = [row for row, job in enumerate(jobs) if not job.is_greedy]
    if greedy:
        ids[greedy] = scaled[greedy].argmax(-1)
    if drawn:
        chosen = [jobs[row] for row in drawn]
        kept = _truncated(weights if len(drawn) == len(jobs) else weights[drawn], chosen)
        ids[drawn] = _invert(kept, [uniform(job.seed, len(job.prompt) + len(job.output)) for job in chosen])
    log_probs = scaled.gather(-1, ids[:, None])[:, 0] - log_norm
    tops = [_top(scaled[row], log_norm[row], job.wanted.top) for row, job in enumerate(jobs)]
    return [Sampled(*entry) for entry in zip(ids.tolist(), log_probs.tolist(), tops, strict=True)]


def score(logits: Tensor, ids: Sequence[int], top: int, beside: Sequence[int] = ()) -> list[Scored]:
    """Return the log-probs at temperature 1 of given next tokens; logits [N, V].

    top: number of likeliest ids of each row. beside: ids whose log-probs each row holds too.
    """
    log_norm = logits.logsumexp(-1)
    targets = torch.tensor(ids, device=logits.device)
    log_probs = logits.gather(-1, targets[:, None])[:, 0] - log_norm
    tops: list[TopLogProbs] = [[]] * len(ids)
    if top:
        values, indices = logits.topk(top, -1)
        pairs = zip((values - log_norm[:, None]).tolist(), indices.tolist(), strict=True)
        tops = [list(zip(value, index, strict=True)) for value, index in pairs]
    others: list[list[float]] = [[]] * len(ids)
    if beside:
        columns = torch.tensor(beside, device=logits.device)
        others = (logits[:, columns] - log_norm[:, None]).tolist()
    return [Scored(*entry) for entry in zip(log_probs.tolist(), tops, others, strict=True)]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) for this seed and position."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _invert(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return the first token whose cumulative weight exceeds u · total, never one of weight 0. weights [B, V]."""
    # By blocks first, then within one: a cumulative sum of a whole row costs more than the rest of the draw.
    blocks = F.pad(weights, (0, -weights.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))  # [B, n, block]
    sums = blocks.sum(-1).double()  # [B, n]
    ends = sums.cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * ends[:, -1:]
    block = _first_above(ends, points)  # [B, 1]
    rest = points - ends.gather(-1, block) + sums.gather(-1, block)
    chosen = blocks[torch.arange(len(uniforms), device=weights.device), block[:, 0]]
    inside = _first_above(chosen.cumsum(-1, dtype=torch.float64), rest)
    return (block * _BLOCK + inside)[:, 0]


def _first_above(ends: Tensor, points: Tensor) -> Tensor:
    """Return [B, 1]: the first index whose cumulative sum exceeds the point, at most the last of weight > 0."""
    # By rounding a point may reach the total.
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(ends, points, right=True), last)


def _truncated(weights: Tensor, jobs: Sequence[Job]) -> Tensor:
    """Zero the weights outside top-k, top-p and min-p; each reads the untruncated distribution, as in SGLang."""
    for row, job in enumerate(jobs):
        params = job.sampling
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            total = weights[row].sum()
            ordered, indices = _head(weights[row], total, params)
            kept = ordered.cumsum(-1, dtype=torch.float64) - ordered <= params.top_p * total
            kept &= ordered >= ordered[0] * params.min_p
            if params.top_k > 0:
                kept[params.top_k :] = False
            weights[row] = torch.zeros_like(weights[row]).index_put((indices[kept],), ordered[kept])
    return weights


def _head(weights: Tensor, total: Tensor, params: EngineSampling) -> tuple[Tensor, Tensor]:
    """Return the largest weights in order, with their ids: as many as any cut can keep."""
    # Sorting a whole row costs milliseconds.
    size = max(_HEAD, params.top_k)
    if size < weights.shape[0]:
        ordered, indices = weights.topk(size)
        by_p = params.top_p < 1 and ordered.sum() > params.top_p * total
        by_min_p = params.min_p > 0 and ordered[-1] < ordered[0] * params.min_p
        if params.top_k > 0 or by_p or by_min_p:
            return ordered, indices
    return torch.sort(weights, descending=True)


def _reshaped(logits: Tensor, jobs: Sequence[Job]) -> Tensor:
    """Apply frequency and presence penalties over the reply, repetition penalty over prompt and reply, then biases."""
    reshaped = [row for row, job in enumerate(jobs) if _reshapes(job.sampling)]
    if not reshaped:
        return logits
    logits = logits.clone()
    for row in reshaped:
        job = jobs[row]
        if job.sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(job.tokens)), device=logits.device)
            values, factor = logits[row, seen], job.sampling.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        if job.output:
            ids, counts = torch.tensor(job.output, device=logits.device).unique(return_counts=True)
            logits[row, ids] -= job.sampling.frequency_penalty * counts + job.sampling.presence_penalty
        for token, bias in (job.sampling.logit_bias or {}).items():
            logits[row, int(token)] += bias
    return logits


def _reshapes(sampling: EngineSampling) -> bool:
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1)
    return any(penalties) or bool(sampling.logit_bias)


def _top(scaled: Tensor, log_norm: Tensor, top: int) -> TopLogProbs:
    if not top:
        return []
    values, indices = scaled.topk(min(top, scaled.shape[-1]))
    return list(zip((values - log_norm).tolist(), indices.tolist(), strict=True))
