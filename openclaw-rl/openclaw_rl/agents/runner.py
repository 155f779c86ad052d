"""The runner: many episodes at once, in groups of one task, against a server that trains on them.

    next task (curriculum) → a group of n members → each: open, play, score, tell the server → whole

An environment's fault aborts the episode and another takes its place, a few times. A fault never ends the run, and
every step is in the journal before it counts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from openclaw_rl.agents.api import EpisodesApi, Member, Refused, ServerGone
from openclaw_rl.agents.curriculum import Curriculum
from openclaw_rl.agents.environment import Environment, Outcome, Split, Task, whole_tasks
from openclaw_rl.agents.episode import Episode, EpisodeOver
from openclaw_rl.agents.evaluation import by_kind, figures
from openclaw_rl.agents.journal import Attempt, GroupRecord, Journal
from openclaw_rl.agents.plan import Plan
from openclaw_rl.agents.sandbox import Sandboxes
from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import EnvironmentFault, SettingsError

log = structlog.get_logger()
_GRACE_S = 60.0
"""Patience with an environment beyond its own limits, before it counts as hung."""
_STOP_S = 5.0
_VERSION_EVERY_S = 2.0
_FAULTS_TO_SET_ASIDE = 2
"""Groups of one task without an outcome, after which this run leaves the task, if other tasks work."""
_FIRST_PAUSE_S = 1.0
_BARREN = 3
"""Groups in a row without an outcome, after which the environment is taken for broken: the run waits between tries."""


class NoTasksLeft(EnvironmentFault):
    """Every task was set aside."""


@dataclass(slots=True)
class _Play:
    """One episode that is played, and what came of it."""

    task: Task
    split: Split
    ready: asyncio.Event
    """Set when the group is open on the server: its other members do not ask before."""
    faults: int = 0


@dataclass(slots=True)
class Runner:
    """One run. `train` and `evaluate` may be called in turn; `train` evaluates beside training if the plan says so."""

    plan: Plan
    environment: Environment
    api: EpisodesApi
    journal: Journal
    open_sandboxes: Callable[[], Awaitable[Sandboxes]]
    """Returns the sandboxes of this run. Raises SandboxFault where none work."""
    tell: Callable[[str], None]
    """Gets the lines of progress."""
    _group_faults: dict[str, int] = field(default_factory=dict)
    _barren: int = 0
    _waits: bool = False

    async def train(self) -> None:
        """Play groups until the plan's number is whole. Raises EnvironmentFault if no task can be played.

        With `eval.every_versions` the version that serves at the end is evaluated, too.
        """
        curriculum = self._curriculum()
        open_groups = [group for group in self.journal.of_split("train") if not group.is_whole]
        by_id = {task.id: task for task in curriculum.tasks}
        async with asyncio.TaskGroup() as tasks:
            is_played = asyncio.Event()
            if self.plan.eval.every_versions:
                tasks.create_task(self._evaluate_beside(is_played))
            await self._groups(tasks, curriculum, open_groups, by_id)
            is_played.set()

    async def evaluate(self) -> dict[str, object]:
        """Play the held-out tasks, and return the figures, which the journal keeps too."""
        plan = self.plan.eval
        tasks = whole_tasks(self.environment, "eval")[: plan.tasks]
        version, number = await self.api.version(), len(self.journal.evaluations)
        await self._abort_open("eval")
        slots = asyncio.Semaphore(plan.concurrency)
        played: list[tuple[Task, GroupRecord]] = []
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                name = f"{self.journal.run}-e{number}-{len(self.journal.groups)}"
                group = GroupRecord(name, task.id, task.kind, plan.samples, "eval", version)
                await self.journal.begin(group)
                played.append((task, group))
                ready = asyncio.Event()
                ready.set()
                for member in range(plan.samples):
                    await slots.acquire()
                    running.create_task(self._member(group, member, _Play(task, "eval", ready), slots.release))
        newest = await self.api.version()
        passes, rewards, kinds = {}, [], []
        for task, group in played:
            await self.journal.whole(group)
            found = [outcome for outcome, _ in group.outcomes()]
            passes[task.id] = [outcome.passed for outcome in found]
            rewards += [outcome.reward for outcome in found]
            kinds += [(task.kind, outcome.passed) for outcome in found]
        result = {"version": version, "newest": newest, "time": time.time(), **figures(passes, rewards)}
        if rates := by_kind(kinds):
            result["kinds"] = rates
        await self.journal.evaluated(result)
        self.tell(line_of(result))
        return result

    def _curriculum(self) -> Curriculum:
        train, plan = whole_tasks(self.environment, "train"), self.plan
        if plan.eval.every_versions:
            held_out = {task.id for task in whole_tasks(self.environment, "eval")}
            if both := next((task.id for task in train if task.id in held_out), None):
                raise SettingsError(f"the task {both!r} of the environment is in both splits")
        curriculum = Curriculum(train, plan.seed, plan.train.fade, plan.train.floor)
        for group in self.journal.of_split("train"):
            if group.is_whole:
                curriculum.saw(group.task, group.kind, [outcome for outcome, _ in group.outcomes()])
        return curriculum

    async def _groups(
        self, tasks: asyncio.TaskGroup, curriculum: Curriculum, left_open: list[GroupRecord], by_id: dict[str, Task]
    ) -> None:
        plan, pauses = self.plan.train, Backoff(_FIRST_PAUSE_S, 60.0)
        slots = asyncio.Semaphore(plan.concurrency)
        number = len(self.journal.of_split("train"))
        running: set[asyncio.Task[None]] = set()
        for group in left_open:
            if group.task not in by_id:
                log.warning("agents_task_is_gone", task=group.task)
                await self.journal.whole(group)
                continue
            await self._start(tasks, group, by_id[group.task], slots, curriculum, running)
        while not plan.groups or number < plan.groups:
            task = curriculum.next(number)
            if task is None:
                raise NoTasksLeft("no task of the environment can be played: the lines above say why")
            group = GroupRecord(
                f"{self.journal.run}-{number}", task.id, task.kind, plan.group_size, "train", await self.api.version()
            )
            await self.journal.begin(group)
            number += 1
            await self._start(tasks, group, task, slots, curriculum, running)
            if self._barren >= _BARREN:
                pause_s = pauses.next_s()
                self.tell(f"! {self._barren} groups in a row without an outcome; the next try is in {pause_s:g} s")
                await asyncio.sleep(pause_s)
            else:
                pauses.reset()
        await asyncio.gather(*running)

    async def _start(
        self,
        tasks: asyncio.TaskGroup,
        group: GroupRecord,
        task: Task,
        slots: asyncio.Semaphore,
        curriculum: Curriculum,
        running: "set[asyncio.Task[None]]",
    ) -> None:
        """Start the members of a group, each as soon as a slot is free, and what follows their end."""
        members, ready = [], asyncio.Event()
        if group.members:  # of a run before
            ready.set()
        for member in range(group.size):
            await slots.acquire()
            play = _Play(task, "train", ready)
            members.append(tasks.create_task(self._member(group, member, play, slots.release)))

        async def finish() -> None:
            await asyncio.wait(members)  # not `gather`, which would cancel the members a second time
            await self._finish(group, task, curriculum)

        after = tasks.create_task(finish())
        running.add(after)
        after.add_done_callback(running.discard)

    async def _finish(self, group: GroupRecord, task: Task, curriculum: Curriculum) -> None:
        await self.journal.whole(group)
        found = list(group.outcomes())
        curriculum.saw(group.task, group.kind, [outcome for outcome, _ in found])
        if not found:
            self._barren += 1
            faults = self._group_faults[task.id] = self._group_faults.get(task.id, 0) + 1
            is_bad = faults >= _FAULTS_TO_SET_ASIDE and task.id not in curriculum.set_aside
            if is_bad and (self._barren < _BARREN or len(curriculum.tasks) == 1):
                curriculum.set_aside.add(task.id)
                self.tell(f"! the task {task.id} is set aside: no episode of it could be played")
            return
        self._barren = 0
        self._group_faults.pop(task.id, None)
        whole = sum(group.is_whole for group in self.journal.of_split("train"))
        rewards = [outcome.reward for outcome, _ in found]
        self.tell(
            f"group {whole}{f'/{self.plan.train.groups}' if self.plan.train.groups else ''}"
            f"  {task.kind or task.id}  version {group.version}  reward {sum(rewards) / len(rewards):+.2f}"
            f"  passed {sum(outcome.passed for outcome, _ in found)}/{len(found)}"
            + (f"  truncated {cut}" if (cut := sum(was_cut for _, was_cut in found)) else "")
            + (f"  aborted {group.size - len(found)}" if len(found) < group.size else "")
        )

    async def _member(self, group: GroupRecord, member: int, play: _Play, release: Callable[[], None]) -> None:
        """Play one member to its end: an outcome that the server has, or an abort and no retries left."""
        try:
            attempts = group.members.get(member, [])
            before = attempts[-1] if attempts else None
            if before is not None and before.stage in ("ended", "scored"):
                if before.stage == "scored":
                    await self._send(group, before)
                return
            if before is not None and before.stage == "opened":
                await self._abort(group, before, "the runner ended", retry=True)
            while await self._attempt(group, member, play):
                play.faults += 1
        finally:
            play.ready.set()
            release()

    async def _attempt(self, group: GroupRecord, member: int, play: _Play) -> bool:
        """Play one episode. Return True if its environment failed and another episode takes its place."""
        is_last = play.faults >= self.plan.train.retries
        number = len(group.members.get(member, ()))
        name = f"{group.id}-{member}" + (f".{number}" if number else "")
        in_group = (group.id, group.size) if group.split == "train" else (None, 1)
        if member:
            await play.ready.wait()
        if number:
            # A stop or a kill may have come between the journal's line and the server's answer. Until the server knows
            # of the abort, the former episode has this place of the group.
            await self._tell_aborted(group.members[member][-1], retry=True)
        attempt = await self.journal.opened(group, member, name)
        try:
            base_url = await self.api.open(Member(name, play.task.id, group.split, *in_group), self._told_to_wait)
        except Refused as error:
            await self.journal.aborted(group, attempt, f"not opened: {error}")
            if error.is_of_every_episode:
                raise
            if number == 0:  # the place of an aborted one: its group may be closed by now
                self._fault(play.task, f"the server refused the episode: {error}")
            return False
        except ServerGone as error:
            await self.journal.aborted(group, attempt, "not opened: the server is gone")
            self._fault(play.task, str(error))
            return not is_last
        finally:
            play.ready.set()
        try:
            outcome, truncated = await self._play(name, base_url, play)
        except EnvironmentFault as error:
            self._fault(play.task, str(error))
            await self._abort(group, attempt, str(error), retry=not is_last)
            return not is_last
        except asyncio.CancelledError:
            await asyncio.shield(self._abort_now(group, attempt))
            raise
        await self.journal.scored(group, attempt, outcome, truncated=truncated)
        await self._send(group, attempt)
        return False

    async def _play(self, name: str, base_url: str, play: _Play) -> tuple[Outcome, bool]:
        plan = self.plan
        limits = plan.limits
        sampling = {**plan.sampling, **(plan.eval.sampling if play.split == "eval" else {})}
        episode = Episode(
            name, base_url, self.api, self.open_sandboxes, split=play.split, limits=limits, sampling=sampling
        )
        try:
            async with asyncio.timeout(limits.setup_s + limits.act_s + limits.check_s + _GRACE_S) as bound:
                outcome = await self.environment.run(play.task, episode)
        except EnvironmentFault:
            raise
        except EpisodeOver as error:
            raise EnvironmentFault("the environment asks the policy outside of `episode.acting()`") from error
        except TimeoutError as error:
            what = "hangs: it did not end within its limits" if bound.expired() else f"failed: {error!r}"
            raise EnvironmentFault(f"the environment {what}") from error
        except Exception as error:
            log.debug("agents_environment_failed", task=play.task.id, exc_info=True)
            raise EnvironmentFault(f"the environment failed: {error!r}") from error
        if not isinstance(outcome, Outcome):
            raise EnvironmentFault(f"the environment returned {type(outcome).__name__} in place of an Outcome")
        return outcome, episode.truncated

    async def _send(self, group: GroupRecord, attempt: Attempt) -> None:
        assert attempt.outcome is not None
        try:
            await self.api.end(attempt.episode_id, attempt.outcome, truncated=attempt.truncated)
        except Refused as error:  # without a turn, expired, or ended by another hand: it does not count
            self.tell(f"! the server refused the outcome of {attempt.episode_id}: {error}")
            await self._abort(group, attempt, f"the server refused the outcome: {error}")
        except ServerGone as error:  # sent again by the next run
            self.tell(f"! {error}; the outcome of {attempt.episode_id} is kept in the journal")
        else:
            await self.journal.ended(group, attempt)

    async def _abort(self, group: GroupRecord, attempt: Attempt, reason: str, *, retry: bool = False) -> None:
        await self.journal.aborted(group, attempt, reason)
        await self._tell_aborted(attempt, retry=retry)

    async def _tell_aborted(self, attempt: Attempt, *, retry: bool) -> None:
        """Tell the server of an abort, which may be told again."""
        try:
            await self.api.abort(attempt.episode_id, attempt.reason, retry=retry)
        except (Refused, ServerGone) as error:  # never opened there, or it expires there by itself
            log.debug("agents_abort_refused", episode=attempt.episode_id, error=str(error))

    async def _abort_now(self, group: GroupRecord, attempt: Attempt) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                await self._abort(group, attempt, "the runner was stopped", retry=True)
        except TimeoutError:
            pass  # the server expires it

    async def _abort_open(self, split: Split) -> None:
        """Abort the episodes that an evaluation of a killed run left open; a new evaluation plays all anew."""
        for group in self.journal.of_split(split):
            if not group.is_whole:
                for attempts in group.members.values():
                    for attempt in attempts:
                        if attempt.stage in ("opened", "scored"):
                            await self._abort(group, attempt, "the evaluation was not finished")
                await self.journal.whole(group)

    async def _evaluate_beside(self, is_played: asyncio.Event) -> None:
        """Evaluate every so many versions, and the last one when the groups are played."""
        last = max((r["version"] for r in self.journal.evaluations if r["version"] is not None), default=None)
        while True:
            is_over, version = is_played.is_set(), await self.api.version()
            newer = 1 if is_over else self.plan.eval.every_versions
            if version is not None and (last is None or version >= last + newer):
                last = version
                try:
                    await self.evaluate()
                except EnvironmentFault as error:
                    self.tell(f"! no evaluation: {error}")
            if is_over:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_VERSION_EVERY_S):
                    await is_played.wait()

    def _fault(self, task: Task, words: str) -> None:
        log.warning("agents_environment_fault", task=task.id, error=words)

    def _told_to_wait(self, _seconds: float) -> None:
        if not self._waits:
            self._waits = True
            self.tell("enough groups wait for training: from now on a new one waits until the trainer took one")


def line_of(result: "dict[str, object]") -> str:
    """Return one line that tells the figures of an evaluation."""
    if not result.get("episodes"):
        return f"eval  version {result['version']}  no episode could be played"
    more = [f"{name} {value:.3f}" for name, value in result.items() if name.startswith("pass@") and name != "pass@1"]
    kinds = result.get("kinds")
    if isinstance(kinds, dict):
        more += [f"{kind} {rate:.2f}" for kind, rate in kinds.items()]
    one, low, high = (result[name] for name in ("pass@1", "low", "high"))
    return f"eval  version {result['version']}  pass@1 {one:.3f} [{low:.3f}, {high:.3f}] of {result['tasks']} tasks" + (
        "  " + "  ".join(more) if more else ""
    )
