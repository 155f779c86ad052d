"""Secrets and conversations are absent from logs, error bodies, status routes, settings and tracebacks."""

import json
import subprocess
import sys

import pytest
import structlog

from openclaw_rl.errors import SettingsError
from openclaw_rl.log import configure as configure_log
from openclaw_rl.settings import load
from openclaw_rl.trainers.local import TrainerConfig

SECRETS = ("sk-ann-5up3r", "sk-bob-5up3r", "admin-5up3r", "trainer-5up3r")
SAID = "the quokka sings at midnight"


def test_no_answer_and_no_log_line_holds_a_secret_or_a_word_of_a_chat(keyed):
    """Every route, with every key, right and wrong, with good and broken bodies."""
    answers = []
    for key in (None, "ann", "admin", "trainer", "wrong-k3y-5up3r"):
        for method, path in (
            ("GET", "/healthz"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/v1/admin/status"),
            ("GET", "/openapi.json"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/feedback"),
            ("POST", "/v1/admin/pin"),
            ("POST", "/v1/trainer/lease"),
            ("POST", "/nothing"),
        ):
            for body in (b"{", b"{}", json.dumps({"admin_key": "x", "wait_s": 0, "trainer": "t"}).encode()):
                reply = keyed.ask(method, path, key, content=body if method == "POST" else None)
                answers.append(reply.text + str(reply.headers))
    assert keyed.chat("ann", messages=[{"role": "user", "content": SAID}]).status_code == 200
    keyed.chat("ann", messages=[{"role": "user", "content": [{"type": "image_url", "text": SAID}]}])
    keyed.chat("ann", messages=[{"role": "user", "content": SAID * 4000}])
    log_text = keyed.server.log
    for secret in (*SECRETS, "wrong-k3y-5up3r"):
        assert not [answer for answer in answers if secret in answer]
        assert secret not in log_text
    assert SAID not in log_text
    assert "Traceback" not in log_text


def test_keys_are_nowhere_in_the_data_directory_but_in_private_files(keyed):
    """Configured keys are not written at all."""
    for file in keyed.server.data_dir.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not [secret for secret in SECRETS if secret.encode() in content], file


def test_settings_are_shown_without_their_secrets(tmp_path):
    secrets = {"server.admin_key": "adm-1", "server.trainer_token": "trn-1", "judge.api_key": "jdg-1"}
    sets = [word for key, value in secrets.items() for word in ("--set", f"{key}={value}")]
    sets += ["--set", "server.api_keys=[{key='chat-1', user='uma'}]"]
    argv = [sys.executable, "-m", "openclaw_rl", "settings", *sets]
    shown = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "server.admin_key" in shown
    assert "uma" in shown
    assert not [secret for secret in (*secrets.values(), "chat-1") if secret in shown]


@pytest.mark.parametrize(
    "wrong",
    [
        {"server.api_keys": "sk-s3cr3t"},
        {"server.api_keys": [{"key": "sk-s3cr3t", "usr": "x"}]},
        {"server.api_keys": [{"key": ["sk-s3cr3t"]}]},
        {"server.admin_key": ["sk-s3cr3t"]},
        {"server.admin_key": "sk-s3cr3t and a blank"},
        {"server.keys": "sk-s3cr3t"},
        {"judge.url": "http://user:sk-s3cr3t@host/v1"},
        {"judge.api_key": {"sk": "sk-s3cr3t"}},
    ],
)
def test_a_fault_in_a_secret_setting_does_not_quote_it(wrong):
    with pytest.raises(SettingsError) as error:
        load(None, wrong, {})
    assert "sk-s3cr3t" not in str(error.value)


def test_a_fault_in_the_trainers_file_does_not_quote_its_token(tmp_path):
    file = tmp_path / "trainer.json"
    for content in ({"token": "tok-s3cr3t"}, {"token": ["tok-s3cr3t"], "url": "u"}, {"tokn": "tok-s3cr3t"}):
        file.write_text(json.dumps(content))
        with pytest.raises(SettingsError) as error:
            TrainerConfig.read(file)
        assert "tok-s3cr3t" not in str(error.value)


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_in_the_log_shows_no_values(form, capsys):
    """Some renderers print the local variables of every frame."""
    configure_log("info", form)

    def fails(api_key: str) -> None:
        raise RuntimeError("no")

    try:
        fails("sk-s3cr3t")
    except RuntimeError:
        structlog.get_logger("leak-test").error("failed", exc_info=True)
    finally:
        structlog.reset_defaults()
    said = capsys.readouterr().err
    assert "RuntimeError" in said
    assert said.count("sk-s3cr3t") == 1  # the line of code itself
