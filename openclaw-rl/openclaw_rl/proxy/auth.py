"""Which caller a key belongs to."""

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


class Keys:
    """Compares digests in constant time, and all of them: neither time nor an error tells anything about a key."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._callers = [(_digest(key.key.get_secret_value()), Caller(key.user, key.train)) for key in keys]

    def caller(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Raises RequestError (401). Without keys everybody is `user`."""
        if not self._callers:
            return Caller("user", train=True)
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip()) if scheme.lower() == "bearer" else b""
        found = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise RequestError(
                "missing or wrong API key: send it as `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
            )
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
