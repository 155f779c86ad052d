"""Stand-in for the engine when turns are scored: the same numbers, by plain batched forwards of the policy itself.

`score` of a method asks an engine for forced log-probs, turn by turn. This module collects the calls of all turns until
no more come, then answers them by one batched fp32 forward at temperature 1. `served.worst_difference` measures the
distance to the real engine's numbers, and `tests/scripts/benchmarks/test_pairs.py` asserts it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.learning.subject import forced_log_probs
from openclaw_rl.engines.base import Score
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

TABLE_ROWS = 8
"""Rows of one pass whose tables are read: 100 MB of logits for each 500 positions of the bundled model."""
QUIET_S = 0.01
"""Time without a call after which the collected calls are answered."""


class ScoringEngine(Protocol):
    """Engine interface that scoring uses, for one policy."""

    def serves(self, version: int) -> AbstractAsyncContextManager[str | None]:
        """Yield the name under which `score` knows the policy as it is now; None: the base, as version 0."""
        ...

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score: ...

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score: ...


@dataclass(frozen=True, slots=True)
class _Call:
    prompt_ids: Ids
    response_ids: Ids
    of_base: bool
    top_k: int
    ids: tuple[Ids, ...] | None
    """Ids of the table [T, K]; None: the likeliest `top_k`."""
    answer: "asyncio.Future[Score]"

    @property
    def has_table(self) -> bool:
        return self.top_k > 0 or self.ids is not None


class ForwardEngine:
    def __init__(self, policy: LoraPolicy) -> None:
        self._policy = policy
        self._calls: list[_Call] = []
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def serves(self, version: int) -> AsyncIterator[str | None]:
        yield adapter_name(version)

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        future = asyncio.get_running_loop().create_future()
        return await self._asked(_Call(prompt_ids, response_ids, lora_path is None, top_k, None, future))

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        future = asyncio.get_running_loop().create_future()
        return await self._asked(_Call(prompt_ids, response_ids, lora_path is None, 0, tuple(ids), future))

    async def _asked(self, call: _Call) -> Score:
        self._calls.append(call)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._answer)
        return await call.answer

    def _answer(self) -> None:
        calls, self._calls, self._timer = self._calls, [], None
        for of_base, has_table in sorted({(call.of_base, call.has_table) for call in calls}):
            some = [call for call in calls if (call.of_base, call.has_table) == (of_base, has_table)]
            with self._policy.reference() if of_base else contextlib.nullcontext():
                scores = self._with_tables(some) if has_table else self._scores(some)
            for call, score in zip(some, scores, strict=True):
                if not call.answer.done():
                    call.answer.set_result(score)

    def _scores(self, calls: Sequence[_Call]) -> list[Score]:
        values = forced_log_probs(self._policy, [(call.prompt_ids, call.response_ids) for call in calls])
        return [Score(tuple(log_probs)) for log_probs in values]

    def _with_tables(self, calls: Sequence[_Call]) -> list[Score]:
        """Return the scores with their tables, a few rows at a time: the logits of all would be gigabytes."""
        by_length = sorted(range(len(calls)), key=lambda n: len(calls[n].prompt_ids) + len(calls[n].response_ids))
        found: dict[int, Score] = {}
        for start in range(0, len(calls), TABLE_ROWS):
            rows = by_length[start : start + TABLE_ROWS]
            found |= zip(rows, self._rows_with_tables([calls[n] for n in rows]), strict=True)
        return [found[n] for n in range(len(calls))]

    @torch.no_grad()
    def _rows_with_tables(self, calls: Sequence[_Call]) -> list[Score]:
        device, texts = self._policy.device, [call.prompt_ids + call.response_ids[:-1] for call in calls]
        ids = torch.zeros(len(calls), max(map(len, texts)), dtype=torch.long, device=device)
        for row, text in enumerate(texts):  # padded behind: a causal model's rows do not see it
            ids[row, : len(text)] = torch.tensor(text, device=device)
        logits = self._policy.model(input_ids=ids, use_cache=False).logits
        scores = []
        for call, text, own_logits in zip(calls, texts, logits, strict=True):
            log_probs = torch.log_softmax(own_logits[len(call.prompt_ids) - 1 : len(text)].float(), -1)  # [T, V]
            response = torch.tensor(call.response_ids, device=device)
            own = tuple(log_probs.gather(-1, response[:, None])[:, 0].tolist())
            if call.ids is None:
                top = log_probs.topk(call.top_k)
                scores.append(
                    Score(own, tuple(map(tuple, top.values.tolist())), tuple(map(tuple, top.indices.tolist())))
                )
                continue
            # The rows are of different lengths: of several hints' tables some ids are the same.
            widest = max(map(len, call.ids))
            wanted = torch.tensor([[*row, *[0] * (widest - len(row))] for row in call.ids], device=device)
            table = zip(call.ids, log_probs.gather(-1, wanted).tolist(), strict=True)
            scores.append(Score(own, tuple(tuple(values[: len(row)]) for row, values in table), call.ids))
        return scores


class DisplacedEngine(ForwardEngine):
    """Engine whose base reports each token's log-prob some tokens late: a teacher that is not aligned."""

    def __init__(self, policy: LoraPolicy, shift: int) -> None:
        super().__init__(policy)
        self._shift = shift

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        found = await super().score(prompt_ids, response_ids, lora_path=lora_path, extra_key=extra_key, top_k=top_k)
        if lora_path is not None:
            return found
        late = found.log_probs[: self._shift] + found.log_probs[: -self._shift]
        return Score(late[: len(response_ids)])
