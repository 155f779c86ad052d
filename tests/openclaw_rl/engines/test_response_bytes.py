"""Responses as bytes: any split of them gives the same events, and every malformed or truncated one is `EngineGone`."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines import event_stream
from openclaw_rl.engines.event_stream import _ResponseProtocol
from openclaw_rl.errors import EngineGone, EngineRefused

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
LINE = st.binary(max_size=60).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"").strip())
CHUNKED, SIZED, UNSIZED = "chunked", "sized", "unsized"


class Transport(asyncio.Transport):
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def read(pieces: list[bytes], *, end: Exception | None = None) -> tuple[list[bytes], EngineRefused | EngineGone | None]:
    """The events and the fault of a response that arrives in these pieces before the connection ends."""

    async def feed() -> tuple[list[bytes], EngineRefused | EngineGone | None]:
        answer = _ResponseProtocol()
        answer.connection_made(Transport())
        for piece in pieces:
            answer.data_received(piece)
        answer.connection_lost(end)
        assert answer.is_over
        return [*answer.waiting], answer.fault

    return asyncio.run(feed())


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@st.composite
def responses(draw: st.DrawFn, framings: tuple[str, ...] = (CHUNKED, SIZED, UNSIZED)) -> tuple[list[bytes], bytes]:
    """Events, and a response that carries them beside comments and other fields."""
    events = draw(st.lists(LINE, max_size=8))
    end = draw(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n: comment\n\n", b"\nid: 7\n\n"]))
    body = b"".join(draw(st.sampled_from([b"data: ", b"data:"])) + event + end for event in events)
    framing = draw(st.sampled_from(framings))
    if framing == UNSIZED:
        return events, HEAD + b"\r\n" + body
    if framing == SIZED:
        return events, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    extension, trailer = draw(st.sampled_from([b"", b";x=y"])), draw(st.sampled_from([b"", b"x-t: 1\r\n"]))
    chunks = [b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in split(body, draw(st.lists(st.integers(0))))]
    return events, HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


@given(responses(), st.lists(st.integers(0), max_size=20))
def test_any_split_gives_the_same_events(response: tuple[list[bytes], bytes], cuts: list[int]) -> None:
    events, data = response
    assert read(split(data, cuts)) == (events, None)
    assert read([data[at : at + 1] for at in range(len(data))]) == (events, None)


@given(responses(), st.binary(max_size=40))
def test_bytes_behind_the_end_change_nothing(response: tuple[list[bytes], bytes], rest: bytes) -> None:
    events, data = response
    if b"\r\n\r\n" in data and (b"content-length" in data or b"Chunked" in data):
        assert read([data + rest]) == (events, None)
        assert read([data, rest]) == (events, None)


@given(responses((CHUNKED, SIZED)), st.integers(0), st.lists(st.integers(0), max_size=5))
def test_a_truncated_response_is_gone_after_its_whole_events(
    response: tuple[list[bytes], bytes], length: int, cuts: list[int]
) -> None:
    events, data = response
    got, fault = read(split(data[: length % len(data)], cuts))
    assert isinstance(fault, EngineGone)
    assert got == events[: len(got)]


@given(responses(), st.integers(0), st.lists(st.integers(0), max_size=5))
def test_a_connection_that_breaks_is_gone_unless_the_response_was_complete(
    response: tuple[list[bytes], bytes], length: int, cuts: list[int]
) -> None:
    _, data = response
    _, fault = read(split(data[: length % len(data)], cuts), end=ConnectionResetError())
    assert isinstance(fault, EngineGone)


@given(responses(), st.integers(0), st.binary(min_size=1, max_size=4), st.lists(st.integers(0), max_size=5))
def test_a_damaged_response_ends_and_its_split_changes_nothing(
    response: tuple[list[bytes], bytes], place: int, damage: bytes, cuts: list[int]
) -> None:
    _, data = response
    at = place % len(data)
    damaged = data[:at] + damage + data[at + len(damage) :]
    got, fault = read([damaged])
    again, same = read(split(damaged, cuts))
    assert (got, type(fault)) == (again, type(same))


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_junk_is_gone(pieces: list[bytes]) -> None:
    _, fault = read([b"junk", *pieces])
    assert isinstance(fault, EngineGone)


@pytest.mark.parametrize(
    "body",
    [
        b"-3\r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"1_0\r\nabcdefghijklmnop\r\n0\r\n\r\n",
        b"\r\nabc\r\n0\r\n\r\n",
        b"zz\r\n",
        b"ffffffffffffffff1\r\nabc",
        b"3\r\nabcd\r\n0\r\n\r\n",
    ],
)
def test_a_chunk_of_no_size_is_gone(body: bytes) -> None:
    assert isinstance(read([HEAD + b"transfer-encoding: chunked\r\n\r\n" + body])[1], EngineGone)


@pytest.mark.parametrize("status", [b"0", b"abc", b"99", b""])
def test_a_status_that_is_none_is_gone(status: bytes) -> None:
    assert isinstance(read([b"HTTP/1.1 " + status + b" OK\r\n\r\n"])[1], EngineGone)


@pytest.mark.parametrize("status", [500, 503, 204, 302])
def test_a_status_that_is_neither_200_nor_a_refusal_is_gone(status: int) -> None:
    _, fault = read([b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status])
    assert isinstance(fault, EngineGone)
    assert f"answered {status}" in str(fault)


@given(st.lists(st.integers(0), max_size=10), st.booleans())
def test_a_refusal_in_any_split_keeps_message_and_retry_after(cuts: list[int], is_chunked: bool) -> None:
    body = b'{"error": {"message": "too many"}}'
    framing, sent = b"Content-Length: %d" % len(body), body
    if is_chunked:
        framing, sent = b"transfer-encoding: chunked", b"%X\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    _, fault = read(split(b"HTTP/1.1 429 Slow\r\nRetry-After: 3\r\n" + framing + b"\r\n\r\n" + sent, cuts))
    assert isinstance(fault, EngineRefused)
    assert (fault.message, fault.status, fault.retry_after) == ("too many", 429, "3")


@pytest.mark.parametrize(
    ("start", "more", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 1000, "a head without end"),
        (HEAD + b"\r\ndata: ", b"a" * 1000, "a line without end"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n3", b";a=" + b"b" * 1000, "a chunk without end"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 1000, "a chunk without end"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"3e8\r\n" + b"a" * 1000 + b"\r\n", "a line without end"),
    ],
)
def test_no_part_of_a_response_fills_the_memory(
    start: bytes, more: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_MAX_HEAD", 10_000)
    monkeypatch.setattr(event_stream, "_MAX_LINE", 20_000)
    _, fault = read([start, *[more] * 40])
    assert isinstance(fault, EngineGone)
    assert says in str(fault)


def test_an_errors_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_MAX_ERROR", 1000)
    _, fault = read([b"HTTP/1.1 400 X\r\n\r\n", *[b"a" * 999] * 50])
    assert isinstance(fault, EngineRefused)
    assert len(fault.message) == 2 * 999  # the piece that passes the limit is the last
    monkeypatch.undo()
    _, fault = read([b"HTTP/1.1 400 X\r\n\r\n", *[b"a" * 999] * 50])
    assert isinstance(fault, EngineRefused)
    assert len(fault.message) == event_stream.MOST_WORDS
