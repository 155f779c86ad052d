"""Policies of users on one engine with few places: each is answered by its own weights, in any order of calls.

The engine is a fake, and so are the weights: the log-prob of a token shows the adapter that sampled it. The ledger, the
publisher, the admission and the loader are real.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ledger import commit_of, give_sample, probe_of
from publishing import until
from turns import make_request, make_turn

from openclaw_rl.engines.admission import Closed, VersionAdmission
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.errors import CommitRefused, EngineRefused, LedgerError, RequestError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.publishing import engine_adapters, version_folders
from openclaw_rl.publishing.engine_adapters import BESIDE
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.on_demand import OnDemand
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.privacy import Forgetting
from openclaw_rl.sessions.store import Sessions
from openclaw_rl.settings import PublisherSettings, TrainingSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Pacing
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.trainers.checkpoint import EMA_FOLDER
from openclaw_rl.types import SHARED_POLICY, Scope, Version, VersionRun, VersionState

PROMPT = (1, 5, 9)
ANN, BOB = "user:ann", "user:bob"


class SmallEngine(FakeEngine):
    """Refuses an adapter beyond its places; an EMA teacher needs none."""

    def __init__(self, places: int) -> None:
        super().__init__(pacing=Pacing(tokens_per_s=2000))
        self.places, self.most_held, self.loads = places, 0, 0

    async def load_adapter(self, name: str, folder: Path) -> None:
        if not name.startswith("ema-") and len(self.held) >= self.places:
            raise EngineRefused("there is no place for another adapter", status=400)
        await super().load_adapter(name, folder)
        self.loads += 1
        self.most_held = max(self.most_held, len(self.held))

    @property
    def held(self) -> list[str]:
        return [name for name in self.adapters if not name.startswith("ema-")]


class Household:
    """Users, their policies, and an engine with few places."""

    def __init__(self, ledger: Ledger, folder: Path, *, places: int, hold_s: float = 60.0) -> None:
        self.ledger, self.folder, self.engine = ledger, folder, SmallEngine(places + BESIDE)
        self.serving, self.health = VersionAdmission(hold_s), Health()
        settings = PublisherSettings(max_step_kl=5, max_base_kl=5, prewarm_sessions=1)
        self.policy = PolicyEngine(
            self.engine, self.serving, settings, folder, health=self.health, most_adapters=places
        )
        self.publisher = Publisher(ledger, self.policy, settings, health=self.health)
        self.on_demand = OnDemand(ledger, self.policy, start=self.start, health=self.health)
        self.serving.loader = self.on_demand
        self.start_at, self.count = 0, 0
        self.replies: list[tuple[str, int]] = []
        """Policy and version of each reply."""

    async def start(self) -> int:
        return self.start_at

    async def chat(self, policy: str, *, tokens: int = 4, samples: bool = True) -> int:
        """Answer a chat; check that its tokens are the user's own version's. Return the version."""
        self.count += 1
        name = f"{policy}-{self.count}"
        async with self.serving.use(policy=policy) as use:
            version = await self.ledger.version(use.weight_version)
            assert (version.policy, use.policy) == (policy, policy)
            seed = BASE_SEED if version.folder is None else adapter_seed(self.folder / version.folder)
            request = GenerateRequest(
                input_ids=list(PROMPT),
                sampling_params=EngineSampling(max_new_tokens=tokens, ignore_eos=True),
                stream=True,
                return_logprob=True,
                lora_path=use.lora_path,
                extra_key=use.cache_of(policy.removeprefix("user:")),
            )
            ids: list[int] = []
            log_probs: list[float] = []
            async with aclosing(self.engine.stream(request)) as events:
                async for event in events:
                    ids += event.output_ids
                    log_probs += [entry[0] or 0.0 for entry in event.meta_info.output_token_logprobs or []]
        own = self.engine.policy.log_probs((*PROMPT, *ids), len(PROMPT), seed)
        assert log_probs == list(own), f"{policy}: another's weights answered"
        self.replies.append((policy, use.weight_version))
        if samples:
            request_row = replace(
                make_request(name, prompt=PROMPT), scope=Scope(policy.removeprefix("user:"), name, policy)
            )
            runs = (VersionRun(use.weight_version, len(ids)),)
            turn = make_turn(name, ids=tuple(ids), log_probs=tuple(log_probs), runs=runs)
            await give_sample(self.ledger, request_row, turn)
        return use.weight_version

    async def step(self, *, probe_error: float = 0.0, has_ema: bool = False) -> tuple[str, int] | None:
        """Train one batch; return its policy and version. None: no sample waits."""
        lease = await self.ledger.lease(trainer="test", now=True)
        if lease is None:
            return None
        assert {run.weight_version for sample in lease.samples for run in sample.versions} <= {
            version.weight_version for version in await self.ledger.versions() if version.policy == lease.policy
        }
        folder = self.folder / "versions" / lease.lease_id
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(lease.lease_id.encode())
        if has_ema:
            (folder / EMA_FOLDER).mkdir()
            (folder / EMA_FOLDER / "adapter_model.safetensors").write_bytes(f"mean of {lease.lease_id}".encode())
        ids = lease.samples[0].response_ids
        true = self.engine.policy.log_probs((*PROMPT, *ids), len(PROMPT), adapter_seed(folder))
        probes = [probe_of(PROMPT, ids, true, error=probe_error, parent_error=0.01)]
        number = await self.ledger.commit(commit_of(lease, probes=probes))
        self.publisher.wake()
        return lease.policy, number

    async def trained(self, *, probe_error: float = 0.0, has_ema: bool = False) -> tuple[str, int]:
        """Train one batch, which waits; return its policy and version."""
        made = await self.step(probe_error=probe_error, has_ema=has_ema)
        assert made is not None
        return made

    async def decided(self) -> None:
        """Wait until the publisher has decided on every version."""

        async def all_are() -> bool:
            return not await self.ledger.unfinished_versions()

        await until(all_are)


@asynccontextmanager
async def household(folder: Path, *, places: int, hold_s: float = 60.0) -> AsyncIterator[Household]:
    training = TrainingSettings(min_batch=1, batch_size=4)
    ledger = await Ledger.open(
        folder / "ledger.sqlite3", identity=Identity("base", "tokenizer", "tiny"), training=training
    )
    house = Household(ledger, folder, places=places, hold_s=hold_s)
    await house.publisher.restore()
    tasks = [asyncio.create_task(house.publisher.run()), asyncio.create_task(house.on_demand.run())]
    try:
        yield house
        for task in tasks:
            assert not task.done(), task
        assert house.engine.most_held <= places + BESIDE
        assert await ledger.audit(is_deep=True) == []
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await ledger.aclose()


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
        await until(partial(_is_used, house, of_ann))
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
        await until(partial(_has_left, house, of_ann))
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
        await until(partial(_has_left, house, of_ann))
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


async def _is_used(house: Household, number: int) -> bool:
    return bool(house.serving.users(number))


async def _has_left(house: Household, number: int) -> bool:
    return f"policy-v{number}" not in house.engine.adapters


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
