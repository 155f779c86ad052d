"""The episode that a chat belongs to: by its path, `X-Episode-Id`, or the body's `episode`.

`/v1/episodes/ID/v1/chat/completions` is `/v1/chat/completions` inside the episode ID, and so for the other routes of
chats and models: a harness that can set nothing but a base URL is recorded as it is. An id that its user has not
registered is a label, as it always was; only a path must name a registered one.
"""

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.types import Episode, EpisodeState
from openclaw_rl.web.auth import Caller

PATH_EPISODE = ":episode"
"""Key of the path's episode in a scope and among the headers; no header's name has a colon."""
_PREFIX = "/v1/episodes/"
_SHOWN = 100


def with_episode_paths(app: ASGIApp) -> ASGIApp:
    """Return `app` behind the base URLs of episodes."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(_PREFIX):
            name, _, rest = path.removeprefix(_PREFIX).partition("/")
            if name and rest.startswith("v1/") and not rest.startswith("v1/episodes"):
                rest = f"/{rest}"
                if _is_chats(rest):
                    scope = {**scope, "path": rest, "raw_path": rest.encode(), PATH_EPISODE: name}
        await app(scope, receive, send)

    return serve


def _is_chats(path: str) -> bool:
    """Return True for the routes of chats and models: an agent inside a sandbox reaches no other one."""
    known = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/models")
    return path in known or path.startswith("/v1/models/")


def episode_named(headers: Mapping[str, str], raw: Mapping[str, Any]) -> str | None:
    """Return the id of the episode that a request names. Raises RequestError if it names two."""
    told = raw.get("episode")
    body = None if told is None or isinstance(told, bool | dict | list) else str(told)
    names = [name for name in (headers.get(PATH_EPISODE), headers.get("x-episode-id"), body) if name]
    if len(set(names)) > 1:
        raise RequestError(
            "the path, the header X-Episode-Id and the body's episode name different episodes", param="episode"
        )
    return names[0] if names else None


async def registered(deps: ProxyDeps, caller: Caller, headers: Mapping[str, str], name: str | None) -> Episode | None:
    """Return the caller's episode of this name; None for a label. Raises RequestError for one that is over."""
    if name is None:
        return None
    found = await deps.ledger.find_episode(caller.user, name)
    if found is None and headers.get(PATH_EPISODE):
        raise RequestError(f"you have no episode {name[:_SHOWN]!r}", status=404, code="episode_not_found")
    if found is not None and found.state is not EpisodeState.RUNNING:
        raise RequestError(
            f"episode {name[:_SHOWN]!r} is {found.state}: it takes no more requests", status=409, code="episode_over"
        )
    return found
