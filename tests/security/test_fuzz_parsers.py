"""Arbitrary bytes and texts of an engine or a judge: the parsers raise only our own exceptions, and never hang.

A campaign: FUZZ_FACTOR=100 pytest tests/security/test_fuzz_parsers.py
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from itertools import pairwise

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openclaw_opd.hint_judge import parse_hint
from openclaw_rl.engines.client import _parse
from openclaw_rl.engines.event_stream import _ResponseProtocol, error_message
from openclaw_rl.errors import EngineError
from openclaw_rl.judge.judge import answer_proper, parse_vote

LOOP = asyncio.new_event_loop()
FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))


class Wire:
    """A transport that only counts."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def read(data: bytes, cuts: list[int]) -> tuple[list[bytes], str, bool]:
    """Return the events of `data`, the kind of fault, and whether the body is over, for pieces that end at `cuts`."""

    async def feed() -> _ResponseProtocol:
        answer = _ResponseProtocol()
        answer.connection_made(Wire())  # type: ignore[arg-type]
        edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        for begin, end in pairwise(edges):
            answer.data_received(data[begin:end])
        answer.connection_lost(None)
        return answer

    answer = LOOP.run_until_complete(feed())
    assert answer.fault is None or isinstance(answer.fault, EngineError)
    return list(answer.waiting), type(answer.fault).__name__, answer.is_over


HEADS = st.sampled_from(
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n",
        b"HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 9\r\n\r\n",
        b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n",
    ]
)
LINES = [
    b"data: {}\n\n",
    b"data: [DONE]\n\n",
    b": ping\n",
    b"\n",
    b"\r\n",
    b"data:",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"-5\r\n",
    b"ffffffffffff\r\n",
    b"\xff\xfe",
]
BODIES = st.lists(st.sampled_from(LINES) | st.binary(max_size=40), max_size=12).map(b"".join)


@settings(max_examples=200 * FACTOR)
@given(HEADS, BODIES, st.lists(st.integers(0, 1000), max_size=12))
@example(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"-5\r\n", [])  # was read for ever
@example(b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", b"data: a\n", [])
@example(b"HTTP/1.1 000 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\ndata: a\n", [])
@example(b"HTTP/1.1 200 OK\r\ncontent-length: 1_0\r\n\r\n", b"data: a\n", [])
def test_an_answers_bytes_mean_the_same_however_they_are_cut(head, body, cuts):
    assert read(head + body, cuts) == read(head + body, [])


@settings(max_examples=100 * FACTOR)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=8), st.lists(st.integers(0, 1000), max_size=10))
def test_events_in_chunks_of_any_size_arrive_whole(payloads, cuts):
    events = [orjson.dumps(payload.hex()) for payload in payloads]
    stream = b"".join(b"data: " + event + b"\n\n" for event in events)
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (stream[i : i + 7] for i in range(0, len(stream), 7))
    )
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    assert read(data, cuts) == (events, "NoneType", True)


def test_a_line_and_a_chunk_without_end_are_given_up(monkeypatch):
    monkeypatch.setattr("openclaw_rl.engines.event_stream._MAX_LINE", 1000)
    for head, body in (
        (b"HTTP/1.1 200 OK\r\n\r\n", b"data: " + b"x" * 2000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"ffff\r\n" + b"x" * 2000),
    ):
        assert read(head + body, list(range(0, 2000, 100)))[1:] == ("EngineGone", True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "output_ids",
                    "meta_info",
                    "text",
                    "error",
                    "message",
                    "finish_reason",
                    "type",
                    "output_token_logprobs",
                    "input_token_logprobs",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200 * FACTOR)
@given(JSON | st.binary(max_size=60))
def test_an_event_is_a_reply_or_an_error_of_ours(said):
    data = (
        said
        if isinstance(said, bytes)
        else orjson.dumps(said, option=orjson.OPT_NON_STR_KEYS, default=str)
        if _fits(said)
        else b"{}"
    )
    with contextlib.suppress(EngineError):
        _parse(data)
    assert isinstance(error_message(data), str)


def test_an_engines_error_shows_no_picture() -> None:
    said = b'{"error": {"message": "Error while loading data data:image/png;base64,iVBORw0KGgo=: bad"}}'
    assert error_message(said) == "Error while loading data data:image/png;base64,\u2026: bad"
    assert "iVBOR" not in error_message(said[:-20])


def _fits(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


PARTS = [
    "<think>",
    "</think>",
    "<thinking>",
    "</thinking>",
    "\\boxed{",
    "\\boxed",
    "{",
    "}",
    "1",
    "-1",
    "0",
    "−",
    "\\text{",
    "$",
    " ",
    "\n",
    "<hint>",
    "</hint>",
    "[HINT]",
    "\0",
    "\\",
    "+1.0",
]
ANSWERS = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=20).map("".join)


@settings(max_examples=200 * FACTOR)
@given(ANSWERS, st.booleans())
def test_a_judges_answer_is_a_vote_or_none(answer, is_cut):
    assert parse_vote(answer, is_cut=is_cut) in (1, -1, 0, None)
    assert parse_hint(answer, is_cut=is_cut).has_hint in (True, False, None)
    proper = answer_proper(answer)
    assert proper is None or "<think>" not in proper


@pytest.mark.parametrize("parse", [parse_vote, parse_hint, lambda text: error_message(text.encode())])
@pytest.mark.parametrize(
    "part",
    [
        "<think>",
        "\\boxed{",
        "\\boxed{{}",
        "{",
        "\\boxed{1",
        "[HINT_START]",
        "<hint>",
        "\\boxed ",
        "</think>",
        "$",
        " ",
        "\\boxed{\\boxed{1}",
        '"',
        "“",
        "«",
        "`",
        "```\n",
        "| ",
        "\n",
        "**",
        '"\\boxed{1}"',
        "`\\boxed{1}`",
        "grade: ",
    ],
)
def test_their_time_grows_with_the_length_and_not_with_its_square(parse, part):
    # Another job on the core may slow one of the two times; a time that grows with the square does so in each try.
    assert any(growth(lambda n: parse(part * n)) < 24 for _ in range(4))


def growth(work: Callable[[int], object], *, small: int = 2000, factor: int = 8) -> float:
    """Return the time of `factor` times as much over the time of `small`: 8 when linear, 64 when quadratic."""

    def least(n: int) -> float:
        times = []  # of this thread's own work: the machine has others
        for _ in range(3):
            began = time.thread_time()
            work(n)
            times.append(time.thread_time() - began)
        return max(min(times), 2e-4)  # below that a clock's noise would be the answer

    return least(small * factor) / least(small)
