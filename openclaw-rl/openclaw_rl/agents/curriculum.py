"""Choice of the next training task: tasks that are always or never passed come rarer, and never go.

A task's pass rate fades: r ← fade · r + (1 − fade) · (mean share of its newest group). Its weight is
floor + (1 − floor) · 4 r (1 − r), the contrast that its next group may show. A new task has the rate of its kind, and a
new kind 1/2.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from openclaw_rl.agents.environment import Outcome, Task


@dataclass(slots=True)
class Curriculum:
    tasks: Sequence[Task]
    seed: int
    fade: float = 0.7
    floor: float = 0.2
    """Weight of a task at rate 0 or 1, of 1."""
    rates: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)
    set_aside: set[str] = field(default_factory=set)
    """Tasks that the environment cannot play."""
    _recent: list[str] = field(default_factory=list)

    def next(self, number: int) -> Task | None:
        """Return the task of the group of this number, or None when all are set aside."""
        left = [task for task in self.tasks if task.id not in self.set_aside]
        fresh = [task for task in left if task.id not in self._recent] or left
        if not fresh:
            return None
        weights = [self.weight(task) for task in fresh]
        task = random.Random(f"{self.seed}:{number}").choices(fresh, weights)[0]
        self._recent = [*self._recent, task.id][-(len(left) // 2) :] if len(left) > 1 else []
        return task

    def weight(self, task: Task) -> float:
        rate = self.rate(task)
        return self.floor + (1 - self.floor) * 4 * rate * (1 - rate)

    def rate(self, task: Task) -> float:
        return self.rates.get(task.id, self.kinds.get(task.kind, 0.5))

    def saw(self, task_id: str, kind: str, outcomes: Sequence[Outcome]) -> None:
        """Take in the outcomes of a group."""
        if not outcomes:
            return
        share = sum((outcome.reward + 1) / 2 for outcome in outcomes) / len(outcomes)
        for rates, name in ((self.rates, task_id), (self.kinds, kind)):
            old = rates.get(name, self.kinds.get(kind, 0.5))
            rates[name] = self.fade * old + (1 - self.fade) * share
