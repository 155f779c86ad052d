"""The command `keys`: the key alone on stdout, once, and one line for each fault."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.data_dir import DataDir
from openclaw_rl.settings import UserLimits, load
from openclaw_rl.web.auth import Keys
from openclaw_rl.web.user_keys import UserKeys


@pytest.fixture
def run(tmp_path: Path):
    def command(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["keys", *words, "--data-dir", str(tmp_path)])
        return done.exit_code, done.stdout, done.stderr

    return command


def test_a_user_from_the_first_key_to_the_last(run, tmp_path: Path) -> None:
    assert run("list") == (0, "no users: `openclaw-rl keys add NAME` adds one\n", "")
    code, key, note = run("add", "anna")
    assert (code, key.startswith("sk-orl-"), key.count("\n")) == (0, True, 1)
    assert note == "openclaw-rl: the key of anna; it is shown this once\n"
    assert run("add", "bert", "--train", "off")[0] == 0
    listed = run("list")[1]
    assert [line.split()[0] for line in listed.splitlines()] == ["anna", "bert"]
    assert "bert" in listed.splitlines()[1]
    assert listed.splitlines()[1].endswith("never trained on")
    assert key.strip() not in listed
    rows = json.loads(run("list", "--json")[1])
    assert [(row["user"], row["train"]) for row in rows] == [("anna", True), ("bert", False)]
    keys = Keys([], UserKeys(DataDir.of(tmp_path).users))
    assert keys.caller(f"Bearer {key.strip()}").user == "anna"
    again = run("rotate", "anna")[1].strip()
    assert keys.caller(f"Bearer {again}").user == "anna"
    assert run("revoke", "anna")[1] == "the key of anna opens nothing any more\n"
    assert [row["user"] for row in json.loads(run("list", "--json")[1])] == ["bert"]


def test_a_users_own_limits_are_set_one_by_one_and_dropped(run, tmp_path: Path) -> None:
    run("add", "anna")
    assert "requests_at_once 4" in run("limit", "anna", "--requests-at-once", "4")[1]
    shown = run("limit", "anna", "--tokens-a-day", "200000", "--practice-share", "0.25", "--train", "off")[1]
    assert shown.endswith("requests_at_once 4   tokens_a_day 200000   practice_share 0.25   never trained on\n")
    rows = json.loads(run("list", "--json")[1])
    assert rows[0]["limits"] == {"requests_at_once": 4, "tokens_a_day": 200_000, "practice_share": 0.25}
    defaults = UserLimits(requests_at_once=2, tokens_a_day=10)
    keys = Keys([], UserKeys(DataDir.of(tmp_path).users), limits=defaults)
    assert keys.limits_of("anna") == UserLimits(requests_at_once=4, tokens_a_day=200_000, practice_share=0.25)
    assert keys.limits_of("nobody") == defaults
    run("limit", "anna", "--default", "--tokens-a-day", "7")
    assert keys.limits_of("anna") == UserLimits(requests_at_once=2, tokens_a_day=7)
    assert keys.limits_of("anna").practice_share is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("limit", "anna"), "nothing to change"),
        (("limit", "anna", "--practice-share", "0"), "practice_share must be above 0"),
        (("limit", "anna", "--tokens-a-day", "5"), "there is no user 'anna'"),
        (("add", "an na"), "user 'an na': a name has up to 64"),
        (("rotate", "anna"), "there is no user 'anna'"),
        (("revoke", "anna"), "there is no user 'anna'"),
    ],
)
def test_a_fault_is_one_line(run, words: tuple[str, ...], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_server_with_users_may_listen_beyond_loopback(run, tmp_path: Path) -> None:
    run("add", "anna")
    assert load(None, {"data_dir": str(tmp_path), "server.host": "0.0.0.0"}, {}).has_keys


def test_commands_ask_for_the_key_that_no_file_holds(run, tmp_path: Path) -> None:
    run("add", "anna")
    for words in (["wishes"], ["feedback", "t", "--good"]):
        done = CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path)])
        assert (done.exit_code, "name one with --key" in done.stderr) == (2, True), done.stderr
