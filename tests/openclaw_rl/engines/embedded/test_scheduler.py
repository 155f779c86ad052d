"""Who runs when: priorities, chunks, preemption, pauses, aborts, new weights. On a tiny random Llama, without HTTP."""

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.embedded.runner import Logits, Span
from openclaw_rl.errors import EngineRefused

CHAT, BACKGROUND = 10, 0
SHARED = 4.0
"""Bound of `Tiny.off` for a reply that shared its steps or its prefix."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=length)


class Recorder:
    """Wraps a runner and notes what each step ran: one list of span lengths per step.

    hold_at: the model thread stops inside this step, counted from 1, until `go_on`.
    """

    def __init__(self, engine: Any, *, hold_at: int = 0) -> None:
        self.steps: list[list[int]] = []
        self._scheduler, self._inner = engine.scheduler, engine.runner.run
        self._hold_at, self._held, self._go_on = hold_at, threading.Event(), threading.Event()
        engine.runner.run = self.run

    def run(self, spans: list[Span]) -> list[Logits]:
        self.steps.append([len(span.ids) for span in spans])
        if len(self.steps) == self._hold_at:
            self._held.set()
            assert self._go_on.wait(120)
        return self._inner(spans)

    async def held(self) -> None:
        """The model thread stands inside the step: what is posted now runs directly after it."""
        assert await asyncio.to_thread(self._held.wait, 120)

    def go_on(self) -> None:
        self._go_on.set()

    async def after_the_step(self, function: Callable[[], object]) -> None:
        """Let the step end, and run `function` before the next one."""
        self._scheduler.post(function)
        self.go_on()
        await self._scheduler.call(lambda: None)


async def paused(engine: Any) -> None:
    """Hold the scheduler, so that everything submitted next is there before it takes a step."""
    await engine.scheduler.call(lambda: engine.scheduler.pause("in_place"))


async def resume(engine: Any) -> None:
    await engine.scheduler.call(engine.scheduler.resume)


async def test_a_prompt_is_computed_in_chunks(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, prefill_chunk=32) as engine:
        recorder = Recorder(engine)
        await engine.generate(prompt(100), 3)
        assert recorder.steps == [[32], [32], [32], [4], [1], [1]]


@pytest.mark.parametrize("is_cached", [False, True])
async def test_prompts_wait_for_a_common_beginning_only_until_it_is_cached(make_tiny, start_engine, is_cached):
    beginning = prompt(100)
    async with start_engine(make_tiny("llama").folder, prefill_chunk=256) as engine:
        if is_cached:
            await engine.generate([*beginning, 4], 1)
        recorder = Recorder(engine)
        await paused(engine)
        jobs = [engine.submit([*beginning, *prompt(5, seed)], 1) for seed in (1, 2, 3)]
        await resume(engine)
        for job in jobs:
            await engine.done(job)
    assert recorder.steps == ([[5, 5, 5]] if is_cached else [[105], [5, 5]])


async def test_replies_go_on_while_a_prompt_is_computed_and_its_chunks_shrink(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, prefill_chunk=256) as engine:
        recorder = Recorder(engine, hold_at=4)
        chat = engine.submit(prompt(5), 100, priority=CHAT)
        await recorder.held()
        await recorder.after_the_step(lambda: engine.scheduler.pause("in_place"))
        recorder.steps.clear()
        equal = engine.submit(prompt(300, 1), 1, priority=CHAT)
        await resume(engine)
        await engine.done(equal)
        with_chunk = [step for step in recorder.steps if len(step) > 1]
        assert with_chunk == [[1, 64]] * 4 + [[1, 44]]
        await engine.done(chat)
        assert len(chat.output) == 100


async def test_background_prompts_are_computed_in_small_chunks_beside_a_chat(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, prefill_chunk=256) as engine:
        recorder = Recorder(engine, hold_at=4)
        chat = engine.submit(prompt(5), 100, priority=CHAT)
        await recorder.held()
        below = engine.submit(prompt(100, 2), 0, priority=BACKGROUND, logprob_start_len=0)
        recorder.go_on()
        await asyncio.gather(engine.done(chat), engine.done(below))
        assert len(chat.output) == 100
        beside = [step for step in recorder.steps if len(step) > 1]
        chunks = [step[1] for step in beside]
        assert sum(chunks) == 100
        assert max(chunks) <= 64  # by what they cost (`background`), never more than beside equals
        assert all(step[0] == 1 for step in beside)  # the chat goes on in every step
        assert len(chat.output) == 100


async def test_chats_go_before_background(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, max_running=2, prefill_chunk=32) as engine:
        await paused(engine)
        jobs = {
            name: engine.submit(prompt(40, seed), 2, priority=p)
            for seed, (name, p) in enumerate({"b1": BACKGROUND, "b2": BACKGROUND, "c1": CHAT, "c2": CHAT}.items())
        }
        order: list[str] = []

        async def note(name: str) -> None:
            await engine.done(jobs[name])
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for name in jobs:
                tasks.create_task(note(name))
            await resume(engine)
        assert order == ["c1", "c2", "b1", "b2"]


async def test_a_chat_takes_the_place_of_a_background_reply_which_goes_on_later(make_tiny, start_engine):
    tiny = make_tiny("llama")
    async with start_engine(tiny.folder, max_running=1) as engine:
        recorder = Recorder(engine, hold_at=5)
        background = engine.submit(prompt(40), 120, priority=BACKGROUND)
        await recorder.held()
        chat = engine.submit(prompt(20, 1), 5, priority=CHAT)
        recorder.go_on()
        await engine.done(chat)
        assert len(recorder.steps) < 120, "the background reply ended before the chat came"
        await engine.done(background)
    assert len(chat.output) == 5
    assert len(background.output) == len(background.log_probs) == 120
    # Its prefix was kept: after the chat, one token is computed, not the whole reply so far.
    assert sum(sum(step) for step in recorder.steps) == 40 + 119 + 20 + 4
    assert tiny.off(None, background.prompt + background.output, background.log_probs) <= SHARED


async def test_more_than_max_running_wait_and_all_are_served(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, max_running=3) as engine:
        recorder = Recorder(engine)
        jobs = [engine.submit(prompt(10, seed), 6) for seed in range(10)]
        await asyncio.gather(*(engine.done(job) for job in jobs))
        assert all(len(job.output) == 6 for job in jobs)
        assert max(len(step) for step in recorder.steps) == 3


async def test_equal_prompts_are_computed_once(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, prefill_chunk=512) as engine:
        recorder = Recorder(engine)
        await paused(engine)
        jobs = [engine.submit(prompt(200), 2) for _ in range(4)]
        await resume(engine)
        await asyncio.gather(*(engine.done(job) for job in jobs))
        assert sorted(job.cached_tokens for job in jobs) == [0, 199, 199, 199]
        assert sum(sum(step) for step in recorder.steps) == 200 + 3 + 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_reply_is_exact(make_tiny, start_engine, mode):
    tiny = make_tiny("qwen3")
    async with start_engine(tiny.folder) as engine:
        recorder = Recorder(engine, hold_at=8)
        job = engine.submit(prompt(50), 60, params={"temperature": 0.7}, logprob_start_len=0)
        await recorder.held()
        await recorder.after_the_step(lambda: engine.scheduler.pause(mode))
        held = job.visible
        assert 0 < held < 60
        other = engine.submit(prompt(10, 1), 1)
        await engine.scheduler.call(lambda: None)  # a turn of the thread: nothing may have moved
        assert (job.visible, other.visible) == (held, 0)
        await resume(engine)
        await engine.done(job)
        await engine.done(other)
    assert tiny.off(None, job.prompt + job.output, job.log_probs, 0.7) <= SHARED
    assert len(job.prompt_log_probs) == 50


async def test_retracted_scoring_starts_over(make_tiny, start_engine):
    tiny = make_tiny("llama")
    ids = prompt(200)
    async with start_engine(tiny.folder, prefill_chunk=16) as engine:
        recorder = Recorder(engine, hold_at=3)
        job = engine.submit(ids, 0, logprob_start_len=10)
        await recorder.held()
        assert job.prompt_log_probs
        await recorder.after_the_step(lambda: engine.scheduler.pause("retract"))
        assert job.finish is None
        assert not job.prompt_log_probs
        await resume(engine)
        await engine.done(job)
    assert len(job.prompt_log_probs) == 190
    assert tiny.off(None, ids, job.prompt_log_probs[1:]) <= SHARED


async def test_new_weights_serve_retracted_replies_and_no_old_prefix(make_tiny, start_engine, tmp_path):
    """A reply that spans a swap is exact per token: the first part under the old weights, the rest wholly under the
    new.
    """
    tiny = make_tiny("llama")
    torch.manual_seed(5)
    changed = AutoModelForCausalLM.from_pretrained(tiny.folder)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    changed.save_pretrained(tmp_path)
    async with start_engine(tiny.folder) as engine:
        recorder = Recorder(engine, hold_at=8)
        job = engine.submit(prompt(50), 60, params={"temperature": 1.0})
        await recorder.held()
        await recorder.after_the_step(lambda: engine.scheduler.pause("in_place"))
        with pytest.raises(EngineRefused, match="running"):
            await engine.scheduler.call(lambda: engine.scheduler.load_weights(tmp_path))
        await engine.scheduler.call(lambda: engine.scheduler.pause("retract"))
        before = len(job.output)
        await engine.scheduler.call(lambda: engine.scheduler.load_weights(tmp_path))
        await resume(engine)
        await engine.done(job)
        again = await engine.generate(job.prompt, 1)
        assert again.cached_tokens == 49  # of the new weights
    ids = job.prompt + job.output
    new = replace(tiny, folder=tmp_path)
    assert tiny.off(None, ids[: 50 + before], job.log_probs[:before]) <= SHARED
    assert new.off(None, ids, job.log_probs[before:]) <= SHARED
    (old, other) = (
        model.log_probs(None, ids)[49:-1].gather(-1, torch.tensor(job.output)[:, None]) for model in (tiny, new)
    )
    assert (old - other).abs().mean() > 0.1


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(make_tiny, start_engine, tmp_path):
    tiny = make_tiny("llama")
    async with start_engine(tiny.folder) as engine:
        for folder in (tmp_path, make_tiny("qwen3").folder):
            with pytest.raises(EngineRefused):
                await engine.scheduler.call(lambda folder=folder: engine.scheduler.load_weights(folder))
        job = await engine.generate(prompt(10), 3)
        assert len(job.output) == 3


async def test_the_context_ends_a_reply(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder) as engine:
        job = await engine.generate(prompt(505), 100)
        assert len(job.output) == 7
        assert (job.finish.type, job.finish.length) == ("length", 7)


async def test_an_end_token_ends_a_reply_and_stays_in_it(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder) as engine:
        free = await engine.generate(prompt(20), 30, params={"temperature": 0.0})
        end = free.output[10]
        job = await engine.generate(
            prompt(20), 30, params={"temperature": 0.0, "stop_token_ids": [end], "ignore_eos": False}
        )
        assert job.output == free.output[: free.output.index(end) + 1]
        assert (job.finish.type, job.finish.matched) == ("stop", end)


async def test_a_reply_that_ends_by_its_limit_holds_what_was_sampled_and_no_more(make_tiny, start_engine):
    """No end token is put after it, and one that comes with the last place ends the reply by itself."""
    async with start_engine(make_tiny("llama").folder) as engine:
        free = await engine.generate(prompt(20), 30, params={"temperature": 0.0})
        last = free.output[10]
        greedy = {"temperature": 0.0, "ignore_eos": False}
        cut = await engine.generate(prompt(20), 8, params=greedy)
        assert cut.output == free.output[:8]
        assert len(cut.log_probs) == 8
        assert not set(cut.output) & cut.end_ids
        assert (cut.finish.type, cut.finish.length) == ("length", 8)
        limit = free.output.index(last) + 1
        whole = await engine.generate(
            prompt(20), limit, params=greedy | {"stop_token_ids": [last], "ignore_eos": False}
        )
        assert whole.output == free.output[:limit]
        assert whole.finish.type == "stop"


async def test_aborting_what_waits_and_what_is_being_computed(make_tiny, start_engine):
    async with start_engine(make_tiny("llama").folder, max_running=1, prefill_chunk=16) as engine:
        await paused(engine)
        first, second = engine.submit(prompt(300), 5, rid="a"), engine.submit(prompt(10), 5, rid="b")
        for rid in ("a", "b"):
            await engine.scheduler.call(lambda rid=rid: engine.scheduler.abort_rid(rid, "test"))
        await engine.done(first)
        await engine.done(second)
        assert [first.finish.type, second.finish.type] == ["abort", "abort"]
        assert (first.output, second.output) == ([], [])
        assert await engine.scheduler.call(engine.scheduler.flush)
