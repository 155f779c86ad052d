"""Keys: the caller of an API key, and the check of a single secret.

Only digests are compared, in constant time or by a table whose order is secret: neither time nor an error reveals a
part of a secret, or its length.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import structlog

from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.settings import NO_LIMITS, ApiKey, UserLimits
from openclaw_rl.types import KEYLESS_USER
from openclaw_rl.web.user_keys import UserKeys

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Caller:
    user: str
    train: bool
    has_commands: bool = True
    """The caller's `/rl` messages are commands."""
    limits: UserLimits = NO_LIMITS


class Keys:
    """The chat keys: those of the settings, and those of the users of the data directory.

    Every key of the settings is compared at each request, also after a match. The users' file may change at any time.
    Once it is there, chats need a key: also when no user is left in it, and also when it is deleted meanwhile.
    """

    def __init__(
        self, keys: Sequence[ApiKey], users: UserKeys | None = None, *, limits: UserLimits = NO_LIMITS
    ) -> None:
        """limits: of each user that has none of its own."""
        self._limits = limits
        self._callers = [
            (_digest(key.key.get_secret_value()), Caller(key.user, key.train, key.chat_commands, limits))
            for key in keys
        ]
        self._file, self._stamp = users, None if users is None else users.stamp()
        self._users: Mapping[bytes, Caller] | None = None if users is None else self._read(users)
        """Callers by digest; None while the file cannot be read."""
        self._had_users = self._stamp is not None

    @property
    def are_set(self) -> bool:
        """False: every caller is `user`, without a key."""
        return bool(self._callers) or self._look()

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of an Authorization header. Raises RequestError (401).

        Without keys every caller is `user`.
        """
        has_users = self._look()
        if not self._callers and not has_users:
            return Caller(KEYLESS_USER, train=True, limits=self._limits)
        given = _digest(bearer(authorization))
        found = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None and has_users:
            if self._users is None:
                raise RequestError("the server cannot read its users' keys", status=503, code="keys_unreadable")
            found = self._users.get(given)  # the order of this table depends on a secret of the process
        if found is None:
            raise RequestError(
                "missing or wrong API key: send it as `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
            )
        return found

    def users(self) -> dict[str, Caller]:
        """Return the users that have a key, by name; of several keys of one user, the one of the users' file."""
        known = (self._users or {}).values() if self._look() else ()
        return {caller.user: caller for caller in (*(caller for _, caller in self._callers), *known)}

    def limits_of(self, user: str) -> UserLimits:
        """Return the limits of a user, whether or not the user has a key."""
        caller = self.users().get(user)
        return self._limits if caller is None else caller.limits

    def _look(self) -> bool:
        """Read the users' file again if it changed. Return True if chats need a key because of it."""
        if self._file is None:
            return False
        stamp = self._file.stamp()  # microseconds, on the disk that every turn is written to
        if stamp != self._stamp:
            self._had_users = True
            self._stamp = stamp
            try:
                self._users = self._read(self._file)
            except SettingsError as error:
                self._users = None  # closed for all of them: it may be a revoked one that asks
                log.error("user_keys_unreadable", error=str(error))
        return self._had_users

    def _read(self, users: UserKeys) -> dict[bytes, Caller]:
        found = {}
        for one in users.read():
            limits = self._limits.model_copy(update=one.limits.model_dump(exclude_none=True))
            found[bytes.fromhex(one.sha256)] = Caller(one.user, one.train, limits=limits)
        return found


class Secret:
    """One secret, of an operator or a trainer."""

    def __init__(self, secret: str) -> None:
        if not secret:
            raise ValueError("an empty secret would let every client in")
        self._digest = _digest(secret)

    def opens(self, authorization: str | None) -> bool:
        """Return True when the Authorization header holds the secret."""
        return hmac.compare_digest(self._digest, _digest(bearer(authorization)))

    def derived(self, purpose: str) -> bytes:
        """Return a key for this purpose, which tells nothing of the secret."""
        return hmac.digest(self._digest, purpose.encode(), "sha256")


def bearer(authorization: str | None) -> str:
    """Return the token of `Bearer TOKEN`; without a token the empty string, which opens no route."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
