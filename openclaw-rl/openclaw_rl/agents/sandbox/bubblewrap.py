"""Sandbox by bubblewrap: one `bwrap` per sandbox, whose process 1 (`process_one`) runs the commands.

Two leaks of plain bubblewrap are closed. `bwrap` is started with an empty environment, because `/proc/1/environ` shows
its starter's in spite of `--clearenv`. Under root it is started as an unprivileged user, because the kernel exempts
root from the limit on processes, `--uid` or not.

A sandbox is one session, without a terminal. Where Linux groups processes by session (autogroup), niceness counts
within a group only, and every group gets an equal share: 64 sandboxes then take the cores from a server beside them,
whatever their niceness. So the group of a sandbox gets the runner's niceness, and a command makes no session.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from openclaw_rl.agents.sandbox import process_one
from openclaw_rl.agents.sandbox.base import GATEWAY_PORT, PATH, Finished, Limits, Profile, Sandbox
from openclaw_rl.errors import SandboxFault

_FIRST_UID, _UIDS = 50_000, 10_000
"""Users of sandboxes that root starts; each open one has its own."""
_START_S, _GRACE_S, _DISK_EVERY_S = 30.0, 10.0, 2.0
_LARGEST_FRAME = 1 << 31
_PASSWD = b"root:x:0:0::/root:/usr/sbin/nologin\nagent:x:1000:1000::/home/agent:/bin/bash\n"
_GROUP = b"root:x:0:\nagent:x:1000:\n"
_HOSTS = b"127.0.0.1 localhost\n"
_PROGRAM = "process_one.py"
_uids = itertools.count()


class BubblewrapSandbox(Sandbox):
    """One sandbox of `bwrap`."""

    def __init__(self, profile: Profile, limits: Limits, folder: Path, bwrap: str) -> None:
        """folder: a new folder for the sandbox's files, below one that every user may pass through."""
        super().__init__(profile, limits)
        self._folder, self._bwrap = folder, bwrap
        self._uid = _FIRST_UID + next(_uids) % _UIDS if os.geteuid() == 0 else None
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._running: dict[int, asyncio.Future[Finished]] = {}
        self._ids = itertools.count()
        self._sending = asyncio.Lock()
        self._has_stepped_back = False

    async def open(self) -> None:
        for folder in self.profile.programs:
            if not await asyncio.to_thread(_can_be_shown, folder):
                raise SandboxFault(f"{folder} is missing, or the sandbox's user cannot pass through to it")
        try:
            await asyncio.to_thread(self._make_folders)
            await self._start()
        except OSError as error:
            raise SandboxFault(f"a sandbox cannot be made in {self._folder}: {error.strerror or error}") from error

    async def renew(self) -> None:
        await self._stop()
        try:
            for name in ("tmp", "home", "shm"):
                await _remove(self._folder / name)
            await asyncio.to_thread(self._make_folders)
            await self._start()
        except OSError as error:
            raise SandboxFault(f"a sandbox cannot start afresh: {error.strerror or error}") from error

    async def close(self) -> None:
        await self._stop()
        await _remove(self._folder)

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
        number = next(self._ids)
        asked = {
            "id": number,
            "argv": argv,
            "cwd": cwd,
            "env": dict(env),
            "timeout_s": timeout_s,
            "stdin": base64.b64encode(stdin).decode(),
            "keep": keep_bytes,
        }
        done = asyncio.get_running_loop().create_future()
        self._running[number] = done
        try:
            await self._send(asked)
            async with asyncio.timeout(timeout_s + _GRACE_S):
                while True:
                    finished, _ = await asyncio.wait((done,), timeout=_DISK_EVERY_S)
                    if finished:
                        return done.result()
                    if await asyncio.to_thread(self._is_over_disk):
                        await self._send({"end": number, "reason": "disk"})
        except TimeoutError as error:
            await self._stop()
            raise SandboxFault(f"the sandbox did not end a command after {timeout_s:g} s") from error
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxFault):
                await self._send({"end": number, "reason": "time"})
            raise
        finally:
            self._running.pop(number, None)

    async def _send(self, frame: Mapping[str, object]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise SandboxFault("the sandbox has ended")
        self._has_stepped_back = self._has_stepped_back or step_back(process.pid)
        text = json.dumps(frame).encode()  # not orjson: a model writes half characters, too
        try:
            async with self._sending:
                process.stdin.write(struct.pack(">I", len(text)) + text)
                async with asyncio.timeout(_GRACE_S + _START_S):
                    await process.stdin.drain()
        except (OSError, TimeoutError) as error:
            raise SandboxFault(f"the sandbox takes no command: {error!r}") from error

    async def _start(self) -> None:
        user = {} if self._uid is None else {"user": self._uid, "group": self._uid, "extra_groups": []}
        async with asyncio.timeout(_START_S):
            self._process = await asyncio.create_subprocess_exec(
                *self._argv(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={},
                cwd="/",
                # A Ctrl-C of the terminal is the runner's, and no command can type into it. `--new-session` would do
                # the latter too, in a second session, whose group nobody can make nicer before Python has started.
                start_new_session=True,
                **user,  # type: ignore[arg-type]
            )
        self._has_stepped_back = step_back(self._process.pid)
        out = self._process.stdout
        assert out is not None
        try:
            async with asyncio.timeout(_START_S):
                if (await _frame(out)).get("ready") is not True:
                    raise SandboxFault("the sandbox did not start")
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            said = await self._last_words()
            await self._stop()
            raise SandboxFault(f"bubblewrap did not start a sandbox: {said}") from error
        self._reader = asyncio.create_task(self._read(out))

    async def _last_words(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(1):
                text = (await self._process.stderr.read(4096)).decode("utf-8", "replace").strip()
        except TimeoutError:
            text = ""
        return text.splitlines()[-1] if text else "it gave no reason"

    async def _read(self, out: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await _frame(out)
                done = self._running.get(frame["id"])
                if done is not None and not done.done():
                    output, errors = (base64.b64decode(frame[name]) for name in ("out", "errors"))
                    done.set_result(Finished(frame["exit_code"], output, errors, frame.get("ended_by")))
        except (asyncio.IncompleteReadError, OSError, ValueError):
            for done in self._running.values():
                if not done.done():
                    done.set_exception(SandboxFault("the sandbox ended by itself"))

    async def _stop(self) -> None:
        """End it: process 1 ends with its input, and the kernel ends the others before `bwrap` returns."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    def _argv(self) -> list[str]:
        limits, profile = self.limits, self.profile
        told = {
            "limits": {
                "memory": limits.memory_mb << 20,
                "cpu": limits.cpu_s,
                "file": limits.file_mb << 20,
                "processes": limits.processes,
                "flood": limits.flood_mb << 20,
            },
            "forward": None if profile.gateway is None else [GATEWAY_PORT, "/run/gateway/socket"],
        }
        argv = [
            *(self._bwrap, "--unshare-all", "--unshare-user", "--die-with-parent"),
            *("--cap-drop", "ALL"),
            *(["--disable-userns"] if "--disable-userns" in options(self._bwrap) else []),
            *("--as-pid-1", "--clearenv", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
            *system_folders(),
            *("--proc", "/proc", "--dev", "/dev", "--bind", str(self._folder / "shm"), "/dev/shm"),
            *("--remount-ro", "/dev", "--bind", str(self._folder / "tmp"), "/tmp"),
            *("--bind", str(self._folder / "home"), "/home/agent"),
        ]
        for name in ("passwd", "group", "hosts"):
            argv += ["--ro-bind", str(self._folder / "etc" / name), f"/etc/{name}"]
        argv += ["--ro-bind", str(self._folder / "etc" / _PROGRAM), f"/run/{_PROGRAM}"]
        for inside, here in self._writable():
            argv += ["--bind", str(here), inside]
        if profile.gateway is not None:
            argv += ["--ro-bind", str(profile.gateway), "/run/gateway"]
        for folder in profile.programs:
            argv += ["--ro-bind", str(folder), str(folder)]
        python = interpreter()
        if not python.startswith("/usr/"):
            argv += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        # A file, because `ps` inside prints the words of a command.
        program = (python, "-I", "-S", f"/run/{_PROGRAM}", json.dumps(told))
        return [*argv, "--remount-ro", "/", "--chdir", "/", "--", *program]

    def _writable(self) -> Iterator[tuple[str, Path]]:
        for number, inside in enumerate((self.profile.workdir, *self.profile.folders)):
            yield inside, self._folder / str(number)

    def _make_folders(self) -> None:
        self._folder.mkdir(mode=0o711, exist_ok=True)
        self._folder.chmod(0o711)
        for here in (*(self._folder / name for name in ("tmp", "home", "shm")), *(h for _, h in self._writable())):
            if not here.exists():
                here.mkdir(mode=0o700)
                if self._uid is not None:
                    os.chown(here, self._uid, self._uid)
        etc = self._folder / "etc"
        etc.mkdir(mode=0o755, exist_ok=True)
        etc.chmod(0o755)
        program = Path(process_one.__file__).read_bytes()
        for name, content in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", _HOSTS), (_PROGRAM, program)):
            (etc / name).write_bytes(content)
            (etc / name).chmod(0o644)

    def _is_over_disk(self) -> bool:
        """Return True if the files are too many, or cannot be measured: a folder may be hidden on purpose."""
        left = self.limits.disk_mb << 20
        todo = [str(self._folder)]
        while todo:
            try:
                with os.scandir(todo.pop()) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            left -= entry.stat(follow_symlinks=False).st_blocks * 512
                            if entry.is_dir(follow_symlinks=False):
                                todo.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                return True
            if left < 0:
                return True
        return False


def step_back(pid: int) -> bool:
    """Give the group of a process's session this process's niceness. False: the kernel wants to be asked later."""
    group = Path(f"/proc/{pid}/autogroup")
    try:
        if group.read_text().strip():  # empty: a kernel that does not group
            group.write_text(f"{os.nice(0)}\n")
    except BlockingIOError:  # ten such changes a second are allowed, from all users but root together
        return False
    except OSError:  # no such file, or a `bwrap` with root's rights
        pass
    return True


async def _frame(out: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = struct.unpack(">I", await out.readexactly(4))
    if length > _LARGEST_FRAME:
        raise ValueError("a frame of a sandbox is too large")
    found = json.loads(await out.readexactly(length))
    if not isinstance(found, dict):
        raise ValueError("a frame of a sandbox is no object")
    return found


async def _remove(folder: Path) -> None:
    """Remove a folder that a model wrote: any depth, any modes, links as links."""
    for command in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
        if not await asyncio.to_thread(os.path.lexists, folder):
            return
        process = await asyncio.create_subprocess_exec(
            *command, "--", str(folder), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await process.wait()


@cache
def options(bwrap: str) -> str:
    """Return the options that this `bwrap` knows."""
    try:
        return subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


@cache
def interpreter() -> str:
    """Return the Python of process 1, which every user can run. Raises SandboxFault."""
    own = os.path.realpath(sys.executable)
    system = shutil.which("python3", path=PATH)
    for python in (system, own):
        if python and can_pass(Path(os.path.realpath(python)).parent):
            return python
    raise SandboxFault("a sandbox needs a Python below /usr: install python3")


def can_pass(folder: Path) -> bool:
    """Return True if the user of a sandbox can pass through all the folders of a path."""
    return closed_folder(folder) is None


def closed_folder(folder: Path) -> Path | None:
    """Return the outermost folder of a path that the user of a sandbox cannot pass through."""
    if os.geteuid() != 0:
        return None if os.access(folder, os.X_OK) else folder
    return next((here for here in (*reversed(folder.parents), folder) if not here.stat().st_mode & 0o001), None)


def _can_be_shown(folder: Path) -> bool:
    try:
        return can_pass(folder.resolve(strict=True))
    except OSError:
        return False


def system_folders() -> Iterator[str]:
    """Yield the words that show the host's programs and libraries in a `bwrap`, read-only."""
    yield from ("--ro-bind", "/usr", "/usr", "--dir", "/etc", "--dir", "/run", "--dir", "/home")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        here = Path("/") / name
        if here.is_symlink():
            yield from ("--symlink", os.readlink(here), str(here))
        elif here.is_dir():
            yield from ("--ro-bind", str(here), str(here))
    if Path("/etc/alternatives").is_dir():  # links alone: /usr/bin/awk is one to them
        yield from ("--ro-bind", "/etc/alternatives", "/etc/alternatives")
