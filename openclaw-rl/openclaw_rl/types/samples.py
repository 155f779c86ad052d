"""Samples: a judged turn with what a method trains on, its hint term, and a leased batch.

As JSON the hint term is the sample's `extra` column and body:

    {"hint": {"text": …, "source": …, "gain": …, "guidance": …, "hinted_gap": …, "absent": …, "detail": …},
     "top_k": {"ids": [T, K], "log_probs": [T, K]}}

Other keys belong to a method of another package. They stay in `HintTerm.method_json`, which the core does not read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from openclaw_rl.errors import AlignmentError
from openclaw_rl.types.turns import SHARED_POLICY, Ids, LogProbs, VersionRun

ROUNDING = 1e-3
"""Largest excess over 1 of an engine's probabilities in sum."""


@dataclass(frozen=True, slots=True)
class TopK:
    """Ids at each response token, the likeliest with the hint in the prompt, and the teacher's log-probs of them."""

    ids: tuple[tuple[int, ...], ...]  # [T, K], distinct in a row
    log_probs: tuple[tuple[float, ...], ...]  # [T, K], at temperature 1

    def check(self, tokens: int) -> None:
        """Raise AlignmentError where the table does not fit a reply of `tokens` tokens, or is no distribution."""
        widths = {len(row) for row in (*self.ids, *self.log_probs)}
        if not tokens == len(self.ids) == len(self.log_probs) or len(widths) != 1 or 0 in widths:
            raise AlignmentError(
                f"top-k: {tokens} tokens, {len(self.ids)} rows of ids and {len(self.log_probs)} of log-probs, "
                f"{sorted(widths)} wide"
            )
        if any(len(set(row)) != len(row) for row in self.ids):
            raise AlignmentError("top-k: an id stands twice in a row")
        if any(not math.fsum(map(math.exp, row)) <= 1 + ROUNDING for row in self.log_probs):  # a nan too
            raise AlignmentError("top-k: what stands there is no distribution")


PRACTICE_SOURCES = ("practice", "anchor")
"""Sources of the hints of practice replies: a wish, and the empty hint of an anchor."""


@dataclass(frozen=True, slots=True)
class HintTerm:
    """The hint's part of a sample, or the counted reason of its absence. Every field may be absent."""

    text: str | None = None
    source: str | None = None
    """`judge`, `verbatim` or `feedback`; of a practice reply `practice` or `anchor`."""
    gain: float | None = None
    """The number by which the hint was chosen among several."""
    guidance: float | None = None
    """Weight of the hint's effect in the teacher's log-probs beyond the hint itself; None: no guidance."""
    hinted_gap: float | None = None
    """With guidance: mean over the trained tokens of the gap that the hint alone makes."""
    absent: str | None = None
    """Reason why the sample has no distillation term."""
    detail: str = ""
    """More about `absent`."""
    top_k: TopK | None = None
    method_json: str | None = None
    """A JSON object with the fields of a method that needs others."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        own = dict(table)
        hint = own.pop("hint") if isinstance(own.get("hint"), Mapping) else {}
        top_k = own.pop("top_k", None)
        return cls(
            text=hint.get("text"),
            source=hint.get("source"),
            gain=hint.get("gain"),
            guidance=hint.get("guidance"),
            hinted_gap=hint.get("hinted_gap"),
            absent=hint.get("absent"),
            detail=hint.get("detail", ""),
            top_k=None if top_k is None else _table(top_k),
            method_json=json.dumps(own, sort_keys=True) if own else None,
        )

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.method_json is None else json.loads(self.method_json)
        hint = {
            "text": self.text,
            "source": self.source,
            "gain": self.gain,
            "guidance": self.guidance,
            "hinted_gap": self.hinted_gap,
            "absent": self.absent,
        }
        if self.absent is not None:
            hint["detail"] = self.detail
        if any(value is not None for value in hint.values()):
            found["hint"] = {key: value for key, value in hint.items() if value is not None}
        if self.top_k is not None:
            found["top_k"] = {"ids": self.top_k.ids, "log_probs": self.top_k.log_probs}
        return found

    @classmethod
    def of_json(cls, text: str) -> Self:
        return cls.of(json.loads(text))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


def _table(top_k: Mapping[str, Any]) -> TopK:
    # pydantic writes an engine's -inf as null.
    rows = (tuple(-math.inf if value is None else value for value in row) for row in top_k["log_probs"])
    return TopK(tuple(tuple(row) for row in top_k["ids"]), tuple(rows))


@dataclass(frozen=True, slots=True)
class Sample:
    """One unit of training, as the trainer receives it. Absent terms are None, never zeros."""

    sample_id: str
    """The turn's id: one turn gives at most one sample."""
    prompt_ids: Ids  # [P]
    response_ids: Ids  # [T]
    loss_mask: tuple[bool, ...]  # [T]
    rollout_log_probs: LogProbs  # [T]
    versions: tuple[VersionRun, ...]
    temperature: float
    is_tool_turn: bool = False
    reward: float | None = None
    """±1; None when the turn has no binary reward."""
    teacher_log_probs: LogProbs | None = None  # [T], at temperature 1, hint in the prompt; guided: not normalised
    student_log_probs: LogProbs | None = None  # [T], the same engine, version and temperature, no hint
    scored_version: int | None = None
    hint: HintTerm | None = None
    is_demonstration: bool = False
    """`response_ids` is a reply that the user wrote: a supervised target. No policy sampled it; its rollout log-probs
    are zeros that no loss may read."""
    advantage: float | None = None
    """Credit of every token of a step, which its closed group gave it; None: a turn outside of episodes."""
    episode: int | None = None
    """The ledger's number of the step's episode."""
    pictures: tuple[str, ...] = ()
    """Digests of the prompt's pictures in its order; their files are beside the ledger."""

    def __post_init__(self) -> None:
        t = len(self.response_ids)
        lengths = {len(self.loss_mask), len(self.rollout_log_probs), sum(run.length for run in self.versions)}
        lengths |= {len(values) for values in (self.teacher_log_probs, self.student_log_probs) if values is not None}
        if lengths != {t}:
            raise AlignmentError(f"sample {self.sample_id}: {t} response ids, but fields of lengths {sorted(lengths)}")
        if not any(self.loss_mask):
            raise AlignmentError(f"sample {self.sample_id}: no token to train on")
        if not all(math.isfinite(value) for value in self.rollout_log_probs):
            raise AlignmentError(f"sample {self.sample_id}: a rollout log-prob is not finite")
        if self.advantage is not None and not math.isfinite(self.advantage):
            raise AlignmentError(f"sample {self.sample_id}: its advantage is not finite")

    @property
    def oldest_version(self) -> int:
        return min(run.weight_version for run in self.versions)

    @property
    def is_practice(self) -> bool:
        """Return True for a practice reply: nobody waited for it, and nobody read it."""
        return self.hint is not None and self.hint.source in PRACTICE_SOURCES

    def sampled_by(self, weight_version: int | None) -> list[bool]:
        """Return [T]: True for trained tokens that this version sampled."""
        if self.is_demonstration:  # the user wrote it: no version sampled it
            return [False] * len(self.response_ids)
        runs = [run.weight_version == weight_version for run in self.versions for _ in range(run.length)]
        return [is_its and is_trained for is_its, is_trained in zip(runs, self.loss_mask, strict=True)]


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch handed to a trainer. It ends by `commit`, by `release` or by its deadline."""

    lease_id: str
    fence: int
    """Grows with every lease; only the newest may commit."""
    parent: int
    expires_at: float
    """Deadline by the server's clock; the trainer's clock may differ."""
    lease_s: float
    """Seconds that it lives from now, or from a renewal."""
    samples: tuple[Sample, ...] = field(repr=False)
    policy: str = SHARED_POLICY
    """The lineage that the step continues, from `parent`."""
