"""Canaries: replies that the owner knows to be good, as a measure without a judge.

A canary file is JSON lines of {"messages": [...], "reply": "..."}: conversations, each with a good reply. The canary
score of a version is the mean log-prob per token of those replies. The gate refuses a version whose score fell by more
than `publisher.max_canary_drop` nats against the base. Full weights leave no base in the policy's engine. Without a
second engine that holds it, the version that serves at the server's first swap takes the base's place.

Canaries catch a judge that lies, or a reward with the wrong sign, if the policy unlearns what the file shows. They do
not catch a policy that grows worse elsewhere.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.messages import Message
from openclaw_rl.publishing.reply_scores import few_at_once
from openclaw_rl.types import Ids

Score = Callable[[int, Ids, Ids], Awaitable[tuple[float, ...]]]
"""(version, prompt ids, response ids [T]) → the engine's log-probs [T] at temperature 1."""

ScoreBase = Callable[[Ids, Ids], Awaitable[tuple[float, ...]]]
"""(prompt ids, response ids [T]) → log-probs [T] of an engine that holds the base alone."""

MOST = 64
"""Most canaries of a file."""  # each costs two prompts a version, between chats


@dataclass(frozen=True, slots=True)
class Canary:
    prompt_ids: Ids
    reply_ids: Ids


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    messages: list[Message] = Field(min_length=1)
    reply: str = Field(min_length=1)


def read_canaries(
    path: Path,
    *,
    render: Callable[[Sequence[Message], str | None, str | None], Ids],
    reply_ids: Callable[[str], Ids],
    context_length: int,
) -> tuple[Canary, ...]:
    """Read the canary file. Raises SettingsError, which names the line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"publisher.canary_file: {path}: {error}") from error
    if not 1 <= len(lines) <= MOST:
        raise SettingsError(f"publisher.canary_file: {path}: {len(lines)} canaries; 1 to {MOST} are needed")
    canaries = []
    for number, line in enumerate(lines, start=1):
        where = f"publisher.canary_file: {path}: canary {number}"
        try:
            said = _Line.model_validate_json(line)
            canary = Canary(render(said.messages, None, None), reply_ids(said.reply))
        except ValidationError as error:
            raise SettingsError(f"{where}: {error.errors()[0]['msg']}") from error
        except RequestError as error:
            raise SettingsError(f"{where}: {error.message}") from error
        if (length := len(canary.prompt_ids) + len(canary.reply_ids)) > context_length:
            raise SettingsError(f"{where}: {length} tokens are more than the context length {context_length}")
        canaries.append(canary)
    return tuple(canaries)


class CanaryScore:
    """Scores versions on the canaries, against a base whose score is measured once."""

    def __init__(self, canaries: Sequence[Canary], score: Score) -> None:
        self._canaries, self._score = tuple(canaries), score
        self._base: float | None = None

    async def compare_with(self, score: ScoreBase) -> None:
        """Measure the score that versions are compared with, unless it is known."""
        if self._canaries and self._base is None:
            self._base = await self._mean(score)

    async def drop(self, version: int) -> float | None:
        """Return the nats per token that the replies lost; None without canaries, or with no score to compare with."""
        # Against the base, not the parent: many small steps down add up to a large one.
        return None if self._base is None else self._base - await self._mean(partial(self._score, version))

    async def _mean(self, score: ScoreBase) -> float:
        found = await few_at_once([partial(score, canary.prompt_ids, canary.reply_ids) for canary in self._canaries])
        return math.fsum(map(math.fsum, found)) / sum(map(len, found))
