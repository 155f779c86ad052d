"""Pictures of the ledger: one file for each content, in a folder beside the ledger, named by its SHA-256.

    ledger.sqlite3.pictures/<64 hex digits>

The table `picture` names the files, and `request_picture` the pictures of each request in the order of its prompt. A
picture is there once, however many requests show it. It is on disk before the row that names it is committed. It is
deleted after the last such row is gone from the disk. A crash between the two leaves a file without a row, which the
next `sweep` deletes: at the end of each deletion, and at each start.

The two `fsync` of a new file would delay every other turn on the ledger's writing thread. So `Staged` writes the files
of a request before its row, on a thread of its own, and holds them meanwhile: no file that is held is deleted. `put` on
the writing thread then finds them. All deletions are on the writing thread.
"""

import asyncio
import os
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from openclaw_rl.data_dir import write_private
from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger.blobs import Connection
from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.types.pictures import Picture

_ZEROS = bytes(2**16)


class _Hold:
    """The time in which one request needs its pictures on disk."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = True


class Staged:
    """Files of pictures that are written, or known to be here, before the rows that name them. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._whole: set[str] = set()
        """Of these, the files that are on disk."""
        self._written: str | None = None
        """The file that is being written: it may be of a hold that ended."""
        self._left: set[str] = set()
        """Files that may have no row: those of a hold that failed, and those that a sweep left as they were held."""
        self.on_left: Callable[[], None] = lambda: None
        """Is called on the event loop when `take_left` has files to give."""
        # One thread: two writers of one file would meet. What waits for it is bounded by the chats that run.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger-pictures")

    @asynccontextmanager
    async def hold(
        self,
        pictures: Sequence[Picture],
        known: Callable[[Collection[str]], Awaitable[Collection[str]]],
        *,
        timeout_s: float,
    ) -> AsyncIterator[None]:
        """Have the pictures on disk, and keep them there for the time of the block.

        known: returns those of the digests that rows name. Raises LedgerError if a picture cannot be written within
        `timeout_s`. If the block fails, files without a row are left to `take_left`.
        """
        by_digest, loop, hold = {one.digest: one for one in pictures}, asyncio.get_running_loop(), _Hold()
        with self._lock:
            self._held.update(by_digest.keys())
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    # Held first: a row that is read now has its file for as long as that file is held.
                    rows = await known(by_digest)
                    write = partial(self._write, hold, list(by_digest.values()), rows, loop)
                    await loop.run_in_executor(self._thread, write)
            except TimeoutError as error:
                raise LedgerError(f"the pictures were not written within {timeout_s:g} s") from error
            except RuntimeError as error:
                raise LedgerUnavailable("the ledger is closed") from error
            yield
        except BaseException:
            with self._lock:
                self._left.update(by_digest)
            raise
        finally:
            with self._lock:
                hold.is_open = False
                self._held.subtract(by_digest.keys())
                for digest in by_digest:
                    if self._held[digest] <= 0:
                        del self._held[digest]
                        self._whole.discard(digest)
                is_left = not self._left.isdisjoint(by_digest)
            if is_left:
                self.on_left()

    def _write(
        self, hold: _Hold, pictures: Sequence[Picture], known: Collection[str], loop: asyncio.AbstractEventLoop
    ) -> None:
        for picture in pictures:
            with self._lock:
                if not hold.is_open:
                    return  # nobody waits for the rest
                if picture.digest in self._whole:
                    continue
                self._written = picture.digest
            is_done = False
            try:
                # A file without a row may be half deleted: it is written again.
                _write(self._folder, picture, is_known=picture.digest in known)
                is_done = True
            finally:
                with self._lock:
                    self._written = None
                    # Only for its own hold: another one may have read the rows after a deletion.
                    if is_done and hold.is_open:
                        self._whole.add(picture.digest)
                    is_left = not hold.is_open
                    if is_left:
                        self._left.add(picture.digest)
                if is_left:
                    with suppress(RuntimeError):  # the loop is closed: the next start sweeps
                        loop.call_soon_threadsafe(self.on_left)

    def has(self, digest: str) -> bool:
        """Return True if the file is held and on disk."""
        with self._lock:
            return digest in self._whole

    def set_aside(self, file: Path) -> Path | None:
        """Rename a file that is to be deleted, so that no reader takes its zeros for the picture.

        None: it is held or being written, and comes back in `take_left` when it is free.
        """
        digest = file.name.lstrip(".").partition(".")[0]
        with self._lock:
            if self._is_used(digest):
                self._left.add(digest)
                return None
            return file if file.name.startswith(".") else file.rename(file.with_name(f".{file.name}"))

    def take_left(self) -> list[str]:
        """Return the digests of files that may have no row and that no one uses, once."""
        with self._lock:
            free = [digest for digest in self._left if not self._is_used(digest)]
            self._left.difference_update(free)
            return free

    def _is_used(self, digest: str) -> bool:
        return digest in self._held or digest == self._written

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)


def folder_of(ledger: Path) -> Path:
    """Return the folder of a ledger's pictures."""
    return ledger.with_name(f"{ledger.name}.pictures")


def put(db: sqlite3.Connection, request: int, pictures: Sequence[Picture]) -> None:
    """Write the pictures of a request. Raises LedgerError if one is neither given nor here, or cannot be written."""
    for number, picture in enumerate(pictures):
        digest = bytes.fromhex(picture.digest)
        is_known = db.execute("SELECT 1 FROM picture WHERE digest = ?", (digest,)).fetchone() is not None
        _write(_folder(db), picture, is_known=is_known or _staged(db).has(picture.digest))
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


def known(db: sqlite3.Connection, digests: Collection[str]) -> set[str]:
    """Return those of the digests that rows name."""
    found = set[str]()
    for some in cut([bytes.fromhex(digest) for digest in digests]):
        marks, values = in_list(some)
        rows = db.execute(f"SELECT hex(digest) FROM picture WHERE digest IN ({marks})", values)
        found.update(digest.lower() for (digest,) in rows)
    return found


def are_here(db: sqlite3.Connection, pictures: Sequence[Picture]) -> bool:
    """Return True if the files of these pictures are on disk."""
    folder = _folder(db)
    return all((folder / picture.digest).is_file() for picture in pictures)


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
    return _delete_all(db, files, set(names(db)))


def sweep_left(db: sqlite3.Connection) -> bool:
    """Do as `sweep` for the files alone that `Staged` left."""
    digests = _staged(db).take_left()
    files = [file for digest in digests if (file := _folder(db) / digest).exists()]
    return _delete_all(db, files, known(db, digests))


def _delete_all(db: sqlite3.Connection, files: Sequence[Path], named: Collection[str]) -> bool:
    staged, is_done = _staged(db), True
    for file in files:
        if file.name not in named:
            try:
                if (aside := staged.set_aside(file)) is not None:
                    _delete(aside)
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


def _staged(db: sqlite3.Connection) -> Staged:
    """Return the pictures that are held; none for a connection of no server."""
    staged = db.staged if isinstance(db, Connection) else None
    return staged or Staged(_folder(db))


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
    with file.open("r+b") as out:
        left = out.seek(0, os.SEEK_END)
        out.seek(0)
        while left > 0:
            left -= out.write(_ZEROS[:left])
        out.flush()
        os.fsync(out.fileno())
    file.unlink()
