"""Data directory: all files that a server keeps, readable by their owner only.

ledger.sqlite3   ledger.sqlite3.pictures/   versions/<lease id>/   keys/admin.key   keys/trainer.token   keys/users.json
run/server.json   logs/   cache/   push/   tracking/   connect/
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import orjson
from pydantic import SecretStr

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import USERS_FILE

PUSH = "push"


@dataclass(frozen=True, slots=True)
class DataDir:
    root: Path

    @classmethod
    def of(cls, root: Path) -> "DataDir":
        """Return the directory as it is, and make no folder."""
        return cls(root.expanduser().absolute())

    @classmethod
    def prepare(cls, root: Path) -> "DataDir":
        """Make the folders, readable by their owner only. Raises SettingsError when that cannot be done."""
        data = cls.of(root)
        try:
            data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (data.versions, data.keys, data.run, data.logs, data.cache):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)  # an old folder may be open to others; the root may be the user's own
        except OSError as error:
            raise SettingsError(f"data_dir: {error.filename}: {error.strerror}") from error
        return data

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite3"

    @property
    def versions(self) -> Path:
        return self.root / "versions"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def users(self) -> Path:
        """File with the users' names and the digests of their keys."""
        return self.root / USERS_FILE

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def push(self) -> Path:
        """Folder that the node's trainer makes if weights go to the engines by disk."""
        return self.root / PUSH

    @property
    def tracking(self) -> Path:
        """Folder of the trackers: figures of each step, and how far each tracker came."""
        return self.root / "tracking"

    @property
    def connect(self) -> Path:
        """Folder of the clients' files as they were before `openclaw-rl connect`."""
        return self.root / "connect"

    @property
    def drained(self) -> Path:
        """File with the names of a pool's engines that the operator drained."""
        return self.run / "drained.json"

    @property
    def server_file(self) -> Path:
        return self.run / "server.json"

    def secret(self, name: str, configured: SecretStr | None) -> str:
        """Return the configured secret, else the stored one, else a new one, which is stored."""
        if configured is not None:
            return configured.get_secret_value()
        path = self.keys / name
        kept = path.read_text().strip() if path.exists() else ""
        if not kept:  # an empty file would be a key that every client has
            kept = secrets.token_urlsafe(32)
            write_private(path, kept.encode())
        return kept


@dataclass(frozen=True, slots=True)
class Announcement:
    """The content of `run/server.json`: the running server of a data directory, and how it proves to be that server."""

    url: str
    version: str
    folder: str
    """Identity of the data directory. A copy has the same file and another identity."""
    proof_key: str = field(repr=False)
    """Secret of this run. Another program on the port does not know it."""

    @classmethod
    def new(cls, data: DataDir, url: str, *, version: str, proof_key: str) -> Self:
        return cls(url, version, _identity(data.root), proof_key)

    @classmethod
    def read(cls, data: DataDir) -> Self:
        """Return the announcement of the server that runs in this directory.

        Raises OSError without one, and SettingsError for a file that belongs to another directory or another release.
        """
        try:
            found = orjson.loads(data.server_file.read_bytes())
            announcement = cls(**{name: str(found[name]) for name in ("url", "version", "folder", "proof_key")})
        except (KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"{data.server_file} is not of this release: restart the server") from error
        if announcement.folder != _identity(data.root):
            raise SettingsError(
                f"{data.root} is a copy, or was moved: its {data.server_file.name} names the server of another"
                f" directory, at {announcement.url}"
            )
        return announcement

    def write(self, data: DataDir) -> None:
        write_json(data.server_file, {name: getattr(self, name) for name in self.__slots__})

    def proves(self, challenge: str, proof: str | None) -> bool:
        """Return True if the proof shows that its sender knows the secret of this run."""
        # As bytes: another program's header may hold any character, which the comparison of texts refuses.
        return hmac.compare_digest(
            proof_of(self.proof_key, challenge).encode(), (proof or "").encode("utf-8", "replace")
        )


def proof_of(proof_key: str, challenge: str) -> str:
    """Return HMAC-SHA256(proof_key, challenge), in hexadecimal digits."""
    return hmac.new(proof_key.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def _identity(folder: Path) -> str:
    """Return the device and the inode: a copy differs in them, a bind mount of a container does not."""
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; readers see the old content or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    write_private(path, orjson.dumps(value, option=orjson.OPT_INDENT_2))
