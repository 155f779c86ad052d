"""An SGLang that batches prompts would end of given ids: it is not sent any, and the server says what to do."""

from typing import Any

CORRECTION = "No, that is wrong: say it in fewer words please."
COMBINED = {"method__name": "combine", "method__top_k": 1, "method__guidance": 1.0, "method__teacher": "base"}


async def test_an_engine_that_batches_prompts_is_asked_for_no_given_ids(place: Any) -> None:
    settings = COMBINED | {"method__hint_source": "verbatim", "judge__kind": "rules"}
    async with place(has_teacher=True, **settings) as here:
        here.teacher.fake.server_info = {"prefill_max_requests": None}
        turns = [await here.turn(CORRECTION, f"s{number}") for number in range(3)]

        async def are_sampled() -> bool:
            return {await here.state(turn) for turn in turns} == {("sampled", None)}

        async def is_told() -> bool:
            return any("start it with --prefill-max-requests 1" in problem for problem in await here.problems())

        await here.until(are_sampled)
        await here.until(is_told)
        assert (await here.chat()).status_code == 200
        assert {call.token_ids_logprob for call in here.teacher.fake.calls} <= {None}
        for turn in turns:
            told = await here.admin(f"/v1/turns/{turn}")
            assert '"absent": "teacher_failed"' in told["sample"]["extra_json"]

        here.teacher.fake.server_info = {"prefill_max_requests": 1, "disable_overlap_schedule": True}
        turns = [await here.turn(CORRECTION, "later")]
        await here.until(are_sampled)
        await here.until_well()
        told = await here.admin(f"/v1/turns/{turns[0]}")
        assert "absent" not in told["sample"]["extra_json"]
        assert any(call.token_ids_logprob for call in here.teacher.fake.calls)
