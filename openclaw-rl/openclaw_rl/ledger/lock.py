"""The single-instance lock: one server per ledger.

An advisory `flock` on a file beside the ledger, with the owner's pid in it for people to read. The kernel frees it when
the process ends, however it ends; the file itself stays (deleting it would let two processes lock two files of one
name).
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from openclaw_rl.errors import LedgerError, LedgerLocked


class InstanceLock:
    """Held from construction to `release`."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(f"cannot open the lock file {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise LedgerLocked(
                f"another server (process {owner or 'unknown'}) holds {path.name.removesuffix('.lock')}; stop it first"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @classmethod
    def beside(cls, ledger: Path) -> "InstanceLock":
        """The lock of this ledger. Raises LedgerLocked, which names the process that has it."""
        return cls(ledger.with_name(ledger.name + ".lock"))

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "InstanceLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
