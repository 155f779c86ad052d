"""Checks on a GPU host: their stages, their command lines, which figures pass, and that no stage stops the others."""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpu import node_check, sglang_check, stages
from openclaw_rl.engines.sglang import launch
from openclaw_rl.settings import EngineSettings

GPU_SCRIPTS = Path(stages.__file__).parent
CHECKS = [sglang_check, node_check]


def test_a_stage_has_a_limit_and_may_run_beside() -> None:
    limits = {"tp": 150, "binary": 240}
    table = stages.table(*(stages.Stage(name, limit, lambda _: {}, "text") for name, limit in limits.items()))
    given = stages.parser("doc", table).parse_args(["--work", "w", "--out", "o", "tp=120+", "binary"])
    assert given.stages == [stages.StageCall("tp", 120, True), stages.StageCall("binary", 240, False)]
    assert given.work == Path("w").absolute()
    with pytest.raises(argparse.ArgumentTypeError, match="no stage 'nonsense': tp, binary"):
        stages.StageCall.of("nonsense=5", limits)


@pytest.mark.parametrize(
    ("figures", "is_good"),
    [
        ({"x": 1}, True),
        ({"findings": []}, True),
        ({"findings": ["a"]}, False),
        ({"exit": 0}, True),
        ({"exit": 3}, False),
    ],
)
def test_findings_and_exit_codes_make_a_stage_bad(tmp_path: Path, figures: dict[str, Any], is_good: bool) -> None:
    file = tmp_path / "stage.json"
    assert stages.run_stage("stage", lambda: figures, 30, lambda: file) is is_good
    kept = json.loads(file.read_text())
    assert kept.pop("stage seconds") < 30
    assert kept == figures


def test_a_stage_that_fails_or_runs_out_of_its_time_is_told_of_and_does_not_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stage.json"

    def fails() -> dict[str, Any]:
        raise ValueError("no such model")

    def hangs() -> dict[str, Any]:
        try:
            time.sleep(60)
        except Exception:  # a stage may catch what it likes
            return {}
        return {}

    assert not stages.run_stage("fails", fails, 30, lambda: file)
    assert json.loads(file.read_text())["failed"] == "ValueError('no such model')"
    assert not stages.run_stage("hangs", hangs, 1, lambda: file)
    assert json.loads(file.read_text())["failed"] == "OutOfTime()"
    assert stages.summarise({"fails": False, "tp": True, "opd": "no time"}) == 1
    assert stages.summarise({"tp": True}) == 0
    assert "== hangs: " in capsys.readouterr().out


@pytest.mark.parametrize("check", CHECKS, ids=["sglang", "node"])
def test_help_lists_each_stage_with_its_limit(check: ModuleType) -> None:
    text = check.arguments().format_help()
    listed = {name: int(limit) for name, limit in re.findall(r"^  ([a-z0-9_]+) +(\d+) s  \S", text, re.MULTILINE)}
    assert listed == {name: stage.limit_s for name, stage in check.STAGES.items()}


@pytest.mark.parametrize("check", CHECKS, ids=["sglang", "node"])
def test_the_calls_in_a_checks_head_are_understood(check: ModuleType) -> None:
    name = check.__name__.removeprefix("gpu.")
    head = (GPU_SCRIPTS / f"{name}.sh").read_text().partition("set -u")[0]
    calls = re.findall(rf"^# *(?:{name}\.sh) (.*)$", head, re.MULTILINE)
    assert calls
    for words in calls:
        given = check.arguments().parse_args(["--work", "w", "--out", "o", *shlex.split(words)])
        assert all(call.limit_s >= 10 for call in given.stages)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run the node's check with stages that record their names; the stage `bad` has a finding."""

    def run(*words: str, bad: str = "") -> tuple[int, list[str]]:
        ran: list[str] = []

        def stage(name: str) -> Callable[[Any], dict[str, Any]]:
            return lambda host: ran.append(name) or {"findings": ["a"] * (name == bad)}

        fakes = {name: replace(real, run=stage(name)) for name, real in node_check.STAGES.items()}
        monkeypatch.setattr(node_check, "STAGES", fakes)
        monkeypatch.setattr(sys, "argv", ["node_check.py", "--work", str(tmp_path), "--out", str(tmp_path), *words])
        return node_check.main(), ran

    return run


def test_the_other_methods_are_left_out_when_the_first_failed(
    node: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert node("binary", "combine", "recorded", "ledger") == (0, ["binary", "combine", "recorded", "ledger"])
    assert node("binary", "combine", "recorded", bad="binary") == (1, ["binary", "recorded"])
    assert "'combine': 'skipped: binary failed'" in capsys.readouterr().out
    assert node("--go-on", "binary", "combine", bad="binary") == (1, ["binary", "combine"])


def test_what_there_is_no_time_for_is_said(
    node: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert node("--budget-s", "60", "recorded", "binary", "ledger") == (1, ["recorded", "ledger"])
    assert "== all: {'recorded': True, 'binary': 'no time', 'ledger': True}" in capsys.readouterr().out


def test_a_stage_beside_counts_when_it_ends(
    node: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It runs in a process of its own, as the real stage, with no process to stop."""
    assert node("stop=30+", "ledger") == (0, ["ledger"])
    assert json.loads((tmp_path / "stop.json").read_text())["stopped"] is True
    assert "== all: {'ledger': True, 'stop': True}" in capsys.readouterr().out


def test_the_stand_in_understands_the_command_line_of_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = launch.Installed("0.5.15.post1", frozenset({"incremental_streaming_output"}), False, False)
    adapters = launch.Adapters(16, ("q_proj", "k_proj"), 5)
    words = launch.argv(
        installed, EngineSettings(kind="sglang", args=("--cuda-graph-max-bs-decode", "64")), folder=tmp_path,
        name="check", port=5, context_length=4096, adapters=adapters,
    )  # fmt: skip
    spec = spec_from_file_location("stand_in", GPU_SCRIPTS / "stand_ins" / "sglang" / "launch_server.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(stand_in := module_from_spec(spec))
    monkeypatch.setattr(sys, "argv", ["launch_server.py", *words])
    given = stand_in._options()
    assert (given.model_path, given.port, given.context_length) == (tmp_path, 5, 4096)
