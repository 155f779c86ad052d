"""A run of turns that no trainer will ever take is a problem that the operator sees, within some chats."""

from typing import Any

import pytest
from chats import HI
from pydantic import SecretStr

from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ApiKey, SamplingSettings, ServerSettings, SessionSettings
from openclaw_rl.telemetry.health import LEAST_OF

QUIET = ServerSettings(port=0, api_keys=(ApiKey(key=SecretStr("quiet"), train=False), ApiKey(key=SecretStr("loud"))))
SIDE = SessionSettings(turn_type_default="side")
DROPS = SamplingSettings(truncated_sampling="drop", top_p=0.9)


@pytest.mark.parametrize(
    ("deps", "body", "headers", "why"),
    [
        ({}, {"temperature": 0}, {}, "sampled greedily"),  # clients of benchmarks and of code completion send it
        ({}, {"frequency_penalty": 0.2, "presence_penalty": 0.1}, {}, "penalties"),  # defaults of some chat clients
        ({}, {"repetition_penalty": 1.1}, {}, "penalties"),
        ({"sampling": DROPS}, {}, {}, "top_p or top_k"),
        ({}, {}, {"X-OpenClaw-Train": "off"}, "opted out"),
        ({"server": QUIET}, {}, {"Authorization": "Bearer quiet"}, "opted out"),
        ({"longest_sample": 8}, {}, {}, "longer than trainer.max_tokens"),
        ({"session": SIDE}, {}, {}, "background request"),
    ],
)
async def test_turns_that_can_never_be_trained_on_are_told(
    qwen: FrontEnd, proxy_over: Any, deps: dict, body: dict, headers: dict, why: str
) -> None:
    async with proxy_over(qwen, trains=True, **deps) as proxy:
        for n in range(LEAST_OF):
            assert not proxy.deps.health.problems(), n
            assert (await proxy.post({**HI, "max_tokens": 2, **body}, **headers)).status_code == 200
        told = [problem for problem in proxy.deps.health.problems() if problem.startswith("trainable turns: ")]
        assert len(told) == 1
        assert why in told[0]


async def test_some_of_them_are_no_problem_and_one_that_is_over_ends(qwen: FrontEnd, proxy_over: Any) -> None:
    async with proxy_over(qwen, trains=True) as proxy:
        for n in range(LEAST_OF + 4):
            await proxy.post({**HI, "max_tokens": 2, "temperature": 0 if n else 0.7})
            await proxy.post({**HI, "max_tokens": 2, "temperature": 0.7 if n % 3 == 0 else 0})
        assert not [problem for problem in proxy.deps.health.problems() if "trainable" in problem]


async def test_where_nothing_is_to_be_trained_it_is_no_problem(qwen: FrontEnd, proxy_over: Any) -> None:
    async with proxy_over(qwen) as proxy:
        for _ in range(LEAST_OF + 1):
            await proxy.post({**HI, "max_tokens": 2, "temperature": 0})
        assert not [problem for problem in proxy.deps.health.problems() if "trainable" in problem]
