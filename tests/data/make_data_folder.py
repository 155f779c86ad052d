"""Makes `data_folder_d71d323.tar.xz`: a data folder as the code at commit d71d323 wrote it, and figures read from it.

Run it in a checkout of that commit, with its environment (the module names below are that commit's):

    python make_data_folder.py data_folder_d71d323.tar.xz

The archive holds

    model/           a random Llama of 6,000 parameters: the base
    data/            the data folder: ledger, versions, keys (dummies), the lease file of a trainer that was killed
    expected.json    what d71d323 said of them: counts, states, log-probs of the engine, the next step of the learner

Replies and their log-probs come from the embedded engine with the adapter of their version; versions come from the
local learner and its checkpoints. The ledger is left as a crash leaves it: a request is running, a lease is live.
"""

import asyncio
import json
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openclaw_rl.engines.embedded.loading import load_runner
from openclaw_rl.trainers.api import LeaseBody
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines import bundled
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.embedded.runner import Runner
from openclaw_rl.engines.embedded.scheduler import Scheduler
from openclaw_rl.engines.embedded.wire import Limits, make_job, progress
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.methods.binary_rl import METHOD
from openclaw_rl.settings import EngineSettings, MethodSettings, ModelSettings, TrainerSettings, TrainingSettings
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.loop import TrainerLoop
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import (
    DropReason,
    Feedback,
    Ids,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    SideCount,
    Turn,
    TurnKey,
    Verdict,
    VersionRun,
    VersionState,
)

TRAINER = TrainerSettings(rank=2, alpha=8, learning_rate=1e-2, micro_batch_tokens=64, max_tokens=64)
TRAINING = TrainingSettings(batch_size=4, min_batch=2, max_wait_s=100, max_staleness=8, lease_s=900)
PROMPT, REPLY = (0, 5, 9, 33, 7, 21), (12, 40, 3, 3, 61, 18, 25, 1)


def make_model(folder: Path) -> None:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Clock:
    now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """The embedded engine without its process."""

    runner: Runner
    scheduler: Scheduler

    async def sample(self, prompt: Ids, length: int, folder: Path | None) -> tuple[Ids, tuple[float, ...]]:
        job = await self._run(prompt, length, folder, seed=len(prompt) + sum(prompt), start=-1)
        return tuple(job.output), tuple(job.log_probs)

    async def score(self, folder: Path | None) -> list[float]:
        job = await self._run(PROMPT + REPLY, 0, folder, seed=0, start=len(PROMPT) - 1)
        return [value for value in job.prompt_log_probs if value is not None]

    async def _run(self, ids: Ids, length: int, folder: Path | None, *, seed: int, start: int) -> Any:
        adapter = None if folder is None else self.runner.load_adapter(folder.name, folder)
        sampling = EngineSampling(max_new_tokens=length, ignore_eos=True, temperature=1.0, sampling_seed=seed)
        request = GenerateRequest(
            input_ids=list(ids), sampling_params=sampling, return_logprob=True, logprob_start_len=start
        )
        job = make_job(request, adapter, Limits(self.runner.vocab_size, self.runner.context_length, frozenset(), None))
        self.scheduler.post(lambda: self.scheduler.submit(job))
        async for _ in progress(job):
            pass
        return job


@dataclass
class Driver:
    """Walks turns through the ledger to the states that a test wants to find."""

    ledger: Ledger
    engine: Engine
    clock: Clock
    learner: LocalLearner
    loop: TrainerLoop
    data: DataDir
    count: int = 0

    async def served(
        self, *, user: str = "ann", drop: DropReason | None = None, version: int = 0, text: str = "", length: int = 5
    ) -> str:
        self.count += 1
        n, at = self.count, self.clock.now
        self.clock.now += 20
        folders = await self.ledger.version_folders()
        folder = self.data.root / folders[version] if version in folders else None
        prompt = (0, *(2 + (n * 7 + i * i) % 60 for i in range(3 + n % 4)))
        ids, log_probs = await self.engine.sample(prompt, length, folder)
        question = Message(role="user", content=text or f"question {n}")
        request = Request(
            f"request-{n}",
            Scope(user, f"session-{n % 3}" if n % 4 else None),
            at,
            (Message(role="system", content="Be brief."), question),
            tools_json=None,
            template_kwargs_json=None,
            prompt_ids=prompt,
            sampling=SamplingParams(max_new_tokens=16),
        )
        turn = Turn(
            turn_id=f"turn-{n}",
            request_id=request.request_id,
            finished_at=at + 1,
            response_ids=ids,
            rollout_log_probs=log_probs,
            loss_mask=(True,) * len(ids),
            versions=(VersionRun(version, len(ids)),),
            finish_reason="stop",
            reply=Message(role="assistant", content=f"answer {n}"),
            drop=drop,
        )
        await self.ledger.begin(request)
        await self.ledger.finish(turn, TurnKey(f"reply-{n}", f"before-{n}", f"history-{n}"))
        return turn.turn_id

    async def paired(self, *, is_tool: bool = False, **more: Any) -> str:
        turn_id = await self.served(**more)
        message = Message(role="tool", content="ok") if is_tool else Message(role="user", content="thanks")
        await self.ledger.pair(turn_id, NextState((message,)), by_request_id=f"after-{turn_id}")
        return turn_id

    async def judged(self, value: int = 1, **more: Any) -> str:
        turn_id = await self.paired(**more)
        await self.ledger.record_verdict(turn_id, Verdict(value, (value, value, None), "rules", "thanks"))
        return turn_id

    async def sampled(self, value: int = 1, **more: Any) -> str:
        turn_id = await self.judged(value, **more)
        (judged,) = [judged for judged in await self.ledger.to_score(1000) if judged.turn.turn_id == turn_id]
        turn = judged.turn
        sample = Sample(
            sample_id=turn_id,
            prompt_ids=judged.request.prompt_ids,
            response_ids=turn.response_ids,
            loss_mask=turn.loss_mask,
            rollout_log_probs=turn.rollout_log_probs,
            versions=turn.versions,
            temperature=1.0,
            is_tool_turn=judged.next_state.is_tool,
            reward=float(value),
        )
        await self.ledger.record_sample(sample)
        return turn_id

    async def step(self, version: int) -> int:
        """A batch of four, one step, one commit."""
        for value in (1, -1, 1, -1):
            await self.sampled(value, version=version)
        lease = await self.ledger.lease(trainer="local@host")
        assert lease is not None
        tip = await self.ledger.tip()
        folder = None if tip.folder is None else self.data.root / tip.folder
        self.learner.load(folder, fresh_moments=tip.needs_fresh_moments)
        step = self.learner.step(lease.samples, lambda: None)
        assert isinstance(step, Step), step
        return await self.ledger.commit(self.loop._checkpoint(LeaseBody.of(lease), step))

    async def serve(self, version: int) -> None:
        for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
            await self.ledger.set_version_state(version, state)


async def fill(driver: Driver) -> None:
    """Five versions: 1 retired, 2 serves, 3 rolled back, 4 rejected, 5 a candidate; and turns in every state."""
    ledger, data = driver.ledger, driver.data
    for version in (1, 2, 3):
        assert await driver.step(version - 1) == version
        await driver.serve(version)
    trained = (await ledger.turns(state="trained"))[-1].turn_id
    await ledger.record_feedback(Feedback("late", trained, driver.clock.now, -1.0), user="ann")
    await ledger.rollback(2, requeue=False)
    assert await driver.step(2) == 4
    await ledger.reject(4, "kl 9.0 is over 0.5")
    folder = await ledger.prune_weights(4, 3)
    assert folder is not None
    shutil.rmtree(data.root / folder)
    (data.root / (await ledger.version_folders())[1] / "optimizer.state").unlink()
    await ledger.optimizer_pruned(1)
    assert await driver.step(2) == 5

    await driver.served(version=2)
    await driver.served(version=2, user="bob")
    await driver.paired(version=2)
    await driver.judged(0, version=2)
    await driver.sampled(version=2, is_tool=True)
    for reason in (DropReason.CANCELLED, DropReason.OPTED_OUT, DropReason.MISALIGNED):
        await driver.served(version=2, drop=reason)
    await driver.served(version=2, text="my password: " + "Zq9-x41-kappa")  # redacted: its prompt ids are not kept
    await ledger.drop(await driver.served(version=2), DropReason.NO_NEXT_STATE)
    await ledger.drop(await driver.judged(0, version=2), DropReason.NEUTRAL, "0 votes")

    now = driver.clock.now
    await ledger.record_feedback(Feedback("up", await driver.served(version=2), now, 1.0), user="ann")
    await ledger.record_feedback(Feedback("hint", await driver.paired(version=2), now, None, "in verse"), user="ann")
    corrected = await driver.sampled(version=2)
    said = Feedback("better", corrected, now, -0.5, "shorter", "a better answer")
    await ledger.record_feedback(said, user="ann", demonstration=(4, 8, 15, 16, 23, 1))

    dropped = await driver.sampled(version=2)
    lease = await ledger.lease(trainer="local@host", now=True)
    assert lease is not None
    drop = {dropped: DropReason.TOO_LONG}
    await ledger.release(lease.lease_id, lease.fence, reason="out of memory", drop=drop)

    await ledger.count_side(SideCount("ann", "session-1", "title", 300, 8, 200, now))
    await ledger.count_side(SideCount("bob", None, "heartbeat", 30, 2, 200, now))
    last = Request(
        "request-abandoned",
        Scope("bob", None),
        now,
        (Message(role="user", content="stop"),),
        tools_json='[{"type":"function"}]',
        template_kwargs_json='{"enable_thinking":false}',
        prompt_ids=(0, 3),
        sampling=SamplingParams(max_new_tokens=16, stop=("END",)),
    )
    await ledger.begin(last)
    await ledger.abandon("request-abandoned", DropReason.CANCELLED, "the client hung up")

    for value in (1, -1):
        await driver.sampled(value, version=2)
    lease = await ledger.lease(trainer="local@host", n=3, now=True)  # the trainer is killed in this step
    assert lease is not None
    left = {"lease_id": lease.lease_id, "fence": lease.fence}
    (data.root / "trainer.lease.json").write_text(json.dumps(left))
    await ledger.begin(Request("request-running", last.scope, now, last.messages, None, None, (0, 3), last.sampling))


async def figures(driver: Driver, base_hash: str) -> dict[str, Any]:
    ledger, data = driver.ledger, driver.data
    folders = {number: data.root / folder for number, folder in (await ledger.version_folders()).items()}
    tip = await ledger.tip()
    # The step that the killed trainer was in, from the tip's checkpoint.
    fence = json.loads((data.root / "trainer.lease.json").read_text())["fence"]
    lease = await ledger.leased(fence)
    driver.learner.load(data.root / str(tip.folder), fresh_moments=tip.needs_fresh_moments)
    step = driver.learner.step(lease.samples, lambda: None)
    assert isinstance(step, Step)
    return {
        "now": driver.clock.now,
        "base_hash": base_hash,
        "counts": await ledger.counts(),
        "states": {
            turn.turn_id: turn.state if turn.reason is None else f"{turn.state}.{turn.reason}"
            for turn in await ledger.turns(limit=1000)
        },
        "versions": {str(v.weight_version): v.state for v in await ledger.versions()},
        "tip": tip.weight_version,
        "serving": await ledger.serving_version(),
        "leased": [sample.sample_id for sample in lease.samples],
        "prompt": PROMPT,
        "reply": REPLY,
        "log_probs": {
            "base": await driver.engine.score(None),
            **{str(number): await driver.engine.score(folder) for number, folder in folders.items()},
        },
        "next_step": {
            "metrics": {name: value for name, value in step.metrics.items() if not name.endswith("_s")},
            "probes": [probe.model_dump() for probe in step.probes],
        },
    }


async def make(root: Path) -> dict[str, Any]:
    make_model(root / "model")
    data = DataDir.prepare(root / "data")
    (data.keys / "admin.key").write_text("dummy-admin-key")
    (data.keys / "trainer.token").write_text("dummy-trainer-token")
    base_hash = bundled.base_hash(bundled.resolve(ModelSettings(path=str(root / "model")), root / "cache"))
    clock = Clock()
    policy = LoraPolicy(LlamaForCausalLM.from_pretrained(root / "model"), TRAINER)
    learner = LocalLearner(policy, METHOD, TRAINER, MethodSettings(), base_hash=base_hash)
    client: Any = None  # the loop is only asked for its checkpoint
    loop = TrainerLoop(client, learner, data.root, name="local@host", stop=threading.Event())
    settings = EngineSettings(threads=1, prefill_chunk=32, cache_tokens=2048)
    runner = load_runner(root / "model", ModelSettings(path=str(root / "model")), settings)
    scheduler = Scheduler(runner, max_running=4, prefill_chunk=32, cache_tokens=2048)
    ledger = await Ledger.open(
        data.ledger, identity=Identity(base_hash, "tokens", "tiny"), training=TRAINING, clock=clock
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(scheduler.run, asyncio.get_running_loop()))
        driver = Driver(ledger, Engine(runner, scheduler), clock, learner, loop, data)
        try:
            await fill(driver)
            assert await ledger.audit(is_deep=True) == []
            return await figures(driver, base_hash)
        finally:
            scheduler.stop()
            await ledger.aclose()


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        expected = asyncio.run(make(root))
        (root / "expected.json").write_text(json.dumps(expected, indent=1))
        with tarfile.open(arguments[0], "w:xz", preset=9) as archive:
            for name in ("model", "data", "expected.json"):
                archive.add(root / name, name, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(entry.name).name in ("cache", "ledger.sqlite3.lock", "ledger.sqlite3-shm"):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 1_790_000_000
    return entry


if __name__ == "__main__":
    main(sys.argv[1:])
