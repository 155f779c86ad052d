"""Users of a server and their keys: `keys/users.json` in the data directory, readable by its owner only.

The file holds SHA-256 digests and no key. A key is 256 random bits, so its digest needs no salt and no slow hash. The
command `openclaw-rl keys` changes the file, under a lock and in one rename. A running server asks for the file's stamp
at each request: a revoked key opens nothing from the moment in which the command returned. Replies that run go on.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import orjson

from openclaw_rl.data_dir import write_json
from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import NO_LIMITS, UserLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_FIELDS = frozenset({"user", "sha256", "train", "created_at"})
_PREFIX = "sk-orl-"
"""Start of every key: redaction knows the form, so a key that lands in a chat is masked."""


@dataclass(frozen=True, slots=True)
class UserKey:
    """One user, and the digest of the user's key."""

    user: str
    sha256: str
    """Hexadecimal digits."""
    train: bool
    """False: the user's turns are served and recorded, never trained on."""
    created_at: float
    """Unix seconds."""
    limits: UserLimits = NO_LIMITS
    """The user's own limits; where unset, the server's hold."""


class UserKeys:
    """The users of one data directory, oldest first. Every call reads the file. Raises SettingsError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def stamp(self) -> tuple[int, int, int] | None:
        """Return a mark that changes with the file; None while there is none. A file out of reach has a mark."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError:  # `read` fails, too, and says why
            return 0, 0, 0
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> tuple[UserKey, ...]:
        """Return the users; an empty list without a file."""
        try:
            rows = orjson.loads(self._path.read_bytes())["users"]
            return tuple(_read(row) for row in rows)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{self._path}: it is no list of users: {error}") from error

    def add(self, user: str, *, train: bool, now: float) -> str:
        """Add a user; return the key, which no file holds."""
        if _NAME.fullmatch(user) is None:
            raise SettingsError(
                f"user {user!r}: a name has up to 64 letters, digits and . _ @ -, and begins with a letter or digit"
            )
        with self._changed() as users:
            if any(one.user == user for one in users):
                raise SettingsError(f"user {user!r} has a key: `openclaw-rl keys rotate {user}` gives a new one")
            key = _new_key()
            users.append(UserKey(user, _digest(key), train, now))
        return key

    def rotate(self, user: str, *, now: float) -> str:
        """Give a user a new key and return it. The old one opens nothing any more."""
        with self._changed() as users:
            at, key = _place(users, user), _new_key()
            users[at] = replace(users[at], sha256=_digest(key), created_at=now)
        return key

    def change(
        self, user: str, *, train: bool | None = None, limits: UserLimits = NO_LIMITS, keeps_others: bool = True
    ) -> UserKey:
        """Change what a user may do, and return the user. None, or a limit that is unset: as before.

        keeps_others: False drops the limits that `limits` does not set.
        """
        with self._changed() as users:
            at = _place(users, user)
            kept = users[at].limits if keeps_others else NO_LIMITS
            limits = kept.model_copy(update=limits.model_dump(exclude_none=True))
            users[at] = replace(users[at], train=users[at].train if train is None else train, limits=limits)
        return users[at]

    def revoke(self, user: str) -> None:
        """Take a user's key away. What the user's turns taught stays, and so do the turns."""
        with self._changed() as users:
            del users[_place(users, user)]

    @contextmanager
    def _changed(self) -> Iterator[list[UserKey]]:
        """Yield the users to change, and write them at the end: one command at a time, all of it or nothing."""
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            users = list(self.read())
            yield users
            write_json(self._path, {"users": [_row(one) for one in users]})
        finally:
            os.close(folder)


def _place(users: list[UserKey], user: str) -> int:
    found = next((at for at, one in enumerate(users) if one.user == user), None)
    if found is None:
        raise SettingsError(f"there is no user {user!r}: `openclaw-rl keys list` shows them")
    return found


def _new_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def _row(one: UserKey) -> dict[str, object]:
    return {"user": one.user, "sha256": one.sha256, "train": one.train, "created_at": one.created_at} | (
        {"limits": own} if (own := one.limits.model_dump(exclude_none=True)) else {}
    )


def _read(row: dict[str, object]) -> UserKey:
    """Return a user. Raises ValueError for a row that another hand or another release wrote."""
    if set(row) - {"limits"} != _FIELDS:
        raise ValueError(f"fields {', '.join(sorted(row))}")
    user, digest, train, created_at = row["user"], row["sha256"], row["train"], row["created_at"]
    if not isinstance(user, str) or not isinstance(digest, str) or len(bytes.fromhex(digest)) != sha256().digest_size:
        raise ValueError(f"user {user!r} has no digest of a key")
    if not isinstance(train, bool) or not isinstance(created_at, int | float):
        raise ValueError(f"user {user!r}: train or created_at")
    limits = UserLimits.model_validate(row.get("limits", {}))
    return UserKey(user, digest.lower(), train, float(created_at), limits)
