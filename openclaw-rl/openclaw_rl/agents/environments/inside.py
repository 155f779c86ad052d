"""Tasks in Harbor's format with a harness that lives inside the sandbox: OpenClaw, codex, any client of OpenAI's API.

The plan names its command. The harness, the files of the task and all that the model runs are in one sandbox, which has
no network: the model of the episode is at http://127.0.0.1:30000/v1, and nothing else is. Reward: 2 · (the task's
reward in [0, 1]) − 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.harbor_tasks import HarborTask, TaskFolders
from openclaw_rl.agents.episode import Episode
from openclaw_rl.agents.sandbox import Sandbox
from openclaw_rl.agents.sandbox.base import GATEWAY_PORT
from openclaw_rl.errors import EnvironmentFault

_HOME = "/home/agent"
_CANNOT_START = (126, 127)
"""A shell's exit codes for a program that it cannot run."""


class Inside:
    """Harbor's tasks, played by a program in the sandbox."""

    needs_sandbox = True

    def __init__(
        self,
        tasks: str,
        command: str,
        eval_tasks: str | None = None,
        eval_share: float = 0.2,
        seed: int = 0,
        programs: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """tasks, eval_tasks, eval_share, seed: as Harbor's. command: run by bash in the task's work folder, with the
        task's text in $INSTRUCTION. programs: folders of the host that it needs, shown read-only. files: contents by
        paths below its home folder. env: of the command."""
        self._folders = TaskFolders(tasks, eval_tasks, eval_share, seed)
        self._command, self._env = command, dict(env or {})
        self._programs = tuple(Path(folder).expanduser() for folder in programs)
        self._files = {name: text.encode() for name, text in (files or {}).items()}

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"inside/{name}", data={"task": task}) for name, task in self._folders.of_split(split).items()]

    async def run(self, task: Task, episode: Episode) -> Outcome:
        about = task.data["task"]
        assert isinstance(about, HarborTask)
        sandboxes = await episode.open_sandboxes()
        profile = about.definition.profile(with_containers=sandboxes.containers is not None)
        async with episode.gateway() as gateway:
            profile = replace(profile, gateway=gateway, programs=self._programs)
            async with episode.sandbox(profile) as sandbox:
                await about.definition.prepare(sandbox)
                if self._files:
                    await sandbox.put(self._files, _HOME)
                async with episode.acting():
                    await self._act(about.instruction, episode, sandbox)
                async with episode.checking():
                    share = await about.score(sandbox, episode.limits.check_s)
        return Outcome(2 * share - 1)

    async def _act(self, instruction: str, episode: Episode, sandbox: Sandbox) -> None:
        """Run the harness to its end. Its failure is scored as it stands, unless it could not start."""
        url = f"http://127.0.0.1:{GATEWAY_PORT}/v1"
        env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", **self._env, "INSTRUCTION": instruction}
        done = await sandbox.run(self._command, env=env, timeout_s=episode.limits.act_s)
        if done.ended_by == "time":
            episode.truncated = True
        if not episode.steps or done.exit_code in _CANNOT_START:
            said = done.text.strip().splitlines() or ["it said nothing"]
            raise EnvironmentFault(
                f"the harness asked the model {episode.steps} times and ended with {done.exit_code}: {said[-1][:300]}"
            )
