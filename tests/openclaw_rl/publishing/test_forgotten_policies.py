"""A user who is forgotten: the policy leaves no weights that serve, whatever runs meanwhile (`household`)."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from household import ANN, BOB, has_left, household, is_used
from ledger import commit_of
from publishing import until

from openclaw_rl.errors import CommitRefused, LedgerError, RequestError
from openclaw_rl.publishing import version_folders
from openclaw_rl.server.privacy import Forgetting
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.types import SHARED_POLICY, Version


async def test_a_forgotten_user_leaves_no_weights_and_begins_anew(tmp_path: Path) -> None:
    async with household(tmp_path, places=3) as house:
        for policy in (ANN, BOB, ANN):
            await house.chat(policy)
            trained = await house.trained()
            await house.decided()
        of_ann, of_bob = trained[1], await house.ledger.serving_version(BOB)
        assert of_ann == await house.ledger.serving_version(ANN)
        await house.chat(ANN)  # its sample waits, and a trainer has it
        lease = await house.ledger.lease(trainer="test", now=True)
        assert lease is not None
        running = asyncio.create_task(house.chat(ANN, tokens=60, samples=False))
        await until(partial(is_used, house, of_ann))
        forgotten = await house.ledger.forget_user("ann")
        await house.publisher.remove(ANN, forgotten.removed)
        assert of_ann in forgotten.removed
        assert (forgotten.trained_in, forgotten.turns) == ((), 3), "nothing is to be rebuilt"
        await running  # a reply that ran ends under its own weights
        with pytest.raises(CommitRefused):
            await house.ledger.commit(commit_of(lease))
        assert await house.ledger.policies() == [SHARED_POLICY, BOB]
        await version_folders.remove_ended(house.ledger, tmp_path / "versions")
        kept = {folder for number, folder in (await house.ledger.version_folders()).items()}
        assert {f"versions/{folder.name}" for folder in (tmp_path / "versions").iterdir()} == kept
        assert b"user:ann" not in (tmp_path / "ledger.sqlite3").read_bytes()
        await until(partial(has_left, house, of_ann))
        anew = await house.ledger.version(await house.chat(ANN))
        assert anew.is_base
        assert anew.weight_version > of_ann
        assert await house.chat(BOB, samples=False) == of_bob
        again = await house.trained()
        await house.decided()
        assert (await house.chat(ANN), await house.chat(BOB)) == (again[1], of_bob)


async def test_work_that_no_user_waits_for_does_not_open_a_policy_anew(tmp_path: Path) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        forgotten = await house.ledger.forget_user("ann")
        await house.publisher.remove(ANN, forgotten.removed)
        with pytest.raises(RequestError, match="there is no policy 'user:ann'"):
            async with house.serving.use(policy=ANN, opens=False):
                pass
        assert await house.ledger.policies() == [SHARED_POLICY]
        await house.chat(ANN)


async def test_a_policy_that_is_removed_while_its_version_is_published_does_not_serve_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        prewarm = house.publisher._publication._prewarm
        removals: list[asyncio.Task[None]] = []

        async def is_removed() -> bool:
            return bool(removals) and removals[0].done()

        async def removed_meanwhile(version: Version) -> None:
            await prewarm(version)
            if not removals:
                forgotten = await house.ledger.forget_user("ann")
                removals.append(asyncio.create_task(house.publisher.remove(ANN, forgotten.removed)))
                await asyncio.sleep(0)  # it has closed the policy, and waits for the publication

        monkeypatch.setattr(house.publisher._publication, "_prewarm", removed_meanwhile)
        of_ann = (await house.trained())[1]
        await until(is_removed)
        assert ANN not in house.serving.currents
        await until(partial(has_left, house, of_ann))
        assert await house.chat(ANN) > of_ann


async def test_a_forgetting_that_fails_late_leaves_no_policy_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def disk_fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    async def forget_deleted() -> None: ...

    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        sessions = cast(Sessions, SimpleNamespace(forget_deleted=forget_deleted))
        monkeypatch.setattr(version_folders, "remove_ended", disk_fails)
        with pytest.raises(OSError, match="Input/output"):
            await Forgetting(house.ledger, sessions, house.publisher, tmp_path).user("ann")
        assert ANN not in house.serving.currents
        with pytest.raises(LedgerError, match="no user"):  # a second one finds nothing to do
            await house.ledger.forget_user("ann")


async def test_a_dead_version_that_was_switched_in_is_closed(tmp_path: Path) -> None:
    """As a load that waited for room while its user was forgotten would leave it."""
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        dead = await house.ledger.target(ANN)
        forgotten = await house.ledger.forget_user("ann")
        await house.publisher.remove(ANN, forgotten.removed)
        house.policy.switch(dead)
        await house.publisher.follow()
        assert ANN not in house.serving.currents


async def test_a_load_whose_user_is_forgotten_meanwhile_leaves_nothing_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with household(tmp_path, places=2) as house:
        await house.chat(ANN)
        house.serving.close_policy(ANN)  # as after a restart
        load = house.policy.adapters.load

        async def forgotten_meanwhile(version: Version, *, on_demand: bool = False) -> None:
            await load(version, on_demand=on_demand)
            forgotten = await house.ledger.forget_user("ann")
            await house.publisher.remove(ANN, forgotten.removed)

        monkeypatch.setattr(house.policy.adapters, "load", forgotten_meanwhile)
        with pytest.raises(RequestError, match="your policy cannot be read now"):
            await house.on_demand.bring(ANN, None, opens=True)
        assert ANN not in house.serving.currents
