"""Our sandbox as an environment of Harbor, for `harbor run --env` too.

    harbor run -p TASK -a terminus-2 --env openclaw_rl.agents.environments.harbor_sandbox:HarborSandbox

When Harbor uploads the tests, every process of the agent ends, `/tmp` and the home folder are emptied, and so are
`/tests` and `/logs/verifier`: the tests run from files that the agent never saw, and no reward of its own survives.
"""

import asyncio
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities

from openclaw_rl.agents.environments.harbor_tasks import Definition, definition_of
from openclaw_rl.agents.sandbox import Limits, Sandbox, Sandboxes
from openclaw_rl.errors import SandboxFault

_opened_by: ContextVar[Callable[[], Awaitable[Sandboxes]]] = ContextVar("sandboxes")
"""Harbor makes the environment by its import path, and its arguments are JSON; the run's sandboxes come by context."""


@contextmanager
def sandboxes_of(opener: Callable[[], Awaitable[Sandboxes]]) -> Iterator[None]:
    """Let Harbor's environments that this block makes take their sandboxes from a run."""
    token = _opened_by.set(opener)
    try:
        yield
    finally:
        _opened_by.reset(token)


class HarborSandbox(BaseEnvironment):
    """One sandbox of ours for one trial of Harbor."""

    def __init__(self, *args: Any, fresh_tests: bool = True, **kwargs: Any) -> None:
        """fresh_tests: end the agent's processes before the tests. False for tasks whose tests ask a server that the
        agent started."""
        self._definition: Definition | None = None
        self._sandbox: Sandbox | None = None
        self._own: Sandboxes | None = None
        self._fresh_tests, self._is_uploading_tests = fresh_tests, False
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "openclaw-rl-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        config = {"docker_image": self.task_env_config.docker_image, "workdir": self.task_env_config.workdir}
        self._definition = definition_of(self.environment_dir, config)

    async def start(self, force_build: bool) -> None:
        assert self._definition is not None
        opener = _opened_by.get(None)
        if opener is None:
            self._own = await Sandboxes.choose("auto", Limits())
        sandboxes = self._own or await opener()  # type: ignore[misc]
        profile = self._definition.profile(with_containers=sandboxes.containers is not None)
        self._sandbox = sandboxes.sandbox(profile)
        await self._sandbox.open()
        await self._sandbox.run("mkdir -p /logs/agent /logs/verifier /logs/artifacts")
        await self._definition.prepare(self._sandbox)

    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
        if self._own is not None:
            await self._own.close()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = PurePosixPath(target_path)
        content, mode = await asyncio.to_thread(_read, Path(source_path))
        await self._opened.put({target.name: content}, str(target.parent), mode=mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if target_dir.rstrip("/") == "/tests" and not self._is_uploading_tests:
            if self._fresh_tests:
                await self._opened.renew()
            await self._opened.run("find /tests /logs/verifier -mindepth 1 -delete; mkdir -p /logs/verifier")
            self._is_uploading_tests = True
        await self._opened.put_folder(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        done = await self._opened.run(("cat", "--", source_path), keep_bytes=1024 * 1024 * self._opened.limits.file_mb)
        if done.exit_code:
            raise FileNotFoundError(source_path)
        await asyncio.to_thread(Path(target_path).write_bytes, done.output)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._opened.pack(source_dir)
        if packed is None:
            raise FileNotFoundError(source_dir)
        await asyncio.to_thread(_unpack, packed, Path(target_dir))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command as the sandbox's one user, whichever is named."""
        self._is_uploading_tests = False
        merged = self._merge_env(env) or {}
        done = await self._opened.run(command, cwd=cwd, env=merged, timeout_s=timeout_sec or 3600)
        output, errors = (data.decode("utf-8", "replace") for data in (done.output, done.errors))
        return ExecResult(stdout=output, stderr=errors, return_code=done.exit_code)

    @property
    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxFault("the sandbox of this trial is not open")
        return self._sandbox


def _read(file: Path) -> tuple[bytes, int]:
    return file.read_bytes(), file.stat().st_mode & 0o777


def _unpack(packed: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter=transfer_tar_filter)
