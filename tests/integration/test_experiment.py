"""`openclaw-rl experiment personalization` against a real server, which records its chats and not its questions."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.offline import personalization
from openclaw_rl.testing.running_server import RunningServer

pytestmark = pytest.mark.real_model

SIZES = ("--corrections", "1", "--held-out", "3", "--max-tokens", "8", "--idle-minutes", "0.05")


def users_turns(server: RunningServer) -> set[str]:
    rows = server.admin("GET", "/v1/turns?limit=1000")["turns"]
    return {row["turn_id"] for row in rows if row["practice"] is None}


def test_a_person_corrects_the_server_and_the_results_add_up(short_server: RunningServer, tmp_path: Path) -> None:
    before = users_turns(short_server)
    out = tmp_path / "found"
    for seed in ("0", "1"):
        where = ("--data-dir", str(short_server.data_dir), "--key", "sk-test", "--out", str(out), "--seed", seed)
        done = CliRunner().invoke(app, ["experiment", "personalization", "--method", "opd", *SIZES, *where])
        assert done.exit_code == 0, done.output
    results = personalization.load([out.with_suffix(".json")])
    assert [one.seed for one in results] == [0, 1]
    for one in results:
        assert {arm: len(one.scores(arm)) for arm in personalization.ARMS} == dict.fromkeys(personalization.ARMS, 3)
        assert (one.corrections, one.turns) == (1, 2)
        assert [event["event"] for event in one.events][:3] == ["base", "memory", "chat"]
    assert (
        len(users_turns(short_server) - before) == 4
    )  # a question and a complaint of each person; no held-out question among them
    assert "| short | opd | 2 | 1 |" in out.with_suffix(".md").read_text()
    assert "</svg>" in out.with_suffix(".svg").read_text()


def test_an_unknown_person_and_a_wrong_key_are_said_in_a_line(short_server: RunningServer, tmp_path: Path) -> None:
    where = ["experiment", "personalization", "--data-dir", str(short_server.data_dir), "--out", str(tmp_path / "x")]
    for more, says in ((["--person", "nobody"], "one of short"), (["--key", "sk-wrong"], "401")):
        done = CliRunner().invoke(app, [*where, "--key", "sk-test", *more])
        assert done.exit_code == 2
        assert says in done.output
    assert not (tmp_path / "x.json").exists()
