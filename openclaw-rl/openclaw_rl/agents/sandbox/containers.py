"""Sandbox by docker or podman: one container per sandbox, whose commands are `exec`s.

The container has no network, no capabilities, and the limits of `Limits`. Its image is the user's: nothing is pulled.
"""

import asyncio
import contextlib
import inspect
import json
from collections.abc import Mapping

from openclaw_rl.agents.sandbox import process_one
from openclaw_rl.agents.sandbox.base import GATEWAY_PORT, Finished, Limits, Profile, Sandbox
from openclaw_rl.errors import SandboxFault

_ANSWER_S, _CONTROL_S, _GRACE_S = 10.0, 120.0, 15.0


class ContainerSandbox(Sandbox):
    """One container."""

    # An image may have sh alone.
    _shell = ("sh", "-c", 'exec "$(command -v bash || command -v sh)" -c "$1"', "sh")

    def __init__(self, profile: Profile, limits: Limits, program: str, name: str) -> None:
        super().__init__(profile, limits)
        self._program, self._name = program, name

    async def open(self) -> None:
        await self._control(*start_words(self.profile, self.limits, self._name))
        folders = (self.profile.workdir, "/home/agent", *self.profile.folders)
        await self._control("exec", self._name, "mkdir", "-p", "--", *folders)
        await self._forward()

    async def renew(self) -> None:
        """Restart the container: every process ends; its files stay, but those of `/tmp` and of the home folder."""
        await self._control("restart", "--time", "0", self._name)
        clean = "rm -rf /home/agent /tmp/* /tmp/.[!.]*; mkdir -p /home/agent"
        await self._control("exec", self._name, "sh", "-c", clean)
        await self._forward()

    async def close(self) -> None:
        with contextlib.suppress(SandboxFault):
            await self._control("rm", "--force", "--volumes", self._name)

    async def _run(
        self,
        argv: tuple[str, ...],
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes,
        keep_bytes: int,
    ) -> Finished:
        words = [self._program, "exec", "--interactive", "--workdir", cwd]
        for key, value in env.items():
            words += ["--env", f"{key}={value}"]
        # `timeout` is the container's own: killing the client would leave the command running.
        words += [self._name, "timeout", "--signal", "KILL", f"{timeout_s:g}", *argv]
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        flood = max(self.limits.flood_mb << 20, keep_bytes)
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stderr is not None
                _, output, errors = await asyncio.gather(
                    _feed(process.stdin, stdin),
                    _kept(process.stdout, keep_bytes, flood),
                    _kept(process.stderr, keep_bytes, flood),
                )
                if output is None or errors is None:
                    return Finished(137, output or b"", errors or b"", "output")
                code = await process.wait()
        except TimeoutError:
            return Finished(137, b"", b"", "time")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return Finished(code, output, errors, "time" if code in (124, 137) else None)

    async def _forward(self) -> None:
        if self.profile.gateway is not None:
            told = json.dumps({"limits": None, "forward": [GATEWAY_PORT, "/run/gateway/socket"]})
            program = inspect.getsource(process_one)
            await self._control("exec", "--detach", self._name, "python3", "-I", "-S", "-c", program, told)

    async def _control(self, *words: str) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                self._program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            try:
                async with asyncio.timeout(_CONTROL_S):
                    said, _ = await process.communicate()
            except TimeoutError as error:
                process.kill()
                raise SandboxFault(f"{self._program} {words[0]} did not end within {_CONTROL_S:g} s") from error
        except OSError as error:
            raise SandboxFault(f"{self._program} cannot be run: {error.strerror}") from error
        if process.returncode:
            lines = said.decode("utf-8", "replace").strip().splitlines()
            raise SandboxFault(f"{self._program} {words[0]}: {lines[-1] if lines else process.returncode}")


def start_words(profile: Profile, limits: Limits, name: str) -> list[str]:
    """Return the words after `docker` that start the container of a profile."""
    assert profile.image is not None
    words = [
        *("run", "--detach", "--init", "--rm=false", "--pull", "never", "--name", name, "--network", "none"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"),
        *("--pids-limit", str(limits.processes), "--memory", f"{limits.memory_mb}m"),
        *("--memory-swap", f"{limits.memory_mb}m", "--ulimit", f"fsize={limits.file_mb << 20}"),
        *("--ulimit", f"cpu={limits.cpu_s}", "--ulimit", "core=0", "--ulimit", "nofile=1024"),
    ]
    if profile.gateway is not None:
        words += ["--volume", f"{profile.gateway}:/run/gateway:ro"]
    for folder in profile.programs:
        words += ["--volume", f"{folder}:{folder}:ro"]
    return [*words, "--entrypoint", "sleep", profile.image, "infinity"]


async def answers(program: str) -> bool:
    """Return True if the daemon of docker, or podman, answers."""
    try:
        process = await asyncio.create_subprocess_exec(
            program, "info", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await process.wait() == 0
    except TimeoutError:
        process.kill()
        await process.wait()
        return False


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _kept(pipe: asyncio.StreamReader, keep: int, flood: int) -> bytes | None:
    """Return head and tail of a stream, or None when it passed the limit of a flood."""
    head, tail, total = bytearray(), bytearray(), 0
    while data := await pipe.read(1 << 16):
        total += len(data)
        if total > flood:
            return None
        room = keep // 2 - len(head)
        head += data[:room]
        tail += data[max(room, 0) :]
        if len(tail) > keep:
            del tail[: -(keep // 2)]
    return bytes(head + tail[-(keep // 2) :] if total > keep else head + tail)
