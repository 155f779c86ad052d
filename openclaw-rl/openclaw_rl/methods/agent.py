"""Agent RL: credit for the steps of episodes, from the outcome of each and from a judge of its steps.

The server computes the credit once, when a group of episodes is closed (`credit`), as one number for each step
(`Sample.advantage`). It depends on no weights, so it survives restarts and is the same for every trainer. The trainer
puts it on every token of the step. Formulas: `methods.credit`.

A verdict of 0 is a number here. An unjudged step has R = o, which is not the same as p = 0. The steps of an aborted or
expired episode, and those of an evaluation, never reach this module.

Turns outside of episodes (a chat beside the agents) train as in Binary RL: their ±1 less its baseline.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from openclaw_rl.methods import credit
from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms
from openclaw_rl.methods.binary_rl import BinaryRL, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import ClosedGroup, DropReason, Ids, JudgedTurn, Sample, StepCredit

_CHATS = BinaryRL()


class AgentSettings(BinarySettings):
    """Settings of the credit of steps; the baseline is of turns outside of episodes."""

    name: str = "agent"
    estimator: Literal["step_wise", "grpo", "single"] = "step_wise"
    """`step_wise`: compares steps of equal index in a group. `grpo`: compares outcomes. `single`: compares an episode
    with earlier ones; a group of one is always credited so."""
    outcome_weight: float = Field(default=1.0, ge=0, le=100)
    """Weight of the outcome; 0: the steps' own rewards alone."""
    process_weight: float = Field(default=1.0, ge=0, le=100)
    """Weight λ of the step's own reward beside the outcome; 0: the outcome alone, and no judge is asked."""
    floor: float = Field(default=0.1, ge=0)
    """Least spread that a difference is divided by."""
    divisor: Literal["step", "episode"] = "step"
    """Weight in a batch: the same for every step, or the same for every episode, whatever its length. The KL to the
    base is always a mean over steps."""
    single_baseline: int = Field(default=64, ge=0, le=256)
    """Earlier groups of one whose mean outcome is subtracted by `single`; 0: none is."""

    @property
    def credits_groups(self) -> bool:
        return True

    @property
    def judges_steps(self) -> bool:
        return self.process_weight > 0


class AgentRL:
    name = "agent"
    settings: type[AgentSettings] = AgentSettings

    def credit(self, group: ClosedGroup, settings: AgentSettings) -> list[StepCredit]:
        """Return the credit of each step of the group that waits for it."""
        outcomes = [settings.outcome_weight * episode.outcome for episode in group.trajectories]
        step_rewards = [
            credit.rewards(outcome, [step.process for step in episode.steps], settings.process_weight)
            for outcome, episode in zip(outcomes, group.trajectories, strict=True)
        ]
        reason, detail = DropReason.NO_CONTRAST, ""
        advantages: list[list[float | None]]
        if settings.estimator == "single" or group.size == 1:
            earlier = group.earlier[: settings.single_baseline]
            baseline = settings.outcome_weight * math.fsum(earlier) / len(earlier) if earlier else 0.0
            advantages = [credit.single(steps, baseline) for steps in step_rewards]
        elif len(outcomes) < 2:
            advantages = [[None] * len(steps) for steps in step_rewards]
            reason, detail = DropReason.GROUP_TOO_SMALL, f"{len(outcomes)} of {group.size} episodes ended"
        elif settings.estimator == "grpo":
            alone = credit.grpo(outcomes, settings.floor)
            advantages = [[None if alone is None else alone[i]] * len(steps) for i, steps in enumerate(step_rewards)]
        else:
            advantages = credit.step_wise(step_rewards, outcomes, settings.floor)
        return [
            StepCredit(step.turn_id, reward, advantage, *((reason, detail) if advantage is None else ()))
            for episode, found, values in zip(group.trajectories, step_rewards, advantages, strict=True)
            for step, reward, advantage in zip(episode.steps, found, values, strict=True)
            if step.is_waiting
        ]

    async def score(self, judged: JudgedTurn, tools: ScoringTools[AgentSettings]) -> Sample | Dropped:
        return await _CHATS.score(judged, tools)

    def can_train(self, sample: Sample) -> bool:
        return sample.advantage is not None or _CHATS.can_train(sample)

    def advantages(
        self, batch: Sequence[Sample], settings: AgentSettings, state: dict[str, float]
    ) -> list[list[float]]:
        """Return the advantage that each step came with, weighed by `settings.divisor`, on each of its tokens."""
        chats = iter(_CHATS.advantages([sample for sample in batch if sample.advantage is None], settings, state))
        steps = [sample for sample in batch if sample.advantage is not None]
        weights = iter(_weights(steps, settings))
        return [
            next(chats) if sample.advantage is None else [sample.advantage * next(weights)] * len(sample.response_ids)
            for sample in batch
        ]

    def gathered_ids(self, sample: Sample) -> Sequence[Ids] | None:
        return None

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: AgentSettings) -> SampleLoss:
        return _CHATS.loss(sample, terms, trainer, method)

    practises = False

    async def practise(
        self, judged: JudgedTurn, hint: str | None, tools: ScoringTools[AgentSettings]
    ) -> Sample | Dropped:
        return Dropped(DropReason.METHOD, "agent has no teacher to practise with")


def _weights(steps: Sequence[Sample], settings: AgentSettings) -> list[float]:
    if settings.divisor == "step":
        return [1.0] * len(steps)
    return credit.episode_weights([-1 if sample.episode is None else sample.episode for sample in steps])


METHOD = AgentRL()
