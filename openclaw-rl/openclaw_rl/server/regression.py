"""Monitor of the users' verdicts and of agents' evaluations: it rolls back to an earlier version when they fall.

It groups the verdicts of user turns by the version that sampled them. A tool's result says more of the tool than of the
policy, so tool turns are left out. So are the turns behind one that waits for the judge: while the judge is away, only
users' own feedback brings verdicts, most of them complaints, and that would look like a fall.

`find_drop` tests the verdicts for a fall. On a fall the ledger goes back to the newest version before it whose weights
exist, and the trainer then loads that version's optimizer state. The samples of the abandoned versions are dropped,
because the same method turned them into the fall. The monitor never gives up all that was learned: when only the base
is left before the fall, it raises an alert and pauses learning.

Each policy is tested and rolled back alone.

Verdicts after the rollback belong to a new version number, so the next finding needs `min_turns` new verdicts: that is
the cooldown. After `pause_after` rollbacks learning pauses until the operator resumes it.

Evaluations of agents (`agents eval`) are tested beside the verdicts, and alike a fall rolls back. `find_worse` compares
the newest version that played held-out tasks with each one before it, on the tasks that both played. Training episodes
are no measure: the curriculum plays those tasks more often that the policy half knows.

Limits: a judge that errs in step with the policy shows no fall (a canary does), and a change of the users' own taste
looks like a fall.

The test is a one-sided permutation test for one change point, and a pure function. One test over all cuts replaces one
test a version, because a version answers too few turns. Testing each cut apart would find falls by chance. The permuted
statistic is therefore the largest over all cuts too: the change-point form of the test (e.g. Antoch & Hušková 2001).
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
import structlog
from numpy.typing import NDArray

from openclaw_rl.errors import EngineError, LedgerError, LedgerUnavailable
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import WatchSettings
from openclaw_rl.telemetry.alerts import Alerts
from openclaw_rl.types import SHARED_POLICY

log = structlog.get_logger()

_TOGETHER = 50  # permutations at once: all of them would take 20 MB, which the C library keeps for each thread


class RegressionMonitor:
    """Task that tests the verdicts every few seconds, and rolls back on a fall."""

    def __init__(self, ledger: Ledger, publisher: Publisher, settings: WatchSettings, alerts: Alerts) -> None:
        self._ledger, self._publisher, self._settings, self._alerts = ledger, publisher, settings, alerts
        self._seen: dict[str, list[tuple[int, int]]] = {}
        """Verdicts that were tested, by policy."""
        self._played: dict[str, list[tuple[str, int, float]]] = {}
        """Evaluations that were tested, by policy."""
        self._falls: Counter[str] = Counter()
        """Automatic rollbacks of each policy since the start."""
        self._no_way_back: dict[str, int] = {}
        """By policy: the last version before the fall that could not be rolled back."""

    @property
    def falls(self) -> int:
        """Automatic rollbacks since the start."""
        return self._falls.total()

    async def run(self) -> None:
        """Test new verdicts every few seconds, forever. The server's task group owns this task."""
        while True:
            await asyncio.sleep(self._settings.check_every_s)
            try:
                policies = await self._ledger.policies()
                self._forget_all_but(policies)
                for policy in policies:
                    await self.look(policy)
            except LedgerUnavailable as error:
                log.debug("watch_delayed", error=str(error))

    def _forget_all_but(self, policies: Collection[str]) -> None:
        """Forget what was seen of policies that were removed."""
        for kept in (self._seen, self._played, self._falls, self._no_way_back):
            for policy in kept.keys() - set(policies):
                del kept[policy]

    async def look(self, policy: str = SHARED_POLICY) -> "VerdictDrop | None":
        """Test a policy once, and roll it back on a fall."""
        if await self._ledger.pinned(policy) is not None:  # the operator who pins a version decides alone
            return None
        limits, fall = self._settings, None
        verdicts = await self._ledger.user_verdicts(limit=limits.turns, before_waiting=True, policy=policy)
        if verdicts != self._seen.get(policy, []):
            test = partial(find_drop, min_side=limits.min_turns, drop=limits.drop, p_value=limits.p_value)
            fall = await asyncio.to_thread(test, verdicts)
        played = await self._ledger.evaluated(policy=policy)
        if fall is None and played != self._played.get(policy, []):
            worse = partial(find_worse, min_tasks=limits.min_turns, drop=limits.drop, p_value=limits.p_value)
            fall = await asyncio.to_thread(worse, played)
        if fall is not None:
            await self._go_back(fall, policy)
        # Last: a fall that the ledger could not take is found again.
        self._seen[policy], self._played[policy] = verdicts, played
        return fall

    async def _go_back(self, fall: "VerdictDrop", policy: str) -> None:
        figures: dict[str, float | str] = {"before": fall.before, "after": fall.after, "p_value": fall.p_value}
        of = {} if policy == SHARED_POLICY else {"policy": policy}
        figures |= of
        turns = {"turns_before": fall.n_before, "turns_after": fall.n_after}
        try:
            to = await self._ledger.roll_back_behind(fall.good)
        except LedgerUnavailable:
            raise
        except LedgerError as error:
            if (
                self._no_way_back.get(policy) != fall.good
            ):  # each later verdict finds the same fall: the operator knows of it
                await self._ledger.set_learning(False, policy)
                self._no_way_back[policy] = fall.good
                self._alerts.raise_alert("verdicts_fall", reason=str(error), good=fall.good, **figures, **turns)
                self._alerts.raise_alert(
                    "learning_paused", reason=str(error), resume="openclaw-rl learning resume", **of
                )
            return
        self._falls[policy] += 1
        self._alerts.raise_alert("rolled_back", serving=to, good=fall.good, **figures, **turns)
        if self._falls[policy] >= self._settings.pause_after:
            await self._ledger.set_learning(False, policy)
            self._alerts.raise_alert("learning_paused", automatic_rollbacks=self._falls[policy], **of)
        try:
            await self._publisher.follow()
        except (EngineError, TimeoutError) as error:  # the publisher retries
            log.debug("rollback_delayed", error=repr(error))
            self._publisher.wake()


@dataclass(frozen=True, slots=True)
class VerdictDrop:
    """A fall after version `good`: means of verdicts over `n` turns each, or of rewards over `n` tasks."""

    good: int
    """The last version before the fall."""
    before: float
    after: float
    n_before: int
    n_after: int
    p_value: float


def find_drop(
    verdicts: Sequence[tuple[int, int]],
    *,
    min_side: int = 30,
    drop: float = 0.3,
    p_value: float = 0.001,
    permutations: int = 2000,
    seed: int = 0,
) -> VerdictDrop | None:
    """Return the clearest fall between two versions, or None when no fall is large and unlikely enough.

    verdicts: (version that sampled the turn, verdict in −1, 0, 1), oldest turn first. A cut lies between two versions
    and has at least `min_side` turns on each side. Statistic of a cut: (mean before − mean after) / √(1/n₁ + 1/n₂),
    of which the verdicts' own spread is no part: permuting leaves it as it is. p = (1 + #{permuted ≥ found}) / (1 +
    permutations); the same verdicts and seed give the same answer. Raises ValueError for a `min_side` below 1.
    """
    if min_side < 1:
        raise ValueError("min_side must be at least 1")
    ordered = sorted(verdicts, key=lambda item: item[0])  # stable: turns of one version keep their order
    versions = np.array([version for version, _ in ordered])
    values = np.array([value for _, value in ordered], dtype=np.float64)
    n = len(values)
    cuts = np.array([i for i in range(min_side, n - min_side + 1) if versions[i - 1] != versions[i]], dtype=np.intp)
    if not len(cuts):
        return None
    falls = _falls(values[None, :], cuts)[0]
    scale = np.sqrt(1 / cuts + 1 / (n - cuts))
    large = falls >= drop
    if not large.any():
        return None
    found = int(np.argmax(np.where(large, falls / scale, -np.inf)))
    statistic = falls[found] / scale[found]
    chance, as_large = np.random.default_rng(seed), 0
    for done in range(0, permutations, _TOGETHER):
        rows = min(_TOGETHER, permutations - done)
        shuffled = chance.permuted(np.tile(values, (rows, 1)), axis=1)
        as_large += int(((_falls(shuffled, cuts) / scale).max(axis=1) >= statistic - 1e-12).sum())
    p = (1 + as_large) / (1 + permutations)
    if p >= p_value:
        return None
    cut = int(cuts[found])
    before, after = float(values[:cut].mean()), float(values[cut:].mean())
    return VerdictDrop(int(versions[cut - 1]), before, after, cut, n - cut, p)


def find_worse(
    played: Sequence[tuple[str, int, float]],
    *,
    min_tasks: int = 30,
    drop: float = 0.3,
    p_value: float = 0.001,
    permutations: int = 20_000,
    seed: int = 0,
) -> VerdictDrop | None:
    """Return the clearest fall of the newest evaluated version behind one before it, or None.

    played: (task, version, reward from −1 to 1). Two versions are compared on the tasks that both played, at least
    `min_tasks`, by the mean of the tasks' differences. The clearest fall has the largest mean times √tasks. The test
    flips the signs of its differences (one-sided, Fisher's randomisation for pairs). Its p is multiplied by the number
    of versions compared (Bonferroni).
    """
    rewards: dict[int, dict[str, list[float]]] = {}
    for task, version, reward in played:
        rewards.setdefault(version, {}).setdefault(task, []).append(reward)
    newest = max(rewards, default=0)
    found: list[tuple[float, int, list[float], list[float]]] = []
    for version, own in rewards.items():
        both = own.keys() & rewards[newest].keys()
        if version < newest and len(both) >= min_tasks:
            before, after = ([fmean(of[task]) for task in both] for of in (own, rewards[newest]))
            found.append((fmean(before) - fmean(after), version, before, after))
    large = [one for one in found if one[0] >= drop]
    if not large:
        return None
    # Not the largest: of a few tasks a larger fall is luck, and would hide a clear one of many.
    fall, good, before, after = max(large, key=lambda one: one[0] * len(one[2]) ** 0.5)
    gaps = np.array(before) - np.array(after)
    chance, as_large = np.random.default_rng(seed), 0
    for _ in range(0, permutations, _TOGETHER):
        signs = chance.choice((-1.0, 1.0), (_TOGETHER, len(gaps)))
        as_large += int(((signs * gaps).mean(axis=1) >= fall - 1e-12).sum())
    p = min(1.0, len(found) * (1 + as_large) / (1 + permutations))
    return VerdictDrop(good, fmean(before), fmean(after), len(before), len(after), p) if p < p_value else None


def _falls(values: NDArray[np.float64], cuts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return mean before − mean after at each cut, [P, C], of values [P, N]."""
    n = values.shape[1]
    sums = values.cumsum(axis=1)
    before = sums[:, cuts - 1]
    fall: NDArray[np.float64] = before / cuts - (sums[:, -1:] - before) / (n - cuts)
    return fall
