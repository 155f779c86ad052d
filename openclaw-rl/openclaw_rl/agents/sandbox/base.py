"""Nouns of a sandbox, and what each kind does alike: files go in and out as tar archives through its own `tar`."""

import asyncio
import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from openclaw_rl.errors import SandboxFault

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GATEWAY_PORT = 30000
_TRANSFER_S = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one sandbox. A command that passes one of them fails or is killed; the sandbox goes on."""

    memory_mb: int = 2048
    """Address space of each process."""
    cpu_s: int = 300
    """CPU time of each process."""
    file_mb: int = 100
    """Size of each file that is written."""
    processes: int = 128
    """Processes and threads at once."""
    output_kb: int = 64
    """Output of a command that is kept, head and tail, for each of its two streams."""
    flood_mb: int = 16
    """Output after which a command is killed."""
    disk_mb: int = 1024
    """Files of the sandbox together."""
    command_s: float = 60.0
    """Time of a command whose caller names none."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A sandbox as its user wants it."""

    workdir: str = "/work"
    folders: tuple[str, ...] = ()
    """More writable folders, by their paths inside, such as `/logs`. `/tmp` and `/home/agent` are always there."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of each command. The host's is never passed on."""
    image: str | None = None
    """Container image. Without one there is bubblewrap alone, whose sandbox shows the host's `/usr`."""
    gateway: Path | None = None
    """Folder of a gateway's socket: port `GATEWAY_PORT` of the sandbox's loopback leads to it."""
    programs: tuple[Path, ...] = ()
    """Folders of the host that are shown read-only at their own paths, for a harness inside."""

    def __post_init__(self) -> None:
        for folder in (self.workdir, *self.folders, *map(str, self.programs)):
            if not folder.startswith("/") or ".." in folder.split("/") or folder == "/":
                raise ValueError(f"a folder of a sandbox is an absolute path below /: {folder!r}")


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended, or was ended."""

    exit_code: int
    """As a shell has it: 128 + the signal that ended it."""
    output: bytes
    errors: bytes
    ended_by: str | None = None
    """The limit that ended it: `time`, `output` or `disk`; None when it ended by itself."""

    @property
    def text(self) -> str:
        """Return both streams as text, for a model to read."""
        return (self.output + self.errors).decode("utf-8", "replace")


class Sandbox(ABC):
    """One sandbox, in use. As a context manager it ends with all its processes and files."""

    _shell: ClassVar[tuple[str, ...]] = ("bash", "-c")

    def __init__(self, profile: Profile, limits: Limits) -> None:
        self.profile, self.limits = profile, limits

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        keep_bytes: int | None = None,
    ) -> Finished:
        """Run a command and return when it ended; a text is run by bash. Processes that it leaves behind go on.

        Raises SandboxFault if the sandbox itself fails, never for what the command does.
        """
        argv = (*self._shell, command) if isinstance(command, str) else tuple(command)
        named = {"PATH": PATH, "HOME": "/home/agent", "LANG": "C.UTF-8", **self.profile.env, **(env or {})}
        if any("\0" in word for word in (*argv, *named, *named.values(), cwd or "")):
            return Finished(127, b"", b"bash: a command has no NUL character\n")  # execve takes none
        return await self._run(
            argv,
            cwd=cwd or self.profile.workdir,
            env=named,
            timeout_s=timeout_s or self.limits.command_s,
            stdin=stdin,
            keep_bytes=keep_bytes or 1024 * self.limits.output_kb,
        )

    async def put(self, files: Mapping[str, bytes], folder: str | None = None, *, mode: int = 0o644) -> None:
        """Write files, by their paths below a folder, which is the work folder by default."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(content), mode
                archive.addfile(info, io.BytesIO(content))
        await self._unpack(buffer.getvalue(), folder or self.profile.workdir)

    async def put_folder(self, source: Path, folder: str | None = None) -> None:
        """Copy a folder of the host into a folder of the sandbox, with links as links."""
        buffer = io.BytesIO()

        def pack() -> None:
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                archive.add(source, ".", filter=_without_owner)

        try:
            await asyncio.to_thread(pack)
        except OSError as error:
            raise SandboxFault(f"{error.filename or source} cannot be read: {error.strerror}") from error
        await self._unpack(buffer.getvalue(), folder or self.profile.workdir)

    async def take(self, folder: str | None = None) -> "dict[str, bytes] | None":
        """Return the files below a folder by their paths; a folder ends with `/` and is empty, a link is `-> target`.

        None: there is no such folder, or it holds more than the sandbox may.
        """
        packed = await self.pack(folder or self.profile.workdir)
        if packed is None:
            return None
        most = 1024 * 1024 * self.limits.disk_mb
        found: dict[str, bytes] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    most -= member.size
                    if most < 0:
                        return None
                    if member.isfile() and (file := archive.extractfile(member)) is not None:
                        found[name] = file.read()
                    elif member.isdir():
                        found[f"{name}/"] = b""
                    else:
                        found[name] = f"-> {member.linkname}".encode()
        except (tarfile.TarError, OSError, ValueError, KeyError):
            return None
        found.pop("./", None)
        return found

    async def pack(self, folder: str) -> bytes | None:
        """Return a folder as a tar archive, or None."""
        most = 1024 * 1024 * self.limits.disk_mb
        done = await self.run(("tar", "-C", folder, "-c", "."), timeout_s=_TRANSFER_S, keep_bytes=most)
        return done.output if done.exit_code in (0, 1) and done.ended_by is None else None  # 1: a file changed

    async def _unpack(self, archive: bytes, folder: str) -> None:
        command = 'mkdir -p -- "$1" && exec tar -C "$1" -x --no-same-owner'
        done = await self.run(("sh", "-c", command, "sh", folder), timeout_s=_TRANSFER_S, stdin=archive)
        if done.exit_code:
            raise SandboxFault(f"files cannot be written to {folder} of the sandbox: {_last(done.errors)}")

    @abstractmethod
    async def _run(
        self,
        argv: tuple[str, ...],
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes,
        keep_bytes: int,
    ) -> Finished: ...

    @abstractmethod
    async def open(self) -> None:
        """Start it. Raises SandboxFault."""

    @abstractmethod
    async def renew(self) -> None:
        """End every process, empty `/tmp` and the home folder, and start afresh; the other folders stay."""

    @abstractmethod
    async def close(self) -> None:
        """End every process and remove the files."""

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _last(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "no reason given"
