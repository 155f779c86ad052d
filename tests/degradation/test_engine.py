"""Engine down, restarting, slow, or answering garbage: chats are held or mended, and refused only when the engine is
gone.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from harness.trainer import ToyTrainer

from openclaw_rl.testing.fake_engine import Scripted

MENDED = ("5xx", "half", "bad_json", "silent", "slow", "negative_id", "enormous_id")
UNTRAINED = {
    "nan": "non_finite",
    "infinite": "non_finite",
    "too_few_log_probs": "misaligned",
    "too_many_log_probs": "misaligned",
    "log_probs_of_others": "misaligned",
    "beyond_the_vocabulary": "misaligned",
}


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """Return the error of a reply; in a stream that had begun, with keep-alives, it is the last event."""
    if reply.status_code == 200:
        last = [line for line in reply.text.splitlines() if line.startswith("data: ")][-1]
        return json.loads(last[6:])["error"]  # type: ignore[no-any-return]
    return reply.json()["error"]  # type: ignore[no-any-return]


async def test_what_an_engine_does_once_costs_no_chat_and_no_line(place: Any) -> None:
    async with place(engine__token_timeout_s=4.0) as here:
        for how in MENDED:
            here.engine.breaks(how, times=1)
            reply = await here.chat(session=how)
            assert reply.status_code == 200, (how, reply.text)
            assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length")
            assert here.engine.asked == 1, how
            assert await here.state(reply.json()["id"]) == ("served", None), how
        for how, reason in UNTRAINED.items():
            here.engine.breaks(how, times=1)
            reply = await here.chat(session=how)
            assert reply.status_code == 200, (how, reply.text)
            assert await here.state(reply.json()["id"]) == ("dropped", reason), how
            assert (await here.chat()).status_code == 200
        assert await here.health() == "ok"
        assert not {"part_fails", "engine_down", "not an event"} & set(here.lines), here.lines


@pytest.mark.parametrize("how", ["5xx", "negative_id"])
async def test_an_engine_that_is_broken_for_good_is_waited_for_and_then_a_clear_503(place: Any, how: str) -> None:
    async with place(engine__hold_s=1.0) as here:
        here.engine.breaks(how, at=1)
        replies = await asyncio.gather(*(here.chat(session=f"s{n}") for n in range(6)))
        for reply in replies:
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["code"] == "engine_unavailable"
            assert set(reply.json()["error"]) >= {"message", "type", "code", "param"}
        assert here.engine.asked > 6, "each was tried again"
        assert await here.health() == "degraded"
        assert [problem.partition(":")[0] for problem in await here.problems()] == ["engine"]
        assert 'openclaw_rl_out_of_order{part="engine"} 1' in await here.admin("/metrics")
        assert here.lines["part_fails"] == 1
        here.engine.breaks("")
        assert (await here.chat()).status_code == 200
        assert await here.health() == "ok"
        assert here.lines["part_works_again"] == 1
        counts = (await here.admin("/v1/admin/status"))["counts"]
        assert (counts["abandoned.engine_failed"], counts["served"]) == (6, 1), "each request is accounted for"


async def test_an_engine_that_is_gone_holds_chats_then_refuses_and_serves_when_it_is_back(place: Any) -> None:
    async with place(engine__hold_s=6.0, server__keepalive_s=0.2) as here:
        assert (await here.chat()).status_code == 200
        await here.engine_port.down()
        whole, streamed = await asyncio.gather(here.chat(), here.chat(session="t", stream=True))
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "engine_unavailable")
        assert error_of(streamed)["code"] == "engine_unavailable"
        assert streamed.status_code == 200 or streamed.headers["retry-after"]
        assert await here.health() == "degraded"
        assert [problem.partition(":")[0] for problem in await here.problems()][:1] == ["engine"]
        assert 'openclaw_rl_out_of_order{part="engine"} 1' in await here.admin("/metrics")
        held = asyncio.create_task(here.chat(session="held"))
        await asyncio.sleep(0.2)
        assert not held.done(), "a chat that comes meanwhile waits"
        await here.engine_port.up()
        assert (await held).status_code == 200
        await here.until_well()
        assert here.lines["engine_down"] <= 1
        assert here.lines["part_fails"] <= 1
        assert here.lines["engine_down"] + here.lines["part_fails"], "the watchdog sees it, or the chats do"
        assert 'openclaw_rl_out_of_order{part="engine"}' not in await here.admin("/metrics")


async def test_an_engine_that_comes_back_empty_gets_its_version_again_and_no_chat_is_refused(place: Any) -> None:
    """The engine restarts between two polls: it answers, and knows no adapter."""
    batch = {"training__batch_size": 1, "training__min_batch": 1, "judge__votes": 1, "judge__quorum": 1}
    async with place(**batch) as here:
        await here.turn("Thanks, that is perfect!", "s")
        trainer = ToyTrainer(here.server.url, here.server.data_dir, here.engine.fake.policy)
        lease = await asyncio.to_thread(trainer.lease)
        assert lease is not None
        await asyncio.to_thread(lambda: trainer.client.commit(trainer.checkpoint(lease)))

        async def serves() -> bool:
            return bool((await here.admin("/v1/admin/status"))["serving"] == 1)

        await here.until(serves)
        for n in range(2):
            here.engine.fake.go_down()
            here.engine.fake.come_up()
            replies = await asyncio.gather(*(here.chat(session=f"t{n}-{k}") for k in range(3)))
            assert {(reply.status_code, reply.headers["x-weight-version"]) for reply in replies} == {(200, "1")}
            assert list(here.engine.fake.adapters) == ["policy-v1"]
        await here.until_well()
        assert here.lines["engine_ready"] == 2
        assert here.lines["engine_lost_its_version"] <= 2
        assert not here.lines["part_fails"]


async def test_numbers_that_cannot_be_used_reply_after_reply_are_a_problem_of_their_own(place: Any) -> None:
    async with place() as here:
        here.engine.breaks("nan")
        for n in range(5):
            assert (await here.chat(session=f"s{n}")).status_code == 200
        (problem,) = await here.problems()
        assert problem.startswith("engine's numbers: failed 5 times in a row")
        assert here.lines["part_fails"] == 1
        here.engine.breaks("")
        await here.chat()
        await here.until_well()


async def test_what_the_engine_refuses_is_told_counted_and_no_turn(place: Any) -> None:
    """The request is in the ledger before the engine sees it, so its end is written there too. A refusal of the proxy
    itself writes no row. Neither is a failure of the engine.
    """
    async with place() as here:
        for stream in (False, True):
            here.engine.fake.script(Scripted(ids=(), refuse=(400, "no grammars here")))
            reply = await here.chat(session="s", stream=stream)
            assert error_of(reply)["message"] == "no grammars here"
            assert reply.status_code == 400 or (stream and reply.status_code == 200)
        assert (await here.chat(temperature="hot")).status_code == 400
        counts = (await here.admin("/v1/admin/status"))["counts"]
        assert (counts["requests"], counts["running"], counts["abandoned.refused"]) == (2, 0, 2)
        assert (await here.admin("/v1/turns"))["turns"] == []
        assert await here.health() == "ok"
        forgotten = await here.admin_post("/v1/admin/forget", {"session_id": "s"})
        assert (forgotten["turns"], forgotten["is_scrubbed"]) == (0, True)
        counts = (await here.admin("/v1/admin/status"))["counts"]
        assert (counts["requests"], counts["abandoned"]) == (0, 0)
