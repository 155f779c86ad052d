"""LoRA adapters: loaded, served side by side, kept to the end of a request, unloaded."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

IDS = [3 + 11 * index % 200 for index in range(30)]


@pytest.fixture
async def adapters(http, served) -> AsyncIterator[tuple[str, str]]:
    """Two loaded adapters of different effect, unloaded afterwards."""
    if len(served.adapters) < 2:
        pytest.skip("no adapters of this engine's base were given (--adapter, twice)")
    names = tuple(served.adapters)[:2]
    for name in names:
        await http.post("/unload_lora_adapter", json={"lora_name": name})
        loaded = await load(http, name, served)
        assert loaded.status_code == 200, loaded.text
    yield names
    for name in names:
        await http.post("/unload_lora_adapter", json={"lora_name": name})


async def load(http: httpx.AsyncClient, name: str, served: Any) -> httpx.Response:
    return await http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(served.adapters[name])})


async def score(http: httpx.AsyncClient, ids: list[int], adapter: str | None) -> list[float]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    reply = await http.post("/generate", json=body | ({"lora_path": adapter} if adapter else {}))
    assert reply.status_code == 200, reply.text
    return [entry[0] for entry in reply.json()["meta_info"]["input_token_logprobs"][1:]]


def gap(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


class Reply:
    """A streamed reply: its tokens so far, and an event that its first token sets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.started = asyncio.Event()

    async def read(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with http.stream("POST", "/generate", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.tokens.extend(event["output_ids"])
                    self.log_probs.extend(entry[0] for entry in event["meta_info"]["output_token_logprobs"])
                    self.started.set()


async def test_each_request_runs_under_its_own_adapter(http, adapters):
    names = [None, *adapters, None, *adapters]
    together = await asyncio.gather(*(score(http, IDS, name) for name in names))
    assert gap(together[0], together[3]) < 0.05
    assert gap(together[1], together[4]) < 0.05
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert gap(together[first], together[second]) > 0.2


async def test_decoding_under_an_adapter_is_what_scoring_under_it_says(http, adapters):
    async def decode(name: str | None) -> tuple[list[int], list[float]]:
        body = {
            "input_ids": IDS,
            "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
        }
        reply = (await http.post("/generate", json=body | ({"lora_path": name} if name else {}))).json()
        return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]

    for name, (ids, log_probs) in zip(
        [None, *adapters], await asyncio.gather(*map(decode, [None, *adapters])), strict=True
    ):
        assert gap((await score(http, IDS + ids, name))[len(IDS) - 1 :], log_probs) < 0.05


async def test_prefixes_are_not_shared_between_adapters_and_the_base(http, adapters):
    cached = []
    for name in (None, *adapters):
        body = {"input_ids": IDS[::-1], "sampling_params": {"max_new_tokens": 1}}
        await http.post("/generate", json=body)  # the base knows it
        reply = await http.post("/generate", json=body | ({"lora_path": name} if name else {}))
        cached.append(reply.json()["meta_info"]["cached_tokens"])
    assert cached == [len(IDS) - 1, 0, 0]


async def test_the_engine_says_which_adapters_it_holds_and_from_where(http, served, adapters):
    cards = (await http.get("/v1/models")).json()["data"]
    held = {card["id"]: card["root"] for card in cards if card.get("parent") is not None}
    assert {name: held.get(name) for name in adapters} == {name: str(served.adapters[name]) for name in adapters}


async def test_an_unknown_adapter_is_refused(refusal):
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}, "lora_path": "never-loaded"}
    for streaming in (False, True):
        assert (await refusal(body | {"stream": streaming})).status == 400


async def test_a_loaded_name_is_refused(http, served, adapters):
    assert (await load(http, adapters[0], served)).status_code == 400


async def test_a_folder_that_is_no_adapter_is_refused(http, served, tmp_path):
    if not served.adapters:
        pytest.skip("the engine may run without LoRA")
    body = {"lora_name": "nothing-there", "lora_path": str(tmp_path)}
    assert (await http.post("/load_lora_adapter", json=body)).status_code == 400


async def test_an_unload_waits_for_the_adapters_requests(http, served, adapters):
    """… and the request keeps its adapter to the end, while others go on."""
    body = {
        "input_ids": IDS,
        "rid": "holds",
        "sampling_params": {"max_new_tokens": 300, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
        "lora_path": adapters[0],
    }
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        held = False
        while not held:
            reply = Reply()
            reading = tasks.create_task(reply.read(http, body))
            await reply.started.wait()
            assert (await http.post("/pause_generation", json={"mode": "retract"})).status_code == 200
            # A flush is refused while the reply is unfinished; it may have ended before the pause came.
            held = (await http.post("/flush_cache")).status_code == 400
            if not held:
                await http.post("/continue_generation", json={})
                await reading
        unloading = tasks.create_task(http.post("/unload_lora_adapter", json={"lora_name": adapters[0]}))
        for _ in range(20):
            assert (await http.get("/health")).status_code == 200
            assert not unloading.done()
        await http.post("/continue_generation", json={})
    assert unloading.result().status_code == 200
    cards = (await http.get("/v1/models")).json()["data"]
    assert adapters[0] not in [card["id"] for card in cards]
    assert len(reply.tokens) == 300
    assert (await load(http, adapters[0], served)).status_code == 200
    assert gap((await score(http, IDS + reply.tokens, adapters[0]))[len(IDS) - 1 :], reply.log_probs) < 0.05
