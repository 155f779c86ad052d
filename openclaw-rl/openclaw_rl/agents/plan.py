"""Plan of a run: one TOML file, with the environment, the limits, and how much of everything."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openclaw_rl.agents.episode import EpisodeLimits
from openclaw_rl.agents.sandbox import Limits
from openclaw_rl.agents.sandbox.kinds import Kind
from openclaw_rl.errors import SettingsError


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainPlan(_Table):
    groups: int = Field(default=0, ge=0)
    """Groups of the whole run; 0: until Ctrl-C."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task, whose outcomes are compared."""
    concurrency: int = Field(default=16, ge=1)
    """Episodes at once."""
    retries: int = Field(default=2, ge=0)
    """New episodes in the place of one whose environment failed."""
    fade: float = Field(default=0.7, ge=0, lt=1)
    floor: float = Field(default=0.2, gt=0, le=1)


class EvalPlan(_Table):
    tasks: int = Field(default=64, ge=1)
    """Held-out tasks, the first ones."""
    samples: int = Field(default=1, ge=1)
    """Episodes of each task; pass@k needs k."""
    concurrency: int = Field(default=8, ge=1)
    sampling: Mapping[str, Any] = Field(default_factory=dict)
    """Fields of each chat request of an evaluation, in the place of the plan's own of these names."""
    every_versions: int = Field(default=0, ge=0)
    """`agents run` evaluates its first version, again whenever this many are new, and its last one; 0: never."""


class SandboxPlan(_Table):
    kind: Kind = "auto"
    folder: Path | None = None
    """For the sandboxes' files. Default: the temporary folder of this machine."""
    memory_mb: int = Field(default=2048, ge=64)
    cpu_s: int = Field(default=300, ge=1)
    file_mb: int = Field(default=100, ge=1)
    processes: int = Field(default=128, ge=8)
    disk_mb: int = Field(default=1024, ge=1)
    command_s: float = Field(default=60.0, gt=0)

    @property
    def limits(self) -> Limits:
        return Limits(
            memory_mb=self.memory_mb,
            cpu_s=self.cpu_s,
            file_mb=self.file_mb,
            processes=self.processes,
            disk_mb=self.disk_mb,
            command_s=self.command_s,
        )


class Plan(_Table):
    environment: str
    """Name of an entry point `openclaw_rl.environments`."""
    folder: Path
    """Journal of the run. A second start with the same folder goes on."""
    server: str = "http://127.0.0.1:30000"
    """URL of the server."""
    python: Path | None = None
    """Interpreter of the environment's packages (scripts/agents/env.sh makes one). Default: this one."""
    seed: int = 0
    nice: int = Field(default=10, ge=0, le=19)
    """Niceness of the runner and its sandboxes: a server on the same machine gets the cores first."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    sampling: Mapping[str, Any] = Field(default_factory=lambda: {"temperature": 1.0, "max_tokens": 1024})
    """Fields of each chat request."""
    train: TrainPlan = TrainPlan()
    eval: EvalPlan = EvalPlan()
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxPlan = SandboxPlan()


def read(file: Path) -> Plan:
    """Read a plan; paths in it are relative to the file. Raises SettingsError with a line for each problem."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{file} is no TOML: {error}") from error
    try:
        plan = Plan.model_validate(tree)
    except ValidationError as error:
        lines = [f"{file}: {'.'.join(map(str, one['loc']))}: {_words(one)}" for one in error.errors()]
        raise SettingsError("\n".join(lines)) from error
    here = file.absolute().parent
    return plan.model_copy(
        update={"folder": here / plan.folder.expanduser(), "python": plan.python and here / plan.python.expanduser()}
    )


def _words(problem: Mapping[str, Any]) -> str:
    return "no such key" if problem["type"] == "extra_forbidden" else str(problem["msg"])
