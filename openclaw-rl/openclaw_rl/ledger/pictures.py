"""Pictures of the ledger: one file for each content, in a folder beside the ledger, named by its SHA-256.

    ledger.sqlite3.pictures/<64 hex digits>

The table `picture` names the files, and `request_picture` the pictures of each request in the order of its prompt. A
picture is there once, however many requests show it. It is on disk before the row that names it is committed. It is
deleted after the last such row is gone from the disk. A crash between the two leaves a file without a row, which the
next `sweep` deletes: at the end of each deletion, and at each start.

All writes are on the ledger's writing thread, so that no picture is deleted while a request comes that shows it.
"""

import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from openclaw_rl.data_dir import write_private
from openclaw_rl.errors import LedgerError
from openclaw_rl.types.pictures import Picture

_ZEROS = bytes(2**16)


def folder_of(ledger: Path) -> Path:
    """Return the folder of a ledger's pictures."""
    return ledger.with_name(f"{ledger.name}.pictures")


def put(db: sqlite3.Connection, request: int, pictures: Sequence[Picture]) -> None:
    """Write the pictures of a request. Raises LedgerError if one is neither given nor here, or cannot be written."""
    for number, picture in enumerate(pictures):
        digest = bytes.fromhex(picture.digest)
        # A file without a row may be half deleted: it is written again.
        is_known = db.execute("SELECT 1 FROM picture WHERE digest = ?", (digest,)).fetchone() is not None
        _write(_folder(db), picture, is_known=is_known)
        db.execute(
            "INSERT OR IGNORE INTO picture (digest, width, height, bytes) VALUES (?, ?, ?, ?)",
            (digest, picture.width, picture.height, (_folder(db) / picture.digest).stat().st_size),
        )
        db.execute(
            "INSERT INTO request_picture SELECT ?, ?, id FROM picture WHERE digest = ?", (request, number, digest)
        )


def copy(db: sqlite3.Connection, request: int, of: int) -> None:
    """Give a request the pictures of another one."""
    db.execute("INSERT INTO request_picture SELECT ?, n, picture FROM request_picture WHERE request = ?", (request, of))


def of_request(db: sqlite3.Connection, request: int) -> tuple[Picture, ...]:
    """Return references to the pictures of a request, in the order of its prompt."""
    rows = db.execute(
        "SELECT hex(digest), width, height FROM request_picture JOIN picture ON picture.id = picture"
        " WHERE request = ? ORDER BY n",
        (request,),
    )
    return tuple(Picture(digest.lower(), width, height) for digest, width, height in rows)


def delete_unused(db: sqlite3.Connection) -> None:
    """Delete the rows of pictures that no request shows; `sweep` then deletes their files."""
    db.execute("DELETE FROM picture WHERE NOT EXISTS (SELECT 1 FROM request_picture WHERE picture = picture.id)")


def sweep(db: sqlite3.Connection) -> bool:
    """Delete the files that no row names. False: one could not be deleted. Runs outside a transaction."""
    folder = _folder(db)
    try:
        files = list(folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:  # too many open files, or a folder of another owner: it costs this sweep, and no write
        return False
    named = set(names(db))
    is_done = True
    for file in files:
        if file.name not in named:
            try:
                _delete(file)
            except OSError:
                is_done = False
    return is_done


def used_bytes(db: sqlite3.Connection) -> int:
    (total,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM picture").fetchone()
    return int(total)


def faults(db: sqlite3.Connection) -> Iterator[str]:
    """Yield pictures whose files are not as their rows say."""
    folder = _folder(db)
    for digest, size in db.execute("SELECT hex(digest), bytes FROM picture"):
        file = folder / digest.lower()
        if not file.is_file():
            yield f"the file of picture {file.name} is missing"
        elif file.stat().st_size != size:
            yield f"the file of picture {file.name} has {file.stat().st_size} bytes, not {size}"


def names(db: sqlite3.Connection) -> list[str]:
    """Return the digests of all pictures; none of a ledger from before they were kept."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'picture'").fetchone() is None:
        return []
    return [digest.lower() for (digest,) in db.execute("SELECT hex(digest) FROM picture")]


def copy_files(digests: Collection[str], source: Path, target: Path) -> int:
    """Copy these pictures to a new folder, for a backup or an export; return their bytes. Raises LedgerError.

    A picture that is forgotten meanwhile is left out.
    """
    total = 0
    try:
        if digests:
            target.mkdir(mode=0o700)
        for name in sorted(digests):
            try:
                data = (source / name).read_bytes()
            except FileNotFoundError:
                continue
            _write_file(target / name, data)
            total += len(data)
    except FileExistsError as error:
        raise LedgerError(f"cannot copy the pictures: {target} is there already") from error
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise LedgerError(f"cannot copy the pictures to {target}: {error.strerror}") from error
    return total


def _folder(db: sqlite3.Connection) -> Path:
    return next(folder_of(Path(file)) for _, name, file in db.execute("PRAGMA database_list") if name == "main")


def _write(folder: Path, picture: Picture, *, is_known: bool) -> None:
    file = folder / picture.digest
    if is_known and file.is_file():
        return
    if picture.data is None:
        raise LedgerError(f"picture {picture.digest} is not in the ledger")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _write_file(file, picture.data)
    except OSError as error:
        raise LedgerError(f"cannot write a picture: {error.strerror}") from error


def _write_file(file: Path, data: bytes) -> None:
    """Write a file of the owner alone that is whole or not there, also after a power cut."""
    write_private(file, data)
    descriptor = os.open(file.parent, os.O_RDONLY)  # the new name has to outlast a power cut too
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(file: Path) -> None:
    """Overwrite the file with zeros, as SQLite does with deleted rows, and delete it."""
    if not file.name.startswith("."):  # no reader may take the zeros for the picture
        file = file.rename(file.with_name(f".{file.name}"))
    with file.open("r+b") as out:
        left = out.seek(0, os.SEEK_END)
        out.seek(0)
        while left > 0:
            left -= out.write(_ZEROS[:left])
        out.flush()
        os.fsync(out.fileno())
    file.unlink()
