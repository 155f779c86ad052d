"""Episodes: runs of an agent on a task, their groups, and the credit of each step.

A group holds the episodes of one task that are compared with each other. Symbols: o(i) the outcome of episode i, p(i,k)
the process reward of its step k, R(i,k) the reward of the step, A(i,k) its advantage.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from openclaw_rl.types.turns import DropReason, TurnState


class Split(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    """Recorded alone: never judged, never trained."""


class EpisodeState(StrEnum):
    RUNNING = "running"
    ENDED = "ended"
    """It has its outcome."""
    ABORTED = "aborted"
    """Its environment failed."""
    EXPIRED = "expired"
    """No outcome came in time."""


class GroupState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    """No episode of it runs; its steps wait for their judge, then for their credit."""
    SCORED = "scored"


@dataclass(frozen=True, slots=True)
class NewEpisode:
    """An episode as its runner registers it."""

    user: str
    episode_id: str
    task: str
    group: str | None = None
    """None: a group of its own."""
    group_size: int = 1
    split: Split = Split.TRAIN


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """End of an episode, as its runner reports it."""

    reward: float
    """In [-1, 1]."""
    truncated: bool = False
    """A limit of steps, tokens or time cut the episode; the reward is of its state then."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not -1 <= self.reward <= 1:
            raise ValueError(f"a reward is in [-1, 1], not {self.reward}")
        if not all(map(math.isfinite, self.metrics.values())):
            raise ValueError("a metric is not finite")


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """One step of an episode, without its content."""

    turn_id: str
    step: int | None
    state: TurnState
    reason: DropReason | None
    reward: float | None
    """R, once the group has its credit."""
    advantage: float | None


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode as the ledger has it."""

    number: int
    user: str
    episode_id: str
    task: str
    group: str | None
    group_size: int
    split: Split
    state: EpisodeState
    opened_at: float
    ended_at: float | None = None
    outcome: EpisodeOutcome | None = None
    reason: str | None = None
    """The runner's reason of an abort."""
    turns: tuple[EpisodeTurn, ...] = ()
    """In order of arrival; empty in a list of episodes."""


@dataclass(frozen=True, slots=True)
class EpisodeTally:
    """Outcomes of the episodes of one set of tasks that began on one version."""

    weight_version: int
    split: Split
    tasks: str
    """The task's name up to its first `/`: an environment puts its own name there."""
    ended: int
    passed: int
    """With a reward of 1."""
    reward: float
    """Mean."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step that a closed group gives credit to."""

    turn_id: str
    process: float | None
    """p: the mean of the judge's valid votes, or the environment's own reward; None: unjudged."""
    is_waiting: bool
    """False for a turn that cannot be trained on; its reward counts all the same."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An ended episode: its outcome and its steps, in order."""

    outcome: float
    steps: tuple[GroupStep, ...]


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A group none of whose episodes runs any more. Aborted and expired episodes are not in it."""

    number: int
    size: int
    """Number of episodes that it was announced with."""
    trajectories: tuple[Trajectory, ...]
    earlier: tuple[float, ...] = ()
    """Outcomes of earlier groups of one, newest first; empty for a larger group."""


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Credit of one step: its advantage, or a reason to drop it."""

    turn_id: str
    reward: float
    """R."""
    advantage: float | None
    drop: DropReason | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.advantage is None) == (self.drop is None):
            raise ValueError(f"turn {self.turn_id}: either an advantage or a reason to drop it")
        if self.advantage is not None and not math.isfinite(self.advantage):
            raise ValueError(f"turn {self.turn_id}: its advantage is not finite")
