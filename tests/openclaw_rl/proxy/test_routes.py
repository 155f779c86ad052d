"""The chat routes over a fake engine, on a real socket: bytes on the wire, and recorded turns."""

import asyncio
import json

from chats import CALL, HI, TOOLS, finishes, ids_of, joined
from pydantic import SecretStr
from waiting import until

from openclaw_rl.settings import ApiKey, ServerSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.types import DropReason


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

        async def slow(request, turn) -> bool:
            entered.set()
            await go.wait()
            return await served(request, turn)

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


async def test_replies_that_end_in_their_thought_are_a_problem_while_they_are_a_fifth(qwen, proxy_over) -> None:
    """A client's limit that is too small for a thinking model: each reply is empty for its user."""
    thought, whole = ids_of(qwen, "<think>\nhm", end=False), ids_of(qwen, "Paris")
    async with proxy_over(qwen) as proxy:
        health = proxy.deps.health

        async def chats(n: int, *, is_cut: bool) -> None:
            proxy.fake.script(*[Scripted(ids=thought, finish="length") if is_cut else Scripted(ids=whole)] * n)
            for _ in range(n):
                await proxy.post({**HI, "max_tokens": len(thought)} if is_cut else HI)

        await chats(2, is_cut=True)
        await chats(8, is_cut=False)
        assert health.problems() == []  # a fifth
        await chats(1, is_cut=True)
        (said,) = health.problems()
        assert said.startswith("replies' content: failed once: 3 of the last 11 replies ended at their limit of tokens")
        await chats(4, is_cut=False)
        assert health.problems() == []


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
        await until(lambda: proxy.fake.aborted)


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
        for value in ("1", "yes", "On", "0", "no", "off", ""):
            await proxy.post(HI, **{"X-Session-Done": value, "X-Session-Id": f"of-{value}"})
        ended = ["s", "t", "of-1", "of-yes", "of-On"]
        assert [scope.session_id for scope in proxy.book.ended] == ended


async def test_models_are_listed_without_a_key_and_chats_need_one(qwen, proxy_over) -> None:
    keys = (ApiKey(key=SecretStr("right"), user="uma"), ApiKey(key=SecretStr("quiet"), user="q", train=False))
    async with proxy_over(qwen, server=ServerSettings(api_keys=keys)) as proxy:
        for path in ("/v1/models", "/models"):
            card = (await proxy.client.get(path)).json()["data"][0]
            assert (card["id"], card["context_length"]) == ("the-policy", qwen.context_length)
            facts = (card["max_output_tokens"], card["supports_tools"], card["supports_reasoning"])
            assert facts == (2048, qwen.renders_tools, qwen.thinks)
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


async def test_the_bundled_template_serves_tools_without_them(smollm, proxy_over) -> None:
    async with proxy_over(smollm) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(smollm, CALL % "ls")), Scripted(ids=ids_of(smollm, "ok")))
        reply = await proxy.post({**HI, "tools": TOOLS})
        assert reply.json()["choices"][0]["message"]["content"] == CALL % "ls"
        await proxy.post(HI)
        with_tools, without = proxy.fake.calls
        assert with_tools.input_ids == without.input_ids
