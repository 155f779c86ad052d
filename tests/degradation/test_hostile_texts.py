"""Answers that no model should give: half characters, nulls, other types, sizes, numbers. No reader of them ends the
server, and all that people read of it can still be read.
"""

from typing import Any

import httpx
import pytest

from openclaw_rl.errors import JudgeError
from openclaw_rl.judge.client import HttpJudgeClient
from openclaw_rl.messages import Message
from openclaw_rl.settings import JudgeSettings

THANKS = "Thanks, that is perfect!"
PROMPT = [Message(role="user", content="| x")]


def answer(content: bytes, finish: bytes = b'"stop"') -> bytes:
    """Return a completion whose content is this JSON."""
    return b'{"choices": [{"message": {"content": ' + content + b'}, "finish_reason": ' + finish + b"}]}"


VOTES = {
    "half a character": answer(rb'"so \ud83d it is \\boxed{1}"'),
    "null": answer(rb'"a\u0000b \\boxed{1}"'),
    "controls": answer(rb'"\u001b[2J\u202e\u2028 \\boxed{1}"'),
    "other numbers beside it": answer(rb'"\\boxed{1}"').replace(
        b'"choices"', b'"usage": {"n": NaN, "m": 1e999}, "choices"'
    ),
    "a finish of another type": answer(rb'"\\boxed{1}"', b'{"why": []}'),
}
"""Answers with a vote of +1, in any case."""
NO_ANSWERS = {
    "a number": answer(b"5"),
    "true": answer(b"true"),
    "parts of another type": answer(b"[1, 2]"),
    "choices of another type": b'{"choices": {}}',
    "no choices": b'{"choices": []}',
    "a choice of another type": b'{"choices": ["yes"]}',
    "a message of another type": b'{"choices": [{"message": "yes"}]}',
    "a list": b"[]",
    "null alone": b"null",
    "nothing": b"",
    "broken bytes": answer(b'"\xff\xfe \\\\boxed{1}"'),
    "too deep": answer(b"[" * 100_000 + b"]" * 100_000),
    "a number without end": b'{"choices": ' + b"9" * 20_000 + b"}",
    "an error": b'{"error": {"message": "\\ud800 no", "code": 429}}',
}
REFUSALS = {
    "half a character": (400, b'{"error": {"message": "no \\ud800\\u0000"}}'),
    "a list": (400, b"[]"),
    "too deep": (422, b"[" * 100_000),
    "another type": (400, b'{"error": {"message": {"a": [1e999]}}}'),
    "long": (404, b'{"error": {"message": "' + b"x" * 100_000 + b'"}}'),
}


async def asked(status: int, body: bytes) -> str:
    """Return the text of the answer that a judge gives."""

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        settings = JudgeSettings.model_validate({"kind": "llm", "url": "http://judge/v1", "model": "\ufffd"})
        return (await HttpJudgeClient(client, settings)(PROMPT, max_new_tokens=8)).text


@pytest.mark.parametrize("name", VOTES)
async def test_an_odd_answer_is_a_text_that_can_be_written(name: str) -> None:
    text = await asked(200, VOTES[name])
    assert text.encode().endswith(b"\\boxed{1}")


@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_what_is_no_answer_is_a_failed_call(name: str) -> None:
    with pytest.raises(JudgeError) as failed:
        await asked(200, NO_ANSWERS[name])
    str(failed.value).encode()


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_in_odd_words_is_a_failed_call(name: str) -> None:
    with pytest.raises(JudgeError) as failed:
        await asked(*REFUSALS[name])
    assert len(str(failed.value).encode()) < 500


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    read = 0

    async def pieces() -> Any:
        nonlocal read
        while True:
            read += 2**20
            yield b" " * 2**20

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=pieces())

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        settings = JudgeSettings.model_validate({"kind": "llm", "url": "http://judge/v1", "model": "j"})
        with pytest.raises(JudgeError, match="larger than 4 MB"):
            await HttpJudgeClient(client, settings)(PROMPT, max_new_tokens=8)
    assert read <= 6 * 2**20


async def test_no_text_of_a_judge_or_an_engine_ends_the_server(place: Any) -> None:
    """Every turn keeps waiting or gets its verdict; the status, the lists and the metrics are read after each."""
    async with place(judge__votes=1, judge__quorum=1, judge__retries=1000) as here:
        for number, body in enumerate(VOTES.values()):
            here.judge.raw = (200, body)
            turn = await here.turn(THANKS, f"vote{number}")

            async def is_judged(turn: str = turn) -> bool:
                return bool((await here.state(turn))[0] == "sampled")

            await here.until(is_judged)
            verdict = (await here.admin(f"/v1/turns/{turn}"))["verdict"]
            assert (verdict["value"], verdict["source"]) == (1, "llm")
        # Three failures in a row open the breaker: these are the worst three.
        for number, raw in enumerate((REFUSALS["half a character"], (200, NO_ANSWERS["too deep"]), REFUSALS["long"])):
            here.judge.raw, before = raw, here.judge.asked
            await here.turn(THANKS, f"none{number}")

            async def is_asked(before: int = before) -> bool:
                return bool(here.judge.asked > before)

            await here.until(is_asked)

        async def is_out() -> bool:
            return any(problem.startswith("judge:") for problem in await here.problems())

        await here.until(is_out)
        await here.admin("/v1/admin/status")
        here.judge.raw = None
        for number, how in enumerate(
            ("beyond_float32", "impossible_counts", "half_a_character", "ids_of_another_type")
        ):
            here.engine.breaks(how, 1, at=1)
            assert (await here.chat(session=f"engine{number}")).status_code == 200
        await here.admin("/metrics")
        rows = (await here.admin("/v1/turns?limit=200"))["turns"]
        for row in rows:
            await here.admin(f"/v1/turns/{row['turn_id']}")
        reasons = {(row["state"], row["reason"]) for row in rows}
        assert ("dropped", "non_finite") in reasons
        assert "Traceback" not in here.server.log
        assert (await here.chat(session="last")).status_code == 200
