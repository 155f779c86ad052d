"""Choice of the sandbox: docker or podman where one answers and an image is named, else bubblewrap, else a refusal."""

import asyncio
import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from openclaw_rl.agents.sandbox import bubblewrap
from openclaw_rl.agents.sandbox.base import Limits, Profile, Sandbox
from openclaw_rl.agents.sandbox.bubblewrap import BubblewrapSandbox
from openclaw_rl.agents.sandbox.containers import ContainerSandbox, answers
from openclaw_rl.errors import SandboxFault

Kind = Literal["auto", "docker", "podman", "bubblewrap"]
_PREFIX, _LOCK = "openclaw-rl-sandboxes-", ".lock"
_INSTALL = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap), or docker, or podman"


@dataclass(slots=True)
class Sandboxes:
    """Opens the sandboxes of one run. `close` removes their folder."""

    limits: Limits
    folder: Path
    """Folder of the sandboxes' files; every user can pass through it."""
    containers: str | None
    """`docker` or `podman`, which answered; None: no containers."""
    bwrap: str | None
    """Program of bubblewrap, which started a sandbox; None: no bubblewrap."""
    _numbers: "itertools.count[int]"
    _lock: int
    """Descriptor of the folder's lock: a free one marks the folder of a run that was killed."""

    @classmethod
    async def choose(cls, kind: Kind, limits: Limits, folder: Path | None = None) -> Self:
        """Find out what works here, by a trial. Raises SandboxFault, which names what to install.

        folder: for the sandboxes' files; a temporary one when None.
        """
        wanted = ("docker", "podman") if kind == "auto" else (kind,)
        containers = None
        for name in wanted:
            if name != "bubblewrap" and containers is None and await answers(name):
                containers = name
        if containers is None and kind in ("docker", "podman"):
            raise SandboxFault(f"{kind} does not answer: start it, or set sandbox.kind to auto")
        where, lock = await asyncio.to_thread(_folder, folder)
        made = cls(limits, where, containers, None, itertools.count(), lock)
        if kind in ("auto", "bubblewrap"):
            made.bwrap = shutil.which("bwrap", path=f"{os.defpath}:{bubblewrap.PATH}")
            try:
                await made._try_bubblewrap()
            except SandboxFault as error:
                made.bwrap = None
                if containers is None:
                    await made.close()
                    raise SandboxFault(f"no sandbox on this machine ({error}): {_INSTALL}") from error
        return made

    def sandbox(self, profile: Profile) -> Sandbox:
        """Return a sandbox to open with `async with`. Raises SandboxFault if the profile's kind is not here."""
        number = next(self._numbers)
        if profile.image is not None:
            if self.containers is None:
                raise SandboxFault(f"the image {profile.image} needs docker or podman, and neither answers")
            return ContainerSandbox(profile, self.limits, self.containers, f"openclaw-rl-{os.getpid()}-{number}")
        if self.bwrap is None:
            raise SandboxFault(f"a sandbox without an image needs bubblewrap: {_INSTALL}")
        return BubblewrapSandbox(profile, self.limits, self.folder / str(number), self.bwrap)

    def gateway_folder(self) -> Path:
        """Return the path of a new folder for a gateway."""
        return self.folder / f"gateway-{next(self._numbers)}"

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        os.close(self._lock)

    async def _try_bubblewrap(self) -> None:
        if self.bwrap is None:
            raise SandboxFault("bubblewrap is not installed")
        async with self.sandbox(Profile()) as sandbox:
            if (await sandbox.run(("true",))).exit_code:
                raise SandboxFault("bubblewrap ran no command")


def _clear(place: Path) -> None:
    """Remove the folders of our user's runs that were killed: their locks are free."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # `rm`, because a model may have made folders deeper than Python's recursion goes.
            subprocess.run(["rm", "-rf", "--one-file-system", "--", folder], check=False, stderr=subprocess.DEVNULL)
        except BlockingIOError:
            pass  # a run that is alive
        finally:
            os.close(lock)


def _folder(wanted: Path | None) -> tuple[Path, int]:
    """Make a folder that the sandboxes' users can pass through; return it, and its lock of this run."""
    places = [wanted] if wanted is not None else [Path(tempfile.gettempdir()), Path("/var/tmp")]
    reasons = []
    for place in places:
        if not place.is_dir():
            reasons.append(f"{place} is no folder")
        elif (closed := bubblewrap.closed_folder(place.absolute())) is not None:
            reasons.append(f"other users cannot pass through {closed}" + (f" to {place}" if closed != place else ""))
        else:
            _clear(place)
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))  # from `_clear`, until it is locked
            lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            hidden.chmod(0o711)
            return hidden.rename(place / hidden.name[1:]), lock
    raise SandboxFault(f"{' and '.join(reasons)}; sandbox.folder names another folder")
