"""Any folder of Harbor tasks (Terminal-Bench 2, SETA, SWE-bench …) with one of Harbor's agents, terminus-2 by default.

The agent runs in the runner's process and its commands in our sandbox; its model calls go to the episode's base URL.
Reward: 2 · (the task's reward in [0, 1]) − 1. Needs the interpreter of `scripts/agents/env.sh`.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Before the imports: telemetry is on by default, and litellm fetches a list of prices at its import.
os.environ["HARBOR_TELEMETRY"] = "off"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments import harbor_sandbox
from openclaw_rl.agents.environments.harbor_tasks import TaskFolders
from openclaw_rl.agents.episode import Episode
from openclaw_rl.errors import EnvironmentFault

# Its loggers write every detail of a trial, and each registration of a model, to the terminal.
logging.getLogger("harbor.utils.logger").propagate = False
logging.getLogger("LiteLLM").setLevel(logging.ERROR)
_CUT = frozenset({"AgentTimeoutError", "ContextLengthExceededError", "OutputLengthExceededError"})
"""Ends of an agent that are the policy's: scored as it stands."""
_CONTEXT_TOKENS = 32_768


class Harbor:
    """Tasks of Harbor."""

    needs_sandbox = True

    def __init__(
        self,
        tasks: str,
        eval_tasks: str | None = None,
        agent: str = "terminus-2",
        agent_options: Mapping[str, object] | None = None,
        eval_share: float = 0.2,
        seed: int = 0,
        fresh_tests: bool = True,
    ) -> None:
        """tasks: a task folder, or a folder of them. eval_tasks: of the held-out ones; without it a seeded share of
        `tasks` is held out. fresh_tests: False runs the tests beside what the agent left running."""
        self._folders = TaskFolders(tasks, eval_tasks, eval_share, seed)
        self._agent, self._agent_options = agent, dict(agent_options or {})
        self._fresh_tests = fresh_tests

    def tasks(self, split: Split) -> Sequence[Task]:
        found = self._folders.of_split(split)
        return [Task(f"harbor/{name}", data={"folder": str(task.folder)}) for name, task in found.items()]

    async def run(self, task: Task, episode: Episode) -> Outcome:
        trials = Path(tempfile.mkdtemp(prefix="openclaw-rl-trial-"))
        try:
            with harbor_sandbox.sandboxes_of(episode.open_sandboxes):
                trial = await Trial.create(self._config(task, episode, trials))
                result = await trial.run()
        finally:
            shutil.rmtree(trials, ignore_errors=True)
        return outcome_of(result, episode)

    def _config(self, task: Task, episode: Episode, trials: Path) -> TrialConfig:
        limits, sampling = episode.limits, dict(episode.sampling)
        options: dict[str, Any] = {}
        if self._agent == "terminus-2":
            options = {
                "api_base": episode.base_url,
                "max_turns": limits.steps,
                "temperature": sampling.pop("temperature", 1.0),
                "llm_kwargs": {"api_key": episode.key or "none"},
                "llm_call_kwargs": sampling,
                "model_info": {
                    "max_input_tokens": _CONTEXT_TOKENS,
                    "max_output_tokens": sampling.get("max_tokens", 1024),
                    "input_cost_per_token": 0.0,
                    "output_cost_per_token": 0.0,
                },
                "record_terminal_session": False,
                "suppress_max_turns_warning": True,
            }
        place = f"{harbor_sandbox.__name__}:{harbor_sandbox.HarborSandbox.__name__}"
        return TrialConfig(
            task=TaskConfig(path=Path(str(task.data["folder"]))),
            trials_dir=trials,
            agent=AgentConfig(
                name=self._agent,
                model_name="openai/policy",
                override_timeout_sec=limits.act_s,
                override_setup_timeout_sec=limits.setup_s,
                kwargs={**options, **self._agent_options},
            ),
            environment=EnvironmentConfig(import_path=place, kwargs={"fresh_tests": self._fresh_tests}),
            verifier=VerifierConfig(override_timeout_sec=limits.check_s),
        )


def outcome_of(result: TrialResult, episode: Episode) -> Outcome:
    """Return the outcome of a trial. Raises EnvironmentFault where the environment, the agent or the tests failed."""
    for failed in result.recorded_exceptions():
        if failed.exception_type not in _CUT:
            raise EnvironmentFault(f"harbor: {failed.exception_type}: {failed.exception_message[:300]}")
        episode.truncated = True
    rewards = result.verifier_result.rewards if result.verifier_result is not None else None
    if not rewards:
        raise EnvironmentFault("harbor: the tests gave no reward")
    metadata = (result.agent_result.metadata if result.agent_result is not None else None) or {}
    turns = metadata.get("n_episodes")
    if isinstance(turns, int) and turns >= episode.limits.steps:
        episode.truncated = True
    share = rewards.get("reward", sum(rewards.values()) / len(rewards))
    if not 0 <= share <= 1:
        raise EnvironmentFault(f"harbor: the task's reward is {share}, which is not in [0, 1]")
    return Outcome(2 * float(share) - 1, {f"reward_{name}": float(value) for name, value in rewards.items()})
