"""The present code opens a data folder that the code at commit d71d323 wrote, and reads the same state from it.

`tests/data/make_data_folder.py` made `tests/data/data_folder_d71d323.tar.xz` with the code of that commit. The archive
has a tiny random base, a ledger with turns in every state and five versions, and the adapters and optimizer states of a
real learner. `expected.json` has the figures that the old code read. The server was killed: a request was running, a
lease was live, and the ledger's log was not yet in its file.
"""

import asyncio
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.embedded.process import load_runner
from openclaw_rl.engines.embedded.scheduler import Scheduler
from openclaw_rl.engines.embedded.wire import Limits, make_job, progress
from openclaw_rl.errors import SettingsError
from openclaw_rl.ledger import Effect, Identity, Ledger
from openclaw_rl.ledger.snapshot import Snapshot
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.models import resolve
from openclaw_rl.offline.export import export
from openclaw_rl.publishing.version_folders import refuse_other_form
from openclaw_rl.settings import EngineSettings, ModelSettings, TrainerSettings, TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Feedback, TurnState

ARCHIVE = Path(__file__).parents[1] / "data" / "data_folder_d71d323.tar.xz"
TRAINER = TrainerSettings(rank=2, alpha=8, learning_rate=1e-2, micro_batch_tokens=64, max_tokens=64)
TRAINING = TrainingSettings(batch_size=4, min_batch=2, max_wait_s=100, max_staleness=8, lease_s=900)
FLOAT32 = {"rel": 1e-4, "abs": 1e-5}
"""Of log-probs around -4: the order of float32 sums differs between machines."""


@dataclass(frozen=True, slots=True)
class Place:
    """The unpacked archive."""

    model: Path
    data: DataDir
    expected: dict[str, Any]

    @property
    def lease_file(self) -> dict[str, Any]:
        left: dict[str, Any] = json.loads((self.data.root / "trainer.lease.json").read_text())
        return left

    @asynccontextmanager
    async def ledger(self) -> AsyncIterator[Ledger]:
        identity = Identity(self.expected["base_hash"], "tokens", "tiny")
        now = self.expected["now"]
        opened = await Ledger.open(self.data.ledger, identity=identity, training=TRAINING, clock=lambda: now)
        try:
            yield opened
        finally:
            await opened.aclose()

    def learner(self) -> LocalLearner:
        policy = LoraPolicy(LlamaForCausalLM.from_pretrained(self.model), TRAINER)
        return LocalLearner(policy, METHOD, TRAINER, BinarySettings(), base_hash=self.expected["base_hash"])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    torch.set_num_threads(1)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return Place(
        tmp_path / "model", DataDir.of(tmp_path / "data"), json.loads((tmp_path / "expected.json").read_text())
    )


async def test_turns_versions_and_counts_are_what_they_were(place: Place) -> None:
    expected = place.expected
    async with place.ledger() as ledger:
        assert await ledger.audit(is_deep=True) == []
        states = {
            turn.turn_id: turn.state if turn.reason is None else f"{turn.state}.{turn.reason}"
            for turn in await ledger.turns(limit=1000)
        }
        assert states == expected["states"]
        by_the_restart = {"running": 0, "abandoned": 2, "abandoned.interrupted": 1}
        counts = expected["counts"] | by_the_restart | {"practice": 0, "episodes": 0, "groups": 0}
        assert await ledger.counts() == counts
        assert {str(v.weight_version): v.state for v in await ledger.versions()} == expected["versions"]
        assert (await ledger.tip()).weight_version == expected["tip"]
        assert await ledger.serving_version() == expected["serving"]
        lease = await ledger.leased(place.lease_file["fence"])
        assert [sample.sample_id for sample in lease.samples] == expected["leased"]


async def test_settings_that_give_its_adapters_another_meaning_are_refused(place: Place) -> None:
    async with place.ledger() as ledger:
        await refuse_other_form(ledger, place.data.root, TRAINER)
        for changed in ({"rank": 4}, {"alpha": 16.0}, {"target_modules": ("q_proj",)}):
            other = TrainerSettings.model_validate(TRAINER.model_dump(exclude_unset=True) | changed)
            with pytest.raises(SettingsError, match=f"trainer.{next(iter(changed))}"):
                await refuse_other_form(ledger, place.data.root, other)


async def test_a_rollback_and_feedback_work_on_it(place: Place) -> None:
    async with place.ledger() as ledger:
        (late,) = [turn for turn in await ledger.turns(limit=1000, state=TurnState.TRAINED) if turn.feedback == -1.0]
        said = Feedback("new", "turn-25", place.expected["now"], -1.0)
        assert (await ledger.record_feedback(said, user="ann")).effect is Effect.RESCORED
        assert (await ledger.rollback(1, requeue=True)).weight_version == 1
        record = await ledger.turn(late.turn_id)
        assert record is not None
        assert record.state is TurnState.TRAINED  # in version 1, which lives
        assert (await ledger.tip()).needs_fresh_moments  # its optimizer state was pruned
        assert await ledger.audit(is_deep=True) == []


async def test_the_learner_steps_on_from_its_checkpoint_as_the_old_code_did(place: Place) -> None:
    """The trainer comes back under its name: it gets the samples that it held, and takes the step it was killed in."""
    learner = place.learner()
    async with place.ledger() as ledger:
        lease = await ledger.lease(trainer="local@host", n=3, now=True)
        assert lease is not None
        assert lease.fence == place.lease_file["fence"] + 1
        assert [sample.sample_id for sample in lease.samples] == place.expected["leased"]
        tip = await ledger.tip()
        assert tip.folder is not None
        assert not tip.needs_fresh_moments
        for folder in (await ledger.version_folders()).values():
            checkpoint.verify(place.data.root / folder)
        learner.load(place.data.root / tip.folder, fresh_moments=False)
        step = learner.step(lease.samples, lambda: None)
        assert isinstance(step, Step)
        old = place.expected["next_step"]
        # Positions that are computed cost time, and change no weight: beginnings that rows share are computed once now.
        told = {name: value for name, value in old["metrics"].items() if name != "computed_tokens"}
        assert step.metrics["computed_tokens"] <= old["metrics"]["computed_tokens"]
        metrics = {name: value for name, value in step.metrics.items() if name in told}
        assert metrics == pytest.approx(told, **FLOAT32)
        assert len(step.probes) == len(old["probes"])
        for probe, before in zip(step.probes, old["probes"], strict=True):
            assert (probe.prompt_ids, probe.response_ids) == (before["prompt_ids"], before["response_ids"])
            assert probe.parent_log_probs == pytest.approx(before["parent_log_probs"], **FLOAT32)
            assert probe.log_probs == pytest.approx(before["log_probs"], **FLOAT32)
        folder = checkpoint.write(place.data.versions, lease.lease_id, lambda folder: str(learner.write(folder)))
        manifest = Manifest(
            folder=f"versions/{folder.name}",
            kind=learner.kind,
            base_hash=learner.base_hash,
            sha256=checkpoint.sha256(folder / "adapter_model.safetensors"),
        )
        report = Report(metrics=dict(step.metrics), probes=list(step.probes))
        commit = Commit(
            lease_id=lease.lease_id, fence=lease.fence, parent=lease.parent, manifest=manifest, report=report
        )
        assert await ledger.commit(commit) == place.expected["tip"] + 1
        assert await ledger.audit(is_deep=True) == []


async def test_the_engine_serves_its_adapters_as_the_old_one_did(place: Place) -> None:
    async with place.ledger() as ledger:
        folders = {str(n): place.data.root / folder for n, folder in (await ledger.version_folders()).items()}
    assert place.expected["log_probs"].keys() == {"base", *folders}
    settings = EngineSettings(threads=1, prefill_chunk=32, cache_tokens=2048)
    runner = load_runner(place.model, ModelSettings(path=str(place.model)), settings)
    scheduler = Scheduler(runner, max_running=4, prefill_chunk=32, cache_tokens=2048)
    limits = Limits(runner.vocab_size, runner.context_length, frozenset(), None)
    prompt, reply = place.expected["prompt"], place.expected["reply"]
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(scheduler.run, asyncio.get_running_loop()))
        try:
            for name, log_probs in place.expected["log_probs"].items():
                adapter = None if name == "base" else runner.load_adapter(name, folders[name])
                request = GenerateRequest(
                    input_ids=[*prompt, *reply],
                    sampling_params=EngineSampling(max_new_tokens=0),
                    return_logprob=True,
                    logprob_start_len=len(prompt) - 1,
                )
                job = make_job(request, adapter, limits)
                scheduler.post(lambda job=job: scheduler.submit(job))  # type: ignore[misc]
                async for _ in progress(job):
                    pass
                assert job.prompt_log_probs[1:] == pytest.approx(log_probs, **FLOAT32), name
        finally:
            scheduler.stop()


def test_the_base_has_the_hash_that_the_ledger_belongs_to(place: Place, tmp_path: Path) -> None:
    """Another hash would refuse every ledger there is."""
    resolved = resolve.resolve(ModelSettings(path=str(place.model)), tmp_path / "cache")
    assert resolve.base_hash(resolved) == place.expected["base_hash"]


async def test_turns_and_feedback_are_read_by_the_command_line(place: Place, tmp_path: Path) -> None:
    async with place.ledger():
        pass  # a start brings the file to today's schema
    with Snapshot.of(place.data.ledger) as snapshot:
        records = {record.turn.turn_id: record for record in snapshot.turns()}
        demonstrations = list(snapshot.demonstrations())
        judged = list(snapshot.judged())
    assert records.keys() == place.expected["states"].keys()
    corrected = records["turn-34"]
    assert corrected.request.messages[1].content == "question 34"
    assert [(said.value, said.comment, said.demonstration) for said in corrected.feedback] == [
        (-0.5, "shorter", "a better answer")
    ]
    assert corrected.verdict is not None
    assert (corrected.verdict.value, corrected.verdict.source) == (-1, "feedback")
    assert [sample.response_ids for _, _, sample in demonstrations] == [(4, 8, 15, 16, 23, 1)]
    assert "turn-33" in {turn.turn.turn_id for turn in judged}  # a comment on a paired turn
    redacted = records["turn-29"].request
    assert redacted.messages[1].content == "my password: [redacted:password]"
    assert redacted.prompt_ids == ()
    assert export(place.data.ledger, tmp_path / "turns.jsonl", what="turns", format="jsonl") == len(records)
    rows = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert {row["turn_id"] for row in rows} == records.keys()
