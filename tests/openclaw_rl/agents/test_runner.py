"""The runner against a fake of the server's episodes: what is counted, aborted, tried again, and told."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fake_episodes import FakeEpisodes, Kept, context_full
from fastapi.responses import JSONResponse

from openclaw_rl.agents.api import EpisodesApi
from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.episode import Episode
from openclaw_rl.agents.journal import Journal
from openclaw_rl.agents.plan import Plan
from openclaw_rl.agents.runner import NoTasksLeft, Runner
from openclaw_rl.agents.sandbox import Sandboxes
from openclaw_rl.errors import EnvironmentFault, SettingsError

Play = Callable[[Task, Episode], Awaitable[Outcome]]


async def one_turn(task: Task, episode: Episode) -> Outcome:
    async with episode.acting():
        reply = await episode.ask([{"role": "user", "content": task.id}])
        return Outcome(1.0 if reply.text == "ok" else -1.0)
    return Outcome(-1.0)


@dataclass
class Words:
    """An environment of a few words; each of its parts can be replaced."""

    play: Play = one_turn
    train: int = 4
    held_out: int = 3
    at_once: int = 0
    most_at_once: int = 0
    seen: list[str] = field(default_factory=list)

    def tasks(self, split: Split) -> list[Task]:
        return [Task(f"{split}-{n}", kind="word") for n in range(self.train if split == "train" else self.held_out)]

    async def run(self, task: Task, episode: Episode) -> Outcome:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.seen.append(task.id)
        try:
            return await self.play(task, episode)
        finally:
            self.at_once -= 1


@dataclass
class Run:
    """One runner at a time on one folder."""

    fake: FakeEpisodes
    folder: Path
    lines: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def __call__(self, environment: object, **plan: Mapping[str, object]):
        async def none() -> Sandboxes:
            raise AssertionError("no sandbox was asked for")

        journal = Journal(self.folder, "words", self.lines.append)
        whole = Plan.model_validate({"environment": "words", "folder": self.folder, "server": "http://server", **plan})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.fake.app)) as client:
            api = EpisodesApi(client, "http://server", "key")
            try:
                yield Runner(whole, environment, api, journal, none, self.lines.append)  # type: ignore[arg-type]
            finally:
                journal.close()


@pytest.fixture
def fake() -> FakeEpisodes:
    return FakeEpisodes()


@pytest.fixture
def run(fake: FakeEpisodes, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Runner]]:
    return Run(fake, tmp_path)


def told(run: Run, words: str) -> list[str]:
    return [line for line in run.lines if words in line]


def counted(fake: FakeEpisodes) -> list[Kept]:
    return [kept for kept in fake.episodes.values() if kept.outcome is not None]


async def test_groups_of_one_task_end_with_their_outcomes(fake: FakeEpisodes, run: Run) -> None:
    full = asyncio.Event()

    async def play(task: Task, episode: Episode) -> Outcome:
        if environment.at_once == 4:
            full.set()
        await full.wait()
        return await one_turn(task, episode)

    environment = Words(play)
    async with run(environment, train={"groups": 6, "group_size": 3, "concurrency": 4}) as runner:
        await runner.train()
    groups = fake.groups()
    assert len(groups) == 6
    for members in groups.values():
        assert len(members) == 3
        assert len({kept.body["task"] for kept in members}) == 1
        assert all(kept.outcome == {"reward": 1.0, "truncated": False, "metrics": {}} for kept in members)
    assert environment.most_at_once == 4
    assert fake.keys == {"Bearer key"}
    assert len(told(run, "passed 3/3")) == 6


async def test_a_second_start_does_nothing_when_all_is_done(fake: FakeEpisodes, run: Run) -> None:
    for _ in range(2):
        async with run(Words(), train={"groups": 2, "group_size": 2}) as runner:
            await runner.train()
    assert [kept.posts for kept in fake.episodes.values()] == [1] * 4


async def test_an_environments_fault_is_aborted_and_played_again(fake: FakeEpisodes, run: Run) -> None:
    faults = iter(range(2))

    async def play(task: Task, episode: Episode) -> Outcome:
        if next(faults, None) is not None:
            raise EnvironmentFault("the disk is full")
        return await one_turn(task, episode)

    async with run(Words(play), train={"groups": 1, "group_size": 2, "concurrency": 1}) as runner:
        await runner.train()
    aborted = [kept.aborted for kept in fake.episodes.values() if kept.aborted]
    assert aborted == [{"reason": "the disk is full", "retry": True}] * 2
    assert len(counted(fake)) == 2


async def test_a_user_without_tokens_is_a_fault_and_no_lost_episode(fake: FakeEpisodes, run: Run) -> None:
    answers = iter(((429, "80000"), (429, "0.1")))

    def say(task: str, messages: list[dict[str, object]]) -> str | JSONResponse:
        status, after = next(answers, (200, ""))
        fault = {"error": {"message": "ann has used 9 tokens today", "code": "rate_limit_exceeded"}}
        return "ok" if status == 200 else JSONResponse(fault, status, {"retry-after": after})

    fake.script = say
    async with run(Words(), train={"groups": 1, "group_size": 2, "concurrency": 1}) as runner:
        await runner.train()
    aborted = [kept.aborted["reason"] for kept in fake.episodes.values() if kept.aborted]
    assert aborted == ["the server refused a chat: 429: ann has used 9 tokens today"]
    assert [kept.outcome["reward"] for kept in counted(fake)] == [1.0, 1.0]


async def test_the_last_fault_has_no_retry_and_the_others_count(fake: FakeEpisodes, run: Run) -> None:
    async def play(task: Task, episode: Episode) -> Outcome:
        if "-1" in episode.id.removeprefix(episode.id.split("-")[0] + "-0"):
            raise EnvironmentFault("broken")
        return await one_turn(task, episode)

    async with run(Words(play), train={"groups": 1, "group_size": 2, "retries": 1}) as runner:
        await runner.train()
    assert [kept.aborted["retry"] for kept in fake.episodes.values() if kept.aborted] == [True, False]
    assert len(counted(fake)) == 1
    assert told(run, "aborted 1")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Outcome(math.nan), "scored nan"),
        (lambda: Outcome(2.0), "scored 2.0"),
        (lambda: None, "NoneType in place of an Outcome"),
        (lambda: {}["x"], "KeyError"),
    ],
)
async def test_a_wrong_outcome_is_the_environments_fault(
    fake: FakeEpisodes, run: Run, wrong: Callable[[], Outcome], words: str
) -> None:
    async def play(task: Task, episode: Episode) -> Outcome:
        return wrong()

    async with run(
        Words(play, train=1), train={"groups": 9, "group_size": 1, "retries": 0, "concurrency": 1}
    ) as runner:
        with pytest.raises(ExceptionGroup) as ended:
            await runner.train()
    assert isinstance(ended.value.exceptions[0], NoTasksLeft)
    assert all(words in kept.aborted["reason"] for kept in fake.episodes.values() if kept.aborted)
    assert len(told(run, "train-0 is set aside")) == 1
    assert not counted(fake)


async def test_a_task_that_cannot_be_played_is_set_aside_and_the_others_go_on(fake: FakeEpisodes, run: Run) -> None:
    async def play(task: Task, episode: Episode) -> Outcome:
        if task.id == "train-1":
            raise EnvironmentFault("its task.toml is broken")
        return await one_turn(task, episode)

    environment = Words(play, train=2)
    async with run(environment, train={"groups": 12, "group_size": 2, "retries": 0, "concurrency": 1}) as runner:
        await runner.train()
    assert environment.seen.count("train-1") == 4
    assert len(told(run, "set aside")) == 1


async def test_limits_of_acting_end_it_scored_and_truncated(fake: FakeEpisodes, run: Run) -> None:
    async def play(task: Task, episode: Episode) -> Outcome:
        async with episode.acting():
            while True:
                await episode.ask([{"role": "user", "content": "on"}])
        return Outcome(0.5, {"steps": episode.steps})

    async with run(Words(play), train={"groups": 1, "group_size": 1}, limits={"steps": 3}) as runner:
        await runner.train()
    (kept,) = fake.episodes.values()
    assert kept.outcome == {"reward": 0.5, "truncated": True, "metrics": {"steps": 3}}
    assert len(kept.chats) == 3
    assert told(run, "truncated 1")


@pytest.mark.parametrize("limits", [{"tokens": 4}, {"act_s": 0.2}, {}])
async def test_tokens_time_and_the_context_are_limits_too(
    fake: FakeEpisodes, run: Run, limits: dict[str, float]
) -> None:
    fake.script = lambda task, messages: "two words" if limits or len(messages) < 3 else context_full()

    async def play(task: Task, episode: Episode) -> Outcome:
        messages = [{"role": "user", "content": "on"}]
        async with episode.acting():
            while True:
                reply = await episode.ask(messages)
                messages.append({"role": "assistant", "content": reply.text})
                await asyncio.sleep(0.05)
        return Outcome(-1.0)

    whole = {"steps": 1000, **limits}
    async with run(Words(play), train={"groups": 1, "group_size": 1}, limits=whole) as runner:
        await runner.train()
    (kept,) = fake.episodes.values()
    assert kept.outcome is not None
    assert kept.outcome["truncated"]


async def test_a_hung_environment_and_a_hung_check_are_faults_and_the_run_goes_on(
    fake: FakeEpisodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_rl.agents.runner._GRACE_S", 0.1)
    hangs = iter(["check", "all"])

    async def play(task: Task, episode: Episode) -> Outcome:
        match next(hangs, None):
            case "check":
                async with episode.checking():
                    await asyncio.sleep(1000)
            case "all":
                await asyncio.sleep(1000)
        return await one_turn(task, episode)

    limits = {"setup_s": 0.1, "act_s": 5, "check_s": 0.1}
    async with run(Words(play), train={"groups": 1, "group_size": 1}, limits=limits) as runner:
        await runner.train()
    reasons = [kept.aborted["reason"] for kept in fake.episodes.values() if kept.aborted]
    assert reasons == ["the check did not end within 0.1 s", "the environment hangs: it did not end within its limits"]
    assert len(counted(fake)) == 1


async def test_a_full_queue_holds_new_groups_and_says_so_once(fake: FakeEpisodes, run: Run) -> None:
    fake.max_ahead = 1
    async with run(Words(), train={"groups": 3, "group_size": 2}) as runner:
        running = asyncio.create_task(runner.train())
        while fake.refused < 3:
            await asyncio.sleep(0.02)
        assert len(fake.groups()) == 1
        while not running.done():
            fake.trained |= set(fake.groups())
            await asyncio.sleep(0.02)
        await running
    assert len(counted(fake)) == 6
    assert len(told(run, "enough groups wait for training")) == 1
    assert fake.refused < 20  # one member asks for its whole group


async def stopped_in_the_middle(fake: FakeEpisodes, run: Run) -> None:
    """Play a group of two until each had a chat, and stop the run."""

    async def play(task: Task, episode: Episode) -> Outcome:
        await episode.ask([])
        await asyncio.sleep(1000)
        raise AssertionError

    async with run(Words(play), train={"groups": 1, "group_size": 2}) as runner:
        running = asyncio.create_task(runner.train())
        while sum(len(kept.chats) for kept in fake.episodes.values()) < 2:
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_stopped_run_aborts_what_it_plays(fake: FakeEpisodes, run: Run) -> None:
    await stopped_in_the_middle(fake, run)
    assert [kept.aborted["reason"] for kept in fake.episodes.values() if kept.aborted] == ["the runner was stopped"] * 2
    async with run(Words(), train={"groups": 1, "group_size": 2}) as runner:
        await runner.train()
    assert len(counted(fake)) == 2
    assert len(fake.groups()) == 1


async def test_an_abort_that_never_arrived_is_told_again_before_another_episode_takes_its_place(
    fake: FakeEpisodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop, or a kill, between the journal's line and the server's answer."""
    monkeypatch.setattr("openclaw_rl.agents.runner._STOP_S", 0.05)
    fake.hears_aborts = False
    await stopped_in_the_middle(fake, run)
    assert not [kept for kept in fake.episodes.values() if kept.aborted]
    fake.hears_aborts = True
    async with run(Words(), train={"groups": 1, "group_size": 2}) as runner:
        await runner.train()
    assert [kept.aborted["retry"] for kept in fake.episodes.values() if kept.aborted] == [True, True]
    assert len(counted(fake)) == 2


async def test_an_outcome_that_the_server_refuses_does_not_count(fake: FakeEpisodes, run: Run) -> None:
    async def play(task: Task, episode: Episode) -> Outcome:
        fake.episodes[episode.id].outcome = {"reward": 1.0}  # by another hand
        return Outcome(-1.0)

    async with run(Words(play), train={"groups": 1, "group_size": 1}) as runner:
        await runner.train()
    assert told(run, "the server refused the outcome of ")
    assert told(run, "409")


async def test_an_evaluation_has_its_figures_and_its_version(fake: FakeEpisodes, run: Run) -> None:
    fake.version = 7
    fake.script = lambda task, messages: "no" if task == "eval-1" else "ok"
    async with run(Words(held_out=4), eval={"tasks": 3, "samples": 2}) as runner:
        result = await runner.evaluate()
    assert (result["version"], result["tasks"], result["episodes"]) == (7, 3, 6)
    assert result["pass@1"] == pytest.approx(2 / 3)
    assert result["pass@2"] == pytest.approx(2 / 3)
    assert 0.1 < result["low"] < 2 / 3 < result["high"] < 1
    assert {kept.body["task"] for kept in fake.of_split("eval").values()} == {"eval-0", "eval-1", "eval-2"}
    assert all("group" not in kept.body for kept in fake.episodes.values())
    assert told(run, "eval  version 7  pass@1 0.667")


async def test_an_evaluation_may_sample_in_its_own_way(run: Run) -> None:
    seen: dict[str, object] = {}

    async def play(task: Task, episode: Episode) -> Outcome:
        seen[task.id] = dict(episode.sampling)
        return await one_turn(task, episode)

    plan = {"sampling": {"temperature": 1.0, "max_tokens": 9}, "train": {"groups": 1, "group_size": 1}}
    async with run(Words(play, train=1, held_out=1), **plan, eval={"sampling": {"temperature": 0.0}}) as runner:
        await runner.train()
        await runner.evaluate()
    assert seen == {
        "train-0": {"temperature": 1.0, "max_tokens": 9},
        "eval-0": {"temperature": 0.0, "max_tokens": 9},
    }


async def test_evaluations_run_beside_training_every_few_versions(
    fake: FakeEpisodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_rl.agents.runner._VERSION_EVERY_S", 0.01)
    environment = Words()

    async def play(task: Task, episode: Episode) -> Outcome:
        if task.id.startswith("train"):
            while len(told(run, f"eval  version {fake.version // 2 * 2} ")) == 0:
                await asyncio.sleep(0.01)
            fake.version += 1
        return await one_turn(task, episode)

    environment.play = play
    plan = {"groups": 5, "group_size": 1, "concurrency": 1}
    async with run(environment, train=plan, eval={"every_versions": 2}) as runner:
        await runner.train()
    assert fake.version == 5
    assert [line.split()[2] for line in told(run, "eval  version")] == ["0", "2", "4", "5"]


async def test_an_evaluation_that_runs_when_the_groups_are_played_comes_to_its_end(
    fake: FakeEpisodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_rl.agents.runner._VERSION_EVERY_S", 0.01)
    environment, begun, goes_on = Words(train=1, held_out=1), asyncio.Event(), asyncio.Event()

    async def play(task: Task, episode: Episode) -> Outcome:
        if task.id.startswith("eval"):
            begun.set()
            await goes_on.wait()
        else:
            await begun.wait()
        return await one_turn(task, episode)

    environment.play = play
    async with run(environment, train={"groups": 1, "group_size": 1}, eval={"every_versions": 4}) as runner:
        running = asyncio.create_task(runner.train())
        while not any(group.is_whole for group in runner.journal.of_split("train")):
            await asyncio.sleep(0.01)
        goes_on.set()
        await running
    assert [line.split()[2] for line in told(run, "eval  version")] == ["0"]


async def test_a_task_in_both_splits_is_refused(run: Run) -> None:
    class Both(Words):
        def tasks(self, split: Split) -> list[Task]:
            return [Task("same")]

    async with run(Both(), eval={"every_versions": 1}) as runner:
        with pytest.raises(SettingsError, match="'same' of the environment is in both splits"):
            await runner.train()


async def test_nothing_works_for_a_while_and_then_the_run_goes_on(
    fake: FakeEpisodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, say: no task is set aside for it."""
    monkeypatch.setattr("openclaw_rl.agents.runner._FIRST_PAUSE_S", 0.01)
    broken = True

    async def play(task: Task, episode: Episode) -> Outcome:
        if broken:
            raise EnvironmentFault("No space left on device")
        return await one_turn(task, episode)

    async with run(
        Words(play, train=8), train={"groups": 12, "group_size": 1, "retries": 0, "concurrency": 1}
    ) as runner:
        running = asyncio.create_task(runner.train())
        while not told(run, "groups in a row without an outcome"):
            await asyncio.sleep(0.01)
        broken = False
        await running
    assert len(counted(fake)) >= 6
    assert not told(run, "set aside")
