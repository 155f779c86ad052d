"""Folders with full weights that a trainer wrote for the engines: `push/` in the data directory.

They are no checkpoints, and a server that ends forgets them. While it runs, an engine that comes back takes the serving
version from its folder. The folders of other versions are deleted.
"""

import shutil
from pathlib import Path

from openclaw_rl.errors import CommitRefused


class PushedFiles:
    """The folders of versions that no checkpoint holds yet."""

    def __init__(self, root: Path) -> None:
        """root: the folder `push/`, which may not be there."""
        self._root = root
        self._folders: dict[int, Path] = {}

    def add(self, weight_version: int, folder: str) -> None:
        """Note a version's folder, relative to the data directory. Blocks. Raises CommitRefused for no such folder."""
        place = (self._root.parent / folder).resolve()
        if not place.is_relative_to(self._root.resolve()) or not place.is_dir():
            raise CommitRefused(f"{folder}: no folder of that name is in {self._root.name}/")
        self._folders[weight_version] = place

    def of(self, weight_version: int) -> Path | None:
        return self._folders.get(weight_version)

    def drop(self, *, kept: int) -> None:
        """Delete all folders but that of one version. Blocks. Call it while no trainer writes."""
        self._folders = {number: place for number, place in self._folders.items() if number == kept}
        for place in self._root.glob("*/*"):  # a folder for each start of a trainer, and below it one for each version
            if place.resolve() not in self._folders.values():
                shutil.rmtree(place, ignore_errors=True)
        for place in self._root.glob("*"):
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()
