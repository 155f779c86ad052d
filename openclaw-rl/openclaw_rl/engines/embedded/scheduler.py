"""Scheduler on the model thread: choose the work of each step, run it, sample, and finish the complete replies.

A step is one ragged pass over one new token of every decoding reply and a chunk of the waiting prompts. Prompts go by
priority, then arrival. Their chunk shrinks while replies decode, most of all beside replies of higher priority (a chat
beside background scoring: `BackgroundShare`). Requests beyond `max_running` wait. A waiting chat takes the place of a
background request, whose KV stays in the prefix cache until it runs again.

The event loop reaches the scheduler through `call` and `post`: functions that the thread runs between two steps. The
two threads share no other state.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from openclaw_rl.engines.dialect import FinishReason
from openclaw_rl.engines.embedded import sampler
from openclaw_rl.engines.embedded.jobs import Job, Mailbox, finish_after
from openclaw_rl.engines.embedded.kv_cache import PrefixCache, common_prefix
from openclaw_rl.engines.embedded.runner import Adapter, Logits, Runner, Span
from openclaw_rl.engines.embedded.throttle import BackgroundShare
from openclaw_rl.errors import EngineRefused

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]

_SCORE_ROWS = 64
"""Prompt positions whose logits are computed together. A row is as wide as the vocabulary."""
_MIN_CHUNK = 16
_SHARE_GAIN = 64
"""Number of tokens, beyond the cached ones, for which a prompt waits while another prompt computes them."""


class Scheduler:
    """The requests of one engine, and the loop that runs them."""

    def __init__(self, runner: Runner, *, max_running: int, prefill_chunk: int, cache_tokens: int) -> None:
        self._runner = runner
        self._max_running, self._prefill_chunk = max_running, prefill_chunk
        self._share = BackgroundShare(max(_MIN_CHUNK, prefill_chunk // 4))
        self._cache = PrefixCache(runner, budget=cache_tokens, spare=prefill_chunk)
        self._mailbox = Mailbox()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._arrivals = 0
        self._is_paused = False
        self._stop = threading.Event()
        self._touched: dict[int, Job] = {}
        """Jobs whose readers must wake after this step."""

    # -- called from the event loop ------------------------------------------------------------------------------------

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the model thread between two steps. Raises EngineGone when the thread has ended."""
        return await self._mailbox.call(function)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the model thread between two steps, and return at once."""
        self._mailbox.post(function)

    def stop(self) -> None:
        self._stop.set()
        self._mailbox.post(lambda: None)

    # -- run by the model thread, through `call` or `post` -------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self._arrivals += 1
        job.number = self._arrivals
        self._waiting.append(job)

    def abort(self, job: Job, message: str) -> None:
        if job.finish is None:
            self._finish(job, FinishReason(type="abort", message=message))

    def abort_rid(self, rid: str | None, message: str) -> None:
        """Abort the request with that id; None: every request."""
        for job in [*self._running, *self._waiting]:
            if rid is None or job.rid == rid:
                self.abort(job, message)

    def pause(self, mode: PauseMode) -> None:
        self._is_paused = True
        if mode == "abort":
            self.abort_rid(None, "paused")
        if mode == "retract":
            for job in list(self._running):
                self._retract(job, keep_kv=False)

    def resume(self) -> None:
        self._is_paused = False

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    def flush(self) -> bool:
        """Forget every prefix. Return False, and keep them, while a request runs or is queued."""
        if self.is_busy:
            return False
        self._cache.clear()
        return True

    def drop_adapter(self, adapter: Adapter) -> None:
        self._cache.clear(adapter=adapter)
        self._runner.drop_adapter(adapter)

    def load_weights(self, folder: Path) -> None:
        """Replace the base. Queued and retracted requests hold no KV, so they go on with the new weights."""
        if any(job.sequence is not None for job in self._running):
            raise EngineRefused("requests are running: pause with mode abort or retract first", status=400)
        self._runner.load_weights(folder)
        self._cache.clear()

    # -- the thread ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run steps until `stop`. An exception here is a bug or a lack of memory: it ends the process."""
        try:
            while not self._stop.is_set():
                # Wait for mail when no request can run.
                self._mailbox.read(wait=not (self._is_active or self._touched))
                if self._is_active:
                    self._step()
                if self._touched:
                    loop.call_soon_threadsafe(_wake, list(self._touched.values()))
                    self._touched = {}
        finally:
            self._mailbox.close()

    @property
    def _is_active(self) -> bool:
        return self.is_busy and not self._is_paused

    def _step(self) -> None:
        began = time.perf_counter()
        self._admit()
        decoding = [job for job in self._running if job.is_prefilled]
        prefills = self._prefills(decoding)
        work = [(job, 1) for job in decoding] + prefills
        spans = []
        for job, count in work:
            assert job.sequence is not None
            begin = len(job.sequence.tokens)
            ids = job.output[-1:] if job.is_prefilled else job.tokens[begin : begin + count]
            spans.append(Span(job.sequence.kv, ids, job.adapter, self._kept(job, begin, len(ids))))
        logits = self._runner.run(spans)
        ready: list[tuple[Job, Logits]] = []
        for (job, _), span, rows in zip(work, spans, logits, strict=True):
            assert job.sequence is not None
            job.sequence.tokens.extend(span.ids)
            if not job.output:
                self._score(job, rows)
            if job.missing == 0:
                if job.max_new_tokens == 0:
                    self._finish(job, FinishReason(type="length", length=0))
                else:
                    ready.append((job, rows))
        if ready:
            jobs = [job for job, _ in ready]
            last = self._runner.last([rows for _, rows in ready])
            for job, sampled in zip(jobs, sampler.sample(last, jobs), strict=True):
                self._append(job, sampled)
        if decoding and all(job.priority < _highest(decoding) for job, _ in prefills):
            self._share.record(len(decoding), sum(count for _, count in prefills), time.perf_counter() - began)

    def _admit(self) -> None:
        """Fill the free places by priority, then arrival. A request of lower priority yields its place."""
        self._waiting.sort(key=_order)
        while self._waiting:
            if len(self._running) >= self._max_running:
                last = max(self._running, key=_order)
                if last.priority >= self._waiting[0].priority:
                    return
                self._retract(last, keep_kv=True)
                self._waiting.sort(key=_order)
            self._running.append(self._waiting.pop(0))

    def _prefills(self, decoding: Sequence[Job]) -> list[tuple[Job, int]]:
        """Return the prompts to compute in this step, and the number of tokens of each."""
        work: list[tuple[Job, int]] = []
        budget = self._prefill_chunk
        for job in sorted((job for job in self._running if not job.is_prefilled), key=_order):
            limit = self._chunk(job, decoding)
            budget = min(budget, limit - sum(count for _, count in work))
            if budget <= 0:
                break
            if job.sequence is None and not self._begin(job, [other for other, _ in work]):
                continue
            count = min(budget, job.missing)
            work.append((job, count))
            budget -= count
        return work

    def _chunk(self, job: Job, decoding: Sequence[Job]) -> int:
        """Return the limit of a step's prompt tokens: small beside decoding replies, least beside more urgent ones."""
        if not decoding or _highest(decoding) < job.priority:
            return self._prefill_chunk
        if _highest(decoding) == job.priority:
            return max(_MIN_CHUNK, self._prefill_chunk // 4)
        return self._share.tokens(len(decoding))

    def _begin(self, job: Job, beside: Sequence[Job]) -> bool:
        """Give the job a place in the cache. Return False if it should wait for a prefix that another job computes."""
        tokens = job.tokens
        limit = len(tokens) - 1  # the last token runs in any case: its logits are wanted
        if job.wanted.prompt_from is not None and not job.output:
            limit = min(limit, job.wanted.prompt_from)
        if self._runner.can_share:
            like = [common_prefix(other.tokens, tokens) for other in beside if other.key == job.key]
            shared = min(max(like, default=0), limit)
            if shared >= _SHARE_GAIN and shared - self._cache.known(job.key, tokens, limit) >= _SHARE_GAIN:
                return False
        job.sequence = self._cache.take(job.key, tokens, limit)
        if job.cached_tokens is None:
            job.cached_tokens = len(job.sequence.tokens)
        return True

    def _kept(self, job: Job, begin: int, count: int) -> int:
        """Return the number of the span's last tokens that need logits."""
        end = begin + count
        if not job.output and job.wanted.prompt_from is not None:
            return end - max(begin, min(job.wanted.prompt_from, end - 1))
        return 1 if end == len(job.prompt) + len(job.output) else 0

    def _score(self, job: Job, rows: Logits) -> None:
        """Record the prompt log-probs of this chunk: the logits after token i belong to token i + 1."""
        start = job.wanted.prompt_from
        if start is None or job.sequence is None:
            return
        if not job.prompt_log_probs:
            job.prompt_log_probs.append(None)
            job.prompt_top_log_probs.append(None)
            job.prompt_id_log_probs.append(None)
        held = len(job.sequence.tokens)
        first = max(held - len(rows), start)  # position of the first row that counts
        for at in range(first, min(held, len(job.prompt) - 1), _SCORE_ROWS):
            end = min(at + _SCORE_ROWS, held, len(job.prompt) - 1)
            offset = held - len(rows)
            tokens, wanted = job.prompt[at + 1 : end + 1], job.wanted
            for scored in sampler.score(rows.rows(at - offset, end - offset), tokens, wanted.top, wanted.ids):
                job.prompt_log_probs.append(scored.log_prob)
                job.prompt_top_log_probs.append(scored.top)
                job.prompt_id_log_probs.append(scored.beside)

    def _append(self, job: Job, sampled: sampler.Sampled) -> None:
        job.output.append(sampled.id)
        job.log_probs.append(sampled.log_prob)
        job.top_log_probs.append(sampled.top)
        finish = finish_after(job)
        if finish is not None:
            self._finish(job, finish)
        else:
            self._touch(job)

    def _finish(self, job: Job, finish: FinishReason) -> None:
        job.finish = finish
        if job.sequence is not None:
            self._cache.give_back(job.sequence)
            job.sequence = None
        if job in self._running:
            self._running.remove(job)
        elif job in self._waiting:
            self._waiting.remove(job)
        self._touch(job)

    def _retract(self, job: Job, *, keep_kv: bool) -> None:
        """Put the job back into the queue, with its reply so far."""
        if job.sequence is not None:
            self._cache.give_back(job.sequence, keep=keep_kv)
            job.sequence = None
        if not job.output:
            job.prompt_log_probs.clear()
            job.prompt_top_log_probs.clear()
            job.prompt_id_log_probs.clear()
        self._running.remove(job)
        self._waiting.append(job)

    def _touch(self, job: Job) -> None:
        job.publish()
        self._touched[id(job)] = job


def _highest(jobs: Sequence[Job]) -> int:
    return max(job.priority for job in jobs)


def _order(job: Job) -> tuple[int, int]:
    return -job.priority, job.number


def _wake(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.changed.set()
