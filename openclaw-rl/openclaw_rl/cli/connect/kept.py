"""Files of a client as they were before `connect` first wrote them, so that `--undo` can put them back.

One folder per client in the data directory: `record.json`, and one file for each content. Contents may hold keys, so
only their owner can read them.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from openclaw_rl.data_dir import write_json, write_private
from openclaw_rl.errors import ClientError


@dataclass(slots=True)
class _File:
    path: str
    content: str | None
    """Name of the file that holds the old content; None: there was no such file."""
    mode: int
    written: str | None
    """Hash of the file after our last write; None: it was gone, or that write did not end."""


@dataclass(slots=True)
class _Record:
    files: list[_File] = field(default_factory=list)
    back: dict[str, Any] = field(default_factory=dict)
    """Values that the client's own writer puts back, if the file was changed since."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Values that `connect` wrote; empty in a record of an earlier release."""
    is_mixed: bool = False
    """Others changed a file between two of our writes: the old content lacks their changes."""


class Kept:
    def __init__(self, folder: Path) -> None:
        """Raises ClientError for a record that cannot be read."""
        self.folder, self._path = folder, folder / "record.json"
        self._record = _Record()
        if self._path.is_file():
            try:
                found = orjson.loads(self._path.read_bytes())
                files = [_File(**row) for row in found["files"]]
                self._record = _Record(files, dict(found["back"]), dict(found.get("ours", {})), bool(found["is_mixed"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ClientError(f"{self._path} cannot be read: {error}") from error

    @property
    def is_empty(self) -> bool:
        return not self._record.files

    @property
    def back(self) -> Mapping[str, Any]:
        return self._record.back

    @property
    def ours(self) -> Mapping[str, Any]:
        return self._record.ours

    def keep(
        self, paths: Iterable[Path], back: Mapping[str, Any] | None = None, ours: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the contents of these files, unless an earlier call kept them. Raises OSError.

        back, ours: the values that undo all writes, and those that all of them wrote, with the one that comes next.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._record.is_mixed |= not self.is_empty and bool(self.changed())
        self._record.back, self._record.ours = dict(back or {}), dict(ours or {})
        known = {file.path for file in self._record.files}
        for path in paths:
            if str(path) in known:
                continue
            content = path.read_bytes() if path.exists() else None
            name = f"{len(self._record.files)}-{path.name}"
            if content is not None:
                write_private(self.folder / name, content)
            mode = stat.S_IMODE(path.stat().st_mode) if content is not None else 0o600
            kept = _File(str(path), None if content is None else name, mode, _hash(path))
            self._record.files.append(kept)
        self._save()

    def wrote(self) -> None:
        """Remember the files as our write left them."""
        for file in self._record.files:
            file.written = _hash(Path(file.path))
        self._save()

    def changed(self) -> list[Path]:
        """Return the files that were changed since our last write."""
        return [path for file in self._record.files if _hash(path := Path(file.path)) != file.written]

    @property
    def is_exact(self) -> bool:
        """True: putting the old contents back loses no change that others made."""
        return not self._record.is_mixed and not self.changed()

    def restore(self) -> list[str]:
        """Put every file back, byte for byte; return a line for each. The contents that are replaced stay in a copy.

        Raises OSError.
        """
        said, changed = [], set(self.changed())
        aside = self.folder.with_name(f"{self.folder.name}-replaced-{time.strftime('%Y%m%dT%H%M%S')}")
        for file in self._record.files:
            path = Path(file.path)
            if path in changed and path.exists():
                aside.mkdir(mode=0o700, exist_ok=True)
                write_private(aside / path.name, path.read_bytes())
                said.append(f"{path}: the changed file is kept in {aside}")
            if file.content is None:
                path.unlink(missing_ok=True)
                said.append(f"{path} is removed: there was none")
            else:
                _replace(path, (self.folder / file.content).read_bytes(), file.mode)
                said.append(f"{path} is as it was, byte for byte")
        return said

    def forget(self) -> None:
        shutil.rmtree(self.folder)
        self._record = _Record()

    def _save(self) -> None:
        write_json(self._path, asdict(self._record))


def _hash(path: Path) -> str | None:
    return sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _replace(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, content)
    os.chmod(path, mode)
