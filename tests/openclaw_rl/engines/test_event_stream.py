"""An answer's events over one connection: in any pieces, to a slow reader, broken off, and connections opened ahead."""

import asyncio
import socket
from contextlib import aclosing

import msgspec
import pytest
import uvicorn
from engine_client import SETTINGS, collect, raw_server, request, served
from waiting import until

from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import FinishReason, GenerateReply, MetaInfo
from openclaw_rl.errors import EngineGone
from openclaw_rl.testing import FakeEngine, Scripted, stub_app


async def test_an_answer_in_any_pieces_is_the_same_answer() -> None:
    event = GenerateReply(output_ids=[7], meta_info=MetaInfo(finish_reason=FinishReason(type="stop")))
    body = b"data: " + msgspec.json.encode(event) + b"\r\n\r\ndata: [DONE]\n\n"
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


async def test_connections_opened_ahead_at_once_keep_their_limit() -> None:
    held: list[asyncio.StreamWriter] = []

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    engine = HttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", settings=SETTINGS)
    try:
        await asyncio.gather(*(engine._generate.refill() for _ in range(50)))
        assert engine._generate.spare == 32
    finally:
        await engine.aclose()
        server.close()
        for writer in held:
            writer.close()


async def test_opening_ahead_to_an_engine_that_is_gone_says_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    engine = HttpEngine(url, settings=SETTINGS)
    await engine._generate.refill()
    with pytest.raises(EngineGone):
        await collect(engine, request([1]))
    await engine.aclose()


@pytest.mark.parametrize("chosen", [lambda n: True, lambda n: n % 3 != 0, lambda n: False])
async def test_a_tap_and_the_iterator_get_every_event_once_in_order(chosen) -> None:
    fake, tapped, got = FakeEngine(), [], []
    fake.script(Scripted(ids=tuple(range(100, 140))))

    def tap(reply: GenerateReply) -> bool:
        if not chosen(reply.output_ids[0]):
            return False
        tapped.extend(reply.output_ids)
        got.extend(reply.output_ids)
        return True

    async with served(fake) as engine, aclosing(engine.stream(request([1], n=40), tap)) as events:
        async for event in events:
            got.extend(event.output_ids)
    assert got == list(range(100, 140))
    assert 100 not in tapped  # the first event is never offered
    assert 139 not in tapped  # nor the last


async def test_events_of_one_read_are_offered_a_few_at_a_time_and_keep_their_order() -> None:
    event = 'data: {"output_ids":[%d],"meta_info":{}}\n\n'
    last = 'data: {"output_ids":[999],"meta_info":{"finish_reason":{"type":"stop"}}}\n\n'
    body = "".join(event % n for n in range(500)) + last
    got: list[int] = []

    def tap(reply: GenerateReply) -> bool:
        got.extend(reply.output_ids)
        return True

    async with raw_server(b"HTTP/1.1 200 OK\r\n\r\n" + body.encode()) as engine:
        async with aclosing(engine.stream(request([1], rid=None), tap)) as events:
            async for reply in events:
                got.extend(reply.output_ids)
    assert got == [*range(500), 999]


async def test_a_fault_of_the_tap_reaches_the_reader() -> None:
    fake, got, calls = FakeEngine(), [], 0
    fake.script(Scripted(ids=(5, 6, 7, 8), hold_after=1))

    def broken(reply: GenerateReply) -> bool:
        nonlocal calls
        calls += 1
        raise KeyError("a bug")

    async with served(fake) as engine:

        async def read() -> None:
            async with aclosing(engine.stream(request([1], n=4), broken)) as events:
                async for event in events:
                    got.extend(event.output_ids)

        reading = asyncio.create_task(read())
        await until(lambda: got == [5])
        await until(lambda: engine._generate.spare == 1)  # the reader waits for the next event
        fake.release()
        with pytest.raises(KeyError):
            await reading
    assert (got, calls) == ([5], 1)
