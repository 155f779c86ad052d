"""Replies that are cut, by their reader or by the engine: nothing goes on unseen, and no token counts twice."""

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from engine_client import collect, raw_server, request, served
from waiting import until

from openclaw_rl.engines.dialect import GenerateReply
from openclaw_rl.testing import FakeEngine, Scripted


async def test_closing_the_iterator_aborts_on_the_engine() -> None:
    fake = FakeEngine()
    fake.script(Scripted(ids=(5, 6, 7), hold_after=1))
    async with served(fake) as engine:
        async with aclosing(engine.stream(request([1]))) as events:
            assert (await anext(events)).output_ids == [5]
        await until(lambda: fake.aborted)
        assert fake.running == 0


async def test_cancelling_before_the_first_token_aborts_on_the_engine() -> None:
    fake = FakeEngine()
    fake.script(Scripted(ids=(5, 6, 7), hold_after=0))
    async with served(fake) as engine:
        task = asyncio.create_task(collect(engine, request([1])))
        await until(lambda: fake.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: fake.aborted)


async def test_abort_all_ends_a_reply_with_what_it_has() -> None:
    fake = FakeEngine()
    fake.script(Scripted(ids=(5, 6, 7), hold_after=2))
    async with served(fake) as engine:
        got: list[int] = []
        async with aclosing(engine.stream(request([1]))) as events:
            async for event in events:
                got += event.output_ids
                if len(got) == 2 and event.meta_info.finish_reason is None:
                    await engine.pause("retract")
                    await engine.abort_all()
        assert got == [5, 6]
        assert event.meta_info.finish_reason is not None
        assert event.meta_info.finish_reason.type == "abort"
        await engine.flush_cache()
        await engine.resume()


def _events(*events: tuple[list[int], list[int], int, str | None]) -> bytes:
    """(new ids, ids with log-probs, tokens so far, why it was aborted) as SGLang writes them."""
    body = b"HTTP/1.1 200 OK\r\n\r\n"
    for ids, scored, count, message in events:
        finish = None if message is None else {"type": "abort", "message": message}
        meta = {"completion_tokens": count, "finish_reason": finish}
        meta["output_token_logprobs"] = [[-0.1 * token, token, None] for token in scored]
        event = msgspec.convert({"output_ids": ids, "meta_info": meta}, GenerateReply)
        body += b"data: " + msgspec.json.encode(event) + b"\n\n"
    return body + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "last",
    [
        ([6], [5, 6], 2, "Abort in waiting queue"),
        ([7, 8, 8], [7, 8, 5, 6, 7, 8], 4, "Abort in waiting queue"),  # joined to two events that were waiting
        ([], [5, 6], 2, "Abort in waiting queue"),
        ([7], [7], 3, None),  # aborted as it ran: nothing is repeated
    ],
)
async def test_what_sglang_repeats_when_it_aborts_a_queued_request_is_taken_out(
    last: tuple[list[int], list[int], int, str | None],
) -> None:
    """A reply cut after its first token looked whole: one token twice, each with that one's log-prob."""
    answer = _events(([5], [5], 1, None), ([6], [6], 2, None), (*last[:3], last[3] or ""))
    async with raw_server(answer) as engine:
        events = await collect(engine, request([1]))
    ids = [token for event in events for token in event.output_ids]
    scored = [token for event in events for _, token, _ in event.meta_info.output_token_logprobs or []]
    assert ids == scored == [5, 6, 7, 8][: last[2]]


async def test_the_first_token_of_a_reply_is_not_repeated_by_its_abort() -> None:
    async with raw_server(_events(([5], [5], 1, None), ([5], [5], 1, "Abort in waiting queue"))) as engine:
        assert [event.output_ids for event in await collect(engine, request([1]))] == [[5], []]


async def test_an_adapter_whose_request_was_aborted_in_the_queue_is_not_unloaded() -> None:
    async with raw_server(_events(([5], [5], 1, None), ([5], [5], 1, "Abort in waiting queue"))) as engine:
        await collect(engine, request([1], lora_path="policy-v1"))
        await engine.unload_adapter("policy-v1")  # or the server's answer, which is no answer to this, would fail it
