"""Replies under a foreign adapter: each recorded reply beside a plain PEFT forward of its own user's version.

A reply is foreign if its version is not of its user's policy, or if that version's forward does not explain its
log-probs. Every tenth reply is also scored under a version of another user, which shows that the check can tell.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.chat_load import quantile
from gpu.models import Forced
from gpu.node_feedback import reading
from gpu.stages import Figures
from openclaw_rl.ledger.snapshot import Snapshot
from openclaw_rl.types import own_policy

TOLERANCE = 0.25
"""Largest mean difference of a reply's log-probs from its own version's forward, in nats a token."""
EVERY = 10
MOST_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class Said:
    """A recorded reply."""

    turn_id: str
    user: str
    versions: tuple[int, ...]
    reply: Forced


def said(ledger: Path, wanted: Iterable[str]) -> list[Said]:
    """Return the turns of these ids that have tokens."""
    ids, found = set(wanted), []
    with Snapshot.of(ledger) as snapshot:
        for record in snapshot.turns():
            turn, request = record.turn, record.request
            if turn.turn_id in ids and turn.response_ids:
                forced = Forced(
                    list(request.prompt_ids), list(turn.response_ids), list(turn.rollout_log_probs),
                    request.sampling.temperature,
                )  # fmt: skip
                versions = tuple(dict.fromkeys(run.weight_version for run in turn.versions))
                found.append(Said(turn.turn_id, request.scope.user, versions, forced))
    return found


def owners(ledger: Path) -> dict[int, tuple[str, str | None]]:
    """Return the policy and the folder of each version; a folder is None where the version is the base."""
    with reading(ledger) as db:
        rows = db.execute("SELECT weight_version, policy, folder FROM version").fetchall()
    return {version: (policy, folder) for version, policy, folder in rows}


def scored(
    replies: Sequence[Said],
    versions: Mapping[int, tuple[str, Path | None]],
    base: Path,
    device: str,
    within_s: float,
    *,
    policy_of: Callable[[str], str] = own_policy,
    apart_by: Callable[[Said], object] = lambda one: one.user,
) -> Figures:
    """Score the replies, version after version in a random order, until the time is over.

    versions: policy and folder of each. policy_of: the policy of a user. apart_by: replies that differ in it are of
    adapters that are far apart.
    """
    end, by_version = time.monotonic() + within_s, dict[int, list[Said]]()
    foreign: list[str] = []
    for one in replies:
        if len(one.versions) == 1 and versions[one.versions[0]][0] == policy_of(one.user):
            by_version.setdefault(one.versions[0], []).append(one)
        else:
            foreign.append(f"{one.turn_id} of {one.user}: versions {one.versions}")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device).eval()
    own, others, last = list[float](), list[float](), list[Said]()
    for version in random.Random(0).sample(sorted(by_version), len(by_version)):
        rows = by_version[version]
        apart = [one for one in last[::EVERY] if apart_by(one) != apart_by(rows[0])]
        found = gaps(model, versions[version][1], [one.reply for one in (*rows, *apart)], device)
        own += found[: len(rows)]
        others += found[len(rows) :]
        for one, gap in zip(rows, found, strict=False):
            if not gap <= TOLERANCE:
                foreign.append(f"{one.turn_id} of {one.user}: {gap:.3g} nats a token from version {version}")
        last = rows
        if time.monotonic() > end:
            break
    return {
        "replies": len(replies),
        "replies scored": len(own),
        "replies under a foreign adapter": len(foreign),
        "foreign": foreign[:20],
        "own adapter: mean |Δ log-prob| p50/p99/max, nats a token": spread(own),
        "another's adapter: the same, min/p1/p50": [min(others, default=None), *_quantiles(others, 0.01, 0.5)],
    }


def findings(figures: Figures) -> list[str]:
    """Return what is foreign, and a sentence if the check could not tell a foreign reply."""
    found = [f"foreign: {one}" for one in figures["foreign"]]
    if not figures["replies scored"]:
        found.append("no reply was scored")
    nearest = figures["another's adapter: the same, min/p1/p50"][1]
    if not nearest > TOLERANCE:
        found.append(f"the adapters are too near to tell: {nearest} nats a token")
    return found


def spread(values: list[float]) -> list[float | None]:
    return [*_quantiles(values, 0.5, 0.99), max(values, default=None)]


def _quantiles(values: list[float], *shares: float) -> list[float]:
    return [quantile(values, share) for share in shares]


def gaps(model: Any, adapter: Path | None, replies: Sequence[Forced], device: str) -> list[float]:
    """Return the mean |recorded − forced| log-prob of each reply under an adapter of the model, in nats a token."""
    if adapter is None:
        return _gaps(model, replies, device)
    policy = PeftModel.from_pretrained(model, adapter).eval()
    try:
        return _gaps(policy, replies, device)
    finally:
        policy.unload()


@torch.no_grad()
def _gaps(model: Any, replies: Sequence[Forced], device: str) -> list[float]:
    found = [float("nan")] * len(replies)
    for batch in _batches(replies, MOST_TOKENS[device]):
        rows = [replies[at].prompt_ids + replies[at].response_ids for at in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        logits = model(ids, attention_mask=mask).logits
        for at, row, whole in zip(batch, logits, ids, strict=True):
            reply = replies[at]
            start, end = len(reply.prompt_ids), len(reply.prompt_ids) + len(reply.response_ids)
            forced = (row[start - 1 : end - 1].float() / reply.temperature).log_softmax(-1)
            forced = forced.gather(1, whole[start:end, None])[:, 0].cpu()
            found[at] = float((forced - torch.tensor(reply.log_probs)).abs().mean())
    return found


def _batches(replies: Sequence[Forced], most: int) -> Iterator[list[int]]:
    """Yield the places of replies of about one length, so that they and their padding fit in `most` tokens."""
    batch: list[int] = []
    for at in sorted(range(len(replies)), key=lambda at: len(replies[at].prompt_ids) + len(replies[at].response_ids)):
        longest = len(replies[at].prompt_ids) + len(replies[at].response_ids)
        if batch and (len(batch) + 1) * longest > most:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch
