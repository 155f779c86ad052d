"""Base class of the settings' branches, and the types that several branches use."""

import ipaddress
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr

ENGINE_KINDS = "openclaw_rl.engines"
"""Entry-point group of the engine kinds."""
USERS_FILE = "keys/users.json"
"""File of the data directory that holds the users of `openclaw-rl keys`."""
_SHIPPED_KINDS = {
    "embedded": "openclaw_rl.engines.embedded.kind:KIND",
    "sglang": "openclaw_rl.engines.sglang.kind:KIND",
    "url": "openclaw_rl.engines.url:KIND",
}


def registered(group: str, shipped: Mapping[str, str]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name: our own (`shipped`), and those of installed packages.

    Imports no plug-in.
    """
    # `shipped` repeats `pyproject.toml`: an environment may have our packages on PYTHONPATH, without their metadata.
    ours = {name: EntryPoint(name, value, group) for name, value in shipped.items()}
    return ours | {point.name: point for point in entry_points(group=group)}


def engine_kinds() -> dict[str, EntryPoint]:
    """Return the entry point of each engine kind by name."""
    return registered(ENGINE_KINDS, _SHIPPED_KINDS)


class Branch(BaseModel):
    """One branch of the tree. It is frozen and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def _plain_url(url: str) -> str:
    """Check that the URL names a host and holds no password, because URLs are shown and logged."""
    parts = _parts(url)
    if parts is None or parts.query or parts.fragment:
        raise ValueError("an http or https URL without a query is needed")
    if "@" in parts.netloc:
        raise ValueError("no user or password belongs into a URL")
    return url


def _secret_url(url: SecretStr) -> SecretStr:
    """Check a URL that may hold a token. It is never shown."""
    if _parts(url.get_secret_value()) is None:
        raise ValueError("an http or https URL is needed")
    return url


def _parts(url: str) -> SplitResult | None:
    """Split the URL; None when no client could request it. The caller must not quote the URL: it may hold a secret."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:  # brackets that do not match, a port that is none
        return None
    return parts if is_one and url.isascii() and url.isprintable() and " " not in url else None


Url = Annotated[str, AfterValidator(_plain_url)]
SecretUrl = Annotated[SecretStr, AfterValidator(_secret_url)]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
