"""What every branch of the settings is, and the values that several of them hold."""

import ipaddress
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr

ENGINE_KINDS = "openclaw_rl.engines"
"""Entry-point group of the engine kinds."""


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of the installed packages in this group, by name. Imports no plug-in."""
    return {point.name: point for point in entry_points(group=group)}


class Branch(BaseModel):
    """A branch of the tree: frozen, and it refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def _plain_url(url: str) -> str:
    """Of a host, with no password in it: URLs are shown and logged."""
    parts = _parts(url)
    if parts is None or parts.query or parts.fragment:
        raise ValueError("an http or https URL without a query is needed")
    if "@" in parts.netloc:
        raise ValueError("no user or password belongs into a URL")
    return url


def _secret_url(url: SecretStr) -> SecretStr:
    """One that is never shown: a token may be part of it."""
    if _parts(url.get_secret_value()) is None:
        raise ValueError("an http or https URL is needed")
    return url


def _parts(url: str) -> SplitResult | None:
    """None: nothing that a client could ask. Whatever is wrong with it, it is not quoted."""
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
