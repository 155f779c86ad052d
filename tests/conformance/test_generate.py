"""`POST /generate`: ids in, ids and aligned log-probs out."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.engines import score_answers
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.settings import EngineSettings

KERNEL_NOISE = 0.05
"""Decode against rescoring on a bf16 GPU is 0.01 on average; the embedded engine's own bound is in its exactness tests.
"""


def prompt(served: Any, length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, served.vocab), k=length)


def body(ids: list[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True} | more.pop("params", {})
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True} | more


async def generate(http: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post("/generate", json=request)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def stream(http: httpx.AsyncClient, request: dict[str, Any]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with http.stream("POST", "/generate", json=request | {"stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in reply.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return events


def common(served: Any, *replies: list[int]) -> int:
    """How many first tokens equal greedy requests agree in: all of them, but for ties that a kernel may break anew."""
    n = next(
        (i for i, tokens in enumerate(zip(*replies, strict=False)) if len(set(tokens)) > 1), min(map(len, replies))
    )
    if served.is_deterministic:
        assert n == max(map(len, replies))
    assert n > 0
    return n


async def test_a_bias_keeps_a_token_away(http, served):
    ids = prompt(served, 20, seed=9)
    first = (await generate(http, body(ids, 1, params={"temperature": 0.0})))["output_ids"]
    biased = body(ids, 1, params={"temperature": 0.0, "logit_bias": {str(first[0]): -100.0}})
    assert (await generate(http, biased))["output_ids"] != first


async def test_a_reply_holds_ids_and_as_many_log_probs(http, served):
    ids = prompt(served, 20)
    reply = await generate(http, body(ids, 12))
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 12
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (20, 12)
    assert meta["finish_reason"]["type"] == "length"


async def test_stream_events_hold_only_what_is_new(http, served):
    request = body(prompt(served, 20), 10, params={"temperature": 0.0})
    events = await stream(http, request)
    whole = await generate(http, request)
    joined = [token for event in events for token in event["output_ids"]]
    log_probs = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    common(served, joined, whole["output_ids"])
    assert [entry[1] for entry in log_probs] == joined
    assert counts == [sum(len(e["output_ids"]) for e in events[: i + 1]) for i in range(len(events))]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_sampled_end_token_is_part_of_the_reply(http, served):
    request = body(prompt(served, 20), 16, params={"temperature": 0.0})
    full = (await generate(http, request))["output_ids"]
    stop = full[5 if served.is_deterministic else 0]  # any token can be made the end
    params = {"temperature": 0.0, "stop_token_ids": [stop], "ignore_eos": False}
    cut = await generate(http, body(prompt(served, 20), 16, params=params))
    assert cut["output_ids"] == full[: full.index(stop) + 1]
    assert len(cut["meta_info"]["output_token_logprobs"]) == len(cut["output_ids"])
    assert cut["meta_info"]["finish_reason"]["type"] == "stop"
    assert cut["meta_info"]["finish_reason"]["matched"] == stop


@pytest.mark.parametrize("start", [0, 1, 7, 18])
async def test_prompt_log_probs_are_those_of_decoding(http, served, start):
    """Greedy decoding gives π(a_t | …) at temperature 1; scoring the joined ids must give the same, entry by entry."""
    ids = prompt(served, 19)
    reply = await generate(http, body(ids, 15, params={"temperature": 0.0}))
    joined = ids + reply["output_ids"]
    scored = await generate(http, body(joined, 0, logprob_start_len=start))
    entries = scored["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == joined[start:]
    assert entries[0][0] is None
    assert all(entry[0] is not None for entry in entries[1:])
    decoded = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    for scored_entry, log_prob in zip(entries[len(ids) - start :], decoded, strict=True):
        if scored_entry[0] is not None:  # start = P - 1 … the response's first token is never the null one
            assert scored_entry[0] == pytest.approx(log_prob, abs=KERNEL_NOISE)


async def test_scoring_a_response_takes_the_prompt_less_one(http, served):
    ids, response = prompt(served, 19), prompt(served, 6, seed=1)
    scored = await generate(http, body(ids + response, 0, logprob_start_len=len(ids) - 1))
    entries = scored["meta_info"]["input_token_logprobs"]
    assert len(entries) == len(response) + 1
    assert entries[0][0] is None
    assert [entry[1] for entry in entries[1:]] == response
    assert scored["output_ids"] == []
    assert scored["meta_info"]["completion_tokens"] == 0


async def test_the_last_id_of_the_vocabulary_is_scored_as_any_other(http, served):
    """SGLang writes another id beside its log-prob; our client knows."""
    folder = Path((await http.get("/model_info")).json()["model_path"])
    last = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    ids, response = prompt(served, 19), [5, last, 7, last]
    engine = HttpEngine(served.url, settings=EngineSettings())
    try:
        score = await engine.score(tuple(ids), tuple(response), lora_path=None, extra_key=None, top_k=2)
    finally:
        await engine.aclose()
    scored = await generate(http, body(ids + response, 0, logprob_start_len=len(ids) - 1))
    entries = scored["meta_info"]["input_token_logprobs"]
    assert list(score.log_probs) == pytest.approx([entry[0] for entry in entries[1:]], abs=KERNEL_NOISE)


async def test_scoring_agrees_from_any_start(http, served):
    """The null entry hides a log-prob, it does not shift the others."""
    ids = prompt(served, 40, seed=3)
    entries = {}
    for start in (0, 10, 30):
        scored = await generate(http, body(ids, 0, logprob_start_len=start, extra_key=f"start-{start}"))
        entries[start] = scored["meta_info"]["input_token_logprobs"]
    for start in (10, 30):
        expected = [entry[0] for entry in entries[0][start + 1 :]]
        assert [entry[0] for entry in entries[start][1:]] == pytest.approx(expected, abs=KERNEL_NOISE)


async def test_top_log_probs_align_and_hold_the_greedy_token(http, served):
    ids = prompt(served, 12)
    reply = await generate(http, body(ids, 6, params={"temperature": 0.0}))
    joined = ids + reply["output_ids"]
    scored = await generate(http, body(joined, 0, logprob_start_len=len(ids) - 1, top_logprobs_num=4))
    meta = scored["meta_info"]
    tops = meta["input_top_logprobs"]
    assert len(tops) == len(meta["input_token_logprobs"])
    assert tops[0] is None or tops[0] == []
    for top, entry in zip(tops[1:], meta["input_token_logprobs"][1:], strict=True):
        assert len(top) == 4
        assert top[0][0] == max(value for value, _, _ in top)
        assert top[0][0] == pytest.approx(entry[0], abs=KERNEL_NOISE)


async def test_log_probs_of_given_ids_align_with_those_of_the_prompt(http, served):
    """The first row is null; each other row holds the same ids in the order of the request, at temperature 1."""
    ids, response = prompt(served, 19), prompt(served, 6, seed=1)
    asked = [*sorted({*response}, reverse=True), 3]
    more = {"top_logprobs_num": 4, "token_ids_logprob": asked}
    meta = (await generate(http, body(ids + response, 0, logprob_start_len=len(ids) - 1, **more)))["meta_info"]
    rows = meta["input_token_ids_logprobs"]
    assert len(rows) == len(meta["input_token_logprobs"]) == len(response) + 1
    assert not rows[0]
    for row, entry, top in zip(rows[1:], meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True):
        assert [token for _, token, _ in row] == asked
        told = {token: value for value, token, _ in row}
        assert told[entry[1]] == pytest.approx(entry[0], abs=KERNEL_NOISE)
        assert max(told.values()) <= max(value for value, _, _ in top) + KERNEL_NOISE
        assert all(told[token] == pytest.approx(value, abs=KERNEL_NOISE) for value, token, _ in top if token in told)


async def test_our_client_asks_for_other_ids_at_each_position(http, served, monkeypatch):
    """By blocks of positions; the values are those of one list of ids for the whole response."""
    monkeypatch.setattr(score_answers, "BLOCK_VALUES", 30)
    ids, response = prompt(served, 19), prompt(served, 9, seed=1)
    wanted = [tuple(prompt(served, 4, seed=50 + t)) for t in range(len(response))]
    engine = HttpEngine(served.url, settings=EngineSettings())
    try:
        score = await engine.score_ids(tuple(ids), tuple(response), wanted, lora_path=None, extra_key="blocks")
        whole = await engine.score(tuple(ids), tuple(response), lora_path=None, extra_key="whole")
    finally:
        await engine.aclose()
    assert len(list(score_answers.id_blocks(wanted))) > 2
    assert score.log_probs == pytest.approx(whole.log_probs, abs=KERNEL_NOISE)
    every = sorted({token for row in wanted for token in row})
    request = body(ids + response, 0, logprob_start_len=len(ids) - 1, token_ids_logprob=every, extra_key="every")
    rows = (await generate(http, request))["meta_info"]["input_token_ids_logprobs"][1:]
    assert score.top_ids == tuple(wanted)
    for given, values, row in zip(wanted, score.top_log_probs, rows, strict=True):
        told = {token: value for value, token, _ in row}
        assert values == pytest.approx([told[token] for token in given], abs=KERNEL_NOISE)


async def test_scores_with_tables_with_ids_and_with_neither_run_beside_each_other(http, served):
    """Practice scores all replies of an update at once: plain, over the top-k, and over given ids. Chats run beside.

    (A batch of calls with ids and calls without ends SGLang, unless it was started with `launch.TAKES_IDS`.)
    """
    cases = [(tuple(prompt(served, 30 + n, seed=n)), tuple(prompt(served, 90, seed=60 + n))) for n in range(8)]
    engine = HttpEngine(served.url, settings=EngineSettings())
    with_key = {"lora_path": None, "extra_key": "beside"}
    try:
        alone = [await engine.score(ids, reply, top_k=6, lora_path=None, extra_key="alone") for ids, reply in cases]
        chats = [generate(http, body(list(ids), 8, extra_key=f"chat {n}")) for n, (ids, _) in enumerate(cases)]
        tables = [engine.score(ids, reply, top_k=6, **with_key) for ids, reply in cases]
        given = [
            engine.score_ids(ids, reply, score.top_ids, **with_key)
            for (ids, reply), score in zip(cases, alone, strict=True)
        ]
        plain = [engine.score(ids, reply, **with_key) for ids, reply in cases]
        mixed = [call for four in zip(given, chats, plain, tables, strict=True) for call in four]
        found = await asyncio.gather(*mixed)
    finally:
        await engine.aclose()
    for number, score in enumerate(alone):
        of_ids, _, unmixed, table = found[4 * number : 4 * number + 4]
        for other in (unmixed, of_ids, table):
            assert other.log_probs == pytest.approx(score.log_probs, abs=KERNEL_NOISE)
        for own, told in zip(score.top_log_probs, of_ids.top_log_probs, strict=True):
            assert told == pytest.approx(own, abs=KERNEL_NOISE)


async def test_log_probs_are_scaled_by_the_temperature_and_never_renormalised(http, served):
    """A tiny top_p samples the likeliest token at every temperature; log-probs are of softmax(logits / T) before the
    cut. (top_k = 1 would not do: SGLang takes a batch of nothing else for greedy, and forgets the temperature.)
    """
    ids = prompt(served, 10)
    greedy = await generate(http, body(ids, 4, params={"temperature": 0.0}))
    hot = await generate(http, body(ids, 4, params={"temperature": 2.0, "top_p": 1e-6}))
    one = await generate(http, body(ids, 4, params={"temperature": 1.0, "top_p": 1e-6}))
    n = common(served, greedy["output_ids"], hot["output_ids"], one["output_ids"])
    values = {
        name: [entry[0] for entry in reply["meta_info"]["output_token_logprobs"][:n]]
        for name, reply in {"greedy": greedy, "hot": hot, "one": one}.items()
    }
    assert values["one"] == pytest.approx(values["greedy"], abs=KERNEL_NOISE)
    assert all(hot < one - KERNEL_NOISE for hot, one in zip(values["hot"], values["one"], strict=True))
    assert all(value < -KERNEL_NOISE for value in values["one"])  # renormalised, they would all be 0


async def test_a_seed_repeats_a_reply(http, served):
    if not served.is_deterministic:
        pytest.skip("this SGLang runs without --enable-deterministic-inference: it ignores seeds")
    params = {"temperature": 1.0, "sampling_seed": 7}
    first = await generate(http, body(prompt(served, 10), 12, params=params))
    again = await generate(http, body(prompt(served, 10), 12, params=params))
    other = await generate(http, body(prompt(served, 10), 12, params=params | {"sampling_seed": 8}))
    assert first["output_ids"] == again["output_ids"]
    assert first["output_ids"] != other["output_ids"]


async def test_the_next_turn_finds_its_prefix(http, served):
    ids = prompt(served, 60, seed=11)
    first = await generate(http, body(ids, 8))
    assert first["meta_info"]["cached_tokens"] == 0
    turn = ids + first["output_ids"] + prompt(served, 5, seed=12)
    second = await generate(http, body(turn, 4))
    assert second["meta_info"]["cached_tokens"] >= 60


async def test_an_extra_key_isolates(http, served):
    ids = prompt(served, 60, seed=13)
    cached = []
    for key in ("v1", "v1", "v2", None):
        more = {"extra_key": key} if key else {}
        cached.append((await generate(http, body(ids, 1, **more)))["meta_info"]["cached_tokens"])
    assert cached == [0, 59, 0, 0]


async def test_many_at_once_are_as_alone(http, served):
    prompts = [prompt(served, 10 + 7 * index, seed=20 + index) for index in range(6)]
    requests = [body(ids, 10, params={"temperature": 0.0}, extra_key="together") for ids in prompts]
    together = await asyncio.gather(*(generate(http, request) for request in requests))
    for request, reply in zip(requests, together, strict=True):
        joined = request["input_ids"] + reply["output_ids"]
        scored = await generate(
            http, body(joined, 0, logprob_start_len=len(request["input_ids"]) - 1, extra_key="alone")
        )
        alone = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
        batched = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        assert batched == pytest.approx(alone, abs=KERNEL_NOISE)


async def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(refusal, served):
    for streaming in (False, True):
        ids = prompt(served, served.context_length + 5)
        answer = await refusal(body(ids, 1) | {"stream": streaming})
        assert answer.status == 400
        assert str(len(ids)) in answer.message
        assert str(served.context_length) in answer.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": []},
        {"input_ids": [5, 10_000_000]},
        {"input_ids": [5, -1]},
        {"input_ids": "text"},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"max_new_tokens": -1}},
        {"sampling_params": {"top_p": 0}},
        {"sampling_params": {"json_schema": "{}"}},
        {"sampling_params": {"logit_bias": {"10000000": 1.0}}},
        {"sampling_params": {"logit_bias": {"hello": 1.0}}},
        {"logprob_start_len": 50},
        {"token_ids_logprob": [5, 10_000_000]},
        {"token_ids_logprob": [-1]},
    ],
)
async def test_nonsense_is_refused_in_the_error_form(http, served, wrong):
    if not served.is_ours:
        pytest.skip("what each engine calls nonsense differs; the proxy checks before it asks")
    reply = await http.post("/generate", json=body(prompt(served, 5), 1) | wrong)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


async def test_model_info_and_health(http, served):
    assert (await http.get("/health")).status_code == 200
    info = (await http.get("/model_info")).json()
    assert info["is_generation"] is True
    assert info["model_path"]
    if served.is_ours:
        assert len(info["base_hash"]) == 64
        assert info["context_length"] == served.context_length
