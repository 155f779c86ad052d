"""The chat routes with clients that leave, engines that refuse or break off, ledgers that cannot write."""

import asyncio
import json
import math
import socket
import struct

import pytest
from chats import HI, finishes, ids_of, joined
from waiting import until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.settings import EngineSettings, ServerSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.types import DropReason


@pytest.mark.parametrize("before", [0, 3])
async def test_a_client_that_leaves_aborts_the_engine(qwen, proxy_over, before: int) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=before))
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if before == 0 or '"l"' in line:
                    break
        await until(lambda: proxy.fake.aborted)
        await until(lambda: proxy.book.turns or proxy.book.abandoned)
        if before:
            turn = proxy.book.turns[0]
            assert (turn.drop, turn.finish_reason) == (DropReason.CANCELLED, "cancelled")
            assert turn.reply.text() == "Hel"
        else:
            assert proxy.book.abandoned[0][1] is DropReason.CANCELLED
        assert proxy.serving.users(0) == 0


async def test_a_client_that_leaves_a_whole_reply_aborts_the_engine(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=2))
        task = asyncio.create_task(proxy.post(HI))
        await until(lambda: proxy.fake.holding)
        task.cancel()
        await until(lambda: proxy.fake.aborted and proxy.book.turns)
        assert proxy.book.turns[0].drop is DropReason.CANCELLED
        assert proxy.book.turns[0].reply.text() == "He"


async def test_an_engine_refusal_keeps_status_and_message(qwen, proxy_over, monkeypatch) -> None:
    monkeypatch.setattr("openclaw_rl.proxy.routes._OPEN_AFTER_S", 120.0)  # a stream that has begun has its status
    async with proxy_over(qwen) as proxy:
        for stream in (False, True):
            proxy.fake.script(Scripted(ids=(), refuse=(422, "grammars are not supported")))
            reply = await proxy.post({**HI, "stream": stream, "response_format": {"type": "json_object"}})
            assert reply.status_code == 422
            assert "grammars are not supported" in reply.json()["error"]["message"]
        assert proxy.book.turns == []
        assert [reason for _, reason, _ in proxy.book.abandoned] == [DropReason.REFUSED] * 2
        assert proxy.fake.calls[0].sampling_params.json_schema == '{"type":"object"}'


async def test_a_reply_the_engine_breaks_off_goes_on(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "<think>\nhm\n</think>\n\nHello")
        proxy.fake.script(
            Scripted(ids=ids, break_after=5), Scripted(ids=ids[5:], finish="abort"), Scripted(ids=ids[5:])
        )
        events = await proxy.events({**HI, "max_tokens": 500})
        # The second call is aborted at its end: every token was there, so nothing is asked again.
        assert joined(events) == "Hello"
        assert joined(events, "reasoning_content") == "hm\n"
        assert finishes(events) == ["stop"]
        turn, (first, second) = proxy.book.turns[0], proxy.fake.calls
        assert turn.response_ids == ids
        assert second.input_ids == [*first.input_ids, *ids[:5]]
        assert second.sampling_params.max_new_tokens == 495
        assert second.rid != first.rid
        assert turn.drop is None


async def test_a_resumed_reply_keeps_its_version_while_the_engine_has_it(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "Hello")
        proxy.fake.adapters = {"policy-v1": 1, "policy-v2": 2}
        proxy.serving.switch(1, "policy-v1")
        proxy.fake.script(Scripted(ids=ids, hold_after=2, break_after=3), Scripted(ids=ids[3:]))
        task = asyncio.create_task(proxy.post(HI))
        await until(lambda: proxy.fake.holding)
        proxy.serving.switch(2, "policy-v2")
        proxy.fake.release()
        assert (await task).headers["x-weight-version"] == "1"
        assert [call.lora_path for call in proxy.fake.calls] == ["policy-v1", "policy-v1"]
        assert [(run.weight_version, run.length) for run in proxy.book.turns[0].versions] == [(1, len(ids))]


async def test_a_resumed_reply_takes_the_current_version_when_its_own_is_lost(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "Hello")
        proxy.fake.adapters = {"policy-v1": 1}
        proxy.serving.switch(1, "policy-v1")
        proxy.fake.script(Scripted(ids=ids, hold_after=2))
        task = asyncio.create_task(proxy.post(HI))
        await until(lambda: proxy.fake.holding)
        proxy.serving.hold()
        proxy.fake.go_down()
        await until(lambda: not proxy.fake.running)
        proxy.fake.come_up()
        proxy.fake.adapters = {"policy-v2": 2}
        proxy.fake.script(Scripted(ids=(), refuse=(400, "policy-v1 was never loaded")), Scripted(ids=ids[2:]))
        proxy.serving.switch(2, "policy-v2")
        proxy.serving.release_hold()
        assert (await task).json()["choices"][0]["message"]["content"] == "Hello"
        versions = [(run.weight_version, run.length) for run in proxy.book.turns[0].versions]
        assert versions == [(1, 2), (2, len(ids) - 2)]
        assert proxy.serving.users(1) == proxy.serving.users(2) == 0


async def test_a_closed_gate_holds_chats_with_keep_alives(qwen, proxy_over) -> None:
    server = ServerSettings(keepalive_s=0.05)
    async with proxy_over(qwen, server=server, keep_gate=True) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi")))
        comments, text = 0, ""
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                comments += line.startswith(":")
                text += line
                if comments == 2:
                    proxy.serving.switch(0, None)
        assert "[DONE]" in text
        assert proxy.book.turns[0].drop is None


async def test_an_engine_that_stays_away_is_503_with_retry_after(qwen, proxy_over) -> None:
    async with proxy_over(qwen, serving=VersionAdmission(hold_s=0.05), keep_gate=True) as proxy:
        reply = await proxy.post(HI)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        assert reply.json()["error"]["code"] == "engine_unavailable"
        assert proxy.book.turns == []
        assert proxy.book.abandoned[0][1] is DropReason.ENGINE_FAILED


async def test_a_stream_that_cannot_be_finished_ends_without_done(qwen, proxy_over) -> None:
    async with proxy_over(qwen, serving=VersionAdmission(hold_s=0.3)) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=2))
        task = asyncio.create_task(proxy.events(HI))
        await until(lambda: proxy.fake.holding)
        proxy.fake.go_down()
        events = await task
        assert events[-1]["error"]["code"] == "engine_unavailable"
        assert finishes(events) == []
        assert proxy.book.abandoned[0][1] is DropReason.ENGINE_FAILED


async def test_a_ledger_that_cannot_write_never_blocks_a_chat(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.book.is_broken = True
        proxy.fake.script(*[Scripted(ids=ids_of(qwen, "Hi"))] * 2)
        reply = await proxy.post(HI)
        assert reply.json()["choices"][0]["message"]["content"] == "Hi"
        assert reply.headers["x-openclaw-recorded"] == "false"
        assert proxy.book.turns == []
        assert (await proxy.post(HI, **{"X-Turn-Type": "side"})).status_code == 200


async def test_a_ledger_that_breaks_as_a_reply_ends_is_told_where_the_head_is_not_out_yet(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.book.loses_ends = True
        proxy.fake.script(*[Scripted(ids=ids_of(qwen, "Hi"))] * 2)
        reply = await proxy.post(HI)
        assert reply.json()["choices"][0]["message"]["content"] == "Hi"
        assert reply.headers["x-openclaw-recorded"] == "false"
        assert finishes(await proxy.events(HI)) == ["stop"]


@pytest.mark.parametrize(
    ("log_probs", "reason"),
    [
        ((-0.1, -0.2), DropReason.MISALIGNED),
        ((-0.1,) * 9, DropReason.MISALIGNED),
        ((-0.1, None, -0.1), DropReason.NON_FINITE),
        ((-0.1, float("-inf"), -0.1), DropReason.NON_FINITE),
    ],
)
async def test_broken_log_probs_are_served_and_refused_never_padded(qwen, proxy_over, log_probs, reason) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi"), log_probs=log_probs))
        reply = await proxy.post({**HI, "logprobs": True})
        choice = json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"not strict JSON: {name}"))["choices"][
            0
        ]
        assert choice["message"]["content"] == "Hi"
        turn = proxy.book.turns[0]
        assert turn.drop is reason
        assert 0.0 not in turn.rollout_log_probs
        assert [entry["logprob"] is None for entry in choice["logprobs"]["content"]] == [
            not math.isfinite(value) for value in turn.rollout_log_probs
        ]


async def test_one_chat_too_many_is_503_with_retry_after(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(max_streams=1)) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi"), hold_after=1))
        first = asyncio.create_task(proxy.post(HI))
        await until(lambda: proxy.fake.holding)
        second = await proxy.post(HI)
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in second.headers
        proxy.fake.release()
        assert (await first).status_code == 200
        assert (await proxy.post(HI)).status_code == 200


async def test_a_client_that_left_is_written_to_no_more(qwen, proxy_over, caplog: pytest.LogCaptureFixture) -> None:
    """Many tokens wait, and only the first write to the client shows that it left. asyncio warns from the fifth such
    write on."""
    writers: list[asyncio.StreamWriter] = []
    event = b'data: {"output_ids":[%d],"meta_info":{}}\n\n' % ids_of(qwen, "l")[0]

    async def engine_side(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).startswith(b"POST /generate"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event)
            writers.append(writer)
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    engine_server = await asyncio.start_server(engine_side, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{engine_server.sockets[0].getsockname()[1]}"
    engine = HttpEngine(url, settings=EngineSettings(kind="url", url=url))
    async with proxy_over(qwen, engine=engine) as proxy:
        for _ in range(5):
            writers.clear()
            client = socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
            body = json.dumps({**HI, "stream": True}).encode()
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            client.setblocking(False)
            heard = b""
            while b'"content":"l"' not in heard:
                heard += await asyncio.get_running_loop().sock_recv(client, 2**16)
            writers[0].write(100 * event)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # a reset, behind what the engine sent
            ended = len(proxy.book.turns) + 1
            await until(lambda ended=ended: len(proxy.book.turns) == ended)
        assert {turn.drop for turn in proxy.book.turns} == {DropReason.CANCELLED}
    await engine.aclose()
    engine_server.close()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
