"""Usage is the tokens of what the client got; the record has all that were sampled."""

import json
from typing import Any

import pytest
from chats import CALL, HI, TOOLS, ids_of, joined
from waiting import until

from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.testing import Scripted

WITH_USAGE = {"stream_options": {"include_usage": True}}


def tokens(frontend: FrontEnd, text: str) -> int:
    return len(ids_of(frontend, text, end=False))


async def both(proxy: Any, ids: tuple[int, ...], body: dict[str, Any], **script: Any) -> list[dict[str, Any]]:
    """Return the usage of the same reply, whole and as a stream."""
    proxy.fake.script(Scripted(ids=ids, **script))
    whole = (await proxy.post(body)).json()["usage"]
    proxy.fake.script(Scripted(ids=ids, **script))
    (streamed,) = [e["usage"] for e in await proxy.events({**body, **WITH_USAGE}) if e.get("usage")]
    return [whole, streamed]


@pytest.mark.parametrize("per_event", [1, 7, 500])
@pytest.mark.parametrize(
    ("text", "more", "shown"),
    [
        ("Hello END and much more", {"stop": "END"}, "Hello "),
        ("Hello END and much more", {"stop": ["zz", "END", "more"]}, "Hello "),
        ("END at once", {"stop": "END"}, ""),
        (CALL % "a" + "\n" + CALL % "b", {"tools": TOOLS, "parallel_tool_calls": False}, CALL % "a"),
        (CALL % "a" + "\nSo.\n" + CALL % "b", {"tools": TOOLS, "parallel_tool_calls": False}, CALL % "a" + "\nSo."),
        (CALL % "a" + CALL % "b" + "END", {"tools": TOOLS, "parallel_tool_calls": False, "stop": "END"}, CALL % "a"),
        ("<think>\nhm END hm", {"stop": "END"}, "<think>\nhm "),
    ],
)
async def test_what_is_cut_off_is_not_counted(qwen: FrontEnd, proxy_over, text, more, shown, per_event) -> None:
    ids = ids_of(qwen, text)
    async with proxy_over(qwen) as proxy:
        for usage in await both(proxy, ids, {**HI, **more}, per_event=per_event):
            assert usage["completion_tokens"] == tokens(qwen, shown)
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for turn in proxy.book.turns:
            assert ids[: len(turn.response_ids)] == turn.response_ids  # as far as the engine came
            assert len(turn.response_ids) >= tokens(qwen, shown)
            assert sum(turn.loss_mask) <= tokens(qwen, shown)


@pytest.mark.parametrize(
    ("text", "more", "end"),
    [
        ("Hello, world", {}, True),
        ("Hello, world", {"stop": "absent"}, True),
        ("Hello, wo", {"max_tokens": 9}, False),  # cut by its limit: all that came was sent
        (CALL % "a" + "\n" + CALL % "b", {"tools": TOOLS}, True),
        (CALL % "a", {"tools": TOOLS, "parallel_tool_calls": False}, True),
        ("é漢🙂", {}, True),
    ],
)
async def test_what_the_client_got_is_counted_with_the_end_token(qwen: FrontEnd, proxy_over, text, more, end) -> None:
    ids = ids_of(qwen, text, end=end)
    script = {} if end else {"finish": "length"}
    async with proxy_over(qwen) as proxy:
        for usage in await both(proxy, ids, {**HI, **more}, **script):
            assert usage["completion_tokens"] == len(ids)


async def test_a_token_that_a_stop_string_cuts_counts_where_its_beginning_is_shown(qwen: FrontEnd, proxy_over) -> None:
    (wide,) = qwen._tokenizer.backend_tokenizer.encode("hello", add_special_tokens=False).ids
    async with proxy_over(qwen) as proxy:
        for stop, shown, count in (("llo", "he", 1), ("hello", "", 0)):
            proxy.fake.script(Scripted(ids=(wide, wide)))
            reply = (await proxy.post({**HI, "stop": stop})).json()
            assert reply["choices"][0]["message"]["content"] == shown
            assert reply["usage"]["completion_tokens"] == count


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>\nhm hm\n</think>\n\nIt is blue.", "<think>\nhm hm\n"),
        ("<think>\nhm hm", "<think>\nhm hm"),
        ("It is blue.", ""),
        ("<think>\nhm\n</think>\n" + CALL % "a", "<think>\nhm\n"),
    ],
)
async def test_the_tokens_of_a_thought_are_told(qwen: FrontEnd, proxy_over, text, thought) -> None:
    async with proxy_over(qwen) as proxy:
        for usage in await both(proxy, ids_of(qwen, text), {**HI, "tools": TOOLS}):
            told = usage["completion_tokens_details"]["reasoning_tokens"]
            assert abs(told - tokens(qwen, thought)) <= 1  # the line end before the mark is shown by neither
            assert told <= usage["completion_tokens"]


@pytest.mark.parametrize("text", ["Hello END and more", "END", "abcEND"])
async def test_log_probs_are_those_of_the_tokens_that_the_client_got(qwen: FrontEnd, proxy_over, text) -> None:
    shown = text.partition("END")[0]
    body = {**HI, "stop": "END", "logprobs": True}
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
        whole = (await proxy.post(body)).json()["choices"][0]["logprobs"]["content"]
        proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
        events = [e for e in await proxy.events(body) if e.get("choices")]
        streamed = [
            entry for e in events for entry in (e["choices"][0].get("logprobs") or {"content": []})["content"] or []
        ]
        for entries in (whole, streamed):
            assert "".join(entry["token"] for entry in entries) == shown
        assert joined(events) == shown


async def test_log_probs_of_a_call_that_is_not_wanted_are_not_sent(qwen: FrontEnd, proxy_over) -> None:
    text, body = CALL % "a" + "\n" + CALL % "b", {**HI, "tools": TOOLS, "parallel_tool_calls": False, "logprobs": True}
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, text)))
        reply = (await proxy.post(body)).json()
        assert "".join(entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]) == CALL % "a"


async def test_a_reply_that_an_engine_began_anew_is_counted_once(qwen: FrontEnd, proxy_over) -> None:
    ids = ids_of(qwen, "Hello, world")
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids, break_after=5), Scripted(ids=ids[5:]))
        reply = (await proxy.post(HI)).json()
        assert len(proxy.fake.calls) == 2
        assert reply["usage"]["completion_tokens"] == len(ids)
        assert reply["usage"]["prompt_tokens"] == len(proxy.fake.calls[0].input_ids)


async def test_no_more_of_the_prompt_is_cached_than_it_has(qwen: FrontEnd, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        for _ in range(2):
            usage = (await proxy.post(HI)).json()["usage"]
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


async def test_a_stream_that_the_client_left_is_recorded_whole_and_tells_no_usage(qwen: FrontEnd, proxy_over) -> None:
    ids, got = ids_of(qwen, "Hello, world"), []
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids, hold_after=4))
        async with proxy.client.stream(
            "POST", "/v1/chat/completions", json={**HI, **WITH_USAGE, "stream": True}
        ) as reply:
            async for line in reply.aiter_lines():
                got.append(line)
                if '"l"' in line:
                    break
        await until(lambda: proxy.book.turns)
        assert proxy.book.turns[0].response_ids == ids[:4]
        assert not any('"usage"' in line for line in got)


async def test_a_background_request_is_counted_with_all_that_was_sampled(qwen: FrontEnd, proxy_over) -> None:
    ids = ids_of(qwen, "Hello END and more")
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids))
        reply = await proxy.post({**HI, "stop": "END"}, **{"X-Turn-Type": "side"})
        usage, (side,) = reply.json()["usage"], proxy.book.sides
        assert usage["completion_tokens"] == tokens(qwen, "Hello ")
        assert side.completion_tokens >= tokens(qwen, "Hello END")
        assert json.loads(reply.text)["usage"]["prompt_tokens"] == side.prompt_tokens
