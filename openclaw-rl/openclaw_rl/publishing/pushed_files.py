"""Folders with full weights that a trainer wrote for the engines: `push/` in the data directory.

They are no checkpoints, and a server that ends forgets them. While it runs, an engine that comes back takes the serving
version from its folder. The folders of other versions are deleted. Whatever else lies in `push/` stays.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import structlog

from openclaw_rl.errors import CommitRefused

log = structlog.get_logger()

_RUN, _VERSION = re.compile(r"[0-9a-f]{8}"), re.compile(r"weight_v([0-9]{6}|[1-9][0-9]{6,})")
"""Names of the folders that the driver makes: one for each of its starts, and below it one for each version."""


class PushedFiles:
    """The folders of versions that no checkpoint holds yet."""

    def __init__(self, root: Path) -> None:
        """root: the folder `push/`, which may not be there."""
        self._root = root
        self._folders: dict[int, Path] = {}
        self.awaited: str | None = None
        """Folder, relative to the data directory, that a trainer is writing; None: no trainer writes."""

    def find(self, folder: str) -> Path:
        """Return the place of a folder, relative to the data directory. Blocks. Raises CommitRefused without it."""
        try:
            place = (self._root.parent / folder).resolve()
            is_ours = place.is_relative_to(self._root.resolve()) and place.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # no permission; links in a circle; no path at all
            raise CommitRefused(f"{folder}: the folder cannot be read: {error}") from error
        if not is_ours:
            raise CommitRefused(f"{folder}: no folder of that name is in {self._root.name}/")
        return place

    def add(self, weight_version: int, place: Path) -> None:
        """Note the folder of a version that the engines took. Its files of before may go."""
        self._folders[weight_version] = place

    def of(self, weight_version: int) -> Path | None:
        return self._folders.get(weight_version)

    def drop(self, *, kept: int, held: Path | None = None) -> list[str]:
        """Delete the driver's folders but those of one version, of the engines, and of the trainer that writes.

        Blocks. Return one sentence for each that stays. held: the folder that engines may read.
        """
        self._folders = {number: place for number, place in self._folders.items() if number == kept}
        others = [held, None if self.awaited is None else self._root.parent / self.awaited]
        return [*self._delete({*self._folders.values(), *(place.resolve() for place in others if place is not None)})]

    def _delete(self, kept: Collection[Path]) -> Iterator[str]:
        try:
            runs = [place for place in self._root.iterdir() if _is_folder(place, _RUN)]
        except FileNotFoundError:
            return
        except OSError as error:
            yield _stays(self._root, error)
            return
        for run in runs:
            try:
                found = [*run.iterdir()]
                gone = [place for place in found if _is_folder(place, _VERSION) and place.resolve() not in kept]
            except OSError as error:
                yield _stays(run, error)
                continue
            for place in gone:
                try:
                    shutil.rmtree(place)
                except OSError as error:  # a rank may still be writing there: the next call deletes the rest
                    yield _stays(place, error)
            try:
                if len(gone) == len(found) and not any(run.iterdir()):
                    run.rmdir()
            except OSError as error:
                yield _stays(run, error)


def _is_folder(place: Path, named: re.Pattern[str]) -> bool:
    return named.fullmatch(place.name) is not None and place.is_dir() and not place.is_symlink()


def _stays(place: Path, error: OSError) -> str:
    log.warning("pushed_weights_not_deleted", folder=str(place), error=repr(error))
    return f"{place} cannot be deleted: {error}"
