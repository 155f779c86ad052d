"""Abort, pause, continue, flush: what an engine does to requests that run."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

LONG = 250


def request(rid: str, length: int = 10, **more: Any) -> dict[str, Any]:
    ids = [3 + (7 * index + len(rid)) % 200 for index in range(length)]
    params = {"max_new_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": ids, "rid": rid, "stream": True, "return_logprob": True, "sampling_params": params} | more


class Stream:
    """A running request: its events so far, and the end."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.grew = asyncio.Event()

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event["output_ids"]]

    @property
    def log_probs(self) -> list[Any]:
        return [entry for event in self.events for entry in event["meta_info"]["output_token_logprobs"]]

    @property
    def finish(self) -> dict[str, Any] | None:
        return self.events[-1]["meta_info"]["finish_reason"] if self.events else None

    async def read(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with http.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.grew.set()

    async def has_tokens(self, more_than: int = 0) -> None:
        while len(self.tokens) <= more_than:
            self.grew.clear()
            await self.grew.wait()


async def cut(play: Callable[[], Awaitable[list[Stream]]]) -> list[Stream]:
    """Play until the call met all requests in their middle; on a busy machine they may have ended before it came."""
    async with asyncio.timeout(120):
        while True:
            streams = await play()
            finishes = [stream.finish["type"] for stream in streams]
            assert set(finishes) <= {"abort", "length"}
            if "length" not in finishes:
                return streams
            assert all(len(s.tokens) == LONG for s in streams if s.finish["type"] == "length")


async def test_an_abort_answers_at_once_with_what_there_is(http):
    async def play() -> list[Stream]:
        stream = Stream()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.read(http, request("to-abort")))
            await stream.has_tokens(3)
            assert (await http.post("/abort_request", json={"rid": "to-abort"})).status_code == 200
        return [stream]

    (stream,) = await cut(play)
    assert 0 < len(stream.tokens) < LONG
    assert [entry[1] for entry in stream.log_probs] == stream.tokens


async def test_an_abort_of_one_leaves_the_others(http):
    async def play() -> list[Stream]:
        kept, one = Stream(), Stream()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kept.read(http, request("kept")))
            tasks.create_task(one.read(http, request("cut")))
            await one.has_tokens()
            await kept.has_tokens()
            await http.post("/abort_request", json={"rid": "cut"})
        assert kept.finish["type"] == "length"
        assert len(kept.tokens) == LONG
        return [one]

    await cut(play)


async def test_abort_all_ends_everything(http):
    async def play() -> list[Stream]:
        streams = [Stream() for _ in range(3)]
        async with asyncio.TaskGroup() as tasks:
            for index, stream in enumerate(streams):
                tasks.create_task(stream.read(http, request(f"all-{index}")))
            for stream in streams:
                await stream.has_tokens()
            await http.post("/abort_request", json={"abort_all": True})
        return streams

    await cut(play)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_where_it_stood(http, mode):
    stream = Stream()
    body = request(f"paused-{mode}")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.read(http, body))
        await stream.has_tokens(2)
        assert (await http.post("/pause_generation", json={"mode": mode})).status_code == 200
        assert (await http.post("/continue_generation", json={})).status_code == 200
    assert stream.finish["type"] == "length"
    assert len(stream.tokens) == len(stream.log_probs) == LONG
    # Nothing was doubled, lost or sampled from another prefix: a plain scoring of the whole agrees.
    joined = body["input_ids"] + stream.tokens
    scoring = {
        "input_ids": joined,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(body["input_ids"]) - 1,
        "extra_key": "scoring",
    }
    scored = (await http.post("/generate", json=scoring)).json()["meta_info"]["input_token_logprobs"][1:]
    differences = [abs(a[0] - b[0]) for a, b in zip(scored, stream.log_probs, strict=True)]
    assert sum(differences) / len(differences) < 0.05


async def test_pause_abort_ends_what_runs(http):
    async def play() -> list[Stream]:
        stream = Stream()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.read(http, request("pause-abort")))
            await stream.has_tokens()
            assert (await http.post("/pause_generation", json={"mode": "abort"})).status_code == 200
        await http.post("/continue_generation", json={})
        return [stream]

    await cut(play)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_request_that_arrives_while_paused_waits(http, mode):
    await http.post("/pause_generation", json={"mode": mode})
    body = request(f"waits-{mode}") | {"stream": False}
    body["sampling_params"] = body["sampling_params"] | {"max_new_tokens": 3}
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(http.post("/generate", json=body))
        # Whether a held request counts as queued is the engine's own business (SGLang holds it before its queue), so
        # nothing but time tells that it waits.
        for _ in range(20):
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/flush_cache")).status_code in (200, 400)
        assert not waiting.done()
        await http.post("/continue_generation", json={})
    assert len(waiting.result().json()["output_ids"]) == 3


async def test_flush_is_refused_while_anything_runs(http):
    refused: list[bool] = []

    async def play() -> list[Stream]:
        stream = Stream()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.read(http, request("busy")))
            await stream.has_tokens()
            refused[:] = [(await http.get("/flush_cache")).status_code == 400]
            await http.post("/pause_generation", json={"mode": "retract"})
            refused.append((await http.post("/flush_cache")).status_code == 400)  # a retracted request is queued
            await http.post("/abort_request", json={"abort_all": True})
            assert await _eventually_flushed(http)
            await http.post("/continue_generation", json={})
        return [stream]

    await cut(play)
    assert refused == [True, True]


async def test_flush_forgets_prefixes(http):
    body = {"input_ids": list(range(3, 60)), "sampling_params": {"max_new_tokens": 1}, "extra_key": "flush"}
    cached = []
    for flush in (False, False, True):
        if flush:
            assert await _eventually_flushed(http)
        cached.append((await http.post("/generate", json=body)).json()["meta_info"]["cached_tokens"])
    assert cached == [0, 56, 0]


async def test_a_client_that_goes_away_ends_its_request(http, served):
    async with asyncio.timeout(120):
        async with httpx.AsyncClient(base_url=served.url) as client:
            async with client.stream("POST", "/generate", json=request("leaves")) as reply:
                async for line in reply.aiter_lines():
                    if line:
                        break
        assert await _eventually_flushed(http)


async def test_a_client_that_does_not_stream_and_goes_away_ends_its_request(http, served):
    async with asyncio.timeout(120):
        body = request("leaves-too") | {"stream": False}
        async with httpx.AsyncClient(base_url=served.url) as client:
            asking = asyncio.ensure_future(client.post("/generate", json=body))
            while (await http.post("/flush_cache")).status_code == 200:
                if asking.done():  # it ran to its end between two looks
                    asking = asyncio.ensure_future(client.post("/generate", json=body))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await _eventually_flushed(http)


async def _eventually_flushed(http: httpx.AsyncClient) -> bool:
    """Flushing succeeds once nothing runs; the callers' timeout says how long that may take."""
    while (await http.post("/flush_cache")).status_code != 200:
        pass
    return True
