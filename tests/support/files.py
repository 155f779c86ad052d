"""Files of a data folder that a running server writes, replaces and deletes meanwhile."""

from pathlib import Path


def contents(folder: Path) -> dict[Path, bytes]:
    """Return each file below the folder with its bytes, as they were while none of them went away."""
    while True:
        try:
            return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        except FileNotFoundError:  # replaced or deleted since it was listed: its successor is not in this list
            continue


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of the folder and of each path below it, by its path there."""
    while True:
        try:
            return {path.relative_to(folder).as_posix(): path.stat().st_mode for path in (folder, *folder.rglob("*"))}
        except FileNotFoundError:
            continue
