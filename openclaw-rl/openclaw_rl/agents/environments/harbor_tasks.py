"""Harbor's task folders: what a sandbox needs of one. Reads files alone; the package harbor is not needed.

    task.toml   instruction.md   environment/Dockerfile   tests/test.sh   solution/

A sandbox builds no image. A Dockerfile that only copies files and sets variables is followed, above the host's `/usr`
or the image that it names; any other needs an image of the user's, as `environment.docker_image` in task.toml.
"""

import hashlib
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from openclaw_rl.agents.environment import Split
from openclaw_rl.agents.sandbox import Profile, Sandbox
from openclaw_rl.errors import EnvironmentFault

log = structlog.get_logger()
_FOLLOWED = frozenset({"FROM", "WORKDIR", "COPY", "ENV", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "SHELL"})


@dataclass(frozen=True, slots=True)
class Definition:
    """A task's `environment` folder, as far as a sandbox follows it."""

    folder: Path
    image: str | None = None
    """Of task.toml: the user's, with everything in it."""
    base: str | None = None
    """Of FROM, used where docker or podman answers."""
    workdir: str = "/app"
    copies: tuple[tuple[str, str], ...] = ()
    """Files or folders below `folder`, and where they go."""
    env: dict[str, str] = field(default_factory=dict)

    def profile(self, *, with_containers: bool) -> Profile:
        folders = ["/logs", "/tests", "/solution"]
        for _, target in self.copies:
            top = "/" + PurePosixPath(target).parts[1]
            if not PurePosixPath(target).is_relative_to(self.workdir) and top not in (*folders, "/tmp", "/home"):
                folders.append(top)
        image = self.image or (self.base if with_containers else None)
        return Profile(workdir=self.workdir, folders=tuple(folders), env=self.env, image=image)

    async def prepare(self, sandbox: Sandbox) -> None:
        """Put the files in."""
        for source, target in self.copies:
            here = self.folder / source
            if here.is_dir():
                await sandbox.put_folder(here, target)
            else:
                goal = PurePosixPath(target)
                name = here.name if target.endswith("/") or target == self.workdir else goal.name
                folder = target if target.endswith("/") or target == self.workdir else str(goal.parent)
                await sandbox.put({name: here.read_bytes()}, folder, mode=here.stat().st_mode & 0o777)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task folder."""

    folder: Path
    instruction: str
    definition: Definition

    @classmethod
    def read(cls, folder: Path) -> "HarborTask":
        """Read a task folder. Raises EnvironmentFault, which names the file that is wrong."""
        try:
            config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        except OSError as error:
            raise EnvironmentFault(f"{folder / 'task.toml'}: {error.strerror}") from error
        except ValueError as error:
            raise EnvironmentFault(f"{folder / 'task.toml'} is no TOML: {error}") from error
        try:
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{folder / 'instruction.md'} cannot be read: {error}") from error
        if not (folder / "tests" / "test.sh").is_file():
            raise EnvironmentFault(f"{folder / 'tests' / 'test.sh'} is missing: nothing scores this task")
        environment = config.get("environment", {})
        if not isinstance(environment, dict):
            raise EnvironmentFault(f"{folder / 'task.toml'}: environment is no table")
        return cls(folder, instruction, definition_of(folder / "environment", environment))

    async def score(self, sandbox: Sandbox, timeout_s: float) -> float:
        """Run the tests over what the agent left; return their reward.

        Every process of the agent ends before, and the tests come from files that it never saw. Raises EnvironmentFault
        where the tests give no reward.
        """
        await sandbox.renew()
        await sandbox.run("find /tests /logs /solution -mindepth 1 -delete; mkdir -p /logs/verifier")
        await sandbox.put_folder(self.folder / "tests", "/tests")
        done = await sandbox.run("bash /tests/test.sh", timeout_s=timeout_s)
        if done.ended_by is not None:
            raise EnvironmentFault(f"the tests of {self.folder.name} were ended by the limit of {done.ended_by}")
        found = await sandbox.run("cat /logs/verifier/reward.txt")
        try:
            reward = float(found.output)
        except ValueError as error:
            raise EnvironmentFault(
                f"the tests of {self.folder.name} wrote no reward to /logs/verifier/reward.txt"
            ) from error
        if not 0 <= reward <= 1:
            raise EnvironmentFault(f"the tests of {self.folder.name} wrote the reward {reward}, not one in [0, 1]")
        return reward


def definition_of(folder: Path, config: dict[str, Any]) -> Definition:
    """Read the folder `environment` of a task. Raises EnvironmentFault where a sandbox cannot follow it."""
    image, workdir = config.get("docker_image"), config.get("workdir")
    for name, value in (("docker_image", image), ("workdir", workdir)):
        if value is not None and not isinstance(value, str):
            raise EnvironmentFault(f"{folder.parent / 'task.toml'}: environment.{name} is no text")
    if image is not None:
        return Definition(folder, image, workdir=workdir or "/app")
    file = folder / "Dockerfile"
    if not file.is_file():
        copies = ((".", "."),) if folder.is_dir() else ()
        workdir = workdir or "/app"
        return Definition(folder, workdir=workdir, copies=tuple((source, workdir) for source, _ in copies))
    base, place = None, "/"
    copied: list[tuple[str, str]] = []
    env: dict[str, str] = {}
    for words in _instructions(file):
        verb, rest = words[0].upper(), words[1:]
        if verb not in _FOLLOWED:
            raise EnvironmentFault(
                f"{file} has {verb}: build the image, and name it as environment.docker_image in task.toml"
            )
        if verb == "FROM" and rest:
            base = rest[0]
        elif verb == "WORKDIR" and rest:
            place = str(PurePosixPath(place) / rest[0])
        elif verb == "ENV" and rest:
            env |= dict(word.split("=", 1) for word in rest if "=" in word) or {rest[0]: " ".join(rest[1:])}
        elif verb == "COPY":
            copied += _copies(file, rest, place)
    workdir = workdir or (place if place != "/" else "/app")
    return Definition(folder, None, base, workdir, tuple(copied), env)


def _instructions(file: Path) -> list[list[str]]:
    text = file.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    try:
        return [shlex.split(line) for line in lines if line and not line.startswith("#")]
    except ValueError as error:
        raise EnvironmentFault(f"{file} cannot be read: {error}") from error


def _copies(file: Path, words: Sequence[str], place: str) -> list[tuple[str, str]]:
    if any(word.startswith("--from") for word in words):
        raise EnvironmentFault(f"{file} copies from another image: name an image in task.toml")
    *sources, target = [word for word in words if not word.startswith("--")] or [""]
    goal = str(PurePosixPath(place) / target) + ("/" if target.endswith("/") else "")
    for source in sources:
        inside = (file.parent / source).resolve()
        if not inside.is_relative_to(file.parent.resolve()) or not inside.exists():
            raise EnvironmentFault(f"{file} copies {source}, which is not beside it")
    return [(source, goal) for source in sources]


def task_folders(root: Path) -> dict[str, HarborTask]:
    """Return the whole tasks below a folder by their names; a broken one is told once and left out.

    Raises EnvironmentFault if none is whole.
    """
    root = root.expanduser()
    folders = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("**/task.toml"))
    found = {}
    for folder in folders:
        try:
            found[folder.name if folder == root else str(folder.relative_to(root))] = HarborTask.read(folder)
        except EnvironmentFault as error:
            log.warning("agents_task_left_out", error=str(error))
    if not found:
        raise EnvironmentFault(f"{root} has no whole task of Harbor: task.toml, instruction.md, tests/test.sh")
    return found


class TaskFolders:
    """The tasks of an environment by split: of two folders, or of one, a seeded share of which is held out."""

    def __init__(self, train: str, held_out: str | None, share: float, seed: int) -> None:
        self._roots: dict[Split, Path] = {"train": Path(train), "eval": Path(held_out or train)}
        self._share, self._seed = (share if held_out is None else None), seed
        self._read: dict[Path, dict[str, HarborTask]] = {}

    def of_split(self, split: Split) -> dict[str, HarborTask]:
        """Return the tasks by their names. Each folder is read once, so a broken task is told once."""
        root = self._roots[split]
        if root not in self._read:
            self._read[root] = task_folders(root)
        return {
            name: task
            for name, task in self._read[root].items()
            if self._share is None or split_of(name, self._share, self._seed) == split
        }


def split_of(name: str, eval_share: float, seed: int) -> Split:
    """Return the split of a task, by its name alone: tasks that are added later move none."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big")
    return "eval" if number < eval_share * 2**32 else "train"
