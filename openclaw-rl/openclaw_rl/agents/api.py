"""Client of the server's episodes: open, end, abort, chat. It waits out restarts and full queues, and refuses the rest.

Every call may be repeated: an episode has its id from the caller, and an outcome is the same outcome when it comes
again.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from openclaw_rl.agents.environment import Outcome, Split
from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import OpenClawRLError

_OUTAGE_S = 900.0
"""Patience with a server that does not answer: a restart with a large model takes minutes."""
_LONGEST_WAIT_S = 60.0
_CHAT_S = 900.0


class ServerGone(OpenClawRLError):
    """The server did not answer for a long time."""


class Refused(OpenClawRLError):
    """The server refused a request; `status` and `code` are its own."""

    def __init__(self, message: str, *, status: int, code: str = "") -> None:
        super().__init__(f"{status}: {message}")
        self.message, self.status, self.code = message, status, code

    @property
    def is_of_every_episode(self) -> bool:
        """True if the server would refuse every other episode, too: its key, its method, or that it has no episodes."""
        return self.status in (401, 403, 404, 405) or self.code == "method_gives_no_credit"


@dataclass(frozen=True, slots=True)
class Member:
    """One episode as the runner opens it."""

    episode_id: str
    task: str
    split: Split
    group: str | None = None
    group_size: int = 1


class EpisodesApi:
    """The routes below `/v1/episodes` of one server."""

    def __init__(self, client: httpx.AsyncClient, url: str, key: str = "") -> None:
        """client: opened and closed by the caller. key: a chat key of the server; empty where it asks for none."""
        self.client, self.url = client, url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def open(self, member: Member, waiting: Callable[[float], None] = lambda _: None) -> str:
        """Open the episode, and return the base URL of its chats.

        waiting: told the seconds for which the server asked, whenever enough groups wait for training.
        """
        body: dict[str, object] = {"episode_id": member.episode_id, "task": member.task, "split": member.split}
        if member.group is not None:
            body |= {"group": member.group, "group_size": member.group_size}
        answer = await self._call("POST", "/v1/episodes", body, waiting)
        base_url = answer.get("base_url")
        if not isinstance(base_url, str):
            raise Refused("the server named no base_url for the episode", status=200)
        return base_url if "://" in base_url else self.url + base_url

    async def end(self, episode_id: str, outcome: Outcome, *, truncated: bool) -> None:
        metrics = {name: float(value) for name, value in outcome.metrics.items()}
        body = {"reward": float(outcome.reward), "truncated": truncated, "metrics": metrics}
        await self._call("POST", f"/v1/episodes/{quote(episode_id, safe='')}/outcome", body)

    async def abort(self, episode_id: str, reason: str, *, retry: bool = False) -> None:
        """Abort an episode. retry: another one takes its place in the group."""
        body = {"reason": reason[:500], "retry": retry}
        await self._call("POST", f"/v1/episodes/{quote(episode_id, safe='')}/abort", body)

    async def version(self) -> int | None:
        """Return the version that serves, or None while none does."""
        answer = await self._call("GET", "/healthz")
        found = answer.get("weight_version")
        return found if isinstance(found, int) else None

    async def chat(self, base_url: str, body: Mapping[str, object]) -> Any:
        """Return the answer of one chat. Only a request that the server did not take is repeated.

        A reply that broke off is not: the server has it as a turn already. Raises ServerGone for it.
        """
        url = f"{base_url.rstrip('/')}/chat/completions"
        return await self._call("POST", url, body, timeout_s=_CHAT_S)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        waiting: Callable[[float], None] = lambda _: None,
        *,
        timeout_s: float = 60.0,
    ) -> Any:
        url = path if "://" in path else self.url + path
        pauses, loop = Backoff(0.5, 30.0), asyncio.get_running_loop()
        end = loop.time() + _OUTAGE_S
        is_chat = timeout_s == _CHAT_S
        while True:
            try:
                answer = await self.client.request(method, url, json=body, headers=self.headers, timeout=timeout_s)
            except httpx.TransportError as error:
                not_taken = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if loop.time() > end or (is_chat and not not_taken):
                    raise ServerGone(f"the server at {self.url} does not answer: {error!r}") from error
                await asyncio.sleep(pauses.next_s())
                continue
            if answer.status_code == 429 and is_chat and _retry_after(answer) >= _LONGEST_WAIT_S:
                # The user's tokens of the day are used up. To wait would take the episode's time, and score it as lost.
                raise _refused(answer)
            if answer.status_code == 429:  # as long as it takes: enough groups wait for training
                pause_s = _retry_after(answer)
                waiting(pause_s)
                await asyncio.sleep(pause_s)
                end = loop.time() + _OUTAGE_S
            elif answer.status_code == 409 and "retry-after" in answer.headers and loop.time() < end:
                await asyncio.sleep(_retry_after(answer))  # a reply that we no longer await streams still
            elif answer.status_code in (502, 503, 504) and path != "/healthz" and loop.time() < end:
                await asyncio.sleep(min(_retry_after(answer), pauses.next_s()))
            elif answer.is_error and path != "/healthz":
                raise _refused(answer)
            else:
                return _object(answer)


def _retry_after(answer: httpx.Response) -> float:
    try:
        return min(max(float(answer.headers.get("retry-after", "5")), 0.1), _LONGEST_WAIT_S)
    except ValueError:
        return 5.0


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError as error:
        raise Refused("the server's answer is no JSON", status=answer.status_code) from error
    if not isinstance(found, dict):
        raise Refused("the server's answer is no object", status=answer.status_code)
    return found


def _refused(answer: httpx.Response) -> Refused:
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError):
        message, code = answer.text[:500], ""
    return Refused(message, status=answer.status_code, code=code)
