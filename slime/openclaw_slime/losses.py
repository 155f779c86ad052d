"""Our methods' losses on slime's micro-batches: two of slime's hooks, and the conversion between its tensors and ours.

    --custom-advantage-function-path  openclaw_slime.losses.set_advantages
    --custom-loss-function-path       openclaw_slime.losses.policy_loss

The loss of a sample is `Method.loss` itself, on the same `TokenTerms` that the local trainer gives it. Old log-probs
are this forward pass, detached, or the engine's (`trainer.old_log_probs`); slime's extra pass for them is off. Under
context parallelism a rank computes its own part of a response: losses are sums over tokens, and the divisor is the
whole sample's.

A sample whose log-probs are not finite makes the loss NaN on purpose. With `--no-check-for-nan-in-loss-and-grad` slime
then skips the optimizer's step on every rank alike, and `Row.is_finite` names the sample to the driver.
"""

# slime and Megatron are untyped, and there only on hosts that train with them.
# mypy: disable-error-code="import-not-found,no-untyped-call"

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Method, Tally, TokenTerms, load_method
from openclaw_rl.types import Sample, VersionRun
from openclaw_slime import heartbeat
from openclaw_slime.node import NodeConfig
from openclaw_slime.rollout import EXTRAS_KEY
from openclaw_slime.rows import Row, ride, row_of
from openclaw_slime.vocab_parallel import VocabShard, gathered_log_probs


def set_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Set each sample's advantages, with the sample attached to the tensor; a hook of slime."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    tensors = []
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for text, mask, (total, response) in zip(
        rollout_data[EXTRAS_KEY], rollout_data["loss_masks"], lengths, strict=True
    ):
        row = Row.of(text)
        local = slice_log_prob_with_cp(list(row.credit), total, response)
        tensors.append(ride(torch.tensor(local, dtype=torch.float32, device=mask.device), row))
    rollout_data["advantages"] = rollout_data["returns"] = tensors


def policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch; a hook of slime."""
    # Not reduced by `sum_of_sample_mean`: it clamps divisors below 1, and a partial batch has such divisors.
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.loss import get_responses

    if args.allgather_cp:
        raise TrainerError("--allgather-cp is not supported: our samples are cut as slime's ring attention cuts them")
    config = NodeConfig.of(args)
    lengths = list(zip(batch["total_lengths"], batch["response_lengths"], strict=True))
    # slime's own function cuts the stream; it gets the positions in place of the logits.
    positions = torch.arange(logits.shape[1], dtype=torch.float32, device=logits.device).view(1, -1, 1)
    cut = get_responses(
        positions,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        apply_temperature=False,
    )
    pieces = [
        Piece(
            row_of(credit),
            at.flatten().long(),
            ids,
            credit,
            slice_log_prob_with_cp(list(range(response)), total, response),
            float(divisor),
            reference,
        )
        for credit, (at, ids), (total, response), divisor, reference in zip(
            batch["advantages"],
            cut,
            lengths,
            batch["rollout_mask_sums"],
            batch.get("ref_log_probs") or [None] * len(lengths),
            strict=True,
        )
    ]
    group = mpu.get_tensor_model_parallel_group()
    shard = VocabShard.of(group, logits.shape[-1], args.vocab_size)
    loss = batch_loss(
        load_method(config.method.name),
        config,
        pieces,
        logits[0],
        shard,
        chunk=args.log_probs_chunk_size if args.log_probs_chunk_size > 0 else 1024,
        reference_temperature=args.rollout_temperature,
    )
    heartbeat.beat(config.heartbeat)
    return loss, {"loss": loss.detach()}


class Piece:
    """One row's part on this rank."""

    __slots__ = ("at", "credit", "divisor", "ids", "local", "reference", "row")

    def __init__(
        self,
        row: Row,
        at: Tensor,
        ids: Tensor,
        credit: Tensor,
        local: Sequence[int],
        divisor: float,
        reference: Tensor | None,
    ) -> None:
        """at: positions in the logits [t]; ids: the tokens they predict [t]; local: their offsets in the response [t].

        divisor: the sample's divisor; slime divides by the batch's size.
        """
        self.row, self.at, self.ids, self.credit, self.divisor, self.reference = (
            row,
            at,
            ids,
            credit,
            divisor,
            reference,
        )
        self.local = list(local)


def batch_loss(
    method: Method,
    config: NodeConfig,
    pieces: Sequence[Piece],
    logits: Tensor,
    shard: VocabShard,
    *,
    chunk: int = 1024,
    reference_temperature: float = 1.0,
) -> Tensor:
    """Return Σ loss_i / divisor_i over the pieces, and write each row's figures. Shapes: logits [N, V/ranks].

    A sample at another temperature than the reference has no KL term: the two distributions cannot be compared.
    """
    pieces = [piece for piece in pieces if not piece.row.is_filler]
    loss = logits[:, :0].float().sum()  # a zero with a graph: every rank runs backward
    if not pieces:
        return loss
    sizes = [len(piece.at) for piece in pieces]
    selected = logits.index_select(0, torch.cat([piece.at for piece in pieces]))  # [R, V/ranks]
    ids = torch.cat([piece.ids for piece in pieces])
    scale = torch.tensor([p.row.sample.temperature for p in pieces], device=logits.device)
    temperatures = scale.repeat_interleave(torch.tensor(sizes, device=logits.device))
    current = gathered_log_probs(selected, ids[:, None], temperatures, shard, chunk=chunk)[:, 0].split(sizes)
    unscaled: Sequence[Tensor | None] = [None] * len(pieces)
    if any(_wants_unscaled(piece.row.sample) for piece in pieces):
        with torch.no_grad():
            ones = torch.ones_like(temperatures)
            unscaled = gathered_log_probs(selected, ids[:, None], ones, shard, chunk=chunk)[:, 0].split(sizes)
    gathered = _gathered(method, pieces, selected, sizes, shard, chunk)
    for n, piece in enumerate(pieces):
        row, sample = piece.row, _part(piece.row.sample, piece.local)
        found = [values[n] for values in (current, unscaled, gathered)]
        row.is_finite &= all(bool(torch.isfinite(values).all()) for values in found if values is not None)
        if sample is None:  # no trained token of it here
            continue
        fits = piece.reference is not None and sample.temperature == reference_temperature
        log_probs = current[n]
        sampled = log_probs.new_tensor(sample.rollout_log_probs)
        is_recomputed = config.trainer.old_log_probs == "recompute"
        terms = TokenTerms(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if is_recomputed else sampled,
            rollout_log_probs=sampled,
            ref_log_probs=piece.reference.to(log_probs.dtype) if piece.reference is not None and fits else None,
            advantages=piece.credit.to(log_probs.dtype),
            loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool, device=log_probs.device),
            unscaled_log_probs=unscaled[n],
            gathered_log_probs=gathered[n],
        )
        result = method.loss(sample, terms, config.trainer, config.method)
        mean = result.loss_sum / piece.divisor
        loss = loss + mean
        row.loss, row.trained_tokens = float(mean.detach()), result.token_count
        fresh = terms.loss_mask.new_tensor([row.is_fresh[k] for k in piece.local])
        gap = (log_probs.detach() - terms.rollout_log_probs)[fresh].abs().sum()
        row.tallies = {**result.tallies, "fresh_abs_log_ratio": Tally(float(gap), int(fresh.sum()))}
        row.is_finite &= bool(torch.isfinite(mean.detach()))
    return loss if all(piece.row.is_finite for piece in pieces) else loss * torch.nan


def _wants_unscaled(sample: Sample) -> bool:
    return sample.teacher_log_probs is not None and sample.student_log_probs is None


def _gathered(
    method: Method, pieces: Sequence[Piece], selected: Tensor, sizes: Sequence[int], shard: VocabShard, chunk: int
) -> list[Tensor | None]:
    """Return log-probs [t, K] for each piece whose method needs those of other ids; None for the others."""
    found: list[Tensor | None] = []
    for piece, part in zip(pieces, selected.split(list(sizes)), strict=True):
        wanted = method.gathered_ids(piece.row.sample)
        if wanted is None:
            found.append(None)
            continue
        if len(piece.local) != len(piece.row.sample.response_ids):
            raise TrainerError("a top-k is not cut under context parallelism: use CP=1")
        ids = torch.tensor(wanted, dtype=torch.long, device=selected.device)
        ones = torch.ones(len(ids), device=selected.device)
        found.append(gathered_log_probs(part, ids, ones, shard, chunk=chunk))
    return found


def _part(sample: Sample, local: Sequence[int]) -> Sample | None:
    """Return the sample cut to this rank's tokens; None if the rank has no trained token of it."""
    if len(local) == len(sample.response_ids):
        return sample
    mask = tuple(sample.loss_mask[k] for k in local)
    if not any(mask):
        return None

    def pick(values: Sequence[float] | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(values[k] for k in local)

    return replace(
        sample,
        response_ids=tuple(sample.response_ids[k] for k in local),
        loss_mask=mask,
        rollout_log_probs=pick(sample.rollout_log_probs) or (),
        versions=(VersionRun(sample.oldest_version, len(local)),),
        teacher_log_probs=pick(sample.teacher_log_probs),
        student_log_probs=pick(sample.student_log_probs),
    )
