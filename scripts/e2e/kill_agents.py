"""Check of episodes under SIGKILL of real processes: runner, server, embedded engine, LoRA trainer, sandboxes.

    scripts/e2e.sh kill_agents FOLDER [--kills 20] [--seed 0] [--log FILE] [any flag of `openclaw-rl serve`]

It needs bubblewrap. A runner plays groups of four episodes, each of three chats and three commands in a sandbox; the
outcome follows from the episode's id. SIGKILL comes at random moments, and the targets take turns in a random order.
This script restarts the runner and the server; the server restarts its children. After each kill the ledger is
audited from its file alone. At the end the open groups are played to their end, and journal and ledger are compared.
Every outcome that the journal has is in the ledger once, and no other is. No group has another task or too many
members, none is trained in parts, and its advantages follow from its own outcomes. No process and no file of a sandbox
is left. The exit code is 1 if there is a finding.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from e2e.openclaw_client import free_port
from openclaw_rl.agents.journal import Records
from openclaw_rl.testing import ledger_audit
from openclaw_rl.testing.running_server import RunningServer

TARGETS = ("runner", "server", "engine", "trainer", "sandbox")
SIZE, STEPS, REST_S = 4, 3, 300.0
ENVIRONMENT = '''\
"""Episodes of three commands, whose outcome follows from the episode's id."""

import hashlib

from openclaw_rl.agents.environment import Outcome, Task


class Coins:
    needs_sandbox = True

    def tasks(self, split):
        return [Task(f"{split}/{number}", data={"number": number}) for number in range(24)]

    async def run(self, task, episode):
        messages = [{"role": "user", "content": f"Do task {task.data['number']}."}]
        async with episode.sandbox() as sandbox:
            async with episode.acting():
                for step in range({steps}):
                    reply = await episode.ask(messages)
                    done = await sandbox.run(f"sleep 0.1; echo step {step}")
                    messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": done.text}]
        return Outcome(1.0 if hashlib.sha256(episode.id.encode()).digest()[0] % 2 else -1.0)
'''.replace("{steps}", str(STEPS))


def reward_of(episode_id: str) -> float:
    return 1.0 if hashlib.sha256(episode_id.encode()).digest()[0] % 2 else -1.0


class RunnerProcess:
    """`openclaw-rl agents run` in a process that is killed and started again."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._url = folder, url
        self._process: subprocess.Popen[bytes] | None = None
        info = folder / "plugin" / "coins-0.dist-info"
        info.mkdir(parents=True)
        (info.parent / "coins.py").write_text(ENVIRONMENT)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coins\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[openclaw_rl.environments]\ncoins = coins:Coins\n")
        self.sandboxes = folder / "sandboxes"
        self.sandboxes.mkdir(mode=0o755)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, groups: int = 0) -> None:
        """Start it, for this number of groups of the whole run; 0: until it is stopped."""
        plan = self.folder / "plan.toml"
        plan.write_text(
            f'environment = "coins"\nfolder = "run"\nserver = "{self._url}"\n'
            "sampling = { temperature = 1.0, max_tokens = 6 }\n"
            f"[train]\ngroups = {groups}\ngroup_size = {SIZE}\nconcurrency = 8\nretries = 50\n"
            f'[sandbox]\nkind = "bubblewrap"\nfolder = "{self.sandboxes}"\n'
        )
        path = os.pathsep.join(filter(None, (str(self.folder / "plugin"), os.environ.get("PYTHONPATH"))))
        argv = [sys.executable, "-m", "openclaw_rl", "agents", "run", str(plan)]
        environ = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        with (self.folder / "runner.log").open("ab") as out:
            self._process = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)

    def end(self, number: int) -> None:
        """Send a signal, and wait."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(120)

    def wait(self, timeout_s: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def boxes(self) -> list[int]:
        """Return the processes of its open sandboxes."""
        return [pid for pid, parent in processes_of(self.sandboxes) if parent == self.pid]

    def left(self) -> list[str]:
        """Return findings on what is left of sandboxes."""
        found = [f"process {pid} of a sandbox is left" for pid, _ in processes_of(self.sandboxes)]
        return found + [f"{folder.name} is left" for folder in self.sandboxes.iterdir()]


def processes_of(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield (process, its parent) of each bwrap whose words name a folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"bwrap") and any(word.startswith(bytes(folder)) for word in words):
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue


def _gone(what: Callable[[], Sequence[object]], timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Campaign:
    def __init__(self, server: RunningServer, runner: RunnerProcess, dice: random.Random, say: Callable[[str], None]):
        self._server, self._runner, self._dice, self._say = server, runner, dice, say
        self._started = time.monotonic()
        self.findings: list[str] = []

    def run(self, kills: int) -> None:
        """Kill so often; each target comes before any comes again."""
        self._runner.start()
        order: list[str] = []
        for number in range(1, kills + 1):
            order = order or self._dice.sample(TARGETS, len(TARGETS))
            self._kill(number, order.pop())

    def _kill(self, number: int, target: str) -> None:
        self._wait_for_play()
        time.sleep(self._dice.uniform(0, 3))
        at = time.monotonic() - self._started
        match target:
            case "runner":
                self._runner.end(signal.SIGKILL)
                if not _gone(lambda: list(processes_of(self._runner.sandboxes))):
                    self.findings.append(f"kill {number}: a killed runner left {len(self._runner.left())} sandboxes")
                self._runner.start()
            case "server":
                self._server.kill()
                self._audit(number)
                self._server.start()
            case "sandbox":
                self._kill_sandbox()
            case _:
                self._kill_child(target)
        self._audit(number)
        counts = self._server.status()["counts"]
        self._say(
            f"{at:6.1f} s: kill {number:2} {target:7} whole again after {time.monotonic() - self._started - at:5.1f} s,"
            f" {counts.get('episodes.ended', 0):4} ended, {counts.get('episodes.aborted', 0):3} aborted,"
            f" {counts['trained']:4} steps trained, findings {self.findings}"
        )

    def _wait_for_play(self) -> None:
        """Wait until two episodes more have ended, so that every kill meets a run at work."""
        before = self._server.status()["counts"].get("episodes.ended", 0)
        self._server.wait_for(
            "episodes go on", lambda now: now["counts"].get("episodes.ended", 0) >= before + 2, REST_S
        )

    def _kill_sandbox(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if boxes := self._runner.boxes():
                os.kill(self._dice.choice(boxes), signal.SIGKILL)
                return
            time.sleep(0.05)
        self.findings.append("no sandbox was there to be killed")

    def _kill_child(self, target: str) -> None:
        pid = next(child["pid"] for child in self._server.status()["children"] if child["name"] == target)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

        def is_back(now: Any) -> bool:
            (child,) = (child for child in now["children"] if child["name"] == target)
            return not now["problems"] and child["pid"] not in (None, pid)

        self._server.wait_for(f"the {target} is back", is_back, REST_S)

    def _audit(self, number: int) -> None:
        found = ledger_audit.audit(self._server.data_dir / "ledger.sqlite3", [], is_deep=True)
        self.findings += [f"kill {number}: {finding}" for finding in found]

    def rest(self) -> None:
        """Play the open groups to their end, wait until all is trained, and compare journal and ledger."""
        self._runner.end(signal.SIGTERM)
        journal = Records.of_folder(self._runner.folder / "run", "coins")
        self._runner.start(groups=max(1, len(journal.groups)))
        if code := self._runner.wait(REST_S):
            self.findings.append(f"the last run ended with {code}: runner.log says why")
        if not _gone(self._runner.left):
            self.findings += self._runner.left()

        def is_so(now: Any) -> bool:
            counts = now["counts"]
            if counts["sampled"]:
                self._server.admin("POST", "/v1/admin/train", {})
            moving = sum(
                counts[state]
                for state in ("running", "served", "paired", "judged", "sampled", "leased")
                if state in counts
            )
            return not moving and now["serving"] == now["tip"] and not now["problems"]

        self._server.wait_for("everything came to rest", is_so, REST_S)
        journal = Records.of_folder(self._runner.folder / "run", "coins")
        self.findings += [*ledger_audit.audit(self._server.data_dir / "ledger.sqlite3", [], is_deep=True)]
        self.findings += compared(journal, self._server.data_dir / "ledger.sqlite3")


def compared(journal: Records, ledger: Path) -> list[str]:
    """Return findings of outcomes, groups, advantages and batches, of a run at rest."""
    with closing(ledger_audit.open_read_only(ledger)) as db:
        query = (
            "SELECT episode.id, episode_id, episode.state, reward, has_successor, name, task, size, episode_group.state"
            " AS fate FROM episode JOIN episode_group ON episode_group.id = grp"
        )
        rows = db.execute(query).fetchall()
        query = (
            "SELECT of_episode, turn.reason, step, advantage, fence FROM turn JOIN request USING (id)"
            " LEFT JOIN credit USING (id) LEFT JOIN lease_sample ON turn = turn.id AND lease_sample.outcome = 'trained'"
        )
        steps = db.execute(query).fetchall()
    told = {a.episode_id: a for group in journal.groups.values() for tries in group.members.values() for a in tries}
    return [
        *_outcomes(journal, rows, {name: a for name, a in told.items() if a.stage in ("scored", "ended")}),
        *_groups(journal, rows),
        *_credit(rows, steps),
    ]


def _outcomes(journal: Records, rows: Sequence[Any], counted: dict[str, Any]) -> Iterator[str]:
    ended = {row["episode_id"]: row["reward"] for row in rows if row["state"] == "ended"}
    for name, attempt in counted.items():
        if name not in ended:
            yield f"LOST: the outcome of {name} is in the journal alone ({attempt.stage})"
    for name, reward in ended.items():
        if name not in counted:
            yield f"the ledger has an outcome of {name}, and the journal none"
        elif reward != counted[name].outcome.reward or reward != reward_of(name):
            yield f"{name} has the reward {reward}, the journal {counted[name].outcome.reward}"
    for group in journal.groups.values():
        for member, tries in group.members.items():
            if (found := sum(attempt.episode_id in ended for attempt in tries)) != 1:
                yield f"member {member} of {group.id} has {found} outcomes"
    if not ended:
        yield "no episode ended"


def _groups(journal: Records, rows: Sequence[Any]) -> Iterator[str]:
    members = defaultdict(list)
    for row in rows:
        members[row["name"]].append(row)
    for name, found in members.items():
        group = journal.groups.get(name)
        known = {a.episode_id for tries in group.members.values() for a in tries} if group else set()
        if group is None or {row["task"] for row in found} != {group.task}:
            yield f"group {name} has other tasks than the journal's"
        if foreign := {row["episode_id"] for row in found} - known:
            yield f"group {name} has episodes of another: {foreign}"
        if (count := sum(not row["has_successor"] for row in found)) != SIZE or found[0]["size"] != SIZE:
            yield f"group {name} has {count} episodes"
        if {row["state"] for row in found} & {"running"} or found[0]["fate"] != "scored":
            yield f"group {name} is {found[0]['fate']}"


def _credit(rows: Sequence[Any], steps: Sequence[Any]) -> Iterator[str]:
    group_of = {row["id"]: row["name"] for row in rows}
    rewards = defaultdict(list)
    for row in rows:
        if row["state"] == "ended":
            rewards[row["name"]].append(row["reward"])
    by_id = {row["id"]: row for row in rows}
    fences, numbers = defaultdict(set), defaultdict(list)
    for step in steps:
        row = by_id[step["of_episode"]]
        if row["state"] != "ended":
            if step["fence"] is not None:
                yield f"a step of {row['episode_id']}, which is {row['state']}, was trained"
            continue
        numbers[row["episode_id"]].append(step["step"])
        found = rewards[row["name"]]
        if len(set(found)) == 1:
            if step["advantage"] is not None:
                yield f"a step of {row['episode_id']} has an advantage, and its group no contrast"
            continue
        expected = (row["reward"] - fmean(found)) / max(pstdev(found), 0.1)
        if step["advantage"] is None or abs(step["advantage"] - expected) > 1e-9:
            yield f"a step of {row['episode_id']} has the advantage {step['advantage']}, not {expected}"
        if step["reason"] != "stale":  # a step that is too old is dropped alone; its credit came before
            fences[group_of[step["of_episode"]]].add(step["fence"])
    for name, counted in numbers.items():
        if sorted(counted) != [*range(1, STEPS + 1)]:
            yield f"{name} has the steps {counted}"
    for name, leases in fences.items():
        if len(leases) > 1:
            yield f"group {name} was trained in parts: {leases}"
    if not any(fence for leases in fences.values() for fence in leases):
        yield "nothing was trained"


def arguments(flags: Sequence[str]) -> list[str]:
    """Return the flags of the server, at a port that stays, with small batches."""
    return [
        *("--port", str(free_port()), "--method", "agent", "--set", "method.process_weight=0"),
        *("--set", "episodes.groups_per_step=2", "--set", "episodes.max_groups_ahead=6"),
        *("--set", "publisher.max_step_kl=1000", "--set", "publisher.max_base_kl=1000", "--set", "trainer.nice=0"),
        *flags,
    ]


def campaign(folder: Path, kills: int, seed: int, say: Callable[[str], None], flags: Sequence[str] = ()) -> list[str]:
    """Run the kills in a folder; return the findings."""
    with RunningServer(folder / "data", arguments(flags)) as server:
        runner = RunnerProcess(folder, server.url)
        found = Campaign(server, runner, random.Random(seed), say)
        try:
            found.run(kills)
            found.rest()
        finally:
            if runner._process is not None and runner._process.poll() is None:
                runner.end(signal.SIGTERM)
        counts = server.status()["counts"]
    say(json.dumps({name: counts[name] for name in sorted(counts) if counts[name]}))
    say(f"{kills} kills, {counts.get('episodes.ended', 0)} outcomes, {len(found.findings)} findings {found.findings}")
    return found.findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="every user can pass through to it")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    options, more = parser.parse_known_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    folder = options.folder.absolute() / f"kills-{options.seed}-{int(time.time())}"
    folder.mkdir(parents=True)
    found = campaign(folder, options.kills, options.seed, say, more)
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
