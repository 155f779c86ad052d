"""One reply over several engine calls: cuts, swaps, versions."""

import asyncio
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import until

from openclaw_rl.engines.admission import Closed, VersionAdmission
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, MetaInfo
from openclaw_rl.errors import EngineRefused, RequestError
from openclaw_rl.proxy.generation import Decoding, EngineExtras, Generation, Sampled
from openclaw_rl.testing import FakeEngine, Scripted
from openclaw_rl.types import SamplingParams

END = 2
STOP = FinishReason(type="stop", matched=2)


def serving_base(hold_s: float = 5) -> VersionAdmission:
    serving = VersionAdmission(hold_s=hold_s)
    serving.switch(0, None)
    return serving


def generation(
    engine: FakeEngine,
    serving: VersionAdmission,
    *,
    limit: int = 10,
    extras: EngineExtras = EngineExtras(),  # noqa: B008 (frozen)
    **params: object,
) -> Generation:
    return Generation(
        engine,
        serving,
        rid="r",
        prompt_ids=(1, 5, 6),
        decoding=Decoding(SamplingParams(max_new_tokens=limit, **params), {END}, extras),  # type: ignore[arg-type]
    )


async def collect(engine: FakeEngine, serving: VersionAdmission, **fields: object) -> Sampled:
    async with generation(engine, serving, **fields) as running:  # type: ignore[arg-type]
        async with aclosing(running.events()) as events:
            async for _ in events:
                pass
        return running.sampled


async def test_a_swap_of_full_weights_joins_two_versions_in_one_reply() -> None:
    engine, serving = FakeEngine(), serving_base()
    engine.script(Scripted(ids=(11, 12, 13, END), hold_after=2), Scripted(ids=(14, END)))
    task = asyncio.create_task(collect(engine, serving))
    await until(lambda: engine.holding)
    serving.hold()
    await engine.pause("retract")
    await engine.abort_all()
    await until(lambda: not engine.running)
    await engine.flush_cache()
    engine.weight_version = 1
    serving.switch(1, None)
    await engine.resume()
    serving.release_hold()
    sampled = await task
    assert sampled.ids == [11, 12, 14, END]
    assert [(run.weight_version, run.length) for run in sampled.versions] == [(0, 2), (1, 2)]
    assert (sampled.finish, sampled.is_joined) == ("stop", True)
    first, second = engine.calls
    assert second.input_ids == [1, 5, 6, 11, 12]
    assert (first.sampling_params.max_new_tokens, second.sampling_params.max_new_tokens) == (10, 8)
    assert (first.extra_key, second.extra_key) == ("v0", "v1")
    assert serving.users(0) == serving.users(1) == 0


@pytest.mark.parametrize(
    ("ids", "limit", "finish"), [((11, END), 10, "stop"), ((11, 12, 13), 3, "length"), ((11, END), 2, "stop")]
)
async def test_a_reply_that_had_ended_when_it_was_cut_is_not_asked_for_again(ids, limit, finish) -> None:
    engine = FakeEngine()
    engine.script(Scripted(ids=ids, break_after=len(ids)))
    sampled = await collect(engine, serving_base(), limit=limit)
    assert (tuple(sampled.ids), sampled.finish) == (ids, finish)
    assert len(engine.calls) == 1


async def test_an_engine_that_never_comes_back_is_given_up_as_503() -> None:
    engine = FakeEngine()
    engine.go_down()
    with pytest.raises(RequestError) as caught:
        await collect(engine, serving_base(hold_s=0.1))
    assert caught.value.status == 503


class Watched(VersionAdmission):
    """Keeps the timeout of each wait for admission; before the fourth wait it holds for ever."""

    def __init__(self) -> None:
        super().__init__(hold_s=60.0)
        self.waits: list[float | None] = []

    async def wait_open(self, within_s: float | None = None) -> None:
        self.waits.append(within_s)
        if len(self.waits) == 4:
            self.hold()
            within_s = 0.0  # as if that were over
        await super().wait_open(within_s)


async def test_what_was_waited_before_the_gate_shut_counts_too() -> None:
    engine, serving = FakeEngine(), Watched()
    serving.switch(0, None)
    engine.go_down()
    with pytest.raises(RequestError) as caught:
        await collect(engine, serving)
    assert caught.value.status == 503
    first, *later = serving.waits
    assert first is None
    assert len(later) == 3
    assert all(60.0 > before > after > 0 for before, after in pairwise(later)), serving.waits


async def test_what_was_waited_at_the_gate_counts_when_the_engine_then_fails() -> None:
    engine, serving = FakeEngine(), Watched()
    engine.go_down()
    held = asyncio.create_task(collect(engine, serving))
    await until(lambda: serving.waits)  # from here on its patience runs
    await asyncio.sleep(0.3)
    serving.switch(0, None)
    with pytest.raises(RequestError):
        await held
    assert serving.waits[0] is None
    assert max(wait for wait in serving.waits if wait is not None) <= 60.0 - 0.3


async def test_progress_renews_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses after six breaks take longer together than the patience, and each a sixth of it."""
    monkeypatch.setattr("openclaw_rl.proxy.generation._FIRST_PAUSE_S", 0.4)
    engine = FakeEngine()
    engine.script(*[Scripted(ids=(10 + i,), break_after=1) for i in range(6)], Scripted(ids=(END,)))
    sampled = await collect(engine, serving_base(hold_s=2.0))
    assert sampled.ids == [*range(10, 16), END]
    assert sampled.resumed == 6


async def test_an_abort_that_is_a_refusal_is_one() -> None:
    class Refusing(FakeEngine):
        async def stream(self, request, tap=None):
            finish = FinishReason(type="abort", message="too long", status_code=400)
            yield GenerateReply(meta_info=MetaInfo(finish_reason=finish))

    with pytest.raises(EngineRefused, match="too long"):
        await collect(Refusing(), serving_base())


async def test_cut_replies_go_on_exactly_as_the_policy_would_have() -> None:
    whole = await collect(FakeEngine(), serving_base(), limit=20)
    halves = FakeEngine()
    calls = 0

    class Cut(FakeEngine):
        async def stream(self, request, tap=None):
            nonlocal calls
            calls += 1
            seen = 0
            async with aclosing(halves.stream(request)) as events:
                async for event in events:
                    yield event
                    seen += 1
                    if seen == 3 and event.meta_info.finish_reason is None:
                        yield GenerateReply(meta_info=MetaInfo(finish_reason=FinishReason(type="abort")))
                        return

    cut = await collect(Cut(), serving_base(), limit=20)
    assert calls > 3
    assert (cut.ids, cut.log_probs, cut.finish) == (whole.ids, whole.log_probs, whole.finish)


async def test_closing_gives_the_version_back_and_aborts() -> None:
    engine, serving = FakeEngine(), serving_base()
    engine.script(Scripted(ids=(11, 12), hold_after=1))
    async with generation(engine, serving) as running:
        async with aclosing(running.events()) as events:
            await anext(events)
            assert serving.users(0) == 1
    assert serving.users(0) == 0
    assert engine.aborted == ["r"]


async def test_an_engine_that_came_back_empty_faster_than_anyone_looked_costs_no_chat(tmp_path: Path) -> None:
    """The engine answers 4xx for an adapter that it had before: the reply waits until the adapter is loaded again."""
    engine, serving = FakeEngine(), serving_base()
    await engine.load_adapter("policy-v3", tmp_path)
    serving.switch(3, "policy-v3")
    engine.go_down()
    engine.come_up()
    task = asyncio.create_task(collect(engine, serving))
    await until(lambda: serving.is_closed_for(Closed.ENGINE))
    assert not task.done()
    await engine.load_adapter("policy-v3", tmp_path)  # as `EngineReadiness` does while chats are held
    serving.release_hold()
    sampled = await task
    assert sampled.finish in ("stop", "length")
    assert {run.weight_version for run in sampled.versions} == {3}


async def test_an_adapter_that_stays_unknown_is_told_and_not_waited_for(tmp_path: Path) -> None:
    engine, serving = FakeEngine(), serving_base()
    serving.switch(3, "policy-v3")
    task = asyncio.create_task(collect(engine, serving))
    await until(lambda: serving.is_closed_for(Closed.ENGINE))
    serving.release_hold()
    with pytest.raises(EngineRefused):
        await task


@pytest.mark.parametrize("ids", [(11, -1, END), (11, 2**40, END)])
async def test_ids_that_are_none_break_off_and_the_reply_goes_on(ids: tuple[int, ...]) -> None:
    engine, serving = FakeEngine(), serving_base()
    engine.script(Scripted(ids=ids), Scripted(ids=(12, END)))
    sampled = await collect(engine, serving)
    assert sampled.ids == [11, 12, END]


@pytest.mark.parametrize("tables", [None, [], [[(-0.1, 11, None)]], [[(-0.1, 11, None)]] * 3])
async def test_every_token_has_a_place_for_its_alternatives_however_many_tables_came(tables) -> None:
    class Careless(FakeEngine):
        async def stream(self, request, tap=None):
            log_probs = [(-0.1, 11, None), (-0.1, END, None)]
            meta = MetaInfo(output_token_logprobs=log_probs, output_top_logprobs=tables, finish_reason=STOP)
            yield GenerateReply(output_ids=[11, END], meta_info=meta)

    sampled = await collect(Careless(), serving_base(), extras=EngineExtras(top_logprobs=1))
    assert [table is None for table in sampled.top] == [n >= len(tables or []) for n in range(2)]
