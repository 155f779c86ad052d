"""The comparison of methods by the experiment: fresh servers, one table, and a stopped comparison goes on."""

from pathlib import Path

import pytest

from e2e import personalization as script
from openclaw_rl.offline import personalization


def test_each_run_has_a_server_of_its_own_and_no_run_is_made_twice(
    short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    argv = ["personalization", str(tmp_path / "data"), "--arms", "opd, no practice", "--seeds", "0", "--held-out", "3"]
    argv += ["--corrections", "1", "--max-tokens", "8", "--idle-minutes", "0.02", "--out", str(tmp_path / "found")]
    argv += ["--model", str(short_model), "--set", "engine.threads=1"]
    monkeypatch.setattr("sys.argv", argv)
    assert script.main() == 0
    (one,) = personalization.load([tmp_path / "found.json"])
    assert (one.person, one.method, one.seed, one.corrections) == ("short", "opd, no practice", 0, 1)
    assert "| short | opd, no practice | 1 |" in (tmp_path / "found.md").read_text()
    assert [folder.name for folder in (tmp_path / "data").iterdir()] == ["opd-no-practice-short-0"]
    capfd.readouterr()
    assert script.main() == 0
    assert capfd.readouterr().out == "", "a known run is left out"
