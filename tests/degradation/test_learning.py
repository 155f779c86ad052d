"""Faults of what is learned: weights with NaN, a judge that errs, a fall that users notice, a long way from the base.

Chats go on. A refused version never serves. The owner gets an alert in the log and at the webhook.
"""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.model import Vocabulary
from harness.trainer import ToyTrainer
from safetensors.numpy import save
from taste import DISLIKED, LIKED, Taste, TasteTrainer, by_rewards

from openclaw_rl.types import WeightKind

THANKS, WRONG = "Thanks, that is perfect!", "No, that is wrong."
JUDGED_ONCE = {"judge__votes": 1, "judge__quorum": 1, "training__min_batch": 1, "method__baseline": "none"}


def alerts(here: Any, event: str) -> list[dict[str, Any]]:
    """Return the alerts of one kind that the webhook got."""
    return [alert["fields"] for alert in here.webhook.alerts if alert["event"] == event]


async def versions(here: Any) -> dict[int, Any]:
    return {row["weight_version"]: row for row in (await here.admin("/v1/admin/status"))["versions"]}


async def until_state(here: Any, number: int, state: str) -> Any:
    async def is_so() -> bool:
        return (await versions(here))[number]["state"] == state  # type: ignore[no-any-return]

    await here.until(is_so)
    return (await versions(here))[number]


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(WeightKind))
async def test_weights_that_are_no_numbers_never_serve_whatever_the_step_measured(place: Any, kind: WeightKind) -> None:
    good = {"layer.weight": np.linspace(-1, 1, 64, dtype=np.float32)}
    spoilt = {"layer.weight": np.where(np.arange(64) == 40, np.float32(np.inf), good["layer.weight"])}
    settings = {"training__batch_size": 1, "training__weights": str(kind), "publisher__unbroken_drain_s": 0.1}
    async with place(**JUDGED_ONCE, **settings) as here:
        trainer = ToyTrainer(here.server.url, here.server.data_dir, here.engine.fake.policy, kind=kind)

        async def step(weights: dict[str, Any], session: str) -> tuple[str, int]:
            turn = await here.turn(THANKS, session)
            lease = await asyncio.to_thread(trainer.lease)
            assert lease is not None
            commit = await asyncio.to_thread(trainer.checkpoint, lease, weights=save(weights))
            assert all(map(math.isfinite, commit.report.metrics.values()))
            return turn, await asyncio.to_thread(trainer.client.commit, commit)

        for n in range(3 if kind is WeightKind.LORA else 1):
            turn, number = await step(spoilt, f"s{n}")
            row = await until_state(here, number, "rejected")
            assert row["reason"] == "adapter_model.safetensors: layer.weight holds what is not a finite number"
            assert await here.state(turn) == ("dropped", "gate_rejected")
            reply = await here.chat(session=f"t{n}")
            assert (reply.status_code, reply.headers["x-weight-version"]) == (200, "0")
        assert here.engine.fake.folders == {}
        assert here.engine.fake.weight_version == 0, "the engine never saw them"
        assert here.lines["version_rejected"] == number
        if number == 3:
            await here.until(lambda: _heard(here, "learning_paused"))
            assert (await here.admin("/v1/admin/status"))["learning"] is False
            await here.admin_post("/v1/admin/learning", {"on": True})
        _, number = await step(good, "again")
        await until_state(here, number, "serving")
        assert (await here.chat(session="u")).headers["x-weight-version"] == str(number)


async def _heard(here: Any, event: str) -> bool:
    return bool(alerts(here, event)) and here.lines[event] == len(alerts(here, event))


# -- taste -------------------------------------------------------------------------------------------------------------


class Users:
    """Users who like one reply and give feedback."""

    def __init__(self, here: Any, policy: Taste) -> None:
        self.here = here
        self.trainer = TasteTrainer(here.server, policy)
        self.said = 0

    async def say(self, turns: int) -> float:
        """Return the share of replies that the users liked."""
        sessions = [f"s{self.said + n}" for n in range(turns)]
        self.said += turns
        return sum(await asyncio.gather(*map(self._turn, sessions))) / turns

    async def _turn(self, session: str) -> bool:
        headers = {"X-Session-Id": session}
        asked = {"role": "user", "content": f"Which one, in {session}?"}
        url = "/v1/chat/completions"
        first = await self.here.http.post(url, json={"messages": [asked]}, headers=headers)
        reply = first.json()["choices"][0]["message"]["content"]
        assert reply in (LIKED, DISLIKED)
        said = {"role": "user", "content": THANKS if reply == LIKED else WRONG}
        messages = [asked, {"role": "assistant", "content": reply}, said]
        assert (await self.here.http.post(url, json={"messages": messages}, headers=headers)).status_code == 200
        return bool(reply == LIKED)


FAR = {"publisher__max_step_kl": 100.0, "publisher__max_base_kl": 100.0}
"""The gate's two bounds are out of the way of what is to be seen."""


async def lied_to(place: Any, folder: Path, vocabulary: Vocabulary, lie: str, *, has_canary: bool) -> None:
    """Make the three steps that such a judge makes of a policy: each is beyond the limit of a canary."""
    folder.mkdir()
    canaries = folder / "canaries.jsonl"
    canaries.write_text(
        json.dumps({"messages": [{"role": "user", "content": "And which in winter?"}], "reply": LIKED}) + "\n"
    )
    policy = Taste.of(vocabulary, theta=0.5)
    follow = by_rewards(policy, 0.4) if lie == "inverts" else lambda theta, _: theta - 1.6
    canary = {"publisher__canary_file": str(canaries), "publisher__max_canary_drop": 0.2} if has_canary else {}
    watch = {"watch__check_every_s": 0.1, "watch__min_turns": 5}
    async with place(folder, policy=policy, training__batch_size=4, **JUDGED_ONCE, **FAR, **canary, **watch) as here:
        here.judge.how = lie
        users = Users(here, policy)
        for number in range(1, 4):
            await users.say(4)
            assert await users.trainer.step(follow) == number
            row = await until_state(here, number, "rejected" if has_canary else "serving")
            assert row["reason"].startswith("canaries lost 0.") if has_canary else row["reason"] is None
        if has_canary:
            assert await here.served_by() == "0"
            await here.until(lambda: _heard(here, "learning_paused"))
        else:
            assert await users.say(12) <= 0.25, "hardly anybody likes it any more, and nothing said so"
            verdicts = (await here.admin("/v1/admin/history"))["verdicts"]
            latest = [value for _, value in verdicts][-8:]
            assert sum(latest) >= 0.5 * len(latest), "the judge is content"
            assert await here.served_by() == "3"
            assert here.webhook.alerts == []
        assert alerts(here, "rolled_back") == []


async def test_a_judge_that_lies_is_caught_by_the_canary_and_by_nothing_else(
    place: Any, tmp_path: Path, model_folder: Path
) -> None:
    """The judge inverts the users' verdicts, and the policy learns to displease; or it praises every reply, and hides a
    broken trainer. Verdicts stay high either way, so the regression monitor sees no fall.
    """
    vocabulary = Vocabulary.of(model_folder)
    async with asyncio.TaskGroup() as servers:
        for lie, has_canary in (("inverts", True), ("inverts", False), ("praises", True), ("praises", False)):
            folder = tmp_path / f"{lie}-{has_canary}"
            servers.create_task(lied_to(place, folder, vocabulary, lie, has_canary=has_canary))


async def test_what_users_like_less_is_gone_back_from_and_the_owner_hears_of_it(place: Any, model_folder: Path) -> None:
    policy = Taste.of(Vocabulary.of(model_folder), theta=3.0)
    watch = {"watch__check_every_s": 0.1, "watch__min_turns": 10}
    settings = {"training__batch_size": 16, **JUDGED_ONCE, **FAR, **watch}
    async with place(policy=policy, **settings) as here:
        users = Users(here, policy)
        liked = await users.say(16)
        spoilt = await users.trainer.step(lambda theta, _: -theta)
        assert spoilt == 1
        await until_state(here, 1, "serving")
        assert liked > 0.8 > 0.2 > await users.say(16)
        row = await until_state(here, 1, "rolled_back")
        assert row["reason"] == "rolled back to version 0"
        await here.until(lambda: _heard(here, "rolled_back"))
        (alert,) = alerts(here, "rolled_back")
        assert (alert["serving"], alert["good"]) == (0, 0)
        assert alert["before"] > 0.6 > -0.6 > alert["after"]
        assert alert["p_value"] < 0.001
        reply = await here.chat(session="after")
        assert (reply.status_code, reply.headers["x-weight-version"]) == (200, "0")
        assert (await here.admin("/v1/admin/status"))["counts"]["dropped.rolled_back"] >= 16
        assert await users.say(8) > 0.8


async def test_a_version_near_the_base_s_limit_serves_and_is_said(place: Any, model_folder: Path) -> None:
    policy = Taste.of(Vocabulary.of(model_folder), theta=8.0)  # it says the liked one, and is sure of it
    lost = math.log1p(math.exp(1.0)) / 2  # nats a token of a reply of two, for a version that is not: θ = −1
    settings = {"training__batch_size": 8, **JUDGED_ONCE, "publisher__max_step_kl": 100.0}
    async with place(policy=policy, publisher__max_base_kl=lost / 0.9, **settings) as here:
        users = Users(here, policy)
        assert await users.say(8) == 1.0
        assert await users.trainer.step(lambda _, __: -1.0) == 1
        await until_state(here, 1, "serving")
        await here.until(lambda: _heard(here, "base_kl_high"))
        (alert,) = alerts(here, "base_kl_high")
        assert alert["weight_version"] == 1
        assert alert["base_kl"] == pytest.approx(lost, abs=0.01)
        assert alert["limit"] == pytest.approx(lost / 0.9)
        assert (await here.chat()).headers["x-weight-version"] == "1"


# -- settings ----------------------------------------------------------------------------------------------------------


async def test_settings_under_which_the_usual_chat_is_never_trained_on_are_a_problem_and_an_alert(place: Any) -> None:
    async with place(sampling__temperature=0, sessions__pair_ttl_s=2) as here:

        async def is_told() -> bool:
            return len(alerts(here, "hardly_trains")) == 2

        await here.until(is_told)
        problems = await here.problems()
        assert [problem.partition(": ")[0] for problem in problems] == [
            "learning, sampling.temperature",
            "learning, sessions.pair_ttl_s",
        ]
        assert here.lines["hardly_trains"] == 2
        assert (await here.chat(session="s")).status_code == 200
