"""A harness that lives in the sandbox plays a task: its chats, its limits, its programs, and its faults."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.agents.environment import Outcome, Task, load
from openclaw_rl.agents.environments.inside import Inside
from openclaw_rl.agents.episode import Episode, EpisodeLimits
from openclaw_rl.agents.sandbox import Profile, Sandboxes
from openclaw_rl.errors import EnvironmentFault, SandboxFault

Play = Callable[..., Awaitable[Outcome]]
HARNESS = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
for _ in range(int(sys.argv[1])):
    body = json.dumps({"messages": messages, "temperature": 0, "max_completion_tokens": 9}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    with urllib.request.urlopen(request, timeout=20) as answer:
        reply = json.load(answer)["choices"][0]["message"]
    done = subprocess.run(reply["content"], shell=True, capture_output=True, text=True)
    messages += [reply, {"role": "user", "content": done.stdout + done.stderr}]
"""


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    for name, text in {
        "task.toml": "",
        "instruction.md": "Make the file 'done'.",
        "environment/note.txt": "",
        "tests/test.sh": "cd /app; (test -e done && echo 1 || echo 0) > /logs/verifier/reward.txt",
    }.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


def made(folder: Path, command: str = "python3 ~/bin/harness.py 2", **options: Any) -> tuple[Inside, Task]:
    environment = load("inside", {"tasks": str(folder), "eval_share": 0.0, "command": command, **options})
    assert isinstance(environment, Inside)
    (task,) = environment.tasks("train")
    return environment, task


async def test_its_chats_reach_the_episode_and_its_work_is_scored(task_folder: Path, play: Play) -> None:
    seen: list[Any] = []

    def script(messages: list[Any]) -> str:
        seen.append([message["content"] for message in messages])
        return "ls" if len(messages) == 1 else "touch done"

    environment, task = made(task_folder, files={"bin/harness.py": HARNESS})
    assert await play(environment, task, script) == Outcome(1.0)
    assert seen == [["Make the file 'done'."], ["Make the file 'done'.", "ls", "note.txt\n"]]
    assert await play(environment, task, "true") == Outcome(-1.0)


async def test_a_harness_that_cannot_start_or_never_asks_is_the_environments_fault(
    task_folder: Path, play: Play
) -> None:
    for command, words in (("no-such-harness", "ended with 127: .*no-such-harness"), ("echo hi", "0 times .* 0: hi")):
        with pytest.raises(EnvironmentFault, match=words):
            await play(*made(task_folder, command), "ls")


async def test_the_limits_of_steps_and_time_leave_it_to_be_scored(task_folder: Path, play: Play) -> None:
    environment, task = made(task_folder, "python3 ~/bin/harness.py 9", files={"bin/harness.py": HARNESS})
    asked = []
    outcome = await play(environment, task, lambda messages: asked.append(messages) or "touch done", steps=3)
    assert (len(asked), outcome) == (3, Outcome(1.0))
    slow, task = made(task_folder, "python3 ~/bin/harness.py 1; sleep 100", files={"bin/harness.py": HARNESS})
    assert await play(slow, task, "touch done", act_s=2) == Outcome(1.0)


def test_each_chat_has_the_runs_sampling_and_counts() -> None:
    sampling = {"temperature": 1.0, "max_tokens": 64}
    episode = Episode("e", "u", None, None, split="train", limits=EpisodeLimits(steps=3), sampling=sampling)  # type: ignore[arg-type]
    own = {"messages": [], "temperature": 0.2, "max_completion_tokens": 9, "stream": True}
    sent = episode._admit(json.dumps(own).encode())
    assert sent is not None
    assert json.loads(sent) == {"messages": [], "temperature": 1.0, "max_tokens": 64, "stream": True}
    assert [episode._admit(junk) for junk in (b"junk", b"[1]")] == [b"junk", b"[1]"]
    assert (episode.truncated, episode.steps) == (False, 3)
    assert episode._admit(b"{}") is None
    assert (episode.truncated, episode.steps) == (True, 3)


async def test_its_programs_are_shown_and_cannot_be_changed(sandboxes: Sandboxes) -> None:
    folder = sandboxes.folder / "programs"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "tool").write_text("a tool")
    (folder / "tool").chmod(0o644)
    async with sandboxes.sandbox(Profile(programs=(folder,))) as sandbox:
        done = await sandbox.run(("sh", "-c", f"cat {folder}/tool; echo x > {folder}/tool"))
    assert (done.output, done.exit_code) == (b"a tool", 2)
    folder.chmod(0o700)
    # Where the runner is no root, the sandbox's user is its own, and may read the folder.
    for hidden in (folder / "missing", *([folder] if os.geteuid() == 0 else [])):
        opened = sandboxes.sandbox(Profile(programs=(hidden,)))
        with pytest.raises(SandboxFault, match="is missing, or the sandbox's user cannot pass"):
            await opened.open()
    folder.chmod(0o755)
