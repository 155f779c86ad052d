"""Data directory: all files that a server keeps, readable by their owner only.

ledger.sqlite3   versions/<lease id>/   keys/admin.key   keys/trainer.token   run/server.json   logs/   cache/   push/
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic import SecretStr

from openclaw_rl.errors import SettingsError


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
        """Folder that the node's trainer makes if weights go to the engine by disk."""
        return self.root / "push"

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
