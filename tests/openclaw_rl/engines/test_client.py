"""The engine client against the stub engine: streams, refusals, an engine that is not there."""

import math
import socket

import httpx
import pytest
from engine_client import SETTINGS, collect, raw_server, request, served

from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.event_stream import MOST_WORDS
from openclaw_rl.errors import EngineGone, EngineRefused
from openclaw_rl.testing import FakeEngine, Scripted


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


def answering(body: bytes, status: int = 200) -> HttpEngine:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    return HttpEngine("http://engine", settings=SETTINGS, client=httpx.AsyncClient(transport=transport))


@pytest.mark.parametrize(
    "body",
    [
        b'{"output_ids": [-1]}',
        b'{"output_ids": [4294967296]}',
        b'{"output_ids": [' + b"9" * 400 + b"]}",
        b'{"output_ids": {}}',
        b'{"output_ids": [1], "text": "\\ud800"}',
        b'{"output_ids": [1], "text": "\xff"}',
        b"[" * 100_000,
        b"5",
        b"",
    ],
)
async def test_what_is_no_reply_is_an_engine_that_failed(body: bytes) -> None:
    with pytest.raises(EngineGone):
        await answering(body).generate(request([1]))


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "' + b"x" * 2**20 + b'"}}', b"x" * 2**20, b'["' + b"x" * 2**20]
)
async def test_an_error_without_end_is_cut(body: bytes) -> None:
    with pytest.raises(EngineRefused) as refused:
        await answering(body, 400).generate(request([1]))
    assert len(refused.value.message) <= MOST_WORDS


async def test_a_log_prob_that_cannot_be_stored_is_no_number() -> None:
    entries = b"[[null, 1, null], [-1e308, 2, null], [-0.5, 3, null]]"
    body = b'{"output_ids": [], "meta_info": {"input_token_logprobs": ' + entries + b"}}"
    score = await answering(body).score((1,), (2, 3), lora_path=None, extra_key=None)
    assert math.isnan(score.log_probs[0])
    assert score.log_probs[1] == -0.5
