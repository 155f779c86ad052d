"""One episode as its environment sees it: the policy, a sandbox, and the limits of each phase.

The phases are setup (opening a sandbox), acting and checking. A limit of acting ends the block, and the environment
scores what is there: the episode is truncated. A limit of setup or checking is the environment's fault.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from openclaw_rl.agents.api import EpisodesApi, Refused, ServerGone
from openclaw_rl.agents.environment import Split
from openclaw_rl.agents.sandbox import Profile, Sandbox, Sandboxes
from openclaw_rl.agents.sandbox.gateway import gateway
from openclaw_rl.errors import EnvironmentFault


class EpisodeLimits(BaseModel):
    """Limits of one episode, a table of the run's plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=20, ge=1)
    """Replies of the policy."""
    tokens: int = Field(default=32_768, ge=1)
    """Tokens of all replies together."""
    setup_s: float = Field(default=300.0, gt=0)
    act_s: float = Field(default=1800.0, gt=0)
    check_s: float = Field(default=600.0, gt=0)


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    finish_reason: str
    message: Mapping[str, Any]
    """The message as it came, with its tool calls."""

    @property
    def was_cut(self) -> bool:
        """True if `max_tokens` ended it."""
        return self.finish_reason == "length"


class EpisodeOver(Exception):
    """A limit of acting was reached; `Episode.acting` ends with it."""


class Episode:
    """One episode, open on the server."""

    def __init__(
        self,
        episode_id: str,
        base_url: str,
        api: EpisodesApi,
        open_sandboxes: Callable[[], Awaitable[Sandboxes]],
        *,
        split: Split,
        limits: EpisodeLimits,
        sampling: Mapping[str, object],
    ) -> None:
        """sampling: fields of every chat request, such as `temperature` and `max_tokens`."""
        self.id, self.split, self.limits = episode_id, split, limits
        self.base_url = base_url
        """Of the OpenAI-compatible API of this episode, for a harness that can set a base URL."""
        self.sampling = sampling
        self.truncated = False
        self.steps = self.tokens = 0
        self._api = api
        self.open_sandboxes = open_sandboxes
        """Returns the run's sandboxes, for a harness that opens its own."""

    @property
    def key(self) -> str:
        """The key for `base_url`; the server asks for none where it is empty."""
        return self._api.headers.get("Authorization", "").removeprefix("Bearer ")

    async def ask(self, messages: Sequence[Mapping[str, object]], **fields: object) -> Reply:
        """Ask the policy. Raises EpisodeOver at the limit of steps or tokens, or where the context is full."""
        if self.steps >= self.limits.steps or self.tokens >= self.limits.tokens:
            self.truncated = True
            raise EpisodeOver
        self.steps += 1
        try:
            answer = await self._api.chat(self.base_url, {"messages": list(messages), **self.sampling, **fields})
        except Refused as error:
            if error.code == "context_length_exceeded":
                self.truncated = True
                raise EpisodeOver from error
            raise EnvironmentFault(f"the server refused a chat: {error}") from error
        except ServerGone as error:
            raise EnvironmentFault(str(error)) from error
        try:
            choice = answer["choices"][0]
            self.tokens += int((answer.get("usage") or {}).get("completion_tokens") or 0)
            message = choice["message"]
            return Reply(str(message.get("content") or ""), str(choice.get("finish_reason") or ""), message)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EnvironmentFault(f"the server's answer is no chat completion: {error!r}") from error

    @asynccontextmanager
    async def acting(self) -> AsyncIterator[None]:
        """Bound the block by the limits of acting; a limit ends it and makes the episode truncated."""
        try:
            async with asyncio.timeout(self.limits.act_s) as bound:
                yield
        except EpisodeOver:
            self.truncated = True
        except TimeoutError:
            if not bound.expired():
                raise  # the environment's own
            self.truncated = True

    def checking(self) -> AbstractAsyncContextManager[None]:
        """Bound the block by the limit of checking."""
        return _bounded(self.limits.check_s, "the check")

    @asynccontextmanager
    async def sandbox(
        self, profile: Profile | None = None, files: Mapping[str, bytes] | None = None
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox with these files in its work folder."""
        sandbox = (await self.open_sandboxes()).sandbox(profile or Profile())
        try:
            async with _bounded(self.limits.setup_s, "the sandbox's start"):
                await sandbox.open()
                if files:
                    await sandbox.put(files)
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[Path]:
        """Serve this episode's model to a harness inside a sandbox; yield the value of `Profile.gateway`.

        Each chat has the run's sampling, whatever the harness sets, and counts as a step.
        """
        folder = (await self.open_sandboxes()).gateway_folder()
        async with gateway(folder, self.base_url, self._api.headers, self._api.client, self._admit):
            yield folder

    def _admit(self, body: bytes) -> bytes | None:
        """Return the chat of a harness inside with the run's sampling; None at the limit of steps."""
        if self.steps >= self.limits.steps:
            self.truncated = True
            return None
        self.steps += 1
        try:
            asked = orjson.loads(body)
        except ValueError:
            return body  # the server says what is wrong with it
        if not isinstance(asked, dict):
            return body
        if "max_tokens" in self.sampling:
            asked.pop("max_completion_tokens", None)
        return orjson.dumps(asked | dict(self.sampling))


@asynccontextmanager
async def _bounded(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as bound:
            yield
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise EnvironmentFault(f"{what} did not end within {seconds:g} s") from error
