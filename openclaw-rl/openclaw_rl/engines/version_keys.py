"""Keys of a version on an engine: the names of its adapters, and the salts of its prefix caches."""

from hashlib import sha256

from openclaw_rl.types import KEYLESS_USER


def adapter_name(weight_version: int) -> str | None:
    """Return the engine's name of a version's adapter; None: the base."""
    return f"policy-v{weight_version}" if weight_version else None


def ema_name(weight_version: int) -> str:
    """Return the engine's name of a version's EMA teacher, which lives as long as its version and only scores."""
    return f"ema-v{weight_version}"


def version_of(salt: str | None) -> int | None:
    """Return the version of a `cache_salt`; None for another text."""
    number = (salt or "").removeprefix("v").partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else None


def cache_salt(weight_version: int, user: str = KEYLESS_USER) -> str:
    """Return the `extra_key` of a version's requests: no request reuses KV that other weights computed.

    Nor KV of another user: a cached prefix answers sooner, and would tell that another user sent it.
    """
    return f"v{weight_version}" + ("" if user == KEYLESS_USER else f"-{sha256(user.encode()).hexdigest()[:16]}")
