"""Binary RL and on-policy distillation in one update: the verdict rates the reply, the hint shows a better one.

    A_t = w_binary · r + w_opd · clip(gap_t, ±c)

A turn with a hint and a verdict of ±1 has both terms. A hint alone: r = 0. A verdict alone: the distillation term is
absent. A turn with neither gives no sample. With a top-k the binary term goes through the clipped objective, and the
distillation term is w_opd times the divergence. A weight of 0 removes its term, which leaves the other method.

Leaves to others: each term (`binary_rl`, `openclaw_opd`). Importing this module does not import torch.
"""

from collections.abc import Iterator, Sequence

from pydantic import Field

from openclaw_opd.method import (
    OPD,
    distillation_term,
    distilled_loss,
    practice_sample,
    scored_sample,
    token_credit,
    why_absent,
)
from openclaw_opd.settings import OpdSettings
from openclaw_rl.errors import TeacherError
from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms, reward_of, sample_of, unusable
from openclaw_rl.methods.binary_rl import BinaryRL, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import DropReason, Ids, JudgedTurn, Sample


class CombineSettings(OpdSettings, BinarySettings):
    """The settings of both methods, and the weight of each term."""

    name: str = "combine"
    binary_weight: float = Field(default=0.3, ge=0)
    """Weight of the judge's reward; 0 removes the term."""
    opd_weight: float = Field(default=1.0, ge=0)
    """Weight of the distillation term; 0 removes it, and no judge is asked for hints."""

    @property
    def distils(self) -> bool:
        return self.opd_weight > 0

    def never_trains(self) -> Iterator[str]:
        if not (self.binary_weight or self.opd_weight or self.demonstration_weight):
            yield "method.binary_weight, method.opd_weight and method.demonstration_weight are all 0: no term is left"


def combined(
    tokens: int,
    binary: Sequence[float] | None,
    distilled: Sequence[float] | None,
    *,
    binary_weight: float,
    opd_weight: float,
) -> list[float]:
    """Return A_t = w_binary · (r − b) + w_opd · clip(gap_t, ±c) for each of `tokens` tokens (arXiv:2603.10165).

    An absent term is None and is left out; no number stands for it. Both may be absent: the distillation term of a
    top-k is a loss of its own and no advantage.
    """
    credit = [0.0] * tokens
    for term, weight in ((binary, binary_weight), (distilled, opd_weight)):
        if term is not None:
            credit = [sofar + weight * value for sofar, value in zip(credit, term, strict=True)]
    return credit


_BINARY, _OPD = BinaryRL(), OPD()


class Combined:
    name = "combine"
    settings: type[CombineSettings] = CombineSettings

    async def score(self, judged: JudgedTurn, tools: ScoringTools[CombineSettings]) -> Sample | Dropped:
        """Return the sample with the terms the turn has. A teacher that fails costs the distillation term, not the
        reward. Raises TeacherError in an outage when the turn has no reward."""
        reason = unusable(judged)
        if reason is not None:
            return Dropped(reason)
        reward = reward_of(judged) if tools.settings.binary_weight else None
        if not tools.settings.opd_weight:
            return sample_of(judged, reward=reward) if reward is not None else _nothing(judged, "")
        found = await distillation_term(judged, tools)
        if found.absent is None:
            return scored_sample(judged, found, reward=reward)
        if reward is not None:
            return sample_of(judged, reward=reward, hint=found.term())
        if found.absent.may_work_later:
            raise TeacherError(why_absent(found))
        return _nothing(judged, why_absent(found))

    def can_train(self, sample: Sample) -> bool:
        return _BINARY.can_train(sample) or _OPD.can_train(sample)

    def advantages(
        self, batch: Sequence[Sample], settings: CombineSettings, state: dict[str, float]
    ) -> list[list[float]]:
        """Return the weighted sum of Binary RL's credit, baseline included, and the clipped gap, as present."""
        for sample in batch:
            if not self.can_train(sample):
                raise ValueError(f"sample {sample.sample_id}: combine needs a reward or a teacher's term")
        has_reward = [sample.reward is not None and not sample.is_demonstration for sample in batch]
        rewarded = [sample for sample, has in zip(batch, has_reward, strict=True) if has]
        binary = iter(_BINARY.advantages(rewarded, settings, state))
        return [
            combined(
                len(sample.response_ids),
                next(binary) if has else None,
                None if sample.is_demonstration else token_credit(sample, settings),
                binary_weight=settings.binary_weight,
                opd_weight=settings.opd_weight,
            )
            for sample, has in zip(batch, has_reward, strict=True)
        ]

    def gathered_ids(self, sample: Sample) -> Sequence[Ids] | None:
        return _OPD.gathered_ids(sample)

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: CombineSettings) -> SampleLoss:
        return distilled_loss(sample, terms, trainer, method, weight=method.opd_weight)

    practises = True

    async def practise(
        self, judged: JudgedTurn, hint: str | None, tools: ScoringTools[CombineSettings]
    ) -> Sample | Dropped:
        """Return OPD's practice sample, with the verdict of ±1 beside it where there is one. An anchor has none."""
        reward = reward_of(judged) if hint is not None and tools.settings.binary_weight else None
        return await practice_sample(judged, hint, tools, reward=reward)


def _nothing(judged: JudgedTurn, detail: str) -> Dropped:
    """Drop the turn by its verdict, so that the ledger counts neutral and unjudged turns as Binary RL does."""
    if judged.verdict is None:
        return Dropped(DropReason.UNJUDGED, detail)
    if reward_of(judged) is None:
        return Dropped(DropReason.NEUTRAL, detail)
    return Dropped(DropReason.METHOD, detail or "method.binary_weight is 0")


METHOD = Combined()
