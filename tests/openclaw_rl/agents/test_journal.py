"""The journal: what a kill leaves, a full disk, a second runner; and `agents run` killed twenty times."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_episodes import FakeEpisodes, served

from openclaw_rl.agents.environment import Outcome
from openclaw_rl.agents.journal import GroupRecord, Journal, Records
from openclaw_rl.errors import SettingsError


async def a_group(journal: Journal) -> GroupRecord:
    group = GroupRecord("g", "task", "kind", 2, "train", 3)
    await journal.begin(group)
    for member in range(2):
        attempt = await journal.opened(group, member, f"g-{member}")
        await journal.scored(group, attempt, Outcome(0.5, {"steps": 2}), truncated=member == 1)
    await journal.ended(group, group.attempt("g-0"))
    return group


async def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "words")
    group = await a_group(journal)
    await journal.evaluated({"version": 1})
    assert Records.of_folder(tmp_path, "words").groups == {"g": group}
    journal.close()
    again = Journal(tmp_path, "words")
    assert (again.run, again.groups, again.evaluations) == (journal.run, {"g": group}, [{"version": 1}])
    assert [stage.stage for attempts in group.members.values() for stage in attempts] == ["ended", "scored"]
    assert list(group.outcomes()) == [(Outcome(0.5, {"steps": 2}), False), (Outcome(0.5, {"steps": 2}), True)]
    again.close()


async def test_half_a_line_of_a_kill_is_cut_off(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "words")
    group = await a_group(journal)
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"what":"ended","gro')
    again = Journal(tmp_path, "words")
    await again.ended(again.groups["g"], again.groups["g"].attempt("g-1"))
    again.close()
    assert Records.of_folder(tmp_path, "words").groups["g"].attempt("g-1").stage == "ended"
    assert group.attempt("g-1").stage == "scored"


async def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    journal = Journal(tmp_path, "words", lines.append)
    write, full = os.write, iter([3, None])  # half a line, then nothing

    def limited(file: int, data: memoryview) -> int:
        match next(full, 0):
            case 3:
                return write(file, data[:3])
            case None:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("openclaw_rl.agents.journal.os.write", limited)
    monkeypatch.setattr("openclaw_rl.agents.journal._FIRST_PAUSE_S", 0.01)
    await journal.begin(GroupRecord("g", "task", "", 1, "train", None))
    journal.close()
    assert lines == [
        f"! the journal {journal.path} cannot be written (No space left on device); the run waits",
        "the journal can be written again",
    ]
    assert list(Records.of_folder(tmp_path, "words").groups) == ["g"]


def test_one_runner_at_a_time_and_of_one_environment(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "words")
    with pytest.raises(SettingsError, match="another run writes"):
        Journal(tmp_path, "words")
    journal.close()
    with pytest.raises(SettingsError, match="is of a run of words; name another folder"):
        Journal(tmp_path, "other")
    journal.path.write_text("junk\n")
    with pytest.raises(SettingsError, match="line 1 is no event of a run"):
        Journal(tmp_path / ".", "words")
    with pytest.raises(SettingsError, match="no run in"):
        Records.of_folder(tmp_path / "none", "words")


PLAY = """
import asyncio, random, sys
from pathlib import Path
import httpx
from openclaw_rl.agents.api import EpisodesApi
from openclaw_rl.agents.environment import Outcome, Task
from openclaw_rl.agents.journal import Journal
from openclaw_rl.agents.plan import Plan
from openclaw_rl.agents.runner import Runner

class Words:
    def tasks(self, split):
        return [Task(f"{split}-{n}") for n in range(5)]

    async def run(self, task, episode):
        async with episode.acting():
            for _ in range(random.randint(1, 3)):
                await episode.ask([{"role": "user", "content": "on"}])
                await asyncio.sleep(0.02)
        return Outcome(random.choice([-1.0, 1.0]))

async def main(url, folder):
    train = {"groups": 100, "group_size": 4, "concurrency": 8}
    plan = Plan(environment="words", folder=Path(folder), server=url, train=train)
    async with httpx.AsyncClient() as client:
        journal = Journal(plan.folder, "words")
        await Runner(plan, Words(), EpisodesApi(client, url), journal, None, lambda line: None).train()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.timeout(900)
def test_a_runner_that_is_killed_twenty_times_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    fake, dice = FakeEpisodes(), random.Random(0)
    with served(fake) as url:
        argv = [sys.executable, "-c", PLAY, url, str(tmp_path)]
        for kill in range(20):
            before = len(fake.episodes)
            with subprocess.Popen(argv) as runner:
                end = time.monotonic() + 60
                more = dice.randint(2, 9)
                while runner.poll() is None and len(fake.episodes) < before + more and time.monotonic() < end:
                    time.sleep(0.005)
                time.sleep(dice.random() * 0.1)
                assert runner.poll() is None, f"it ended before kill {kill}"
                runner.send_signal(signal.SIGKILL)
        assert subprocess.run(argv, check=False, timeout=120).returncode == 0
    groups = fake.groups()
    assert len(groups) == 100
    for members in groups.values():
        assert sum(kept.outcome is not None for kept in members) == 4
        assert all((kept.outcome is None) != (kept.aborted is None) for kept in members)
        assert len({kept.body["task"] for kept in members}) == 1
    records = Records.of_folder(tmp_path, "words")
    told = {a.episode_id: a for g in records.groups.values() for many in g.members.values() for a in many}
    for name, kept in fake.episodes.items():
        attempt = told[name]
        assert (attempt.stage == "ended") == (kept.outcome is not None)
        assert attempt.outcome is None or kept.outcome is None or attempt.outcome.reward == kept.outcome["reward"]
