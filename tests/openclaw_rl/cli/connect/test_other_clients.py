"""`connect codex`, `claude-code` and `open-webui`: print, write, undo. The files' forms are read as the clients do."""

import json
import tomllib

import pytest

from openclaw_rl.cli.connect import other_clients
from openclaw_rl.cli.connect.served import Served, reachable

SERVED = Served("http://127.0.0.1:30000", 32768, 2048, thinks=True, has_tools=True, key=None)


def test_codex_gets_a_profile_of_its_own(server, run, tmp_path, monkeypatch):
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "codex"))
    shown = run("codex")
    assert shown.exit_code == 0, shown.output
    assert "# start it with: codex --profile rl" in shown.output
    assert not (tmp_path / "codex").exists()
    assert run("codex", "--write").exit_code == 0
    file = tmp_path / "codex" / "rl.config.toml"
    found = tomllib.loads(file.read_text())
    assert found == tomllib.loads("\n".join(line for line in shown.output.splitlines() if line[:1] != "#"))
    assert (found["model"], found["model_provider"], found["model_context_window"]) == ("policy", "rl", 32768)
    assert found["model_providers"]["rl"] == {
        "name": "rl",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
    }
    assert "holds it already" in run("codex", "--write").output
    assert run("codex", "--undo").exit_code == 0
    assert not file.exists()


def test_a_key_is_named_to_codex_by_a_variable():
    found = other_clients.codex(Served("http://h", 8192, 2048, thinks=False, has_tools=False, key="k y"), "rl", None)
    assert tomllib.loads(found.content)["model_providers"]["rl"]["env_key"] == "OPENCLAW_RL_API_KEY"
    assert found.notes[0] == "first: export OPENCLAW_RL_API_KEY='k y'"
    assert len(found.notes) == 4


def test_claude_codes_settings_are_merged_and_come_back(server, run, tmp_path, monkeypatch):
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))
    (tmp_path / "claude").mkdir()
    (real := tmp_path / "dotfiles.json").write_text('{"env": {"FOO": "1"},   "theme": "dark"}')
    (tmp_path / "claude" / "settings.json").symlink_to(real)
    before = real.read_bytes()
    shown = run("claude-code")
    assert f"export ANTHROPIC_BASE_URL={server.url}\n" in shown.output
    assert real.read_bytes() == before
    assert run("claude-code", "--write").exit_code == 0
    found = json.loads(real.read_text())
    assert (found["theme"], found["env"]["FOO"], found["env"]["ANTHROPIC_API_KEY"]) == ("dark", "1", "")
    assert found["env"]["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert (tmp_path / "claude" / "settings.json").is_symlink()
    assert run("claude-code", "--undo").exit_code == 0
    assert real.read_bytes() == before


@pytest.mark.parametrize("content", ["{// a comment\n}", "[]", '{"env": 3}'])
def test_settings_that_cannot_be_merged_stay_as_they_are(server, run, tmp_path, content):
    file = tmp_path / "settings.json"
    file.write_text(content)
    done = run("claude-code", "--write", "--file", str(file))
    assert done.exit_code == 2
    assert "stays as it is" in done.output
    assert file.read_text() == content


def test_open_webui(server, run, tmp_path):
    file = tmp_path / "open-webui.env"
    assert (
        run("open-webui", "--write", "--file", str(file), "--url", "http://host.docker.internal:30000").exit_code == 0
    )
    assert file.read_text() == "OPENAI_API_BASE_URL=http://host.docker.internal:30000/v1\nOPENAI_API_KEY=none\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert run("open-webui", "--undo").exit_code == 0
    assert not file.exists()
    assert run("open-webui", "--undo").exit_code == 2


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://0.0.0.0:30000", "http://127.0.0.1:30000"),
        ("http://[::]:30000/v1/", "http://[::1]:30000"),
        ("https://models.example.org/v1", "https://models.example.org"),
    ],
)
def test_an_address_that_a_client_can_use(url, found):
    assert reachable(url) == found
