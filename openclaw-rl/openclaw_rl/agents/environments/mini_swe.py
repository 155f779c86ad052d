"""SWE tasks in Harbor's format with mini-swe-agent: a repository, an issue, hidden tests; ±1.

The agent's loop runs in a thread of the runner, its commands in our sandbox. The tests run afterwards, in a fresh one
over the same work folder. Needs the interpreter of `scripts/agents/env.sh`.
"""

import asyncio
import contextlib
import os
import platform
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

# Before the imports: litellm fetches a list of prices at its import, and the agent prints a banner.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import litellm
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from pydantic import BaseModel

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.harbor_tasks import HarborTask, TaskFolders
from openclaw_rl.agents.episode import Episode
from openclaw_rl.agents.sandbox import Sandbox
from openclaw_rl.errors import EnvironmentFault, SandboxFault

litellm.suppress_debug_info = True
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_CUT = frozenset({"LimitsExceeded", "TimeExceeded"})


class SandboxConfig(BaseModel):
    cwd: str
    env: dict[str, str] = {}
    timeout: int = 30


class MiniSweSandbox:
    """Our sandbox as an environment of mini-swe-agent; it is called from the agent's thread."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop, **config: Any) -> None:
        self.config = SandboxConfig(cwd=sandbox.profile.workdir, **config)
        self._sandbox, self._loop = sandbox, loop

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        seconds = timeout or self.config.timeout
        done = self._wait(
            self._sandbox.run(
                f"exec 2>&1\n{action.get('command', '')}",
                cwd=cwd or self.config.cwd,
                env=self.config.env,
                timeout_s=seconds,
            )
        )
        text = done.text
        if done.ended_by is not None:
            said = {"time": f"it ran longer than {seconds} s", "output": "it printed too much"}
            words = f"The command was ended: {said.get(done.ended_by, 'it wrote too much')}."
            return {"output": text, "returncode": -1, "exception_info": words}
        lines = text.lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == _SUBMIT and done.exit_code == 0:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return {"output": text, "returncode": done.exit_code, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        return {**self.config.model_dump(), **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": self.config.model_dump(mode="json"), "environment_type": kind}}}

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class MiniSwe:
    """Repositories with hidden tests."""

    needs_sandbox = True

    def __init__(
        self,
        tasks: str,
        eval_tasks: str | None = None,
        eval_share: float = 0.2,
        seed: int = 0,
        tool_calls: bool = False,
        config: str = "",
        command_s: int = 60,
    ) -> None:
        """tasks, eval_tasks, eval_share, seed: as Harbor's. tool_calls: commands as tool calls; False: as code blocks.
        config: a file of mini-swe-agent's; its own for tool calls or code blocks by default."""
        self._folders = TaskFolders(tasks, eval_tasks, eval_share, seed)
        self._tool_calls, self._command_s = tool_calls, command_s
        shipped = package_dir / "config" / ("mini.yaml" if tool_calls else "mini_textbased.yaml")
        file = Path(config).expanduser() if config else shipped
        self._config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"swe/{name}", data={"task": task}) for name, task in self._folders.of_split(split).items()]

    async def run(self, task: Task, episode: Episode) -> Outcome:
        about = task.data["task"]
        assert isinstance(about, HarborTask)
        sandboxes = await episode.open_sandboxes()
        profile = about.definition.profile(with_containers=sandboxes.containers is not None)
        async with episode.sandbox(profile) as sandbox:
            await about.definition.prepare(sandbox)
            async with episode.acting():
                await self._act(about, episode, sandbox)
            async with episode.checking():
                passed = await about.score(sandbox, episode.limits.check_s) >= 1.0
        return Outcome(1.0 if passed else -1.0)

    async def _act(self, about: HarborTask, episode: Episode, sandbox: Sandbox) -> None:
        loop = asyncio.get_running_loop()
        place = MiniSweSandbox(
            sandbox, loop, timeout=self._command_s, env=self._config.get("environment", {}).get("env", {})
        )
        model_kwargs = {
            **self._config["model"].get("model_kwargs", {}),
            "api_base": episode.base_url,
            "api_key": episode.key or "none",
            **episode.sampling,
        }
        kind = LitellmModel if self._tool_calls else LitellmTextbasedModel
        model = kind(
            **{
                **self._config["model"],
                "model_name": "openai/policy",
                "model_kwargs": model_kwargs,
                "cost_tracking": "ignore_errors",
            }
        )
        known = {"system_template", "instance_template"}
        agent = DefaultAgent(
            model,
            place,
            **{name: value for name, value in self._config["agent"].items() if name in known},
            step_limit=episode.limits.steps,
            cost_limit=0,
            wall_time_limit_seconds=int(episode.limits.act_s),
        )
        try:
            end = await _in_thread(agent.run, about.instruction)
        except SandboxFault:
            raise
        except Exception as error:
            if "context" in f"{type(error).__name__} {error}".lower() and "exceed" in f"{error}".lower():
                episode.truncated = True
                return
            raise EnvironmentFault(f"mini-swe-agent failed: {error!r}") from error
        episode.truncated = end.get("exit_status") in _CUT


async def _in_thread(work: Callable[[str], dict[str, Any]], task: str) -> dict[str, Any]:
    """Run the agent in a thread of its own, which nobody waits for when the episode's time is over."""
    # asyncio.to_thread has six threads on two cores, and the journal needs one of them.
    loop = asyncio.get_running_loop()
    done: asyncio.Future[dict[str, Any]] = loop.create_future()

    def settle(result: dict[str, Any] | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result or {})

    def run() -> None:
        result, failed = None, None
        try:
            result = work(task)
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, daemon=True, name="mini-swe-agent").start()
    return await done
