"""Keys: the caller of an API key, and the check of a single secret.

Only digests are compared, in constant time: neither time nor an error reveals a part of a secret, or its length.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from openclaw_rl.errors import RequestError
from openclaw_rl.settings import ApiKey


@dataclass(frozen=True, slots=True)
class Caller:
    user: str
    train: bool
    has_commands: bool = True
    """The caller's `/rl` messages are commands."""


class Keys:
    """The chat keys. Every one of them is compared at each request, also after a match."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._callers = [
            (_digest(key.key.get_secret_value()), Caller(key.user, key.train, key.chat_commands)) for key in keys
        ]

    @property
    def are_set(self) -> bool:
        """False: every caller is `user`, without a key."""
        return bool(self._callers)

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of an Authorization header. Raises RequestError (401).

        Without keys every caller is `user`.
        """
        if not self._callers:
            return Caller("user", train=True)
        given = _digest(bearer(authorization))
        found = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise RequestError(
                "missing or wrong API key: send it as `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
            )
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


def bearer(authorization: str | None) -> str:
    """Return the token of `Bearer TOKEN`; without a token the empty string, which opens no route."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
