"""An environment, and how the runner finds it: by the entry points `openclaw_rl.environments`.

An environment has tasks and plays them:

    class Echo:
        def tasks(self, split):
            return [Task(f"{split}-{word}", data={"word": word}) for word in ("pear", "plum")]

        async def run(self, task, episode):
            async with episode.acting():
                reply = await episode.ask([{"role": "user", "content": f"Say {task.data['word']}."}])
            right = not episode.truncated and reply.text.strip() == task.data["word"]
            return Outcome(1.0 if right else -1.0)

The entry point names the class, or a function that makes the environment; its parameters are the plan's `options`.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast

from openclaw_rl.errors import EnvironmentFault, SettingsError
from openclaw_rl.settings.base import registered

if TYPE_CHECKING:
    from openclaw_rl.agents.episode import Episode

GROUP = "openclaw_rl.environments"
_SHIPPED = {
    "terminal_mini": "openclaw_rl.agents.environments.terminal_mini:TerminalMini",
    "terminal_find": "openclaw_rl.agents.environments.terminal_find:TerminalFind",
    "swe_mini": "openclaw_rl.agents.environments.swe_mini:SweMini",
    "harbor": "openclaw_rl.agents.environments.harbor:Harbor",
    "mini_swe": "openclaw_rl.agents.environments.mini_swe:MiniSwe",
    "toolcall_mini": "openclaw_rl.agents.environments.toolcall_mini:ToolcallMini",
    "gui_mini": "openclaw_rl.agents.environments.gui_mini:GuiMini",
    "bfcl": "openclaw_rl.agents.environments.bfcl:Bfcl",
    "python_tool": "openclaw_rl.agents.environments.python_tool:PythonTool",
    "inside": "openclaw_rl.agents.environments.inside:Inside",
    "miniwob": "openclaw_rl.agents.environments.miniwob:MiniWob",
    "browsergym": "openclaw_rl.agents.environments.browser_gym:BrowserGym",
    "verifiers": "openclaw_rl.agents.environments.verifiers_tasks:Verifiers",
}
Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Its id is stable: the journal, the curriculum and the server know it by that."""

    id: str
    kind: str = ""
    """Tasks of one kind share a pass rate until each has its own."""
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one episode."""

    reward: float
    """In [-1, 1]; 1 counts as passed."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reward) and -1 <= self.reward <= 1):
            raise EnvironmentFault(f"the environment scored {self.reward}, which is not in [-1, 1]")

    @property
    def passed(self) -> bool:
        return self.reward >= 1.0


class Environment(Protocol):
    """The two members of an environment.

    Optional are `needs_sandbox = True`, with which a run refuses to start where no sandbox works, and `close()`, which
    is awaited when the run ends.
    """

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split, in an order that stays. No task is in both."""

    def run(self, task: Task, episode: "Episode") -> Awaitable[Outcome]:
        """Play the task: ask the policy, act, check.

        Raise EnvironmentFault where the environment failed and not the policy: the episode is then aborted and tried
        again. Work that blocks belongs in `asyncio.to_thread`.
        """


def load(name: str, options: Mapping[str, object]) -> Environment:
    """Make the environment of an entry point with its options. Raises SettingsError."""
    found = registered(GROUP, _SHIPPED)
    if name not in found:
        raise SettingsError(f"environment: there is no {name!r}; installed are {', '.join(sorted(found))}")
    try:
        make = cast(Callable[..., Environment], found[name].load())
    except ImportError as error:
        raise SettingsError(f"environment: {name} needs a package that this interpreter has not: {error}") from error
    known = inspect.signature(make).parameters
    if wrong := sorted(set(options) - set(known)):
        raise SettingsError(f"options.{wrong[0]}: {name} takes {', '.join(known) or 'no options'}")
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"options: {error}") from error


def whole_tasks(environment: Environment, split: Split) -> tuple[Task, ...]:
    """Return the tasks of a split, each id once. Raises EnvironmentFault."""
    tasks = tuple(environment.tasks(split))
    if not tasks:
        raise EnvironmentFault(f"the environment has no tasks in the split {split}")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise EnvironmentFault(f"two tasks of the environment have the id {task.id!r}")
        seen.add(task.id)
    return tasks
