"""The gate of weights that a trainer sends without a probe, as slime's does.

A token of the toy policy is less likely by exact nats under each version, so every KL is known.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_client import served
from publishing import Drifted
from pushing import PushWorld, pushing
from waiting import until

from openclaw_rl.engines.base import Score
from openclaw_rl.errors import EngineGone, LedgerUnavailable
from openclaw_rl.publishing.canary import Canary
from openclaw_rl.publishing.gate import GateResult
from openclaw_rl.server.app import _base_score
from openclaw_rl.settings import Settings
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.types import Ids, LogProbs, VersionState

CANARY = Canary((1, 5), (21, 22))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PushWorld]:
    async with pushing(tmp_path) as world:
        yield world


async def base_log_probs(prompt_ids: Ids, ids: Ids) -> LogProbs:
    return ToyPolicy().log_probs((*prompt_ids, *ids), len(prompt_ids), 0)


async def push(world: PushWorld, lost: float, *, is_refused: bool = False) -> int:
    """Commit and send a version under which each token has lost these nats."""
    number = await world.commit()
    policy = world.engine.policy
    known = policy.lost if isinstance(policy, Drifted) else {}
    world.engine.policy = Drifted(lost={**known, number: lost})
    await world.push(number, status=409 if is_refused else 200)
    assert await world.state(number) is (VersionState.REJECTED if is_refused else VersionState.SERVING)
    return number


async def reason(world: PushWorld, number: int) -> str | None:
    return (await world.ledger.version(number)).reason


def figures(world: PushWorld) -> GateResult:
    last = world.publisher.last_gate
    assert last is not None
    return last


async def test_small_steps_serve_and_their_kl_is_measured_against_the_version_before(world: PushWorld) -> None:
    await push(world, 0.4)
    assert figures(world).step_kl == figures(world).base_kl == pytest.approx(0.4)
    await push(world, 0.7)
    assert figures(world).step_kl == pytest.approx(0.3)
    assert (figures(world).base_kl, figures(world).canary_drop) == (None, None)  # no engine holds the base


async def test_a_version_that_drifts_is_refused_and_what_served_is_restored(world: PushWorld) -> None:
    number = await push(world, 0.7, is_refused=True)
    assert await reason(world, number) == "KL(v0 || v1) = 0.700 > 0.5"
    assert figures(world).step_kl == pytest.approx(0.7)
    await until(lambda: world.serving.is_open)
    assert (world.engine.weight_version, world.serving.current) == (0, 0)
    assert (await world.ledger.counts())["dropped.gate_rejected"] == 1
    await push(world, 0.1)


async def test_weights_that_drift_are_refused_while_the_ledger_takes_no_figures(
    world: PushWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refused weights are on the engine already: chats must not run on them."""

    async def no_room(*args: object) -> None:
        raise LedgerUnavailable("the disk is full")

    monkeypatch.setattr(world.ledger, "record_gate", no_room)
    await push(world, 0.7, is_refused=True)
    await until(lambda: world.serving.is_open)
    assert (world.engine.weight_version, world.serving.current) == (0, 0)


async def test_a_drifting_version_whose_parent_is_on_no_disk_holds_chats_until_the_trainer_starts_again(
    world: PushWorld,
) -> None:
    """As a failed self-test does: the refused weights serve no further chat."""
    await push(world, 0.1)
    await push(world, 0.8, is_refused=True)
    assert not world.serving.is_open
    await world.call("start", {"trainer": "node"})
    await until(lambda: world.serving.is_open and world.engine.weight_version == world.serving.current)
    serving = await world.ledger.version(world.serving.current)
    assert (serving.folder, serving.durable) == (None, True)  # the base, under a new number


async def test_a_version_without_a_reply_of_its_own_is_compared_on_its_parents(world: PushWorld) -> None:
    for _ in range(3):
        await world.sampled()
    for lost in (0.2, 0.3, 0.4):  # a backlog: three steps between two chats
        lease = (await world.call("lease", {"trainer": "node", "wait_s": 0}))["lease"]
        number = await world.commit_lease(lease)
        policy = world.engine.policy
        world.engine.policy = Drifted(lost={**getattr(policy, "lost", {}), number: lost})
        await world.push(number)
        assert figures(world).step_kl == pytest.approx(0.2 if lost == 0.2 else 0.1)


async def test_without_a_stored_reply_there_is_no_figure_and_no_refusal(world: PushWorld) -> None:
    number = await world.commit()
    await world.ledger.forget("s")
    world.engine.policy = Drifted(lost={number: 9.0})
    await world.push(number)
    assert figures(world) == GateResult(None, None)


@pytest.mark.parametrize("call", [2, 4], ids=["before the push", "after it"])
@pytest.mark.parametrize("hangs", [False, True])
async def test_an_engine_that_cannot_score_gives_no_figure_and_no_refusal(
    tmp_path: Path, call: int, hangs: bool
) -> None:
    """Calls: 1 and 3 ask for numbers at all, 2 and 4 compare the same reply."""
    async with pushing(tmp_path, gate={"gate_s": 0.2} if hangs else {}) as world:
        score, calls = world.engine.score, 0

        async def fails(*args: Any, **kwargs: Any) -> Score:
            nonlocal calls
            calls += 1
            if calls == call:
                if hangs:
                    await asyncio.sleep(600)
                raise EngineGone("scoring is out of order")
            return await score(*args, **kwargs)

        world.engine.score = fails  # type: ignore[method-assign]
        await push(world, 9.0)
        assert calls == (3 if call == 2 else 4)
        assert figures(world) == GateResult(None, None)
        assert world.serving.is_open


async def test_weights_without_numbers_on_a_reply_that_had_them_are_refused(world: PushWorld) -> None:
    score, calls = world.engine.score, 0

    async def mute(*args: Any, **kwargs: Any) -> Score:
        nonlocal calls
        calls += 1
        said = await score(*args, **kwargs)
        return replace(said, log_probs=(float("nan"),) * len(said.log_probs)) if calls >= 4 else said

    world.engine.score = mute  # type: ignore[method-assign]
    number = await push(world, 0.1, is_refused=True)
    assert "no numbers for version 1" in (await reason(world, number) or "")


async def test_a_second_engine_with_the_base_bounds_the_distance_to_it(tmp_path: Path) -> None:
    async with pushing(tmp_path, gate={"max_base_kl": 0.9}, score_base=base_log_probs) as world:
        await push(world, 0.4)
        assert world.alerts == []
        number = await push(world, 0.8)
        assert figures(world).base_kl == pytest.approx(0.8)
        ((event, fields),) = world.alerts
        assert (event, fields["weight_version"]) == ("base_kl_high", number)
        refused = await push(world, 1.2, is_refused=True)
        assert await reason(world, refused) == "KL(base || v3) = 1.200 > 0.9"


async def test_a_base_that_cannot_be_scored_refuses_no_version(tmp_path: Path) -> None:
    async def away(prompt_ids: Ids, ids: Ids) -> LogProbs:
        raise EngineGone("the judge's engine is away")

    async with pushing(tmp_path, gate={"max_base_kl": 0.1}, canaries=[CANARY], score_base=away) as world:
        await push(world, 0.05)
        await push(world, 0.4)
        assert figures(world) == GateResult(pytest.approx(0.35), None)  # type: ignore[arg-type]


async def test_canaries_that_full_weights_lose_step_by_step_refuse_the_version(tmp_path: Path) -> None:
    async with pushing(tmp_path, canaries=[CANARY]) as world:
        await push(world, 0.3)
        assert figures(world).canary_drop == pytest.approx(0.3)
        number = await push(world, 0.6, is_refused=True)
        assert await reason(world, number) == "canaries lost 0.600 nats per token > 0.5"


@pytest.mark.parametrize("has_base", [False, True])
async def test_after_a_restart_canaries_are_compared_with_the_base_or_with_what_serves(
    tmp_path: Path, has_base: bool
) -> None:
    async with pushing(tmp_path, canaries=[CANARY], score_base=base_log_probs if has_base else None) as world:
        world.engine.policy = Drifted(lost={0: 0.3})  # what serves when the server starts is no longer the base
        number = await world.commit()
        world.engine.policy = Drifted(lost={0: 0.3, number: 0.4})
        await world.push(number)
        assert figures(world).canary_drop == pytest.approx(0.4 if has_base else 0.1)


async def test_the_base_is_asked_over_http_at_the_url_of_the_settings() -> None:
    async with served(FakeEngine()) as engine, AsyncExitStack() as stack:
        settings = Settings.model_validate(
            {
                "method": {"name": "binary_rl"},
                "judge": {"url": "http://judge/v1"},
                "training": {"weights": "full"},
                "publisher": {"base_url": engine.url},
            }
        )
        score = _base_score(settings, stack)
        assert score is not None
        assert await score((1, 5), (21, 22)) == pytest.approx(await base_log_probs((1, 5), (21, 22)))
        without = settings.model_copy(update={"publisher": settings.publisher.model_copy(update={"base_url": None})})
        assert _base_score(without, stack) is None


def test_adapters_need_no_second_engine_for_the_base() -> None:
    with pytest.raises(ValueError, match=r"publisher.base_url is for training.weights"):
        Settings.model_validate({"publisher": {"base_url": "http://base"}})
