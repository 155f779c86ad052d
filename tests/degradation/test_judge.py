"""Judge down, slow, or answering garbage: chats never notice, no turn gets a made-up verdict, and all waiting turns are
judged when the judge is back.
"""

import asyncio
from pathlib import Path
from typing import Any

from breaking import BrokenJudge, Port

THANKS, WRONG = "Thanks, that is perfect!", "No, that is wrong."
TIMEOUT_S = 3.0
"""Five servers run at once: a judge that works answers within it on a busy machine too, or its outage counts twice."""


async def fails(place: Any, folder: Path, how: str) -> None:
    async with place(folder, judge__workers=4, judge__timeout_s=TIMEOUT_S, judge__votes=1, judge__quorum=1) as here:
        if how == "down":
            await here.judge_port.down()
        here.judge.how = how
        said = [THANKS, WRONG, THANKS, WRONG, THANKS]
        turns = [await here.turn(following, f"s{n}") for n, following in enumerate(said)]

        async def is_out() -> bool:
            return any(problem.startswith("judge:") for problem in await here.problems())

        await here.until(is_out)
        assert await here.health() == "degraded"
        assert 'openclaw_rl_out_of_order{part="judge"} 1' in await here.admin("/metrics")
        assert {await here.state(turn) for turn in turns} == {("paired", None)}
        here.judge.how = ""
        if how == "down":
            await here.judge_port.up()

        async def are_judged() -> bool:
            return {await here.state(turn) for turn in turns} == {("sampled", None)}

        await here.until(are_judged)
        verdicts = [(await here.admin(f"/v1/turns/{turn}"))["verdict"]["value"] for turn in turns]
        assert verdicts == [1 if following == THANKS else -1 for following in said]
        await here.until_well()
        assert (here.lines["judge_out"], here.lines["part_fails"]) == (1, 1)
        assert (here.lines["judge_works_again"], here.lines["part_works_again"]) == (1, 1)


async def test_a_judge_that_fails_keeps_turns_waiting_and_says_so_once(place: Any, tmp_path: Path) -> None:
    """All faults at once, each on a server of its own: the servers mostly wait."""
    async with asyncio.TaskGroup() as servers:
        for how in ("down", "slow", "no_vote", "5xx", "bad_json"):
            servers.create_task(fails(place, tmp_path / how, how), name=how)


async def test_a_judge_that_is_away_at_the_start_is_told_before_the_first_chat(place: Any) -> None:
    judge = BrokenJudge()
    port = Port(judge)
    opd = {"method__name": "opd", "method__hint_source": "judge"}
    async with place(judge__url=f"{port.url}/v1", **opd) as here:
        there = f"failed once: judge did not answer at {port.url}/v1/models"

        async def are_told() -> bool:
            return sum(there in problem for problem in await here.problems()) == 2

        await here.until(are_told)
        assert {problem.partition(":")[0] for problem in await here.problems()} == {"hint judge", "judge"}
        await port.up()
        try:
            await here.until_well()
        finally:
            await port.down()
            port.let_go()
        assert (here.lines["part_fails"], here.lines["part_works_again"]) == (2, 2)


async def test_what_waits_for_a_judge_is_bounded(place: Any) -> None:
    """Answers of another form are an outage like any other."""
    async with place(judge__max_waiting=2, judge__votes=1, judge__quorum=1) as here:
        here.judge.how = "other_json"
        turns = [await here.turn(THANKS, f"s{n}") for n in range(5)]

        async def is_shed() -> bool:
            return bool((await here.admin("/v1/admin/status"))["counts"].get("dropped.backlog") == 3)

        await here.until(is_shed)
        assert [await here.state(turn) for turn in turns] == [("dropped", "backlog")] * 3 + [("paired", None)] * 2


async def test_what_waits_for_a_trainer_is_bounded(place: Any) -> None:
    async with place(training__max_waiting=3, training__batch_size=3, judge__votes=1, judge__quorum=1) as here:
        turns = [await here.turn(THANKS, f"s{n}") for n in range(5)]

        async def is_shed() -> bool:
            counts = (await here.admin("/v1/admin/status"))["counts"]
            return (counts.get("dropped.backlog"), counts.get("sampled")) == (2, 3)

        await here.until(is_shed)
        assert {await here.state(turn) for turn in turns} == {("dropped", "backlog"), ("sampled", None)}
