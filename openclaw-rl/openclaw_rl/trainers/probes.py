"""Probes: a few forced tokens with the trainer's log-probs before and after a step, for the publisher's self-test."""

from collections.abc import Sequence

import torch

from openclaw_rl.trainers.api import Probe
from openclaw_rl.trainers.batches import MicroBatch, Piece, Row
from openclaw_rl.trainers.policy import Policy
from openclaw_rl.types import Sample

PROBES, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 32, 32
"""Small: a probe compares two programs on equal ids, and needs neither the whole prompt nor the whole reply."""


def probe_rows(samples: Sequence[Sample]) -> MicroBatch:
    """Of the samples with the longest replies: the prompt's end and the reply's beginning, at temperature 1."""
    chosen = sorted(samples, key=lambda sample: (-len(sample.response_ids), sample.sample_id))[:PROBES]
    rows = []
    for index, sample in enumerate(chosen):
        prompt, response = sample.prompt_ids[-PROMPT_TOKENS:], sample.response_ids[:RESPONSE_TOKENS]
        piece = Piece(index, len(prompt), len(response), trained=tuple(range(len(response))), temperature=1.0)
        rows.append(Row(prompt + response, (piece,)))
    return MicroBatch(tuple(rows))


@torch.no_grad()
def score(policy: Policy, batch: MicroBatch) -> list[list[float]]:
    log_probs = policy.log_probs(batch)
    return [[float(value) for value in log_probs[piece.index]] for piece in batch.pieces]


def probes_of(
    batch: MicroBatch, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> tuple[Probe, ...]:
    return tuple(
        Probe(
            prompt_ids=list(row.ids[: piece.start]),
            response_ids=list(row.ids[piece.start :]),
            log_probs=list(new),
            parent_log_probs=list(old),
        )
        for row, piece, old, new in zip(batch.rows, batch.pieces, before, after, strict=True)
    )
