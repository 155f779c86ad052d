"""Fake engine in this process: `engines.base.Engine` over scripted replies, or over `ToyPolicy` without a script.

A test can `script` replies, and `go_down` / `come_up`: a crashed and restarted engine, without its adapters and running
replies. It can `pause` / `abort_all` as the publisher does, and read `calls` and `aborted`.
"""

import asyncio
import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from openclaw_rl.engines.base import Score, Tap
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, GenerateRequest, MetaInfo, ModelInfo, TokenLogProb
from openclaw_rl.errors import EngineGone, EngineRefused
from openclaw_rl.testing.toy_policy import BASE_SEED, ToyPolicy, adapter_seed
from openclaw_rl.types import Ids, LogProbs


@dataclass(frozen=True, slots=True)
class Scripted:
    """One forced reply, cut to `max_new_tokens`. Log-probs default to -0.01 (i + 1)."""

    ids: Ids
    log_probs: tuple[float | None, ...] | None = None
    """Another length than that of `ids`, or a None in it, plays a broken engine."""
    finish: Literal["stop", "length", "abort"] = "stop"
    break_after: int | None = None
    """Raise EngineGone after this many tokens."""
    hold_after: int | None = None
    """Wait for `FakeEngine.release()` after this many tokens."""
    refuse: tuple[int, str] | None = None
    """Status and message of a 4xx."""
    per_event: int = 1
    """Tokens in one event."""


@dataclass(slots=True)
class Pacing:
    """Speed of the engine; zeros for unit tests."""

    prefill_tokens_per_s: float = 0.0
    """0: without a pause."""
    tokens_per_s: float = 0.0
    """Speed of one stream; 0: without a pause. All streams get tokens at the same ticks, as from one decode step."""


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    is_held: bool
    """It came during a pause: no abort reaches it, and the engine counts as empty."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """An engine with scripted or toy replies, and controls for tests."""

    def __init__(
        self, *, policy: ToyPolicy | None = None, context_length: int = 8192, pacing: Pacing | None = None
    ) -> None:
        self.policy = policy or ToyPolicy()
        self.pacing = pacing or Pacing()
        self.context_length = context_length
        self.weight_version = 0
        self.adapters: dict[str, int] = {}
        """Name → seed of each loaded adapter."""
        self.folders: dict[str, str] = {}
        """Name → folder of each adapter's last load."""
        self.server_info: Mapping[str, object] | None = None  # SGLang's answer; None: it has no such route
        self.calls: list[GenerateRequest] = []
        self.aborted: list[str] = []
        """rids of streams that were closed or aborted before their end."""
        self._scripts: deque[Scripted] = deque()
        self._running: dict[int, _Running] = {}
        self._users: Counter[str | None] = Counter()
        self._changed = asyncio.Condition()
        self._changing = asyncio.Lock()
        self._released = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._down = False
        self.holding = 0  # replies that wait at their `hold_after`; their reader has taken every token before it
        self._count = itertools.count()

    def script(self, *replies: Scripted) -> None:
        self._scripts.extend(replies)

    def release(self) -> None:
        """Resume every reply that waits at its `hold_after`."""
        self._released.set()

    def go_down(self) -> None:
        """Crash: running replies break off, adapters are lost, every call raises EngineGone."""
        self._down = True
        self.adapters.clear()
        for running in self._running.values():
            running.aborted.set()

    def come_up(self) -> None:
        self._down = False

    @property
    def running(self) -> int:
        return len(self._running)

    # the engine

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        self._check_up()
        self.calls.append(request)
        script = self._scripts.popleft() if self._scripts else None
        if script is not None and script.refuse is not None:
            raise EngineRefused(script.refuse[1], status=script.refuse[0])
        self._check(request)
        number, running = next(self._count), _Running(request, is_held=not self._unpaused.is_set())
        self._running[number] = running
        self._users[request.lora_path] += 1
        finished = False
        try:
            await self._unpaused_or_aborted(running)
            running.is_held = False
            await self._sleep(running, len(request.input_ids), self.pacing.prefill_tokens_per_s)
            events = self._toy(running) if script is None else self._forced(running, script)
            offer: Tap | None = None
            async for reply in events:
                self._check_up()
                finished = reply.meta_info.finish_reason is not None
                if finished or offer is None or not offer(reply):
                    yield reply
                offer = tap
        finally:
            if not finished or running.aborted.is_set():
                self.aborted.append(request.rid or "")
            del self._running[number]
            self._users[request.lora_path] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.logprob_start_len >= 0:
            return self._scored(request)
        ids: list[int] = []
        log_probs, meta = list[TokenLogProb](), MetaInfo()
        async for reply in self.stream(request):
            meta = reply.meta_info
            ids += reply.output_ids
            log_probs += meta.output_token_logprobs or []
        return GenerateReply(output_ids=ids, meta_info=replace(meta, output_token_logprobs=log_probs))

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        self._check_up()
        await self._unpaused.wait()
        ids = (*prompt_ids, *response_ids)
        log_probs = self.policy.log_probs(ids, len(prompt_ids), self._seed(lora_path))
        if not top_k:
            return Score(log_probs)
        rows = tuple(self.policy.likeliest(token, top_k) for token in response_ids)
        return Score(log_probs, self.policy.table(rows, response_ids, log_probs), rows)

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        scored = await self.score(prompt_ids, response_ids, lora_path=lora_path, extra_key=extra_key)
        return Score(scored.log_probs, self.policy.table(ids, response_ids, scored.log_probs), tuple(ids))

    async def is_healthy(self) -> bool:
        return not self._down

    async def model_info(self) -> ModelInfo:
        self._check_up()
        return ModelInfo(
            model_path="stub",
            weight_version=str(self.weight_version),
            base_hash="stub",
            context_length=self.context_length,
        )

    async def adapter_folders(self) -> dict[str, str] | None:
        self._check_up()
        return {name: self.folders.get(name, "") for name in self.adapters}

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter. Like SGLang, it waits for an unload that waits."""
        self._check_up()
        async with self._changing:
            if name in self.adapters:
                raise EngineRefused(f"adapter {name} is already loaded", status=400)
            if not await asyncio.to_thread(folder.is_dir):
                raise EngineRefused(f"no such folder: {folder}", status=400)
            self.adapters[name] = await asyncio.to_thread(adapter_seed, folder)
            self.folders[name] = str(folder)

    async def unload_adapter(self, name: str) -> None:
        self._check_up()
        async with self._changing:
            if name not in self.adapters:
                raise EngineRefused(f"adapter {name} is not loaded", status=400)
            async with self._changed:
                await self._changed.wait_for(lambda: not self._users[name])
            self.adapters.pop(name, None)

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        self._check_up()
        self._unpaused.clear()
        if mode == "abort":
            await self.abort_all()

    async def resume(self) -> None:
        self._check_up()
        self._unpaused.set()

    async def abort_all(self) -> None:
        self._check_up()
        for running in self._running.values():
            if not running.is_held:
                running.aborted.set()

    async def abort(self, rid: str) -> None:
        for running in self._running.values():
            if running.request.rid == rid and not running.is_held:
                running.aborted.set()

    async def flush_cache(self) -> None:
        self._check_up()
        if any(not running.is_held for running in self._running.values()):
            raise EngineRefused("requests are running", status=400)

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        await self.flush_cache()
        self.weight_version = weight_version

    # internals

    def _check_up(self) -> None:
        if self._down:
            raise EngineGone("the fake engine is down")

    def _check(self, request: GenerateRequest) -> None:
        if len(request.input_ids) >= self.context_length:
            raise EngineRefused(
                f"the prompt has {len(request.input_ids)} tokens, the context {self.context_length}", status=400
            )
        self._seed(request.lora_path)

    def _seed(self, lora_path: str | None) -> int:
        if lora_path is None:
            return BASE_SEED ^ self.weight_version
        if lora_path not in self.adapters:
            raise EngineRefused(f"adapter {lora_path} has never been loaded", status=400)
        return self.adapters[lora_path]

    async def _sleep(self, running: _Running, tokens: float, tokens_per_s: float) -> None:
        if tokens_per_s <= 0:
            return
        try:
            async with asyncio.timeout(tokens / tokens_per_s):
                await running.aborted.wait()
        except TimeoutError:
            return

    async def _toy(self, running: _Running) -> AsyncIterator[GenerateReply]:
        request = running.request
        ids = list(request.input_ids)
        seed, limit = self._seed(request.lora_path), request.sampling_params.max_new_tokens
        stops = {self.policy.end_id, *(request.sampling_params.stop_token_ids or ())}
        for count in range(1, limit + 1):
            token = self.policy.next_token(ids, seed)
            ids.append(token)
            log_prob = self.policy.log_prob(ids, len(ids) - 1, seed)
            if token in stops and not request.sampling_params.ignore_eos:
                finish: FinishReason | None = FinishReason(type="stop", matched=token)
            else:
                finish = FinishReason(type="length", length=limit) if count == limit else None
            if running.aborted.is_set():
                yield _event(request, count - 1, (), (), FinishReason(type="abort"), self.weight_version)
                return
            yield _event(request, count, (token,), (log_prob,), finish, self.weight_version)
            if finish is not None:
                return
            await asyncio.sleep(self._until_tick())
            await self._unpaused_or_aborted(running)

    async def _unpaused_or_aborted(self, running: _Running) -> None:
        """Wait out a pause. An abort ends a paused request at once, as with SGLang's retracted requests."""
        if self._unpaused.is_set():
            return
        waits = [asyncio.ensure_future(self._unpaused.wait()), asyncio.ensure_future(running.aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _until_tick(self) -> float:
        rate = self.pacing.tokens_per_s
        if rate <= 0:
            return 0
        now = asyncio.get_running_loop().time()
        return (math.floor(now * rate) + 1) / rate - now

    async def _forced(self, running: _Running, script: Scripted) -> AsyncIterator[GenerateReply]:
        request, limit = running.request, running.request.sampling_params.max_new_tokens
        ids = script.ids[:limit]
        default = tuple(-0.01 * (i + 1) for i in range(len(ids)))
        log_probs = default if script.log_probs is None else script.log_probs
        for start in range(0, max(1, len(ids)), script.per_event):
            if script.break_after is not None and start >= script.break_after:
                raise EngineGone("the fake engine broke off")
            if script.hold_after is not None and start >= script.hold_after:
                await self._hold(running)
            if running.aborted.is_set():
                yield _event(request, start, (), (), FinishReason(type="abort"), self.weight_version)
                return
            end = min(start + script.per_event, len(ids))
            finish = None
            if end == len(ids) and script.break_after is None and script.hold_after != end:
                finish = self._end(script, limit)
            values = log_probs[start:] if end == len(ids) else log_probs[start:end]
            yield _event(request, end, ids[start:end], values, finish, self.weight_version)
            await asyncio.sleep(0)
        if script.break_after is not None:
            raise EngineGone("the fake engine broke off")
        if script.hold_after == len(ids):
            await self._hold(running)
            finish = FinishReason(type="abort") if running.aborted.is_set() else self._end(script, limit)
            yield _event(request, len(ids), (), (), finish, self.weight_version)

    async def _hold(self, running: _Running) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._released, running.aborted)]
        self.holding += 1
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.holding -= 1
            for wait in waits:
                wait.cancel()

    @staticmethod
    def _end(script: Scripted, limit: int) -> FinishReason:
        if script.finish == "stop" and len(script.ids) <= limit:
            return FinishReason(type="stop", matched=script.ids[-1] if script.ids else None)
        return FinishReason(type="abort" if script.finish == "abort" else "length", length=limit)

    def _scored(self, request: GenerateRequest) -> GenerateReply:
        self._check_up()
        self.calls.append(request)
        ids, start = request.input_ids, request.logprob_start_len
        log_probs: LogProbs = self.policy.log_probs(ids, start + 1, self._seed(request.lora_path))
        entries: list[TokenLogProb] = [(None, ids[start], None)]
        tokens, k, asked = ids[start + 1 :], request.top_logprobs_num, request.token_ids_logprob
        entries += [(value, token, None) for value, token in zip(log_probs, tokens, strict=True)]

        def table(rows: Sequence[Sequence[int]]) -> list[list[TokenLogProb] | None]:
            found: list[list[TokenLogProb] | None] = [None]
            for row, values in zip(rows, self.policy.table(rows, tokens, log_probs), strict=True):
                found.append([(value, i, None) for i, value in zip(row, values, strict=True)])
            return found

        return GenerateReply(
            meta_info=MetaInfo(
                id=request.rid or "",
                prompt_tokens=len(ids),
                weight_version=str(self.weight_version),
                finish_reason=FinishReason(type="length", length=0),
                input_token_logprobs=entries,
                input_top_logprobs=table([self.policy.likeliest(token, k) for token in tokens]) if k else None,
                input_token_ids_logprobs=table([asked] * len(tokens)) if asked else None,
            )
        )


def _event(
    request: GenerateRequest,
    count: int,
    ids: Ids,
    log_probs: tuple[float | None, ...],
    finish: FinishReason | None,
    weight_version: int,
) -> GenerateReply:
    values: list[TokenLogProb] | None = None
    if request.return_logprob:
        padded = itertools.chain(ids, itertools.repeat(0))
        values = [(log_prob, token, None) for log_prob, token in zip(log_probs, padded, strict=False)]
    meta = MetaInfo(
        id=request.rid or "",
        prompt_tokens=len(request.input_ids),
        completion_tokens=count,
        weight_version=str(weight_version),
        finish_reason=finish,
        output_token_logprobs=values,
    )
    return GenerateReply(output_ids=list(ids), meta_info=meta)
