"""The facts about a server that a client's configuration needs."""

from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from openclaw_rl.errors import ClientError
from openclaw_rl.settings import Settings

MODEL = "policy"
"""Name of the model for every client: it is the current version, whatever the server calls its model."""
_ANSWER_S = 30.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    """Without `/v1`."""
    context: int
    """Tokens of a prompt and its reply together."""
    reply_tokens: int
    """Tokens that a client may ask for in one reply."""
    thinks: bool
    has_tools: bool
    """The template can show tools to the model."""
    key: str | None
    """A chat key; None: the server asks for none."""

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def at(self, url: str) -> "Served":
        """Return the same server under the address by which the client reaches it."""
        return replace(self, url=url)


def ask(url: str, settings: Settings, *, key: str | None = None, reply_tokens: int | None = None) -> Served:
    """Ask the server at `url` for its model. Raises ClientError.

    key: None is the first of `server.api_keys`. reply_tokens: None is the server's own limit, at most a quarter of the
    context.
    """
    url = reachable(url)
    try:
        answer = httpx.get(f"{url}/v1/models/{MODEL}", timeout=_ANSWER_S, trust_env=False)
        card: dict[str, Any] = answer.raise_for_status().json()
        context = int(card["max_model_len"])
        longest = int(card.get("max_output_tokens") or settings.sampling.max_new_tokens)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ClientError(f"{url}/v1/models/{MODEL} names no model of this project: {error!r}") from error
    keys = settings.server.api_keys
    if key is None and not keys and settings.has_keys:
        raise ClientError("the users of this server have keys, and it stores none of them: name one with --key")
    return Served(
        url=url,
        context=context,
        reply_tokens=reply_tokens or min(longest, context // 4),
        thinks=bool(card.get("supports_reasoning")),
        has_tools=bool(card.get("supports_tools", True)),
        key=key or (keys[0].key.get_secret_value() if keys else None),
    )


def reachable(url: str) -> str:
    """Return the URL without `/v1`. An address that stands for all of the machine's becomes loopback."""
    parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
    host = _EVERY_ADDRESS.get(parts.hostname or "")
    if host is None:
        return urlunsplit(parts)
    named = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=named if parts.port is None else f"{named}:{parts.port}"))
