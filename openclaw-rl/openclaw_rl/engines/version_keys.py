"""Keys of a version on an engine: the names of its adapters, and the salt of its prefix cache."""


def adapter_name(weight_version: int) -> str | None:
    """Return the engine's name of a version's adapter; None: the base."""
    return f"policy-v{weight_version}" if weight_version else None


def ema_name(weight_version: int) -> str:
    """Return the engine's name of a version's EMA teacher, which lives as long as its version and only scores."""
    return f"ema-v{weight_version}"


def cache_salt(weight_version: int) -> str:
    """Return the `extra_key` of a version's requests: no request reuses KV that other weights computed."""
    return f"v{weight_version}"
