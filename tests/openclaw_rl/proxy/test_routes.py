"""The chat routes over a fake engine, on a real socket: what goes over the wire, and what is recorded of it."""

import asyncio
import json
import math

import httpx
import pytest
from pydantic import SecretStr

from openclaw_rl.engines.serving import ServingVersions
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ApiKey, SamplingSettings, ServerSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.types import DropReason

HI = {"model": "the-policy", "messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "exec", "description": "run", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "%s"}}\n</tool_call>'


def ids_of(frontend: FrontEnd, text: str, *, end: bool = True) -> tuple[int, ...]:
    """Pieces as a model would write them: one token a character, so that every boundary is crossed."""
    backend = frontend._tokenizer.backend_tokenizer
    ids: list[int] = []
    rest = text
    controls = sorted(frontend._pieces._ids, key=len, reverse=True)
    while rest:
        control = next((c for c in controls if rest.startswith(c)), None)
        piece = control or rest[0]
        ids += backend.encode(piece, add_special_tokens=False).ids
        rest = rest[len(piece) :]
    return (*ids, *(sorted(frontend.end_ids)[:1] if end else ()))


def joined(events: list[dict], field: str = "content") -> str:
    return "".join(e["choices"][0]["delta"].get(field) or "" for e in events if e.get("choices"))


def finishes(events: list[dict]) -> list[str]:
    return [e["choices"][0]["finish_reason"] for e in events if e.get("choices") and e["choices"][0]["finish_reason"]]


async def test_a_stream_is_role_then_tokens_then_finish_then_usage_then_done(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "Hello, world")
        proxy.fake.script(Scripted(ids=ids))
        events = await proxy.events({**HI, "stream_options": {"include_usage": True}})
        assert events[0]["choices"][0]["delta"] == {"content": "", "role": "assistant"}
        assert joined(events) == "Hello, world"
        assert len([e for e in events if e.get("choices") and e["choices"][0]["delta"].get("content")]) == 12
        assert finishes(events) == ["stop"]
        assert events[-3]["choices"][0]["finish_reason"] == "stop"
        assert events[-2]["choices"] == []
        usage, turn, request = events[-2]["usage"], proxy.book.turns[0], proxy.book.requests[0]
        assert usage["prompt_tokens"] == len(request.prompt_ids) == len(proxy.fake.calls[0].input_ids)
        assert usage["completion_tokens"] == len(ids) == len(turn.response_ids)
        assert events[-1] == {}
        assert {e["id"] for e in events if e} == {turn.turn_id}


async def test_a_turn_is_recorded_exactly_as_sampled_end_token_included(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "Hi é漢🙂")
        proxy.fake.script(Scripted(ids=ids))
        reply = await proxy.post(HI, **{"X-Session-Id": "s1"})
        turn, request = proxy.book.turns[0], proxy.book.requests[0]
        assert turn.response_ids == ids
        assert turn.rollout_log_probs == tuple(-0.01 * (i + 1) for i in range(len(ids)))
        assert all(turn.loss_mask)
        assert turn.drop is None
        assert turn.reply.text() == reply.json()["choices"][0]["message"]["content"] == "Hi é漢🙂"
        assert reply.json()["id"] == turn.turn_id
        assert reply.headers["x-session-id"] == request.scope.session_id == "s1"
        assert reply.headers["x-weight-version"] == "0"
        assert list(request.prompt_ids) == proxy.fake.calls[0].input_ids
        assert sorted(proxy.book.log[:2]) == ["begin", "observe"]
        assert proxy.book.log[-1] == "served"


async def test_a_turn_is_committed_before_the_finish_is_sent(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        entered, go = asyncio.Event(), asyncio.Event()
        served = proxy.book.served

        async def slow(request, turn) -> None:
            entered.set()
            await go.wait()
            await served(request, turn)

        proxy.book.served = slow
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi")))
        got: list[str] = []
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            lines = reply.aiter_lines()
            while "i" not in joined([json.loads(line[6:]) for line in got if line.startswith("data")]):
                got.append(await anext(lines))
            await entered.wait()
            assert not any('"stop"' in line for line in got)
            go.set()
            got += [line async for line in lines]
        assert proxy.book.turns
        assert any('"stop"' in line for line in got)


async def test_the_role_comes_before_the_first_token(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi"), hold_after=0))
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            lines = reply.aiter_lines()
            assert '"role":"assistant"' in await anext(lines)
            assert proxy.fake.running == 1
            proxy.fake.release()
            assert "[DONE]" in "".join([line async for line in lines])


async def test_silence_is_filled_with_comments(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(keepalive_s=0.05)) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi"), hold_after=1))
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            comments = 0
            async for line in reply.aiter_lines():
                comments += line.startswith(":")
                if comments == 3:
                    proxy.fake.release()
        assert comments >= 3
        assert proxy.book.turns[0].finish_reason == "stop"


async def test_calls_come_in_deltas_with_index_id_and_name_once(qwen, proxy_over) -> None:
    text = f"Let me look.\n{CALL % 'ls'}\n{CALL % 'pwd'}"
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, text)
        proxy.fake.script(Scripted(ids=ids), Scripted(ids=ids))
        events = await proxy.events({**HI, "tools": TOOLS})
        calls = [c for e in events if e.get("choices") for c in e["choices"][0]["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert [json.loads(call["function"]["arguments"])["command"] for call in calls] == ["ls", "pwd"]
        assert len({call["id"] for call in calls}) == 2
        assert joined(events) == "Let me look."
        assert finishes(events) == ["tool_calls"]
        whole = (await proxy.post({**HI, "tools": TOOLS})).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] == "Let me look."
        assert [c["function"] for c in whole["message"]["tool_calls"]] == [c["function"] for c in calls]
        assert proxy.book.turns[0].response_ids == proxy.book.turns[1].response_ids == ids


async def test_without_tools_markup_is_text(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, CALL % "ls")))
        events = await proxy.events(HI)
        assert joined(events) == CALL % "ls"
        assert finishes(events) == ["stop"]


async def test_a_call_cut_by_the_limit_is_no_call(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, CALL % "ls", end=False)[:-8]
        proxy.fake.script(Scripted(ids=ids, finish="length"))
        reply = (await proxy.post({**HI, "tools": TOOLS, "max_tokens": len(ids)})).json()["choices"][0]
        assert reply["finish_reason"] == proxy.book.turns[0].finish_reason == "length"
        assert "tool_calls" not in reply["message"]
        assert proxy.book.turns[0].response_ids == ids


async def test_three_channels_and_one_complete_record(qwen, proxy_over) -> None:
    text = f"<think>\nI should look.\n</think>\n\n{CALL % 'ls'}"
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, text)
        proxy.fake.script(Scripted(ids=ids))
        events = await proxy.events({**HI, "tools": TOOLS, "logprobs": True})
        assert joined(events, "reasoning_content").strip() == "I should look."
        assert joined(events) == ""
        assert finishes(events) == ["tool_calls"]
        given = [
            t
            for e in events
            if e.get("choices") and e["choices"][0]["logprobs"]
            for t in e["choices"][0]["logprobs"]["content"]
        ]
        assert [entry["logprob"] for entry in given] == list(proxy.book.turns[0].rollout_log_probs)
        assert proxy.book.turns[0].response_ids == ids


async def test_thinking_off_puts_the_answer_into_content(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(
            *[Scripted(ids=ids_of(qwen, "Paris"))] * 2, Scripted(ids=ids_of(qwen, "hm\n</think>\n\nParis"))
        )
        for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}):
            message = (await proxy.post({**HI, **extra})).json()["choices"][0]["message"]
            assert message["content"] == "Paris"
            assert "reasoning_content" not in message
        assert proxy.fake.calls[0].input_ids == proxy.fake.calls[1].input_ids
        message = (await proxy.post({**HI, "chat_template_kwargs": {"open_thinking": True}})).json()["choices"][0][
            "message"
        ]
        assert (message["reasoning_content"], message["content"]) == ("hm\n", "Paris")


async def test_tokens_cut_by_a_stop_string_are_recorded_outside_the_mask(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "one\nEND two", end=False)
        proxy.fake.script(Scripted(ids=ids))
        events = await proxy.events({**HI, "stop": ["\nEND", "unused"]})
        assert joined(events) == "one"
        assert finishes(events) == ["stop"]
        turn = proxy.book.turns[0]
        assert turn.response_ids == ids[:7]
        assert turn.loss_mask == (True,) * 3 + (False,) * 4
        assert turn.drop is None
        await proxy.until(lambda: proxy.fake.aborted)


@pytest.mark.parametrize("before", [0, 3])
async def test_a_client_that_leaves_aborts_the_engine(qwen, proxy_over, before: int) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=before))
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if before == 0 or '"l"' in line:
                    break
        await proxy.until(lambda: proxy.fake.aborted)
        await proxy.until(lambda: proxy.book.turns or proxy.book.abandoned)
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
        with pytest.raises(httpx.TimeoutException):
            await proxy.client.post("/v1/chat/completions", json=HI, timeout=0.2)
        await proxy.until(lambda: proxy.fake.aborted and proxy.book.turns)
        assert proxy.book.turns[0].drop is DropReason.CANCELLED


async def test_an_engine_refusal_keeps_status_and_message(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        for stream in (False, True):
            proxy.fake.script(Scripted(ids=(), refuse=(422, "grammars are not supported")))
            reply = await proxy.post({**HI, "stream": stream, "response_format": {"type": "json_object"}})
            assert reply.status_code == 422
            assert "grammars are not supported" in reply.json()["error"]["message"]
        assert proxy.book.turns == []
        assert [reason for _, reason, _ in proxy.book.abandoned] == [DropReason.ENGINE_FAILED] * 2
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
        await proxy.until(lambda: proxy.fake.running)
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
        await proxy.until(lambda: proxy.fake.running)
        proxy.serving.close_gate()
        proxy.fake.go_down()
        await proxy.until(lambda: not proxy.fake.running)
        proxy.fake.come_up()
        proxy.fake.adapters = {"policy-v2": 2}
        proxy.fake.script(Scripted(ids=(), refuse=(400, "policy-v1 was never loaded")), Scripted(ids=ids[2:]))
        proxy.serving.switch(2, "policy-v2")
        proxy.serving.open_gate()
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
    async with proxy_over(qwen, serving=ServingVersions(hold_s=0.05), keep_gate=True) as proxy:
        reply = await proxy.post(HI)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        assert reply.json()["error"]["code"] == "engine_unavailable"
        assert proxy.book.turns == []
        assert proxy.book.abandoned[0][1] is DropReason.ENGINE_FAILED


async def test_a_stream_that_cannot_be_finished_ends_without_done(qwen, proxy_over) -> None:
    async with proxy_over(qwen, serving=ServingVersions(hold_s=0.3)) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=2))
        task = asyncio.create_task(proxy.events(HI))
        await proxy.until(lambda: proxy.fake.running)
        await asyncio.sleep(0.15)
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


async def test_side_requests_are_served_and_counted_never_recorded(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        ids = ids_of(qwen, "A title")
        proxy.fake.script(Scripted(ids=ids))
        events = await proxy.events(HI, **{"X-Turn-Type": "side", "X-Session-Id": "s"})
        assert joined(events) == "A title"
        side = proxy.book.sides[0]
        assert (side.completion_tokens, side.status, side.session_id) == (len(ids), 200, "s")
        assert proxy.book.requests == proxy.book.turns == []


async def test_session_done_ends_the_session_after_the_reply(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        await proxy.post({**HI, "session_done": True, "session_id": "s"})
        await proxy.post(HI, **{"X-Session-Done": "true", "X-Session-Id": "t"})
        assert [scope.session_id for scope in proxy.book.ended] == ["s", "t"]


async def test_a_session_id_with_line_breaks_adds_no_header(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        reply = await proxy.post({**HI, "session_id": "a\r\nX-Evil: 1\u6f22"})
        assert reply.status_code == 200
        assert reply.headers["x-session-id"] == "a  X-Evil: 1?"
        assert "x-evil" not in reply.headers


@pytest.mark.parametrize(
    ("fields", "headers", "reason"),
    [
        ({}, {}, None),
        ({"temperature": 0}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"top_k": 1}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"presence_penalty": 0.5}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"logit_bias": {"5": 1.0}}, {}, DropReason.NOT_TRAINABLE_SAMPLING),
        ({"top_p": 0.9}, {}, DropReason.TRUNCATED_SAMPLING),
        ({"seed": 7}, {}, None),
        ({}, {"X-OpenClaw-Train": "off"}, DropReason.OPTED_OUT),
    ],
)
async def test_what_can_never_be_trained_is_served_and_says_why(qwen, proxy_over, fields, headers, reason) -> None:
    async with proxy_over(qwen, sampling=SamplingSettings(truncated_sampling="drop")) as proxy:
        assert (await proxy.post({**HI, **fields}, **headers)).status_code == 200
        assert proxy.book.turns[0].drop is reason


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


async def test_sampling_is_always_explicit_the_clients_or_ours(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        await proxy.post(HI)
        await proxy.post({**HI, "temperature": 0.2, "top_p": 0.5, "max_completion_tokens": 7, "seed": 3})
        ours, theirs = (call.sampling_params for call in proxy.fake.calls)
        assert (ours.temperature, ours.top_p, ours.top_k, ours.max_new_tokens) == (0.7, 1.0, -1, 2048)
        assert (theirs.temperature, theirs.top_p, theirs.sampling_seed, theirs.max_new_tokens) == (0.2, 0.5, 3, 7)
        assert proxy.book.requests[1].sampling.temperature == 0.2
        assert proxy.fake.calls[0].extra_key == "v0"


async def test_harmless_fields_change_nothing(qwen, proxy_over) -> None:
    extra = {"store": False, "metadata": {"a": "b"}, "max_completion_tokens": 7, "tools": [], "tool_choice": "auto"}
    async with proxy_over(qwen) as proxy:
        await proxy.post(HI)
        assert (await proxy.post({**HI, **extra, "user": "u", "model": "my-alias"})).status_code == 200
        plain, full = proxy.fake.calls
        assert plain.input_ids == full.input_ids
        assert full.sampling_params.max_new_tokens == 7


async def test_an_output_limit_as_large_as_the_context_is_clamped(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        assert (await proxy.post({**HI, "max_tokens": 1_000_000})).status_code == 200
        call = proxy.fake.calls[0]
        assert len(call.input_ids) + call.sampling_params.max_new_tokens < qwen.context_length


async def test_models_are_listed_without_a_key_and_chats_need_one(qwen, proxy_over) -> None:
    keys = (ApiKey(key=SecretStr("right"), user="uma"), ApiKey(key=SecretStr("quiet"), user="q", train=False))
    async with proxy_over(qwen, server=ServerSettings(api_keys=keys)) as proxy:
        for path in ("/v1/models", "/models"):
            card = (await proxy.client.get(path)).json()["data"][0]
            assert (card["id"], card["context_length"]) == ("the-policy", qwen.context_length)
        for authorization in ("", "Bearer wrong", "Bearer", "Basic right", "right"):
            reply = await proxy.post(HI, Authorization=authorization)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert "right" not in reply.text
        assert proxy.fake.calls == []
        assert (await proxy.post(HI, Authorization="Bearer right")).status_code == 200
        assert (await proxy.post(HI, Authorization="Bearer quiet")).status_code == 200
        assert [request.scope.user for request in proxy.book.requests] == ["uma", "q"]
        assert [turn.drop for turn in proxy.book.turns] == [None, DropReason.OPTED_OUT]
        reply = await proxy.client.post("/chat/completions", json=HI, headers={"Authorization": "Bearer right"})
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{not json", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'\xff\xfe{"messages": 1}', 400, "invalid_json", None),
        ({}, 400, None, "messages"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": "hello"}, 400, None, "messages"),
        ({"messages": [{"content": "x"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, 400, None, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, None, None),
        ({**HI, "temperature": "hot"}, 400, None, "temperature"),
        ({**HI, "temperature": -1}, 400, None, "temperature"),
        ({**HI, "top_p": 2}, 400, None, "top_p"),
        ({**HI, "max_tokens": 0}, 400, None, "max_tokens"),
        ({**HI, "max_tokens": "many"}, 400, None, "max_tokens"),
        ({**HI, "n": 2}, 400, None, "n"),
        ({**HI, "model": 5}, 400, None, "model"),
        ({**HI, "stream": "perhaps"}, 400, None, "stream"),
        ({**HI, "tools": [{"type": "function"}]}, 400, None, "tools[0]"),
        ({**HI, "tools": "all"}, 400, None, "tools"),
        ({**HI, "stop": [1]}, 400, None, None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            400,
            "unsupported_content",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "unsupported_content", None),
        ({"messages": [{"role": "user", "content": "hello " * 5000}]}, 400, "context_length_exceeded", "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}]},
            400,
            None,
            "messages",
        ),
    ],
)
async def test_bad_input_is_a_4xx_in_openais_form_and_leaves_no_trace(
    qwen, proxy_over, body, status, code, param
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with proxy_over(qwen) as proxy:
        reply = await proxy.client.post("/v1/chat/completions", content=data)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert code is None or error["code"] == code
        assert param is None or error["param"] == param
        if code == "context_length_exceeded":
            assert str(qwen.context_length) in error["message"]
        assert proxy.fake.calls == []
        assert proxy.book.log == []


async def test_a_large_body_is_refused_without_being_read(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(max_body_mb=1)) as proxy:
        reply = await proxy.client.post("/v1/chat/completions", content=b"x" * 20_000_000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")

        async def endless():
            for _ in range(40):
                yield b"y" * 100_000

        reply = await proxy.client.post("/v1/chat/completions", content=endless())
        assert reply.status_code == 413
        assert (await proxy.post(HI)).status_code == 200


async def test_one_chat_too_many_is_503_with_retry_after(qwen, proxy_over) -> None:
    async with proxy_over(qwen, server=ServerSettings(max_streams=1)) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hi"), hold_after=1))
        first = asyncio.create_task(proxy.post(HI))
        await proxy.until(lambda: proxy.fake.running)
        second = await proxy.post(HI)
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in second.headers
        proxy.fake.release()
        assert (await first).status_code == 200
        assert (await proxy.post(HI)).status_code == 200


async def test_the_bundled_template_serves_tools_without_them(smollm, proxy_over) -> None:
    async with proxy_over(smollm) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(smollm, CALL % "ls")), Scripted(ids=ids_of(smollm, "ok")))
        reply = await proxy.post({**HI, "tools": TOOLS})
        assert reply.json()["choices"][0]["message"]["content"] == CALL % "ls"
        await proxy.post(HI)
        with_tools, without = proxy.fake.calls
        assert with_tools.input_ids == without.input_ids
