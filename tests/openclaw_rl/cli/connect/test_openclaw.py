"""`openclaw-rl connect openclaw` with a stand-in for the client: write, check, undo."""

import json

import pytest

from openclaw_rl.cli.connect import openclaw as openclaw_module
from openclaw_rl.cli.connect.openclaw import config_files, plan
from openclaw_rl.cli.connect.served import Served

OTHERS = {
    "models": {"providers": {"hosted": {"baseUrl": "https://example.org/v1", "apiKey": "sk-secret", "models": []}}},
    "agents": {"defaults": {"model": {"primary": "hosted/large", "fallbacks": ["hosted/small"]}}},
    "gateway": {"mode": "local", "auth": {"token": "t"}},
    "channels": {"telegram": {"enabled": True}},
}

OWN = """\
// Mine, with what I need.
{
  models: { providers: { rl: {
    baseUrl: "%(url)s/v1", apiKey: 'my-key', headers: { "X-Mine": "yes" }, /* a proxy wants it */
    models: [{ id: "%(model)s", name: "Mine", contextWindow: 4096, maxTokens: 512, },],
  }, }, },
  agents: { defaults: { model: { primary: "hosted/large", }, }, },
  gateway: { mode: "local", },
}
"""
"""A JSON5 file of a user who gave a provider our name and our address."""


def own(file, url, model="policy"):
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN % {"url": url, "model": model})
    return file.read_bytes()


def write(file, value):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, indent=7))  # another layout than the client's own
    return file.read_bytes()


def test_a_machine_without_a_configuration(server, client_file, run):
    done = run("openclaw", "--yes")
    assert done.exit_code == 0, done.output
    found = json.loads(client_file.read_text())
    assert found["gateway"] == {"mode": "local"}
    assert found["agents"] == {"defaults": {"model": {"primary": "rl/policy"}}}
    assert found["models"]["mode"] == "merge"
    provider = found["models"]["providers"]["rl"]
    assert (provider["baseUrl"], provider["apiKey"]) == (f"{server.url}/v1", "none")
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"], model["maxTokens"], model["reasoning"]) == (
        "policy",
        32768,
        2048,
        True,
    )
    assert model["compat"] == {"sendSessionAffinityHeaders": True}
    undone = run("openclaw", "--undo", "--yes")
    assert undone.exit_code == 0, undone.output
    assert not client_file.exists()
    assert run("openclaw", "--undo", "--yes").exit_code == 2


def test_a_full_configuration_keeps_the_rest_and_comes_back_byte_for_byte(server, client_file, run):
    before = write(client_file, OTHERS)
    client_file.chmod(0o640)
    done = run("openclaw", answer="y\n")
    assert done.exit_code == 0, done.output
    assert 'agents.defaults.model.primary = "rl/policy"    (was "hosted/large")' in done.output
    assert "sk-secret" not in done.output
    found = json.loads(client_file.read_text())
    assert found["models"]["providers"]["hosted"] == OTHERS["models"]["providers"]["hosted"]
    assert found["agents"]["defaults"]["model"] == {"primary": "rl/policy", "fallbacks": ["hosted/small"]}
    assert {name: found[name] for name in ("gateway", "channels")} == {
        name: OTHERS[name] for name in ("gateway", "channels")
    }
    assert run("openclaw", "--undo", "--yes").exit_code == 0
    assert client_file.read_bytes() == before
    assert client_file.stat().st_mode & 0o777 == 0o640


def test_a_users_own_provider_of_our_name_and_address_stays(server, client_file, run):
    before = own(client_file, server.url)
    done = run("openclaw", "--yes")
    assert done.exit_code == 0, done.output
    assert (
        "? models.providers.rl is yours and stays as it is, its key too; its contextWindow is 4096, the server's 32768"
        in done.output
    )
    assert "my-key" not in done.output
    found = json.loads(client_file.read_text())
    provider = found["models"]["providers"]["rl"]
    assert (provider["apiKey"], provider["headers"], len(provider["models"])) == ("my-key", {"X-Mine": "yes"}, 1)
    assert "mode" not in found["models"]
    assert found["agents"]["defaults"]["model"] == {"primary": "rl/policy"}
    assert run("openclaw", "--yes").exit_code == 0
    assert json.loads(client_file.read_text())["models"]["providers"]["rl"] == provider
    assert run("openclaw", "--undo", "--yes").exit_code == 0
    assert client_file.read_bytes() == before


def test_undo_keeps_a_users_own_provider_when_the_file_was_changed_since(server, client_file, run):
    own(client_file, server.url)
    assert run("openclaw", "--yes").exit_code == 0
    found = json.loads(client_file.read_text())
    client_file.write_text(json.dumps(found | {"channels": {"discord": {"enabled": True}}}))
    done = run("openclaw", "--undo", "--yes")
    assert done.exit_code == 0, done.output
    left = json.loads(client_file.read_text())
    assert left["models"] == found["models"]
    assert left["agents"]["defaults"]["model"] == {"primary": "hosted/large"}
    assert left["channels"] == {"discord": {"enabled": True}}


@pytest.mark.parametrize(
    ("url", "model", "says"),
    [
        ("http://127.0.0.1:9", "policy", "has a provider 'rl' already, at http://127.0.0.1:9/v1: --provider gives"),
        (None, "another", "of yours for this server, without a model 'policy': --provider gives ours another name"),
    ],
)
def test_a_users_own_provider_that_cannot_serve_is_refused_and_another_name_is_taken(
    server, client_file, run, url, model, says
):
    before = own(client_file, url or server.url, model)
    done = run("openclaw", "--yes")
    assert done.exit_code == 2
    assert says in done.output
    assert client_file.read_bytes() == before
    assert run("openclaw", "--yes", "--provider", "mine").exit_code == 0
    assert sorted(json.loads(client_file.read_text())["models"]["providers"]) == ["mine", "rl"]
    assert run("openclaw", "--undo", "--yes").exit_code == 0
    assert client_file.read_bytes() == before


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_second_connect_by_another_name_leaves_a_users_provider_of_that_name(server, client_file, run, is_changed):
    """The first connection was by another name: it makes no provider of the second name ours."""
    before = own(client_file, server.url)
    assert run("openclaw", "--yes", "--provider", "mine").exit_code == 0
    assert run("openclaw", "--yes", "--small").exit_code == 0
    found = json.loads(client_file.read_text())
    assert found["models"]["providers"]["rl"]["apiKey"] == "my-key"
    assert found["agents"]["defaults"]["model"] == {"primary": "rl/policy"}
    if is_changed:
        client_file.write_text(json.dumps(found | {"channels": {"discord": {"enabled": True}}}))
    done = run("openclaw", "--undo", "--yes")
    assert done.exit_code == 0, done.output
    if is_changed:
        left = json.loads(client_file.read_text())
        assert sorted(left["models"]["providers"]) == ["rl"]
        assert left["agents"] == {"defaults": {"model": {"primary": "hosted/large"}}}
        assert left["tools"] == {}
    else:
        assert client_file.read_bytes() == before


def test_undo_takes_out_the_providers_of_both_connections(server, client_file, run):
    write(client_file, OTHERS)
    assert run("openclaw", "--yes").exit_code == 0
    assert run("openclaw", "--yes", "--provider", "second").exit_code == 0
    found = json.loads(client_file.read_text())
    assert found["agents"]["defaults"]["model"]["primary"] == "second/policy"
    client_file.write_text(json.dumps(found | {"logging": {}}))
    assert run("openclaw", "--undo", "--yes").exit_code == 0
    assert json.loads(client_file.read_text()) == OTHERS | {"logging": {}}


def test_a_second_connect_that_fails_leaves_the_way_back_of_the_first(server, client_file, run, monkeypatch):
    write(client_file, OTHERS)
    assert run("openclaw", "--yes").exit_code == 0
    monkeypatch.setenv("FAKE_FAILS", "1")
    assert run("openclaw", "--yes", "--provider", "second").exit_code == 2
    monkeypatch.delenv("FAKE_FAILS")
    client_file.write_text(json.dumps(json.loads(client_file.read_text()) | {"logging": {}}))
    assert run("openclaw", "--undo", "--yes").exit_code == 0
    assert json.loads(client_file.read_text()) == OTHERS | {"logging": {}}


@pytest.mark.parametrize(("flags", "answer"), [(["--dry-run"], ""), ([], "n\n"), ([], "")])
def test_nothing_is_written_without_a_yes(server, client_file, run, flags, answer):
    before = write(client_file, OTHERS)
    done = run("openclaw", *flags, answer=answer)
    assert done.exit_code == (0 if flags else 2)
    assert "othing is written" in done.output
    assert client_file.read_bytes() == before
    assert run("openclaw", "--undo", "--yes").exit_code == 2


def test_a_second_connect_keeps_the_first_way_back(server, client_file, run):
    before = write(client_file, OTHERS)
    assert run("openclaw", "--yes").exit_code == 0
    server.card["max_model_len"] = 65536
    again = run("openclaw", "--yes")
    assert again.exit_code == 0, again.output
    (model,) = json.loads(client_file.read_text())["models"]["providers"]["rl"]["models"]
    assert model["contextWindow"] == 65536
    assert run("openclaw", "--undo", "--yes").exit_code == 0
    assert client_file.read_bytes() == before


@pytest.mark.parametrize("again", [False, True])
def test_undo_after_others_changed_the_file_takes_out_our_values_alone(server, client_file, run, again):
    write(client_file, OTHERS)
    assert run("openclaw", "--yes").exit_code == 0
    found = json.loads(client_file.read_text())
    found["channels"]["discord"] = {"enabled": True}
    client_file.write_text(json.dumps(found))
    if again:
        assert run("openclaw", "--yes").exit_code == 0
    done = run("openclaw", "--undo", "--yes")
    assert done.exit_code == 0, done.output
    assert json.loads(client_file.read_text()) == OTHERS | {
        "channels": OTHERS["channels"] | {"discord": {"enabled": True}}
    }


def test_undo_keeps_a_model_that_the_user_chose_after_connect(server, client_file, run):
    write(client_file, OTHERS)
    assert run("openclaw", "--yes").exit_code == 0
    found = json.loads(client_file.read_text())
    found["agents"]["defaults"]["model"]["primary"] = "another/model"
    client_file.write_text(json.dumps(found))
    done = run("openclaw", "--undo", "--yes")
    assert done.exit_code == 0, done.output
    assert "agents.defaults.model" not in done.output
    left = json.loads(client_file.read_text())
    assert left["agents"]["defaults"]["model"]["primary"] == "another/model"
    assert "openclaw-rl" not in json.dumps(left["models"])


def test_undo_where_nearly_all_of_the_file_is_ours(server, client_file, run):
    """The client refuses a write that halves its file."""
    assert run("openclaw", "--yes").exit_code == 0
    found = json.loads(client_file.read_text()) | {"channels": {"discord": {"enabled": True}}}
    client_file.write_text(json.dumps(found))
    done = run("openclaw", "--undo", "--yes")
    assert done.exit_code == 0, done.output
    left = json.loads(client_file.read_text())
    assert left["channels"] == {"discord": {"enabled": True}}
    assert left["models"] == {"providers": {}}
    assert left["agents"] == {"defaults": {}}


def test_exact_puts_the_old_file_back_and_keeps_the_changed_one(server, client_file, run, tmp_path):
    before = write(client_file, OTHERS)
    assert run("openclaw", "--yes").exit_code == 0
    client_file.write_text("{changed: true}")
    done = run("openclaw", "--undo", "--exact", "--yes")
    assert done.exit_code == 0, done.output
    assert client_file.read_bytes() == before
    (kept,) = (tmp_path / "data" / "connect").glob("openclaw-replaced-*/openclaw.json")
    assert kept.read_text() == "{changed: true}"


@pytest.mark.parametrize("gateway", ["", "starts", "1"])
def test_check_finds_the_message_and_its_session(server, client_file, run, monkeypatch, gateway):
    monkeypatch.setenv("FAKE_GATEWAY", gateway)
    assert run("openclaw", "--yes", "--key", "chat-key").exit_code == 0
    done = run("openclaw", "--check")
    assert done.exit_code == 0, done.output
    (turn,) = server.turns
    assert f"ledger: turn-0, session {turn['session_id']}, version 3" in done.output
    assert turn["key"] == "Bearer chat-key"
    assert run("openclaw", "--check").exit_code == 0
    assert len({turn["session_id"] for turn in server.turns}) == 2


@pytest.mark.parametrize(
    ("variable", "says"),
    [("FAKE_ELSEWHERE", "no such message reached this server"), ("FAKE_NO_SESSION", "in session None, not in")],
)
def test_check_says_what_is_wrong(server, client_file, run, monkeypatch, variable, says):
    monkeypatch.setattr("openclaw_rl.cli.connect.command._RECORDED_S", 0.1)
    assert run("openclaw", "--yes").exit_code == 0
    monkeypatch.setenv(variable, "1")
    done = run("openclaw", "--check")
    assert done.exit_code == 2
    assert says in done.output


def test_a_version_that_does_not_know_the_session_headers(server, client_file, run, monkeypatch):
    monkeypatch.setenv("FAKE_REFUSES", "sendSessionAffinityHeaders")
    monkeypatch.setenv("FAKE_VERSION", "2027.1.1")
    done = run("openclaw", "--yes")
    assert done.exit_code == 0, done.output
    assert "(tested: 2026.9.6)" in done.output
    assert "? this version knows no session headers" in done.output
    assert json.loads(client_file.read_text())["models"]["providers"]["rl"]["models"][0]["compat"] == {}


def test_a_refusal_of_the_client_is_told_and_nothing_is_written(server, client_file, run, monkeypatch):
    before = write(client_file, OTHERS)
    monkeypatch.setenv("FAKE_REFUSES", "contextWindow")
    done = run("openclaw", "--yes")
    assert done.exit_code == 2
    assert "OpenClaw refuses this configuration: Unrecognized key: contextWindow" in done.output
    assert client_file.read_bytes() == before


def test_a_small_context_gets_the_smallest_profile_only_where_nothing_is_configured(server, client_file, run):
    server.card |= {"max_model_len": 8192, "supports_tools": False, "supports_reasoning": False}
    shown = run("openclaw", "--dry-run")
    assert 'tools.deny = ["*"]' in shown.output
    assert "contextWindow" in shown.output
    write(client_file, OTHERS)
    shown = run("openclaw", "--dry-run")
    assert "tools.deny" not in shown.output
    assert "? OpenClaw's own prompt and tools have about 13000 tokens, and the context 8192" in shown.output
    assert "tools.deny" in run("openclaw", "--dry-run", "--small").output


def test_the_patch_alone_for_another_machine(server, run):
    done = run("openclaw", "--print", "--url", "http://10.0.0.5:30000/v1", "--key", "k")
    assert done.exit_code == 0, done.output
    provider = json.loads(done.output)["models"]["providers"]["rl"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://10.0.0.5:30000/v1", "k")


def test_a_machine_without_the_client(server, run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("openclaw", "--yes")
    assert done.exit_code == 2
    assert "no program 'openclaw' on the PATH" in done.output


def test_a_symbolic_link_is_refused(server, client_file, run, tmp_path):
    write(tmp_path / "real.json", OTHERS)
    client_file.parent.mkdir()
    client_file.symlink_to(tmp_path / "real.json")
    done = run("openclaw", "--yes")
    assert done.exit_code == 2
    assert f"set OPENCLAW_CONFIG_PATH to {tmp_path / 'real.json'}" in done.output


SERVED = Served("http://127.0.0.1:30000", 32768, 2048, thinks=True, has_tools=True, key=None)


def test_what_keeps_its_own_model_is_remarked():
    entries = {"main": {}, "work": {"model": "hosted/large"}, "home": {"model": {"primary": "rl/policy"}}}
    old = {"agents": {"defaults": {"modelPolicy": {"allow": ["hosted/*"]}}, "entries": entries}}
    said = plan(SERVED, old, "rl", is_new=False, is_small=False).remarks
    assert said == (
        "agent 'work' keeps its own model hosted/large",
        "agents.defaults.modelPolicy.allow does not list rl/policy: /model cannot choose it",
    )


def test_a_provider_of_the_users_and_a_remote_gateway_are_refused():
    taken = {"models": {"providers": {"rl": {"baseUrl": "https://example.org"}}}}
    with pytest.raises(openclaw_module.ClientError, match="--provider gives ours another name"):
        plan(SERVED, taken, "rl", is_new=False, is_small=False)
    with pytest.raises(openclaw_module.ClientError, match="gateway on another machine"):
        plan(SERVED, {"gateway": {"mode": "remote"}}, "rl", is_new=False, is_small=False)


def test_a_users_replace_stays_and_a_model_as_a_string_comes_back():
    old = {"models": {"mode": "replace"}, "agents": {"defaults": {"model": "hosted/large"}}}
    found = plan(SERVED, old, "rl", is_new=False, is_small=True)
    assert found.patch["models"]["mode"] == "replace"
    assert found.back["models"] == {"providers": {"rl": None}}
    assert found.back["agents"]["defaults"] == {
        "model": "hosted/large",
        "skipBootstrap": None,
        "contextInjection": None,
        "skills": None,
    }
    assert found.back["tools"] == {"deny": None}


def test_included_files_are_kept_too(tmp_path):
    (tmp_path / "sub").mkdir()
    root = tmp_path / "openclaw.json"
    root.write_text("{models: {$include: './models.json5'}, 'agents': {\"$include\": [\"sub/a.json5\", 'gone.json']}}")
    (tmp_path / "models.json5").write_text("{$include: '../outside.json'}")
    (tmp_path / "sub" / "a.json5").write_text("{$include: '../models.json5'}")
    assert config_files(root) == [root, tmp_path / "models.json5", tmp_path / "sub" / "a.json5"]
    assert config_files(tmp_path / "none.json") == [tmp_path / "none.json"]
