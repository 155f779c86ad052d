"""Version uses and the gate."""

import asyncio

import pytest

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.errors import RequestError


async def test_a_reply_keeps_its_version_over_a_switch() -> None:
    serving = VersionAdmission(hold_s=1)
    serving.switch(0, None)
    async with serving.use() as old:
        serving.switch(1, "policy-v1")
        async with serving.use() as new:
            assert (old.weight_version, old.lora_path, old.extra_key) == (0, None, "v0")
            assert (new.weight_version, new.lora_path, new.extra_key) == (1, "policy-v1", "v1")
            assert (serving.users(0), serving.users(1), serving.current) == (1, 1, 1)
    assert (serving.users(0), serving.users(1)) == (0, 0)


async def test_a_named_version_keeps_its_own_adapter() -> None:
    serving = VersionAdmission(hold_s=1)
    serving.switch(3, "policy-v3")
    async with serving.use(2) as use:
        assert use.lora_path == adapter_name(2) == "policy-v2"
    async with serving.use(0) as use:
        assert use.lora_path is None


async def test_drained_waits_for_the_last_user() -> None:
    serving = VersionAdmission(hold_s=1)
    serving.switch(0, None)
    await serving.drained(0)
    async with serving.use():
        async with serving.use():
            drained = asyncio.create_task(serving.drained(0))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not drained.done()
    await drained


async def test_a_use_that_fails_is_given_back() -> None:
    serving = VersionAdmission(hold_s=1)
    serving.switch(0, None)
    with pytest.raises(ZeroDivisionError):
        async with serving.use():
            _ = 1 / 0
    assert serving.users(0) == 0


async def test_the_gate_holds_and_lets_go() -> None:
    serving = VersionAdmission(hold_s=10)
    entered: list[int] = []

    async def chat() -> None:
        async with serving.use() as use:
            entered.append(use.weight_version)

    waiting = asyncio.create_task(chat())
    await asyncio.sleep(0)
    assert entered == []
    serving.hold()
    serving.switch(4, "policy-v4")
    await asyncio.sleep(0)
    assert entered == []
    serving.switch(5, "policy-v5")
    serving.release_hold()
    await waiting
    assert entered == [5]


async def test_a_gate_that_stays_closed_ends_in_503() -> None:
    serving = VersionAdmission(hold_s=0.01)
    with pytest.raises(RequestError) as caught:
        async with serving.use():
            pass
    assert (caught.value.status, caught.value.code) == (503, "engine_unavailable")


async def test_a_gate_that_closes_again_at_once_lets_nobody_through() -> None:
    serving = VersionAdmission(hold_s=0.05)
    serving.switch(0, None)
    serving.hold()
    waiting = asyncio.create_task(serving.wait_open())
    await asyncio.sleep(0)
    serving.release_hold()
    serving.hold()
    with pytest.raises(RequestError):
        await waiting


async def test_a_cancelled_wait_for_drained_leaves_nothing_behind() -> None:
    serving = VersionAdmission(hold_s=1)
    serving.switch(0, None)
    async with serving.use():
        waiting = asyncio.create_task(serving.drained(0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert serving.users(0) == 0
