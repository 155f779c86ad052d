"""A real server never mixes scoring calls with given ids and calls without on one engine: SGLang would end."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

CORRECTION = "No, that is wrong: say it in fewer words please."
GUIDED = {"method__name": "opd", "method__teacher": "base", "method__hint_source": "verbatim", "judge__kind": "rules"}


@pytest.mark.parametrize(("top_k", "guidance", "names"), [(1, 1.0, True), (1, 0.0, False), (0, 1.0, False)])
@pytest.mark.parametrize("has_teacher", [True, False])
async def test_scoring_calls_name_ids_all_or_none(
    place: Callable[..., AbstractAsyncContextManager[Any]],
    top_k: int,
    guidance: float,
    names: bool,
    has_teacher: bool,
) -> None:
    settings = GUIDED | {"method__top_k": top_k, "method__guidance": guidance}
    async with place(has_teacher=has_teacher, **settings) as here:
        turn = await here.turn(CORRECTION, "s")

        async def is_over() -> bool:
            return (await here.state(turn))[0] not in ("paired", "judged", "running")

        await here.until(is_over)
        assert await here.state(turn) == ("sampled", None)
        engines = [here.engine, here.teacher] if has_teacher else [here.engine]
        for engine in engines:
            scoring = [call for call in engine.fake.calls if call.logprob_start_len >= 0]
            assert scoring
            assert {call.token_ids_logprob is not None for call in scoring} == {names}
