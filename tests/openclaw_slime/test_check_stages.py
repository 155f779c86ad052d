"""The stage runner of the checks on a GPU host: what it is told, what is good, and that no stage stops the others."""

import argparse
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GPU_SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(GPU_SCRIPTS))
    import stages

    return stages


def test_a_stage_has_a_limit_and_may_run_beside(stages: ModuleType) -> None:
    limits = {"tp": 150, "binary": 240}
    given = stages.parser("doc", limits).parse_args(["--work", "w", "--out", "o", "tp=120+", "binary"])
    assert given.stages == [stages.Asked("tp", 120, True), stages.Asked("binary", 240, False)]
    assert given.work == Path("w").absolute()
    with pytest.raises(argparse.ArgumentTypeError, match="no stage 'nonsense': tp, binary"):
        stages.Asked.of("nonsense=5", limits)


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
def test_findings_and_exit_codes_make_a_stage_bad(
    stages: ModuleType, tmp_path: Path, figures: dict[str, Any], is_good: bool
) -> None:
    file = tmp_path / "stage.json"
    assert stages.run_stage("stage", lambda: figures, 30, lambda: file) is is_good
    kept = json.loads(file.read_text())
    assert kept.pop("stage seconds") < 30
    assert kept == figures


def test_a_stage_that_fails_or_runs_out_of_its_time_is_told_of_and_does_not_raise(
    stages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert stages.told({"fails": False, "tp": True, "opd": "no time"}) == 1
    assert stages.told({"tp": True}) == 0
    assert "== hangs: " in capsys.readouterr().out
