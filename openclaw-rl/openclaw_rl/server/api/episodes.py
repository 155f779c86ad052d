"""`/v1/episodes*`: a runner of agents opens an episode, and ends it by its outcome or by an abort.

A chat key reaches the episodes of its own user alone; any other one does not exist for it. The admin key reads all.
Every call may come again: the same call changes nothing, and another one about an episode that is over gets 409. The
answers hold names and numbers, no content.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StringConstraints

from openclaw_rl.errors import RequestError
from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import MethodSettings
from openclaw_rl.types import Episode, EpisodeOutcome, EpisodeState, NewEpisode, Split
from openclaw_rl.web.auth import Caller, Keys, Secret

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@=+~-]*$"
"""Ids stand in a path."""
_SHOWN = 100

Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_NAME)]
Number = Annotated[StrictFloat, Field(allow_inf_nan=False)]


class EpisodeBody(BaseModel):
    """An episode to open."""

    model_config = ConfigDict(extra="forbid")

    task: Annotated[str, StringConstraints(min_length=1, max_length=1000)]
    """Name of the task; the instruction itself comes in the chat."""
    episode_id: Name | None = None
    """The server makes one when absent. The same id with the same fields is the same episode."""
    group: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """Name of the episodes of this task that are compared with each other; absent: a group of its own."""
    group_size: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    """Number of episodes of the group."""
    split: Split = Split.TRAIN
    """`eval`: recorded alone. A task that was opened so is refused as `train`."""


class OutcomeBody(BaseModel):
    """The outcome of an episode."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[StrictFloat, Field(ge=-1, le=1, allow_inf_nan=False)]
    """In [-1, 1]."""
    truncated: StrictBool = False
    """A limit cut the episode; the reward is of its state then."""
    metrics: Annotated[dict[Annotated[str, StringConstraints(max_length=100)], Number], Field(max_length=64)] = {}


class AbortBody(BaseModel):
    """The environment's failure."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, StringConstraints(max_length=2000)] = ""
    retry: StrictBool = False
    """Another episode of the group takes its place."""


class EpisodeQuery(BaseModel):
    """Conditions on a list of episodes."""

    model_config = ConfigDict(extra="forbid")

    state: EpisodeState | None = None
    group: Annotated[str, StringConstraints(max_length=200)] | None = None
    task: Annotated[str, StringConstraints(max_length=1000)] | None = None
    limit: int = Field(default=100, ge=1, le=1000)


@dataclass(frozen=True, slots=True)
class Reader:
    """Caller of the reading routes; `user` is None for the operator, who reads every episode."""

    user: str | None


@dataclass(frozen=True, slots=True)
class EpisodesDeps:
    ledger: Ledger
    keys: Keys
    admin_key: Secret
    method: MethodSettings
    make_id: Callable[[], str]
    on_change: Callable[[], None]
    """A group may be ready for its credit."""


def build_episodes_router(deps: EpisodesDeps) -> APIRouter:
    router = APIRouter()
    ledger = deps.ledger

    # As dependencies, the keys come before the body: without one no field of it is answered.
    async def runner(request: Request) -> Caller:
        return deps.keys.caller(request.headers.get("authorization"))

    async def reader(request: Request) -> Reader:
        authorization = request.headers.get("authorization")
        return Reader(None if deps.admin_key.opens(authorization) else deps.keys.caller(authorization).user)

    Runs = Annotated[Caller, Depends(runner)]
    Reads = Annotated[Reader, Depends(reader)]

    @router.post("/v1/episodes", status_code=201)
    async def open_episode(request: Request, caller: Runs, body: EpisodeBody) -> JSONResponse:
        """Open an episode. Its `base_url` is the chat API inside it."""
        if body.group is None and body.group_size > 1:
            raise RequestError("group: a group of several episodes needs a name", status=422, param="group")
        if body.split is Split.TRAIN and not caller.train:
            raise RequestError(
                "this key is not trained on (server.api_keys: train = false): open the episode with split eval",
                status=403,
                code="key_not_trained",
                param="split",
            )
        if body.split is Split.TRAIN and not deps.method.credits_groups:
            raise RequestError(
                f"method {deps.method.name} gives no credit to episodes: serve with method.name = agent, or open the"
                " episode with split eval",
                status=409,
                code="method_gives_no_credit",
                param="split",
            )
        new = NewEpisode(
            caller.user, body.episode_id or deps.make_id(), body.task, body.group, body.group_size, body.split
        )
        return JSONResponse(_plain(await ledger.open_episode(new), request), 201)

    @router.post("/v1/episodes/{episode_id}/outcome")
    async def outcome(request: Request, caller: Runs, episode_id: str, body: OutcomeBody) -> JSONResponse:
        """End an episode. Its last turn has the outcome for a reward; the group closes with its last episode."""
        metrics = {name: float(value) for name, value in sorted(body.metrics.items())}
        found = EpisodeOutcome(float(body.reward), body.truncated, metrics)
        await ledger.end_episode(caller.user, _short(episode_id), found)
        deps.on_change()
        return await answer(request, episode_id, caller.user)

    @router.post("/v1/episodes/{episode_id}/abort")
    async def abort(request: Request, caller: Runs, episode_id: str, body: AbortBody) -> JSONResponse:
        """End an episode whose environment failed: its turns are dropped, and no failure of the policy."""
        await ledger.abort_episode(caller.user, _short(episode_id), body.reason, has_successor=body.retry)
        deps.on_change()
        return await answer(request, episode_id, caller.user)

    @router.get("/v1/episodes")
    async def episodes(request: Request, who: Reads, asked: Annotated[EpisodeQuery, Query()]) -> JSONResponse:
        """Return episodes without their turns, newest first."""
        found = await ledger.episodes(
            user=who.user, state=asked.state, group=asked.group, task=asked.task, limit=asked.limit
        )
        return JSONResponse({"episodes": [_plain(episode, request) for episode in found]})

    @router.get("/v1/episodes/{episode_id}")
    async def episode(request: Request, who: Reads, episode_id: str) -> JSONResponse:
        """Return an episode with its turns: the step, the state, the reward and the advantage of each."""
        return await answer(request, episode_id, who.user)

    async def answer(request: Request, episode_id: str, user: str | None) -> JSONResponse:
        found = await ledger.episode(_short(episode_id), user=user)
        if found is None:
            raise RequestError(f"you have no episode {episode_id[:_SHOWN]!r}", status=404, code="episode_not_found")
        turns = [
            {
                "id": turn.turn_id,
                "step": turn.step,
                "state": str(turn.state),
                "reason": turn.reason and str(turn.reason),
                "reward": turn.reward,
                "advantage": turn.advantage,
            }
            for turn in found.turns
        ]
        return JSONResponse({**_plain(found, request), "turns": turns})

    return router


def _short(episode_id: str) -> str:
    """Return the id; raises RequestError for one that no episode can have."""
    if len(episode_id) > 200:
        raise RequestError(
            f"you have no episode {episode_id[:_SHOWN]!r}…: an id has at most 200 characters",
            status=404,
            code="episode_not_found",
        )
    return episode_id


def _plain(episode: Episode, request: Request) -> dict[str, Any]:
    outcome = episode.outcome
    return {
        "episode_id": episode.episode_id,
        "base_url": f"{request.base_url}v1/episodes/{episode.episode_id}/v1",
        "task": episode.task,
        "group": episode.group,
        "group_size": episode.group_size,
        "split": str(episode.split),
        "state": str(episode.state),
        "user": episode.user,
        "opened_at": episode.opened_at,
        "ended_at": episode.ended_at,
        "outcome": None
        if outcome is None
        else {"reward": outcome.reward, "truncated": outcome.truncated, "metrics": dict(outcome.metrics)},
        "reason": episode.reason,
    }
