"""The kill check: feedback at stake and its fate in a real ledger, the recovery of a process, and its findings."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from turns import make_request, make_turn, serve_turn

from gpu import node_feedback, node_kills, node_processes, node_script
from gpu.host import NodeHost
from gpu.node_script import Script
from openclaw_opd.hint_judge import parse_hint
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.types import DropReason, NextState, Sample, Verdict

Clock = list[float]


@pytest.fixture
def now() -> Clock:
    return [1000.0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite3"


@pytest.fixture
async def ledger(file: Path, now: Clock) -> AsyncIterator[Ledger]:
    training = TrainingSettings(batch_size=2, min_batch=1)
    opened = await Ledger.open(
        file, identity=Identity("base", "tokenizer", "tiny"), training=training, clock=lambda: now[0]
    )
    yield opened
    await opened.aclose()


async def sampled(ledger: Ledger, name: str, *, drop: DropReason | None = None) -> None:
    request, turn = make_request(f"r-{name}"), make_turn(name, request=f"r-{name}", drop=drop)
    await serve_turn(ledger, request, turn)
    if drop is not None:
        return
    await ledger.pair(name, NextState((Message(role="user", content="no"),)), by_request_id=f"after-{name}")
    await ledger.record_verdict(name, Verdict(-1, (-1,), "llm", "no"))
    ids = {"prompt_ids": request.prompt_ids, "response_ids": turn.response_ids, "loss_mask": turn.loss_mask}
    row = Sample(
        name, **ids, rollout_log_probs=turn.rollout_log_probs, versions=turn.versions, temperature=1, reward=-1
    )
    await ledger.record_sample(row)


async def step(ledger: Ledger, *, durable: bool) -> int:
    lease = await ledger.lease(trainer="driver", now=True)
    assert lease is not None
    manifest = Manifest(
        folder=f"versions/full-{lease.fence}", kind=(await ledger.tip()).kind, base_hash="base", sha256="",
        weights_file="model.safetensors",
    )  # fmt: skip
    commit = Commit(
        lease_id=lease.lease_id, fence=lease.fence, parent=lease.parent, manifest=manifest, report=Report(metrics={}),
        durable=False, drop={},
    )  # fmt: skip
    version = await ledger.commit(commit)
    if durable:
        await ledger.durable(version)
    return version


async def test_feedback_after_the_checkpoint_is_at_stake_and_waits_after_the_crash(
    ledger: Ledger, file: Path, now: Clock
) -> None:
    await sampled(ledger, "on-disk")
    assert await step(ledger, durable=True) == 1
    now[0] = 2000.0
    await sampled(ledger, "in-memory")
    assert await step(ledger, durable=False) == 2
    await sampled(ledger, "waiting")
    given = node_feedback.given_since_checkpoint(file)
    assert (given.durable, len(given.turns), node_feedback.undurable(file)) == (1, 2, 1)
    assert node_feedback.kept(file, given)["now"] == {"trained": 1, "sampled": 1}

    now[0] = 3000.0
    await ledger.lose_undurable("the driver was killed")
    after = node_feedback.kept(file, given)
    assert (after["now"], after["trained or waits"], after["deleted"]) == ({"sampled": 2}, 1.0, 0)
    # The durable weights serve under a new number: the checkpoint is as old as before.
    assert node_feedback.given_since_checkpoint(file).turns == given.turns


async def test_a_version_under_a_checkpoint_is_not_at_stake(ledger: Ledger, file: Path, now: Clock) -> None:
    await sampled(ledger, "first")
    assert await step(ledger, durable=False) == 1
    assert (node_feedback.undurable(file), node_feedback.has_checkpoint(file)) == (1, False)
    await sampled(ledger, "second")
    now[0] = 2000.0
    assert await step(ledger, durable=True) == 2
    assert (node_feedback.undurable(file), node_feedback.has_checkpoint(file)) == (0, True)
    assert not node_feedback.given_since_checkpoint(file).turns


async def test_feedback_that_is_dropped_counts_as_lost(ledger: Ledger, file: Path, now: Clock) -> None:
    await sampled(ledger, "first")
    await step(ledger, durable=False)
    given = node_feedback.given_since_checkpoint(file)
    await ledger.rollback(0, requeue=False)
    after = node_feedback.kept(file, given)
    assert (after["now"], after["trained or waits"]) == ({"dropped.rolled_back": 1}, 0.0)


async def test_the_judge_of_the_ledger_and_its_versions_are_found_by_their_time(
    ledger: Ledger, file: Path, now: Clock
) -> None:
    await sampled(ledger, "first")
    assert (node_feedback.judged_since(file, 999.0), node_feedback.judged_since(file, 1000.0)) == (1, 0)
    await step(ledger, durable=True)
    assert node_feedback.trained_since(file, 999.0) is None  # a candidate was not decided on
    assert await ledger.counts() != {}


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").write_text("version 0 serves\n")
    log = tmp_path / "script.log"
    log.write_text("[launch] driver started, pid 7, log x\n[launch] driver started, pid 9, log x\n")
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return Script(process, tmp_path, log, 0.0)


def test_a_driver_is_back_when_its_new_process_serves(script: Script) -> None:
    is_back = node_kills.recovery(script, "driver")
    assert (node_kills.started_pid(script, "driver"), is_back()) == (9, False)
    with script.driver_log.open("a") as log:
        log.write("version 3 serves\n")
    assert not is_back()  # the dying one sent it
    with script.log.open("a") as log:
        log.write("[launch] driver started, pid 12, log x\n")
    assert not is_back()
    with script.driver_log.open("a") as log:
        log.write("version 3 serves\n")
    assert is_back()


def test_a_part_that_was_not_started_again_is_not_back(script: Script) -> None:
    with script.log.open("a") as log:
        log.write("[launch] prm started, pid 11, log x\n")
    assert not node_kills.recovery(script, "prm")()


# -- long hints --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in() -> ModuleType:
    path = Path(node_kills.__file__).parent / "stand_ins" / "sglang" / "launch_server.py"
    spec = importlib.util.spec_from_file_location("stand_in_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", [node_processes.VOTE, node_processes.HINT, node_processes.LONG_HINT])
def test_the_stand_in_answers_in_the_form(stand_in: ModuleType, form: str) -> None:
    assert re.fullmatch(form, stand_in._formed(form))


def test_a_long_hint_is_read_behind_its_thought(stand_in: ModuleType) -> None:
    vote = parse_hint(stand_in._formed(node_processes.LONG_HINT))
    assert (vote.has_hint, vote.hint) == (True, node_processes.LONG_HINT_SAYS)


# -- findings ----------------------------------------------------------------------------------------------------------


def figures(**more: Any) -> dict[str, Any]:
    kept = {"trained or waits": 0.99}
    whole = {"finish": "stop", "tokens": 3030, "thought characters": 3000}
    row = {"trains again s": 40.0, "feedback since the checkpoint": kept, "feedback after all kills": kept}
    row |= {"versions at stake": 3, "chats": {"answered": 90}}
    return {
        "gpus": 2,
        "engines": 1,
        "wanted push": "nccl",
        "script exit": 0,
        "set": {"method.teacher": "base", "push": "nccl"},
        "kills": {"driver": row | {"chats until the next": {"errors": {}}}},
        "long hints": [whole],
        "long hints in samples": {"trained": 1},
        "steering": {"pin": {"is as said": True}},
        **more,
    }


def test_a_run_as_demanded_has_no_findings() -> None:
    assert node_kills.findings(figures()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"long hints in samples": {}}, "no hint behind 3000 tokens"),
        ({"never lost": {"of them not in the ledger": 2}}, "never lost: of them not in the ledger"),
        ({"chats before the first kill": {"errors": {"503": 1}}}, "before the first kill: chats were refused"),
        ({"kills": {"head": {"skipped": "9 s left"}}}, "head: not killed, 9 s left"),
        ({"ledger failed": "OSError()"}, "ledger failed: OSError()"),
        ({"left behind": ["7 python"]}, "left behind: ['7 python']"),
        ({"script exit": 2}, "the script ended with 2"),
        ({"steering": {"pin": {"is as said": False}}}, "pin: "),
        ({"steering": {}}, "steering: "),
        ({"set": {"method.teacher": "policy", "push": "nccl"}}, "the teacher is not the base"),
        ({"set": {"method.teacher": "base", "push": "disk"}}, "the weights do not go by nccl"),
    ],
)
def test_what_a_run_lacks_is_a_finding(more: dict[str, Any], says: str) -> None:
    (finding,) = node_kills.findings(figures(**more))
    assert finding.startswith(says)


def test_on_one_card_weights_go_by_disk() -> None:
    by_disk = {"wanted push": "disk", "set": {"method.teacher": "base", "push": "disk"}}
    assert node_kills.findings(figures(gpus=1, **by_disk)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trains again s": "not within 75 s"}, "head: no version was trained since"),
        ({"versions at stake": 0}, "head: a crash had 0 versions to lose"),
        (
            {"feedback after all kills": {"trained or waits": None}},
            "head: feedback after all kills: no feedback was at",
        ),
        ({"chats": {"answered": 0}}, "head: no chat was answered meanwhile"),
    ],
)
def test_a_kill_that_proves_too_little_is_a_finding(change: dict[str, Any], says: str) -> None:
    row = figures()["kills"]["driver"] | change
    (finding,) = node_kills.findings(figures(kills={"head": row}))
    assert finding.startswith(says)


def test_a_pool_loses_no_chat_with_one_engine() -> None:
    row = figures()["kills"]["driver"] | {"chats until the next": {"errors": {"ReadError": 1}}}
    assert node_kills.findings(figures(kills={"engine": row})) == []
    (finding,) = node_kills.findings(figures(kills={"engine": row}, engines=2))
    assert finding.startswith("engine: chats were refused or cut")


@pytest.mark.parametrize(("gpus", "engines", "push"), [(1, 1, "disk"), (2, 1, "nccl"), (2, 2, "disk"), (4, 2, "nccl")])
def test_the_script_takes_the_layout_of_the_check(gpus: int, engines: int, push: str, tmp_path: Path) -> None:
    host = NodeHost(tmp_path, tmp_path, is_tiny=True, streams=1, gpus=gpus, engines=engines)
    given = node_script.cards(host)
    assert given["PUSH"] == push
    words = [str(node_script.SCRIPT), "--dry-run", *node_script.SHARING.get((gpus, engines), [])]
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "HF_CKPT": "C", "OPTIMIZER": "gpu", **given}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"--push {push}" in done.stdout
    assert ("engine.replicas=2" in done.stdout) == (engines == 2)
    with pytest.raises(ValueError, match="no layout of the script has these"):
        node_script.cards(replace(host, gpus=1, engines=2))


def test_too_little_feedback_kept_is_a_finding() -> None:
    bad = figures()
    bad["kills"]["driver"]["feedback after all kills"] = {"trained or waits": 0.5}
    assert node_kills.findings(bad) == ["driver: feedback after all kills: 0.5 is trained or waits"]


def test_cut_chats_are_a_finding_unless_the_killed_process_served_them() -> None:
    cut = {"errors": {"ReadError": 3}}
    bad = figures()
    row = bad["kills"]["driver"]
    bad["kills"] = {"driver": row | {"chats until the next": cut}, "server": row | {"chats until the next": cut}}
    assert node_kills.findings(bad) == ["driver: chats were refused or cut: {'ReadError': 3}"]


def test_chats_are_counted_by_the_time_of_their_end() -> None:
    people = node_feedback.People("http://127.0.0.1:1", 1, offset=0.0)
    replies = [
        node_feedback.Reply(started=10.0, text="whole", finish_reason="stop"),
        node_feedback.Reply(started=19.0, error=repr(httpx.ReadError("")), token_times=[19.5]),
        node_feedback.Reply(started=21.0, error=repr(httpx.ConnectError(""))),
    ]
    people.ends.extend(zip([30.0, 31.0, 32.0], replies, strict=True))
    found = people.between(20.0, 40.0)
    assert (found["answered"], found["cut"], found["refused"]) == (1, 1, 1)
    assert (found["running at the kill"], found["of them went on"], found["longest of these s"]) == (2, 1, 20.0)
    assert people.between(40.0, 50.0)["answered"] == 0
