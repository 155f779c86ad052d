"""Teacher down, slow, or answering garbage: chats never notice.

With OPD the turns that need the teacher wait, and are scored when it is back. With Combined the verdict is trained on
without the hint's term, which is absent and counted, and never made up.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CORRECTION = "No, that is wrong: say it in fewer words please."
OUT_OF_ORDER = 'openclaw_rl_out_of_order{part="teacher"} 1'
ABSENT = {"scores_nan": "non_finite"}
"""Reason of the missing term in a turn, by fault; `teacher_failed` for all others."""


@asynccontextmanager
async def broken(place: Any, folder: Path, method: str, how: str) -> Any:
    """Yield a server whose teacher has failed three turns."""
    settings = {"method__name": method, "method__score_timeout_s": 2.0, "judge__votes": 1, "judge__quorum": 1}
    async with place(folder, has_teacher=True, **settings) as here:
        await breaks(here, how)
        turns = [await here.turn(CORRECTION, f"s{n}") for n in range(3)]

        async def is_out() -> bool:
            return any(re.match(r"teacher: failed \d+ times in a row", found) for found in await here.problems())

        await here.until(is_out)
        assert await here.health() == "degraded"
        metrics = await here.admin("/metrics")
        assert OUT_OF_ORDER in metrics
        counted = rf'^openclaw_rl_scoring{{what="hindsight_{ABSENT.get(how, "teacher_failed")}"}} (\d+)\.0$'
        found = re.search(counted, metrics, re.MULTILINE)
        assert found, metrics
        assert int(found[1]) >= 3
        assert (await here.chat()).status_code == 200
        yield here, turns


async def breaks(here: Any, how: str) -> None:
    if how == "down":
        await here.teacher_port.down()
    here.teacher.breaks(how)


async def mends(here: Any, how: str) -> None:
    here.teacher.breaks("")
    if how == "down":
        await here.teacher_port.up()


async def record(here: Any, turn: str) -> Any:
    return await here.admin(f"/v1/turns/{turn}")


async def until_sampled(here: Any, turns: Sequence[str]) -> None:
    async def are_sampled() -> bool:
        return {await here.state(turn) for turn in turns} == {("sampled", None)}

    await here.until(are_sampled)


def said_once(lines: Counter[str], *events: str) -> None:
    assert {event: lines[event] for event in events} == dict.fromkeys(events, 1), lines
    assert not lines["not an event"]


async def combined(place: Any, folder: Path, how: str) -> None:
    """Check that Combined trains on the verdict alone, and that hints come back with the teacher."""
    async with broken(place, folder, "combine", how) as (here, turns):
        await until_sampled(here, turns)
        for turn in turns:
            told = await record(here, turn)
            assert (told["state"], told["sample"]["reward"]) == ("sampled", -1.0), how
            assert told["sample"]["teacher_log_probs"] is told["sample"]["student_log_probs"] is None
            assert f'"absent": "{ABSENT.get(how, "teacher_failed")}"' in told["sample"]["extra_json"]
        await mends(here, how)
        turn = await here.turn(CORRECTION, "later")
        await until_sampled(here, [turn])
        await here.until_well()
        told = await record(here, turn)
        assert (told["state"], told["sample"]["reward"]) == ("sampled", -1.0)
        assert len(told["sample"]["teacher_log_probs"]) == len(told["turn"]["response_ids"])
        said_once(here.lines, "part_fails", "part_works_again")
        assert OUT_OF_ORDER not in await here.admin("/metrics")


async def opd(place: Any, folder: Path, how: str) -> None:
    """Check that the turns of OPD wait and that all of them are scored later."""
    async with broken(place, folder, "opd", how) as (here, turns):
        assert {await here.state(turn) for turn in turns} == {("judged", None)}
        await mends(here, how)
        await until_sampled(here, turns)
        await here.until_well()
        for turn in turns:
            told = await record(here, turn)
            assert told["sample"]["reward"] is None
            assert len(told["sample"]["teacher_log_probs"]) == len(told["turn"]["response_ids"])
        said_once(here.lines, "part_fails", "part_works_again", "score_out", "score_works_again")
        assert OUT_OF_ORDER not in await here.admin("/metrics")


async def test_a_teacher_that_fails_costs_a_term_or_time_and_nothing_else(place: Any, tmp_path: Path) -> None:
    """All faults at once, each on a server of its own: the servers mostly wait."""
    for method in ("combine", "opd"):
        (tmp_path / method).mkdir()
    async with asyncio.TaskGroup() as all_of_them:
        for how in ("down", "silent", "scores_of_others"):
            all_of_them.create_task(combined(place, tmp_path / "combine" / how, how))
        for how in ("down", "scores_nan"):
            all_of_them.create_task(opd(place, tmp_path / "opd" / how, how))
