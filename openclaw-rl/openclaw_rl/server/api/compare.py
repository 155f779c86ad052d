"""`POST /v1/admin/compare`: one prompt to several versions, side by side.

The replies are greedy by default, so that they differ by the weights alone. They are no turns: nothing is recorded and
nothing is learned from them. Chats go first (the engine's priority).
"""

import asyncio
import uuid
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from openclaw_rl.engines.admission import VersionUse
from openclaw_rl.engines.base import PRIORITY_BACKGROUND, Engine
from openclaw_rl.engines.dialect import EngineSampling, FinishReason, GenerateRequest
from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import Rendered
from openclaw_rl.types import Ids

_DEADLINE_S = 180.0
_MOST_VERSIONS = 4


class Compare(BaseModel):
    """One prompt, and the versions that answer it."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    """A user's message."""
    versions: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=_MOST_VERSIONS)]
    max_tokens: int = Field(default=200, ge=1, le=2000)
    temperature: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)


class Versions(Protocol):
    """The publisher: it lends a version to a caller, loaded on the engine."""

    def lend(self, weight_version: int) -> AbstractAsyncContextManager[VersionUse]: ...


class Renderer(Protocol):
    """Members of the front end that a comparison uses."""

    end_ids: frozenset[int]
    context_length: int

    async def render_async(self, messages: Sequence[Message]) -> Rendered: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """Asks versions for replies, one after the other: a version is loaded while its turn lasts."""

    publisher: Versions
    engine: Engine
    frontend: Renderer

    async def reply(self, prompt: Ids, weight_version: int, asked: Compare, *, end: float) -> dict[str, Any]:
        """Return the reply of one version. Raises TimeoutError after `end` of the loop's time."""
        async with self.publisher.lend(weight_version) as use:  # no deadline: a load that is cut leaves its adapter
            async with asyncio.timeout_at(end):
                ids, how = await self._sampled(self._request(prompt, use, asked, self.frontend.end_ids))
        if how is not None and how.type == "abort":  # cut by a swap: its tokens may be of no version alone
            raise RequestError(
                f"the weights changed while version {weight_version} answered; try again",
                status=409,
                code="weights_changed",
            )
        return {
            "weight_version": weight_version,
            "text": await asyncio.to_thread(self.frontend.decode, ids),
            "tokens": len(ids),
            "is_cut": how is not None and how.type == "length",
        }

    async def _sampled(self, request: GenerateRequest) -> tuple[list[int], FinishReason | None]:
        """Return the tokens of a reply, and how it ended. Streamed: what is cut here ends on the engine too."""
        ids: list[int] = []
        how = None
        async with aclosing(self.engine.stream(request)) as events:
            async for event in events:
                ids += event.output_ids
                how = event.meta_info.finish_reason or how
        return ids, how

    def _request(self, prompt: Ids, use: VersionUse, asked: Compare, end_ids: Collection[int]) -> GenerateRequest:
        room = self.frontend.context_length - len(prompt) - 1
        if room < 1:
            raise RequestError(
                f"prompt: its {len(prompt)} tokens fill the context", code="context_length_exceeded", param="prompt"
            )
        return GenerateRequest(
            input_ids=list(prompt),
            sampling_params=EngineSampling(
                max_new_tokens=min(asked.max_tokens, room),
                temperature=asked.temperature,
                stop_token_ids=sorted(end_ids) or None,
                skip_special_tokens=False,
            ),
            rid=f"compare-{uuid.uuid4().hex}",
            stream=True,
            return_logprob=True,
            lora_path=use.lora_path,
            extra_key=use.extra_key,
            priority=PRIORITY_BACKGROUND,
        )


def add_compare_route(guarded: APIRouter, comparison: Comparison) -> None:
    one_at_a_time = asyncio.Lock()

    @guarded.post("/v1/admin/compare")
    async def compare(body: Compare) -> JSONResponse:
        """Return the reply of each version to one prompt. Nothing of it is recorded."""
        if one_at_a_time.locked():
            raise RequestError("a comparison runs already", status=409, code="busy")
        async with one_at_a_time:
            rendered = await comparison.frontend.render_async([Message(role="user", content=body.prompt)])
            end = asyncio.get_running_loop().time() + _DEADLINE_S
            try:
                replies = [await comparison.reply(rendered.ids, number, body, end=end) for number in body.versions]
            except TimeoutError as error:
                raise RequestError(
                    f"no answer within {_DEADLINE_S:g} s; try again while fewer chats run", status=503, code="timeout"
                ) from error
            except LedgerUnavailable:
                raise
            except LedgerError as error:
                raise RequestError(str(error), status=409, code="version_not_ready", param="versions") from error
        return JSONResponse({"replies": replies})
