"""The check that a wish is learned by its user's own policy: two users of one real server, and a verdict on both."""

import json
from pathlib import Path

import pytest

from e2e import own_wishes as script


def test_a_model_that_learns_nothing_is_told_apart_and_the_other_user_is_the_base(
    short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    argv = ["own_wishes", str(tmp_path / "data"), "--held-out", "3", "--corrections", "1", "--idle-minutes", "0.02"]
    argv += ["--out", str(tmp_path / "found.json"), "--model", str(short_model), "--set", "engine.threads=1"]
    monkeypatch.setattr("sys.argv", argv)
    assert script.main() == 1
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert row["wishes in Bob's list"] == 0
    assert (row["ann"]["corrections"], row["bob"]["corrections"]) == (1, 0)
    assert len(row["bob"]["learned"]) == 3
    assert capfd.readouterr().out.splitlines()[-1] == "seed 0: Ann's policy learned too little"
