"""Tasksets of verifiers 0.4 with its harnesses; the policy is asked at the episode's base URL, and its reward counts.

Covers what verifiers adapts itself: Harbor, OpenEnv, NeMo-Gym, TextArena, and packages of others. Its commands upload
runs and use a cloud by default. Nothing of that is here: no run is pushed, and the runtime is a container on this host.
The runtime `subprocess` is no sandbox, and is taken only where neither harness nor task runs code.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Its programs are started by `uv`, which is installed beside this interpreter.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env
from verifiers.v1.task import Task as TheirTask
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import harness_class, load_environment, load_taskset, resolve_env_config

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.harbor_tasks import split_of
from openclaw_rl.agents.episode import Episode, EpisodeLimits
from openclaw_rl.errors import EnvironmentFault

RUNTIMES = ("docker", "podman", "apptainer", "subprocess")
_KEY_VARIABLE = "OPENCLAW_RL_VERIFIERS_KEY"
_START_S = 600.0


class Verifiers:
    """The tasks of one taskset."""

    def __init__(
        self,
        taskset: str,
        harness: str = "null",
        runtime: str = "docker",
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        reward: str = "unit",
        eval_share: float = 0.2,
        seed: int = 0,
    ) -> None:
        """taskset, harness: names of installed packages, or of verifiers' own. options: of the taskset. env: more of
        verifiers' table `[env]`, such as agent.harness or agent.runtime. reward: `unit` for one in [0, 1], from which
        2 · reward − 1 is made, or `signed` for one in [−1, 1]."""
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime: {runtime!r} is none of {', '.join(RUNTIMES)}")
        if reward not in ("unit", "signed"):
            raise ValueError(f"reward: {reward!r} is neither unit nor signed")
        self._tree: dict[str, Any] = {**(env or {})}
        agent = self._agent = dict(self._tree.get("agent", {}))
        agent["harness"] = {**agent.get("harness", {}), "id": harness}
        agent["runtime"] = {**agent.get("runtime", {}), "type": runtime}
        self._tree |= {"taskset": {**(options or {}), "id": taskset}, "agent": agent}
        self._tree.setdefault("retries", {"max_retries": 0})  # the runner's
        config = self._config(None)
        for name, role in agent_config_fields(config).items():
            if role.runtime.type not in RUNTIMES:
                raise ValueError(f"env.{name}.runtime: {role.runtime.type!r} is none of {', '.join(RUNTIMES)}")
        loaded = load_taskset(config.taskset)
        if not loaded.bounded:
            raise ValueError(f"taskset: {taskset} has no end")
        if runtime == "subprocess" and _runs_code(harness, type(loaded).task_type()):
            raise ValueError(
                f"runtime: subprocess is no sandbox, and {harness} or {taskset} runs code: name a container"
            )
        self._tasks: dict[Split, dict[str, TheirTask]] = {"train": {}, "eval": {}}
        for task in loaded:
            self._tasks[split_of(task.key, eval_share, seed)][task.key] = task
        self._taskset, self._is_unit = taskset, reward == "unit"
        self._serving: asyncio.Task[None] | None = None
        self._env: asyncio.Future[Env] | None = None
        self._stopping = asyncio.Event()

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{self._taskset}/{key[:24]}", data={"key": key}) for key in self._tasks[split]]

    async def run(self, task: Task, episode: Episode) -> Outcome:
        env = await self._started(episode.limits)
        os.environ[_KEY_VARIABLE] = episode.key or "none"
        context = ModelContext(
            model="policy",
            client=EvalClientConfig(base_url=episode.base_url, api_key_var=_KEY_VARIABLE),
            sampling=SamplingConfig.model_validate(dict(episode.sampling)),
        )
        found = await env.run_episode(self._tasks[episode.split][str(task.data["key"])], context)
        if not found.ok or len(found.traces) != 1:
            errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
            words = f"{errors[-1].type}: {errors[-1].message[:300]}" if errors else f"{len(found.traces)} agents played"
            raise EnvironmentFault(f"verifiers: {words}")
        (trace,) = found.traces
        episode.truncated, episode.steps = bool(trace.is_truncated), int(trace.num_turns)
        reward = 2 * float(trace.reward) - 1 if self._is_unit else float(trace.reward)
        return Outcome(reward, {"turns": float(trace.num_turns), "raw_reward": float(trace.reward)})

    async def close(self) -> None:
        self._stopping.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    def _config(self, limits: EpisodeLimits | None) -> EnvConfig:
        agent = dict(self._agent)
        if limits is not None:
            times = {"setup": limits.setup_s, "rollout": limits.act_s, "scoring": limits.check_s}
            agent |= {"max_turns": limits.steps, "max_output_tokens": limits.tokens, "timeout": times}
        return resolve_env_config({**self._tree, "agent": agent})

    async def _started(self, limits: EpisodeLimits) -> Env:
        """Return the environment with its servers, which live until `close` in a task of their own."""
        if self._env is None:
            self._env = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(limits, self._env))
        async with asyncio.timeout(_START_S):
            return await asyncio.shield(self._env)

    async def _serve(self, limits: EpisodeLimits, ready: "asyncio.Future[Env]") -> None:
        try:
            env = load_environment(self._config(limits))
            async with env.serving():
                ready.set_result(env)
                await self._stopping.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(EnvironmentFault(f"verifiers did not start: {error!r}"))


def _runs_code(harness: str, task: type[TheirTask]) -> bool:
    made = harness_class(harness)
    return bool(made.EXECUTES_CODE or made.NEEDS_CONTAINER or task.NEEDS_CONTAINER)
