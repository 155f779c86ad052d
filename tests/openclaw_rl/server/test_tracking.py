"""Trackers follow the ledger: each decided version once, in order, over restarts, rollbacks and faults."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ledger import IDENTITY, commit_of, give_sample, serve_version
from turns import make_request, make_turn
from waiting import until

from openclaw_rl.data_dir import DataDir
from openclaw_rl.ledger import Ledger
from openclaw_rl.server import tracking
from openclaw_rl.server.tracking import Tracking, facts
from openclaw_rl.settings import Settings, TrackingSettings, TrainingSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.telemetry.trackers.base import TrackedRun, Tracker
from openclaw_rl.telemetry.trackers.json_lines import JsonLines
from openclaw_rl.types import VersionState

FIGURES = {"loss": 0.25, "ref_kl": 0.01, "gap_abs": 0.5}


class Broken(Tracker):
    def start(self, run: TrackedRun) -> None:
        raise ConnectionError("no such host")

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        raise AssertionError("it never started")


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    return DataDir.prepare(tmp_path / "data")


@pytest.fixture
async def ledger(data: DataDir) -> AsyncIterator[Ledger]:
    training = TrainingSettings(batch_size=1, min_batch=1)
    opened = await Ledger.open(data.ledger, identity=IDENTITY, training=training, clock=lambda: 1000.0)
    yield opened
    await opened.aclose()


async def commit(ledger: Ledger, name: str) -> int:
    """Train one turn; return the number of the version, which the gate has not seen yet."""
    await give_sample(ledger, make_request(name), make_turn(name))
    lease = await ledger.lease(trainer="t")
    assert lease is not None
    return await ledger.commit(commit_of(lease, metrics=FIGURES))


@asynccontextmanager
async def following(ledger: Ledger, data: DataDir, health: Health, **settings: Any) -> AsyncIterator[Tracking]:
    chosen = Settings().model_copy(update={"tracking": TrackingSettings(**settings)})
    found = Tracking(ledger, health, data, chosen, model_name="tiny", clock=lambda: 1001.0, poll_s=0.001)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


def written(data: DataDir) -> list[dict[str, Any]]:
    file = data.tracking / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def test_a_version_is_sent_once_when_its_fate_is_decided(ledger: Ledger, data: DataDir) -> None:
    async with following(ledger, data, Health()) as found:
        first = await commit(ledger, "a")
        await until(lambda: found.sent == {"jsonl": 0})
        assert written(data) == []
        await ledger.record_gate(first, {"gate_kl_parent": 0.125})
        await serve_version(ledger, first)
        await until(lambda: found.sent == {"jsonl": first})
    (line,) = written(data)
    assert line == {
        "version": first,
        "at": 1000.0,
        "train/loss": 0.25,
        "train/kl_loss": 0.01,
        "train/gap_abs": 0.5,
        "gate/kl_parent": 0.125,
        "gate/refused": 0.0,
        "turns/samples": 1.0,
        "turns/practice_samples": 0.0,
        "version/lag_mean": 0.0,
    }


async def test_a_restart_neither_loses_nor_repeats_a_version(ledger: Ledger, data: DataDir) -> None:
    await serve_version(ledger, await commit(ledger, "a"))
    async with following(ledger, data, Health()) as found:
        await until(lambda: found.sent == {"jsonl": 1})
    run = (data.tracking / "run.json").read_text()
    await serve_version(ledger, await commit(ledger, "b"))
    async with following(ledger, data, Health()) as found:
        await until(lambda: found.sent == {"jsonl": 2})
    assert [line["version"] for line in written(data)] == [1, 2]
    assert (data.tracking / "run.json").read_text() == run


async def test_a_rollback_marks_the_version_once_and_deletes_no_line(ledger: Ledger, data: DataDir) -> None:
    await serve_version(ledger, await commit(ledger, "a"))
    async with following(ledger, data, Health()) as found:
        await until(lambda: found.sent == {"jsonl": 1})
        await ledger.rollback(0, requeue=False)
        await until(lambda: len(written(data)) == 2)
    async with following(ledger, data, Health()) as found:
        await serve_version(ledger, await commit(ledger, "b"))
        await until(lambda: found.sent == {"jsonl": 2})
    lines = written(data)
    assert [line["version"] for line in lines] == [1, 1, 2]
    assert (lines[1]["version/rolled_back"], "version/rolled_back" in lines[2]) == (1.0, False)


async def test_a_refused_version_is_sent_too(ledger: Ledger, data: DataDir) -> None:
    number = await commit(ledger, "a")
    await ledger.reject(number, "KL")
    async with following(ledger, data, Health()) as found:
        await until(lambda: found.sent == {"jsonl": number})
    assert written(data)[0]["gate/refused"] == 1.0


async def test_a_version_that_a_pin_holds_back_is_sent_without_the_gates_figures_in_the_end(
    ledger: Ledger, data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "DECIDED_AFTER_S", 0.5)
    number = await commit(ledger, "a")
    assert (await ledger.version(number)).state is VersionState.CANDIDATE
    async with following(ledger, data, Health()) as found:
        await until(lambda: found.sent == {"jsonl": number})


async def test_a_tracker_that_fails_is_a_problem_of_its_own_and_the_others_go_on(
    ledger: Ledger, data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"jsonl": JsonLines, "wandb": Broken}
    monkeypatch.setattr(tracking, "load_tracker", kinds.__getitem__)
    await serve_version(ledger, await commit(ledger, "a"))
    health = Health()
    async with following(ledger, data, health, trackers=("wandb",)) as found:
        await until(lambda: found.sent == {"jsonl": 1, "wandb": 0} and bool(health.problems()))
    assert health.problems() == ["tracker wandb: failed once: ConnectionError: no such host"]


async def test_samples_are_ids_and_numbers_without_a_word_of_the_chat(ledger: Ledger, data: DataDir) -> None:
    await serve_version(ledger, await commit(ledger, "turn-a"))
    async with following(ledger, data, Health(), samples=10) as found:
        await until(lambda: found.sent == {"jsonl": 1})
    (rows,) = [line["samples"] for line in written(data) if "samples" in line]
    assert [(row["turn_id"], row["verdict"], row["sampled_by"]) for row in rows] == [("turn-a", 1, 0)]
    assert set(rows[0]) == {"turn_id", "verdict", "prompt_tokens", "response_tokens", "sampled_by", "is_practice"}


async def test_an_older_copy_of_the_ledger_is_followed_from_its_end(ledger: Ledger, data: DataDir) -> None:
    data.tracking.mkdir()
    (data.tracking / "jsonl.json").write_text('{"sent": 40, "marked": [39]}')
    async with following(ledger, data, Health()) as found:
        await until(lambda: found._offered == {"jsonl": 0})
        await serve_version(ledger, await commit(ledger, "a"))
        await until(lambda: found.sent == {"jsonl": 1})
    assert [line["version"] for line in written(data)] == [1]


def test_the_facts_of_a_run_hold_no_secret_no_address_and_no_path() -> None:
    said = Settings(
        server={"admin_key": "5ecret-admin"},
        judge={"kind": "llm", "url": "http://judge.example/v1"},
        data_dir="/home/me",
    )
    told = json.dumps(facts(said, "tiny"))
    assert all(word not in told for word in ("5ecret", "judge.example", "/home"))
