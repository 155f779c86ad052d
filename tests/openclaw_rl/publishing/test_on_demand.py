"""Policies of users on one engine with few places: each is answered by its own weights, in any order of calls.

`household` tells what is real.
"""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from household import ANN, BOB, household
from publishing import until

from openclaw_rl.engines.admission import Closed
from openclaw_rl.errors import LedgerError, RequestError
from openclaw_rl.publishing import engine_adapters
from openclaw_rl.trainers.checkpoint import EMA_FOLDER
from openclaw_rl.types import SHARED_POLICY, VersionState


async def test_a_new_user_is_answered_by_the_base_under_a_version_of_its_own(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        ann, bob = await house.chat(ANN), await house.chat(BOB)
        assert (await house.ledger.version(ann)).is_base
        assert len({0, ann, bob}) == 3
        salts = [call.extra_key for call in house.engine.calls]
        assert len(set(salts)) == 2
        assert [call.lora_path for call in house.engine.calls] == [None, None]


async def test_what_one_user_taught_answers_that_user_alone(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        ann, bob = await house.chat(ANN), await house.chat(BOB, samples=False)
        trained = await house.trained()
        await house.decided()
        assert trained[0] == ANN
        assert await house.chat(ANN) == trained[1] > ann
        assert await house.chat(BOB, samples=False) == bob
        assert await house.ledger.serving_version() == 0


async def test_after_a_restart_a_version_is_compared_with_the_base_that_no_request_has_named(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)  # by the root of the policy, which is the base
        await house.trained()
        await house.decided()
        await house.chat(ANN)
    async with household(tmp_path, places=2) as house:
        trained = await house.trained()
        await house.decided()
        assert await house.chat(ANN, samples=False) == trained[1]
        assert not house.serving.is_closed_for(Closed.ENGINE)


async def test_a_version_that_waits_for_room_is_published_when_a_reply_ends(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        of_ann = await house.trained()
        await house.decided()
        others = [f"user:{name}" for name in ("bob", "eve", "kim")]
        for policy in others:
            await house.chat(policy)
            await house.trained()
            await house.decided()
        await house.chat(ANN)
        async with AsyncExitStack() as stack:
            for policy in others:
                version = await house.ledger.target(policy)
                stack.enter_context(house.serving.held(version.weight_version))  # as a reply does; its end wakes nobody
                await house.policy.adapters.load(version)
            newer = await house.trained()
            assert newer[0] == ANN

            async def waits() -> bool:
                return house.publisher._waits_since is not None

            await until(waits)
            assert (await house.ledger.version(newer[1])).state is VersionState.CANDIDATE
        await house.decided()
        assert await house.chat(ANN, samples=False) == newer[1] > of_ann[1]


async def test_an_ema_teacher_comes_and_leaves_with_its_version_and_is_its_own_users(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        numbers = {}
        for policy in (ANN, BOB, "user:eve", "user:kim", "user:lee"):
            await house.chat(policy)
            numbers[policy] = (await house.trained(has_ema=True))[1]
            await house.decided()
        for policy in (*numbers, ANN, BOB):
            await house.chat(policy, samples=False)
            async with house.serving.use(policy=policy) as use:
                name = f"ema-v{numbers[policy]}"
                folder = (await house.ledger.version(numbers[policy])).folder
                assert use.ema_path == name
                assert house.engine.folders[name] == str(tmp_path / str(folder) / EMA_FOLDER)
            names = {name.partition("-")[2] for name in house.engine.adapters if name.startswith("ema-")}
            assert names == {name.partition("-")[2] for name in house.engine.held}, "no teacher stays behind"


async def test_people_who_chat_without_a_pause_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of two users a reply runs at any time, and the engine has two places: the third one's turn comes too."""
    monkeypatch.setattr(engine_adapters, "PATIENCE_S", 0.05)
    async with household(tmp_path, places=2) as house:
        numbers = {}
        for policy in (ANN, BOB, "user:eve"):
            await house.chat(policy)
            numbers[policy] = (await house.trained())[1]
            await house.decided()
        is_over = asyncio.Event()
        running: Counter[str] = Counter()
        begun: set[str] = set()

        async def keep_chatting(policy: str) -> None:
            while not is_over.is_set():
                async with house.serving.use(policy=policy) as use:
                    assert use.weight_version == numbers[policy]
                    running[policy] += 1
                    begun.add(policy)
                    # It ends once the other one of the user runs, or would run if its adapter were there.
                    while running[policy] == 1 and house.on_demand.holds(numbers[policy]) and not is_over.is_set():
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(0.002)
                    running[policy] -= 1

        async with asyncio.TaskGroup() as tasks:
            for policy in (ANN, BOB, ANN, BOB):
                tasks.create_task(keep_chatting(policy))

            async def all_chat() -> bool:
                return begun == {ANN, BOB}

            await until(all_chat)
            for _ in range(3):
                assert await house.chat("user:eve", samples=False) == numbers["user:eve"]
            is_over.set()
        assert [await house.chat(policy, samples=False) for policy in (ANN, BOB)] == [numbers[ANN], numbers[BOB]]


async def test_a_pin_is_refused_at_once_where_every_place_has_a_reply(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        numbers = {}
        for policy in (ANN, BOB, "user:eve", "user:kim", "user:lee"):
            await house.chat(policy)
            numbers[policy] = (await house.trained())[1]
            await house.decided()
        root = await house.ledger.root(ANN)
        await house.publisher.pin(root.weight_version, ANN)
        async with AsyncExitStack() as stack:
            for policy in (BOB, "user:eve", "user:kim", "user:lee"):
                await stack.enter_async_context(house.publisher.lend(numbers[policy]))
            with pytest.raises(LedgerError, match="has room for"):
                await house.publisher.pin(numbers[ANN], ANN)
        assert await house.ledger.pinned(ANN) == root.weight_version
        await house.publisher.pin(numbers[ANN], ANN)
        assert await house.chat(ANN, samples=False) == numbers[ANN]


async def test_a_rejected_version_of_one_user_changes_no_other(tmp_path: Path) -> None:
    async with household(tmp_path, places=3) as house:
        await house.chat(BOB)
        of_bob = await house.trained()
        await house.decided()
        ann = await house.chat(ANN)
        for _ in range(3):
            await house.chat(ANN)
            refused = await house.trained(probe_error=2.0)
            assert refused[0] == ANN
            await house.decided()
            assert (await house.ledger.version(refused[1])).state is VersionState.REJECTED

        async def is_paused() -> bool:
            return not await house.ledger.learning(ANN)

        await until(is_paused)
        assert [await house.ledger.learning(policy) for policy in (SHARED_POLICY, BOB)] == [True, True]
        assert [await house.chat(policy, samples=False) for policy in (ANN, BOB)] == [ann, of_bob[1]]


async def test_the_least_recently_used_adapter_leaves_and_comes_back(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        versions = {}
        for policy in (ANN, BOB, "user:eve", "user:kim", "user:lee", "user:max", "user:ned"):
            await house.chat(policy)
            versions[policy] = (await house.trained())[1]
            await house.decided()
        for policy in (ANN, BOB, ANN, "user:eve"):
            assert await house.chat(policy, samples=False) == versions[policy]
        assert set(house.engine.adapters) == {f"policy-v{versions[policy]}" for policy in (ANN, "user:eve")}
        loads = house.engine.loads
        await asyncio.gather(*(house.chat(BOB, samples=False) for _ in range(8)))
        assert house.engine.loads == loads + 1, "requests of one policy share a load"


async def test_a_chat_waits_for_a_place_and_no_running_one_loses_its_own(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        users = [f"user:u{number}" for number in range(6)]
        for policy in users:
            await house.chat(policy)
            await house.trained()
            await house.decided()
        await asyncio.gather(*(house.chat(policy, tokens=40, samples=False) for policy in users * 4))
        assert {version for _, version in house.replies[-24:]} == set(
            [await house.ledger.serving_version(policy) for policy in users]
        )


async def test_people_who_chat_all_the_time_do_not_keep_a_version_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_adapters, "PATIENCE_S", 3600.0)  # no version leaves for the one that waits
    async with household(tmp_path, places=2) as house:
        taught = {}
        for policy in ("user:eve", "user:kim", "user:lee", "user:max", ANN, BOB):
            await house.chat(policy)
            taught[policy] = (await house.trained())[1]
            await house.decided()
        async with house.serving.use(policy=ANN), house.serving.use(policy=BOB):  # both places, without an end
            waiting = asyncio.create_task(house.chat("user:eve"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await house.chat(ANN)
            assert (await house.trained())[0] == ANN
            await house.decided()
            assert await house.chat(ANN, samples=False) > taught[ANN]
        assert await waiting == taught["user:eve"]


async def test_weights_that_cannot_be_loaded_are_no_reason_to_answer_with_others(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        trained = await house.trained()
        await house.decided()
        for policy in (BOB, "user:eve", "user:kim", "user:lee", "user:max"):
            await house.chat(policy)
            await house.trained()
            await house.decided()
        folder = (await house.ledger.version(trained[1])).folder
        assert folder is not None
        gone = house.folder / "elsewhere"
        (house.folder / folder).rename(gone)
        with pytest.raises(RequestError, match="weights of your policy cannot be loaded") as refused:
            await house.chat(ANN)
        assert (refused.value.status, refused.value.code) == (503, "policy_unavailable")
        assert house.health.is_failing("adapters")
        gone.rename(house.folder / folder)
        assert await house.chat(ANN) == trained[1]
        assert not house.health.is_failing("adapters")


async def test_a_policy_starts_at_what_the_shared_one_serves(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(SHARED_POLICY)
        shared = await house.trained()
        await house.decided()
        house.start_at = await house.ledger.serving_version()
        root = await house.ledger.version(await house.chat(ANN))
        assert (root.same_weights_as, root.folder) == (shared[1], (await house.ledger.version(shared[1])).folder)
        trained = await house.trained()
        await house.decided()
        assert await house.chat(ANN) == trained[1]
        assert await house.chat(SHARED_POLICY) == shared[1]


@pytest.mark.parametrize("seed", range(3))
async def test_users_in_any_order_are_answered_by_their_own_weights_alone(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    users = [SHARED_POLICY, ANN, BOB, "user:eve", "user:kim"]
    async with household(tmp_path, places=3) as house:
        running: set[asyncio.Task[int]] = set()
        for _ in range(60):
            match dice.choice(("chat",) * 6 + ("step",) * 3 + ("refuse", "back", "crash")):
                case "chat":
                    policy, tokens = dice.choice(users), dice.choice((1, 4, 60))
                    running.add(asyncio.create_task(house.chat(policy, tokens=tokens)))
                case "step":
                    await house.step()
                case "refuse":
                    await house.step(probe_error=2.0)
                case "back":
                    policy = dice.choice(await house.ledger.policies())
                    if not await house.ledger.unfinished_versions():
                        await house.ledger.rollback((await house.ledger.root(policy)).weight_version, requeue=False)
                        await house.publisher.follow()
                case "crash":
                    await asyncio.gather(*running)  # a cut reply is the proxy's to resume
                    await house.decided()
                    house.serving.hold()
                    house.engine.go_down()
                    house.engine.come_up()
                    await house.publisher.restore()
                    house.serving.release_hold()
            await asyncio.sleep(dice.choice((0, 0, 0.002)))
            await house.ledger.set_learning(True)
        await asyncio.gather(*running)
        await house.decided()
        for policy in users:
            assert await house.chat(policy, samples=False) == await house.ledger.serving_version(policy)


async def test_a_user_whom_the_base_answers_waits_for_no_load_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_adapters, "PATIENCE_S", 600.0)
    async with household(tmp_path, places=1) as house:
        for policy in (ANN, BOB):
            await house.chat(policy)
            await house.trained()
            await house.decided()
        async with house.serving.use(policy=ANN):  # the only place, until this reply ends
            await house.policy.adapters.unload(await house.ledger.serving_version(BOB))  # left there by its publication
            waits = asyncio.create_task(house.chat(BOB, samples=False))

            async def is_waiting() -> bool:
                return bool(house.on_demand._loads)

            await until(is_waiting)
            assert (await house.ledger.version(await house.chat("user:new", samples=False))).is_base
            assert not waits.done()
        await waits


async def test_a_version_that_a_publication_kept_is_asked_to_leave_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to make room for a request, and a load of the publication withdrew that."""
    monkeypatch.setattr(engine_adapters, "PATIENCE_S", 0.0)
    monkeypatch.setattr(engine_adapters, "_LOOK_S", 0.01)
    async with household(tmp_path, places=1) as house:
        for policy in (ANN, BOB):
            await house.chat(policy)
            await house.trained()
            await house.decided()
        adapters = house.policy.adapters
        async with house.serving.use(policy=ANN) as use:
            await adapters.unload(await house.ledger.serving_version(BOB))
            waits = asyncio.create_task(house.chat(BOB, samples=False))
            number = use.weight_version

            async def leaves() -> bool:
                return not house.on_demand.holds(number)

            await until(leaves)
            await adapters.load(await house.ledger.version(number))
            await until(leaves)
            assert not waits.done()
        await waits
