"""Log-probs of replies for the gate: a few calls at once, no figure of a version taken twice, and their differences.

A version's weights never change, so its log-probs of a reply don't either. The gate compares each new version with the
same replies of the serving version and of the base. `Remembered` keeps their figures while gate after gate asks for
them. It keeps no text: a reply stands there by its hash.

Leaves to others: what the figures mean (`gate`).
"""

import asyncio
import hashlib
import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

import structlog

from openclaw_rl.errors import AlignmentError, EngineError, EngineRefused, PicturesRefused
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import Ids, LogProbs, StepProbe
from openclaw_rl.types.pictures import pictures_of

log = structlog.get_logger()

T = TypeVar("T")

Reply = tuple[Ids, Ids]
"""A prompt, and the start of a reply to it."""

AT_ONCE = 2
"""Scoring calls that the gate has on the engine at once: they share its steps. With four, chats beside a gate seemed to
have longer gaps on two cores."""


class Remembered:
    """Log-probs by version and reply: those that the last gate or the present one asked for."""

    def __init__(self) -> None:
        self._last: dict[bytes, LogProbs] = {}
        self._present: dict[bytes, LogProbs] = {}
        self._is_prepared = False
        """The figures of a preparation wait for their gate."""

    def next_gate(self) -> None:
        """Begin anew after a gate, and forget what neither it nor its preparation asked for."""
        self._last, self._present, self._is_prepared = self._present, {}, False

    def next_preparation(self) -> None:
        """Begin a preparation. After one that no gate followed, forget what that one did not ask for."""
        if self._is_prepared:
            self.next_gate()
        self._is_prepared = True

    async def of(
        self, number: int, prompt_ids: Ids, ids: Ids, score: Callable[[int, Ids, Ids], Awaitable[LogProbs]]
    ) -> LogProbs:
        """Return the reply's log-probs under the version: the known ones, or those of `score`."""
        key = _key(number, prompt_ids, ids)
        found = self._present.get(key) or self._last.get(key) or await score(number, prompt_ids, ids)
        self._present[key] = found
        return found


def _key(number: int, prompt_ids: Ids, ids: Ids) -> bytes:
    numbers = array("q", (number, len(prompt_ids), *prompt_ids, *ids))
    shown = "".join(picture.digest for picture in pictures_of(prompt_ids))  # of one size, and another picture
    return hashlib.blake2b(numbers.tobytes() + shown.encode(), digest_size=16).digest()


async def or_left_out(call: Awaitable[T], prompt_ids: Ids, health: Health) -> T | None:
    """Return the call's answer; None if it fails for a prompt with pictures, which is left out and counted.

    A picture may be gone, or the engine refuse it. It must stop no version.
    """
    try:
        return await call
    except (EngineRefused, AlignmentError) as error:
        if not pictures_of(prompt_ids) and not isinstance(error, PicturesRefused):
            raise
        health.count("gate_pictures_left_out")
        log.warning("gate_reply_left_out", error=str(error))
        return None


def affordable(replies: Sequence[tuple[Ids, Ids]], settings: PublisherSettings) -> list[tuple[Ids, Ids]]:
    """Return the first tokens of the replies with the shortest prompts, as far as the settings allow.

    Prompts with pictures are longer than texts. Where there are both, every second reply is of one with pictures.
    """
    of_kinds = [[reply for reply in replies if bool(pictures_of(reply[0])) is shows] for shows in (False, True)]
    turns = zip_longest(*(sorted(some, key=lambda reply: len(reply[0])) for some in of_kinds))
    kept: list[tuple[Ids, Ids]] = []
    budget = settings.gate_prompt_tokens
    for prompt_ids, ids in [reply for pair in turns for reply in pair if reply is not None]:
        if len(kept) == settings.gate_replies:
            break
        if kept and budget < len(prompt_ids):
            continue  # a long one takes no place of a shorter one behind it
        budget -= len(prompt_ids)
        kept.append((prompt_ids, ids[: settings.gate_tokens]))
    return kept


async def few_at_once(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Return the calls' results in order: the first call alone, then `AT_ONCE` at a time.

    Raises the first exception that a call raises, and ends the others.
    """
    if not calls:
        return []
    # Chats begin alike. After the first call the engine's prefix cache holds the beginning for all others.
    results = [await calls[0]()]
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    tasks = [asyncio.ensure_future(one(call)) for call in calls[1:]]
    try:
        return results + list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def probed_kl(probes: Sequence[StepProbe]) -> float | None:
    """Return KL(parent || new) by the trainer's own figures on its probes; None without probes."""
    terms = [a - b for probe in probes for a, b in zip(probe.parent_log_probs, probe.log_probs, strict=True)]
    return math.fsum(terms) / len(terms) if terms else None


def mean_abs(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean |a − b|; infinite when the lengths differ, so that no test passes."""
    if len(a) != len(b) or not a:
        return math.inf
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


async def in_time(call: Awaitable[T], end: float, what: str) -> T | None:
    """Return the call's answer; None after `end`, or if an engine cannot score."""
    try:
        async with asyncio.timeout_at(end):
            return await call
    except (EngineError, AlignmentError, TimeoutError) as error:
        log.warning("gate_not_measured", what=what, error=repr(error))
        return None


async def scored(
    score: Callable[[Ids, Ids], Awaitable[LogProbs]], replies: Sequence[Reply], end: float, health: Health
) -> tuple[tuple[Reply, float], ...]:
    """Return the replies with the sums of their log-probs: those that were scored before `end`."""
    done: dict[Reply, float] = {}

    async def run() -> None:
        for reply in replies:
            if (found := await or_left_out(score(*reply), reply[0], health)) is not None:
                done[reply] = math.fsum(found)  # kept when the time is over

    await in_time(run(), end, "replies")
    return tuple(done.items())


def with_ids(probes: Sequence[StepProbe]) -> list[StepProbe]:
    """Return the probes with ids; those of a forgotten session have figures alone."""
    return [probe for probe in probes if probe.response_ids]
