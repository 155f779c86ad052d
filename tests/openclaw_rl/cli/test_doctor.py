"""`openclaw-rl doctor`: its checks, and the lines that it prints."""

import json
import socket
import sys
import threading
import venv
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli import doctor
from openclaw_rl.cli.doctor import Finding, Question, examine
from openclaw_rl.cli.main import app
from openclaw_rl.data_dir import Announcement, DataDir, proof_of
from openclaw_rl.processes import malloc
from openclaw_rl.settings import load
from openclaw_rl.telemetry.trackers import base


@pytest.fixture
def question(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=100e9))  # whatever this machine has
    return Question(load(None, {"data_dir": str(tmp_path / "data"), "server.port": 0}, {}))


def by_name(findings):
    return {finding.what: finding for finding in findings}


def test_the_default_of_a_laptop_is_fine(question):
    found = by_name(examine(question))
    for what in ("python", "torch", "transformers", "port", "packages", "data directory", "model", "engine"):
        assert found[what].level == "ok", found[what]
    assert "node" not in found


def test_a_taken_port_is_named(question, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = load(None, {"data_dir": str(tmp_path), "server.port": port}, {})
        (finding,) = examine(Question(settings), [doctor.port])
    assert finding.level == "missing"
    assert f"127.0.0.1:{port}" in finding.says


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, []),
        (
            {"method.name": "opd", "method.top_k": 20, "method.guidance": 2.0},
            ["--prefill-max-requests 1 --disable-overlap-schedule"],
        ),
        (
            {
                "training.weights": "full",
                "trainer.kind": "external",
                "judge.kind": "llm",
                "judge.url": "http://judge:1",
            },
            ["cuts the requests of other programs"],
        ),
    ],
)
def test_what_a_running_engine_needs_and_what_others_would_meet_there_is_told(more, says):
    about = {"engine.kind": "url", "engine.url": "http://gpu:30000"}
    own, *others = doctor.engine(Question(load(None, about | more, {})))
    assert (own.level, own.says) == ("ok", "at http://gpu:30000; it is asked when the server starts")
    assert [finding.level for finding in others] == ["differs"] * len(says)
    assert all(part in finding.says for part, finding in zip(says, others, strict=True))


def test_a_named_tracker_is_looked_for_and_one_that_sends_is_told(monkeypatch):
    offline, online = (
        load(None, {"tracking.trackers": '["tensorboardx", "wandb"]', "tracking.wandb_mode": mode}, {})
        for mode in ("offline", "online")
    )
    assert list(doctor.trackers(Question(load(None, {}, {})))) == []
    (finding,) = doctor.trackers(Question(offline))
    assert (finding.level, finding.says) == ("ok", "tensorboardx, wandb; files alone")
    (finding,) = doctor.trackers(Question(online))
    assert finding.says.endswith("wandb sends every figure to its host")
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    assert [finding.level for finding in doctor.trackers(Question(offline))] == ["missing", "missing"]


def test_a_folder_that_is_no_model_says_what_it_lacks(question, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (finding,) = examine(Question(question.settings, model=str(tmp_path)), [doctor.model])
    assert finding.level == "missing"
    assert finding.says.endswith("lacks tokenizer_config.json, *.safetensors")


def test_what_fits_on_a_card_is_said(question, tmp_path):
    shape = {"num_attention_heads": 16, "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
    shape |= {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"")
    found = examine(Question(question.settings, model=str(tmp_path), gpu_memory_gb=24), [doctor.model])
    assert found[0].level == "ok"
    assert [finding.what for finding in found[1:]] == ["memory"] * (len(found) - 1)
    assert len(found) > 1


def test_an_sglang_that_is_not_there_is_named(question, tmp_path):
    settings = load(None, {"data_dir": str(tmp_path), "engine.kind": "sglang", "engine.python": sys.executable}, {})
    (finding,) = examine(Question(settings), [doctor.engine])
    assert finding.level == "missing"
    assert "SGLang is not installed there" in finding.says


def test_the_node_answers_by_its_own_interpreter(question):
    found = examine(Question(question.settings, slime_python=sys.executable), [doctor.node])
    assert {"slime", "Megatron-LM", "sglang", "ray", "torch", "numpy"} <= {finding.what for finding in found}


def test_an_environment_that_does_not_know_this_project_answers_for_itself_alone(question, tmp_path):
    """Our environment holds torch and numpy. The other one is empty, and the report must not list ours for it."""
    venv.create(tmp_path / "bare", symlinks=True)
    found = examine(Question(question.settings, slime_python=str(tmp_path / "bare/bin/python")), [doctor.node])
    assert {"slime", "Megatron-LM", "sglang", "ray", "torch", "numpy"} <= {finding.what for finding in found}
    assert {finding.level for finding in found if finding.what in ("torch", "numpy")} == {"missing"}


def test_an_interpreter_that_cannot_answer_is_a_finding(question):
    (finding,) = examine(Question(question.settings, slime_python="/no/such/python"), [doctor.node])
    assert (finding.what, finding.level) == ("node", "missing")


def test_the_command_prints_a_line_a_finding_and_fails_for_what_is_missing(tmp_path):
    arguments = ["doctor", "--data-dir", str(tmp_path), "--set", "server.port=0"]
    good = CliRunner().invoke(app, arguments)
    assert good.exit_code == 0, good.output
    assert "  port" in good.output
    bad = CliRunner().invoke(app, [*arguments, "--slime-python", "/no/such/python"])
    assert bad.exit_code == 1
    assert "! node" in bad.output


def test_marks():
    assert Finding("a", "ok", "b").line().startswith("  a ")
    assert Finding("a", "differs", "b").line().startswith("? a ")
    assert Finding("a", "missing", "b").line().startswith("! a ")


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            {},
            "binary_rl, with the defaults that taught this model: method.baseline others, trainer.learning_rate 0.001,",
        ),
        ({"trainer.learning_rate": 0.01}, "this model: method.baseline others, trainer.kl_coef 0.1"),
        ({"method.name": "opd"}, "opd, with the defaults that taught this model: method.guidance 3.0, "),
        ({"model.path": "/some/model"}, "binary_rl, with cautious defaults: what teaches this model"),
    ],
)
def test_what_the_learning_goes_by_is_said(tmp_path, sets, says):
    question = Question(load(None, {"data_dir": str(tmp_path)} | sets, {}))
    (finding,) = examine(question, [doctor.learning])
    assert (finding.what, finding.level) == ("learning", "ok")
    assert says in finding.says
    assert examine(Question(question.settings, model="/another"), [doctor.learning]) == []


def test_a_template_is_tried_as_a_start_tries_it(question, tmp_path):
    """The tokenizer of the cases' small model, with templates that cannot serve, and one that serves a part."""
    from harness.model import TEMPLATE, make_folder

    make_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    tried = Question(question.settings, model=str(tmp_path))
    (fine,) = examine(tried, [doctor.chat_template])
    assert (fine.what, fine.level) == ("chat template", "ok")

    def with_template(template):
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        return examine(tried, [doctor.chat_template])

    (torn,) = with_template("{% for m in messages %}{{ m.content }}{% endif %}")
    assert torn.level == "missing"
    assert "can serve no chat" in torn.says
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (partly,) = with_template(refuses + TEMPLATE)
    assert (partly.level, partly.says) == ("differs", "the template cannot render a system message: no system role")
    (tmp_path / "tokenizer.json").write_text("{")
    (broken,) = examine(tried, [doctor.chat_template])
    assert broken.level == "missing"


def test_a_template_of_a_model_that_is_elsewhere_is_not_tried(question):
    assert examine(question, [doctor.chat_template]) == []  # the bundled model is not converted in this folder
    assert examine(Question(question.settings, model="somebody/some-model"), [doctor.chat_template]) == []


def test_a_package_of_another_version_is_named(question, monkeypatch):
    wanted = ["numpy>=1.26", "pydantic>=999", "no-such-package>=1", 'absent; extra == "gpu"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: wanted)
    low, gone = examine(question, [doctor.packages])
    assert (low.level, gone.level) == ("differs", "missing")
    assert low.says.startswith("pydantic>=999 is needed; ")
    assert gone.says == "no-such-package>=1 is needed; it is not installed"


def test_the_memory_of_the_machine_is_held_against_the_need(question, tmp_path, monkeypatch):
    for free, level in ((64 * 10**9, "ok"), (10**9, "differs")):
        monkeypatch.setattr(malloc, "free_memory", lambda free=free: free)
        (finding,) = examine(question, [doctor.host_memory])
        assert (finding.what, finding.level) == ("host memory", level)
        assert finding.says == f"{free / 1e9:.1f} GB free, about 3.9 GB needed"
    settings = load(None, {"data_dir": str(tmp_path), "engine.kind": "url", "engine.url": "http://127.0.0.1:1"}, {})
    (finding,) = examine(Question(settings), [doctor.host_memory])
    assert finding.says == "1.0 GB free"


def test_the_port_of_this_directorys_own_server_is_fine(tmp_path):
    data = DataDir.prepare(tmp_path)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("X-OpenClaw-Proof", proof_of("secret", self.headers["X-OpenClaw-Challenge"]))
            self.end_headers()

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        settings = load(None, {"data_dir": str(tmp_path), "server.port": server.server_port}, {})
        url = f"http://127.0.0.1:{server.server_port}"
        for key, level in (("secret", "ok"), ("of another run", "missing")):
            Announcement.new(data, url, version="1", proof_key=key).write(data)
            (finding,) = examine(Question(settings), [doctor.port])
            assert finding.level == level, finding
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("primary", "says"),
    [("rl/policy", "its default model is rl/policy, on port 30000"), ("hosted/large", "has the provider rl, and its")],
)
def test_the_client_is_asked_for_its_default_model(tmp_path, monkeypatch, primary, says):
    program = Path(__file__).parents[2] / "support" / "fake_openclaw.py"
    (tmp_path / "openclaw").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    (tmp_path / "openclaw").chmod(0o755)
    config = {
        "models": {"providers": {"rl": {"baseUrl": "http://127.0.0.1:30000/v1"}}},
        "agents": {"defaults": {"model": {"primary": primary}}},
    }
    (tmp_path / "openclaw.json").write_text(json.dumps(config))
    monkeypatch.setenv("OPENCLAW_CONFIG_PATH", str(tmp_path / "openclaw.json"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ask = Question(load(None, {"data_dir": str(tmp_path)}, {}))
    (finding,) = examine(ask, [doctor.client])
    assert (finding.what, finding.level) == ("client", "ok")
    assert says in finding.says
    (tmp_path / "openclaw.json").write_text("{}")
    assert "knows no server on port 30000" in examine(ask, [doctor.client])[0].says
    monkeypatch.setenv("PATH", "/nowhere")
    assert examine(ask, [doctor.client])[0].says.startswith("no OpenClaw on the PATH")
