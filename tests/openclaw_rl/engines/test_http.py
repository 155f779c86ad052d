"""The engine client against the stub engine, and against servers that misbehave."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from openclaw_rl.engines.dialect import EngineSampling, GenerateReply, GenerateRequest
from openclaw_rl.engines.http import HttpEngine
from openclaw_rl.errors import AlignmentError, EngineGone, EngineRefused
from openclaw_rl.settings import EngineSettings
from openclaw_rl.testing import FakeEngine, Scripted, ToyPolicy, stub_app
from openclaw_rl.types import Ids, LogProbs

SETTINGS = EngineSettings(kind="url", url="http://unused", connect_timeout_s=30, token_timeout_s=120)


@asynccontextmanager
async def served(fake: FakeEngine, settings: EngineSettings = SETTINGS) -> AsyncIterator[HttpEngine]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(stub_app(fake), log_level="error", lifespan="off", access_log=False))
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        engine = HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", settings=settings)
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield engine
        finally:
            await engine.aclose()
            server.should_exit = True


@asynccontextmanager
async def raw_server(answer: bytes, *, then_hang: bool = False) -> AsyncIterator[HttpEngine]:
    """Answers every connection with fixed bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if then_hang:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = SETTINGS.model_copy(update={"token_timeout_s": 0.2} if then_hang else {})
    engine = HttpEngine(f"http://127.0.0.1:{port}", settings=settings)
    try:
        yield engine
    finally:
        await engine.aclose()
        server.close()


def request(ids: list[int], n: int = 32, **fields: object) -> GenerateRequest:
    sampling = EngineSampling(max_new_tokens=n, temperature=0.7)
    return GenerateRequest.model_validate(
        {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": "r1", **fields}
    )


async def collect(engine: HttpEngine, body: GenerateRequest) -> list[GenerateReply]:
    async with aclosing(engine.stream(body)) as events:
        return [event async for event in events]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_stream_carries_every_id_with_its_log_prob() -> None:
    fake = FakeEngine()
    fake.script(Scripted(ids=(5, 6, 7, 2)))
    async with served(fake) as engine:
        events = await collect(engine, request([1, 2, 3]))
    assert [token for event in events for token in event.output_ids] == [5, 6, 7, 2]
    pairs = [(t, lp) for event in events for lp, t, _ in event.meta_info.output_token_logprobs or []]
    assert pairs == [(5, -0.01), (6, -0.02), (7, -0.03), (2, -0.04)]
    assert [event.meta_info.completion_tokens for event in events] == [1, 2, 3, 4]
    finish = events[-1].meta_info.finish_reason
    assert finish is not None
    assert (finish.type, finish.matched) == ("stop", 2)
    assert fake.aborted == []


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


async def test_a_refusal_keeps_status_and_message() -> None:
    fake = FakeEngine()
    fake.script(Scripted(ids=(), refuse=(422, "no such thing")))
    async with served(fake) as engine:
        with pytest.raises(EngineRefused, match="no such thing") as caught:
            await collect(engine, request([1]))
        assert caught.value.status == 422
        with pytest.raises(EngineRefused, match="never been loaded"):
            await engine.generate(request([1], lora_path="policy-v9"))


async def test_a_refusal_inside_a_started_stream_is_a_refusal() -> None:
    answer = b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n'
    async with raw_server(answer) as engine:
        with pytest.raises(EngineRefused, match="too long"):
            await collect(engine, request([1]))


async def test_a_refusal_keeps_its_retry_after() -> None:
    answer = b'HTTP/1.1 429 No\r\ncontent-length: 34\r\nretry-after: 9\r\n\r\n{"error": {"message": "too many"}} '
    async with raw_server(answer) as engine:
        with pytest.raises(EngineRefused, match="too many") as caught:
            await collect(engine, request([1]))
    assert (caught.value.status, caught.value.retry_after) == (429, "9")


async def test_an_answer_in_any_pieces_is_the_same_answer() -> None:
    event = GenerateReply.model_validate({"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop"}}})
    body = b"data: " + event.model_dump_json().encode() + b"\r\n\r\ndata: [DONE]\n\n"
    cut = len(body) // 3
    chunks = b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:])) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    engine = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", settings=SETTINGS)
    assert [event.output_ids for event in await collect(engine, request([1]))] == [[7]]
    await engine.aclose()
    server.close()


async def test_a_slow_reader_stops_the_connection_and_loses_nothing() -> None:
    count = 20_000
    event = b'data: {"output_ids":[5],"meta_info":{}}\n\n'
    last = b'data: {"output_ids":[6],"meta_info":{"finish_reason":{"type":"stop"}}}\n\n'
    async with raw_server(b"HTTP/1.1 200 OK\r\n\r\n" + event * count + last) as engine:
        seen = 0
        async with aclosing(engine.stream(request([1], rid=None))) as events:
            async for reply in events:
                seen += len(reply.output_ids)
                if seen % 5000 == 1:
                    await asyncio.sleep(0.05)
        assert seen == count + 1


async def test_an_answer_that_breaks_off_is_gone() -> None:
    fake = FakeEngine()
    fake.script(Scripted(ids=(5, 6, 7), break_after=2))
    got: list[int] = []
    async with served(fake) as engine:
        with pytest.raises(EngineGone):  # noqa: PT012 (what came before the break is the point)
            async with aclosing(engine.stream(request([1]))) as events:
                async for event in events:
                    got += event.output_ids
    assert got == [5, 6]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n",
        b"HTTP/1.1 200 OK\r\n\r\ndata: {not json\n\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\nno",
        b"junk\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_gone_never_an_empty_reply(answer: bytes) -> None:
    async with raw_server(answer) as engine:
        with pytest.raises(EngineGone):
            await collect(engine, request([1]))


async def test_silence_is_gone() -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\n\r\n", then_hang=True) as engine:
        with pytest.raises(EngineGone, match="silent"):
            await collect(engine, request([1], rid=None))


async def test_nobody_listening_is_gone_and_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    engine = HttpEngine(f"http://127.0.0.1:{port}", settings=SETTINGS)
    with pytest.raises(EngineGone):
        await collect(engine, request([1]))
    with pytest.raises(EngineGone):
        await engine.model_info()
    assert not await engine.is_healthy()
    await engine.aclose()


async def test_scores_align_with_the_response() -> None:
    fake = FakeEngine(policy=ToyPolicy())
    async with served(fake) as engine:
        score = await engine.score((1, 2, 3), (400, 500), lora_path=None, extra_key="v0", top_k=3)
        assert score.log_probs == fake.policy.log_probs([1, 2, 3, 400, 500], 3, 0)
        assert score.top_ids is not None
        assert score.top_log_probs is not None
        assert [row[0] for row in score.top_ids] == [400, 500]
        assert [len(row) for row in score.top_log_probs] == [3, 3]
        call = fake.calls[-1]
        assert (call.logprob_start_len, call.sampling_params.max_new_tokens, call.extra_key) == (2, 0, "v0")


async def score_answered_by(told: list[int], asked: Ids) -> LogProbs:
    """What scoring gives where the engine says that these were the tokens."""
    entries = [[None, 1, None], *([-float(n), token, None] for n, token in enumerate(told, start=1))]
    text = GenerateReply.model_validate({"meta_info": {"input_token_logprobs": entries}}).model_dump_json().encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
    async with raw_server(answer) as engine:
        return (await engine.score((1,), asked, lora_path=None, extra_key=None)).log_probs


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((2,), [9]),
        ((2, 3), [2]),
        ((5, 6, 7, 8), [1, 5, 6, 7]),  # shifted
        ((5, 6, 7, 8), [6, 7, 8, 0]),
        ((7, 7, 7, 5), [0, 7, 7, 7]),
        ((5, 6, 7, 7), [5, 6, 7, 0]),  # not each time
        ((5, 8, 7), [0, 8, 7]),  # not the last of any vocabulary
        ((5, 8, 7), [0, 0, 7]),
    ],
)
async def test_scores_of_other_tokens_are_refused(asked: Ids, told: list[int]) -> None:
    with pytest.raises(AlignmentError):
        await score_answered_by(told, asked)


@pytest.mark.parametrize(("asked", "told"), [((5, 999, 6), [5, 0, 6]), ((999, 0, 999), [0, 0, 0]), ((999,), [0])])
async def test_sglangs_zero_for_the_last_id_of_the_vocabulary_is_that_id(asked: Ids, told: list[int]) -> None:
    assert await score_answered_by(told, asked) == tuple(-float(n) for n in range(1, len(asked) + 1))


async def test_generated_log_probs_are_those_that_scoring_gives() -> None:
    fake = FakeEngine()
    async with served(fake) as engine:
        reply = await engine.generate(request([1, 2, 3], n=20))
        score = await engine.score((1, 2, 3), tuple(reply.output_ids), lora_path=None, extra_key=None)
    assert [lp for lp, _, _ in reply.meta_info.output_token_logprobs or []] == list(score.log_probs)


async def test_adapters_change_log_probs_and_unload_waits_for_their_users(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    fake = FakeEngine()
    async with served(fake) as engine:
        await engine.load_adapter("policy-v1", tmp_path)
        with pytest.raises(EngineRefused, match="already loaded"):
            await engine.load_adapter("policy-v1", tmp_path)
        base = await engine.score((1,), (300, 301), lora_path=None, extra_key=None)
        tuned = await engine.score((1,), (300, 301), lora_path="policy-v1", extra_key=None)
        assert base.log_probs != tuned.log_probs
        fake.script(Scripted(ids=(5, 6, 2), hold_after=1))
        async with aclosing(engine.stream(request([1], lora_path="policy-v1"))) as events:
            await anext(events)
            unload = asyncio.create_task(engine.unload_adapter("policy-v1"))
            await engine.model_info()
            assert not unload.done()
            fake.release()
            rest = [token async for event in events for token in event.output_ids]
        await unload
        assert rest == [6, 2]
        assert not fake.adapters


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
        event = GenerateReply.model_validate({"output_ids": ids, "meta_info": meta})
        body += b"data: " + event.model_dump_json().encode() + b"\n\n"
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


async def test_a_stream_takes_the_connection_that_was_opened_for_it_and_never_a_dead_one() -> None:
    fake, opened = FakeEngine(), 0
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(stub_app(fake), log_level="error", lifespan="off", access_log=False))
    relays: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        relays.append(writer)
        up_reader, up_writer = await asyncio.open_connection(*listener.getsockname())

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, up_writer), copy(up_reader, writer), return_exceptions=True)

    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        front = await asyncio.start_server(relay, "127.0.0.1", 0)
        engine = HttpEngine(f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}", settings=SETTINGS)
        try:
            await until(lambda: server.started)
            assert [event.output_ids for event in await collect(engine, request([1], n=1))] != []
            await until(lambda: opened == 2)  # the stream opened its own, and one for the next
            assert engine._generate.spare == 1
            await collect(engine, request([1], n=1))
            await until(lambda: opened == 3)  # the stream took that one, and left another
            relays[-1].transport.abort()
            await until(lambda: not engine._generate.spare)
            await collect(engine, request([1], n=1))
            await until(lambda: opened == 5)  # its own, and one for the next
            old = engine._generate._spare[0][1]
            old.heard_at -= 60
            assert not engine._generate.spare  # too old to be trusted
        finally:
            await engine.aclose()
            front.close()
            server.should_exit = True


async def test_opening_ahead_to_an_engine_that_is_gone_says_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    engine = HttpEngine(url, settings=SETTINGS)
    await engine._generate.refill()
    with pytest.raises(EngineGone):
        await collect(engine, request([1]))
    await engine.aclose()


@pytest.mark.parametrize(("kind", "stays"), [("sglang", True), ("embedded", False)])
async def test_an_adapter_whose_requests_sglang_may_have_miscounted_is_not_unloaded(
    tmp_path: Path, kind: str, stays: bool
) -> None:
    """An unload there would wait for ever, and hold up every load. A fresh load of the name starts a fresh count."""
    fake = FakeEngine()
    async with served(fake, SETTINGS.model_copy(update={"kind": kind})) as engine:
        for name in ("refused", "whole"):
            await engine.load_adapter(name, tmp_path)
        fake.script(Scripted(ids=(), refuse=(400, "too long")))
        with pytest.raises(EngineRefused):
            await engine.generate(request([1], lora_path="refused"))
        await engine.generate(request([1], lora_path="whole"))
        for name in ("refused", "whole"):
            await engine.unload_adapter(name)
        assert list(fake.adapters) == (["refused"] if stays else [])
        fake.adapters.clear()  # it was restarted
        await engine.load_adapter("refused", tmp_path)
        await engine.unload_adapter("refused")
        assert not fake.adapters


async def test_a_stream_that_never_began_leaves_its_adapter_loaded_one_that_did_does_not(tmp_path: Path) -> None:
    fake = FakeEngine()
    async with served(fake) as engine:
        for name in ("never", "begun"):
            await engine.load_adapter(name, tmp_path)
        fake.script(Scripted(ids=(), refuse=(400, "too long")))
        with pytest.raises(EngineRefused):
            async with aclosing(engine.stream(request([1], lora_path="never"))) as events:
                await anext(events)
        async with aclosing(engine.stream(request([1], lora_path="begun"))) as events:
            await anext(events)
        for name in ("never", "begun"):
            await engine.unload_adapter(name)
        assert list(fake.adapters) == ["never"]
