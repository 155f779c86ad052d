"""The command line: a command that cannot run prints one line and exits with code 2."""

import contextlib
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest
from typer.testing import CliRunner

from openclaw_rl.cli import main as main_module
from openclaw_rl.cli.main import app
from openclaw_rl.cli.options import one_engine, settings_of
from openclaw_rl.data_dir import Announcement, DataDir, proof_of

ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/admin/learning": {"policy": "policy", "learning": False, "enabled": True},
    "/v1/admin/policies": {"policies": []},
    "/v1/admin/train": {"waiting": 3, "learning": True, "enabled": True},
    "/v1/feedback": {"turn_id": "t", "effect": "judged", "state": "judged", "demonstration_id": None},
    "/v1/wishes": {"wishes": []},
    "/v1/admin/users/an%20na/wishes": {"wishes": []},
    "/v1/admin/users": {
        "users": [
            {
                "user": "anna",
                "has_key": True,
                "train": False,
                "requests": 3,
                "tokens": 500,
                "last_at": 5.0,
                "waiting": {"served": 2},
                "wishes": 1,
                "limits": {},
            }
        ]
    },
    "/v1/wishes/3": {"wish_id": 3, "state": "removed"},
    "/v1/admin/versions/1": {"folder": "versions/one", "kind": "full"},
    "/v1/admin/versions/2": {"folder": "versions/two", "kind": "lora"},
}


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[list[str | None]]:
    """Yield the keys that a server got; it has one answer for each path."""
    shown: list[str | None] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/healthz":
                self.send_response(200)
                self.send_header("X-OpenClaw-Proof", proof_of("secret", self.headers["X-OpenClaw-Challenge"]))
                self.end_headers()
                assert self.headers["authorization"] is None
                return
            shown.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWERS[self.path]).encode())

        do_GET = do_DELETE = do_POST

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    data, url = DataDir.prepare(tmp_path), f"http://127.0.0.1:{server.server_port}"
    Announcement.new(data, url, version="1", proof_key="secret").write(data)
    yield shown
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_kept_admin_key_is_shown(admin: list[str | None], tmp_path: Path) -> None:
    kept = DataDir.prepare(tmp_path).secret("admin.key", None)
    result = CliRunner().invoke(app, ["learning", "pause", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert admin == [f"Bearer {kept}"]


def test_a_command_names_the_policy_that_it_acted_on(admin: list[str | None], tmp_path: Path) -> None:
    pause = ["learning", "pause", "--data-dir", str(tmp_path)]
    assert CliRunner().invoke(app, pause).output == "learning is paused\n"
    named = CliRunner().invoke(app, [*pause, "--policy", "user:ann"])
    assert named.output == "learning is paused for user:ann\n"
    resumed = CliRunner().invoke(app, ["learning", "resume", "--data-dir", str(tmp_path), "--policy", "user:ann"])
    assert "user:ann is no longer paused by itself, but everyone is" in resumed.output
    assert CliRunner().invoke(app, ["policies", "--json", "--data-dir", str(tmp_path)]).output == "[]\n"


@pytest.mark.parametrize("command", [["engines", "drain", "2"], ["wishes", "remove", "3"]])
def test_options_before_a_subcommand_are_refused_as_it_would_ask_another_server(
    admin: list[str | None], tmp_path: Path, command: list[str]
) -> None:
    name, *rest = command
    result = CliRunner().invoke(app, [name, "--data-dir", str(tmp_path), *rest])
    assert result.exit_code == 2
    assert f"put the options behind `{name} {rest[0]}`" in result.output.replace("\n", " ")
    assert admin == []


def test_another_program_on_the_port_gets_no_key(admin: list[str | None], tmp_path: Path) -> None:
    data = DataDir.prepare(tmp_path)
    url = Announcement.read(data).url
    Announcement.new(data, url, version="1", proof_key="of another run").write(data)
    for command in (["learning", "pause"], ["status"], ["page"]):
        result = CliRunner().invoke(app, [*command, "--data-dir", str(tmp_path)])
        assert result.exit_code == 2
        assert "another program answers" in result.stderr
    assert admin == []
    assert not (data.run / "page.html").exists()


class Impostor(BaseHTTPRequestHandler):
    """Another program on the port; `answers` are what it says to the check."""

    answers: ClassVar[dict[str, str]] = {}
    status = 200
    is_endless = False
    keys: ClassVar[list[str | None]] = []
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        type(self).keys.append(self.headers.get("Authorization"))
        type(self).paths.append(self.path)
        self.send_response(self.status)
        for name, value in self.answers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            while self.is_endless:
                self.wfile.write(b" " * 65536)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        return


PROOF = "X-OpenClaw-Proof"


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"answers": {PROOF: ""}},
        {"answers": {PROOF: "\xe9\xff"}},
        {"answers": {PROOF: "0" * 64}},
        {"answers": {PROOF: proof_of("of another user's server", "")}},
        {"is_endless": True},
        {"status": 307, "answers": {"Location": "http://127.0.0.1:1/healthz"}},
        {"status": 401, "answers": {"WWW-Authenticate": "Bearer"}},
        {"status": 407, "answers": {"Proxy-Authenticate": "Basic"}},
        {"status": 503, "answers": {"Retry-After": "1"}},
    ],
    ids=str,
)
def test_whatever_another_program_answers_it_gets_no_key(tmp_path: Path, what: dict[str, Any]) -> None:
    handler = type("Handler", (Impostor,), {"keys": [], "paths": [], **what})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        data, url = DataDir.prepare(tmp_path), f"http://127.0.0.1:{server.server_port}"
        Announcement.new(data, url, version="1", proof_key="secret").write(data)
        for command in (["status"], ["forget", "s"], ["learning", "pause"]):
            result = CliRunner().invoke(app, [*command, "--data-dir", str(tmp_path)])
            assert result.exit_code == 2, result.output
            assert "another program answers" in result.stderr
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert set(handler.keys) == {None}
    assert set(handler.paths) == {"/healthz"}


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://127.0.0.1:1", "http://127.0.0.1:99999", "http://[", "http://\ud800"]
)
def test_an_address_file_without_an_address_is_an_error_in_words(tmp_path: Path, url: str) -> None:
    data = DataDir.prepare(tmp_path)
    Announcement.new(data, "http://here", version="1", proof_key="secret").write(data)
    text = data.server_file.read_text()
    data.server_file.write_text(text.replace("http://here", url.encode("ascii", "backslashreplace").decode()))
    result = CliRunner().invoke(app, ["status", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("openclaw-rl: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["status"], ["learning", "pause"], ["forget", "s"], ["train", "--now"]])
@pytest.mark.parametrize("is_moved", [False, True], ids=["copied", "moved"])
def test_a_copy_of_a_data_directory_has_no_server(
    admin: list[str | None], tmp_path: Path, command: list[str], is_moved: bool
) -> None:
    original, other = tmp_path / "original", tmp_path / "other"
    DataDir.prepare(original)
    shutil.copytree(tmp_path / "run", original / "run", dirs_exist_ok=True)
    data = DataDir.of(original)
    url = orjson.loads(data.server_file.read_bytes())["url"]
    Announcement.new(data, url, version="1", proof_key="secret").write(data)
    shutil.copytree(original, other)
    if is_moved:  # the old path is made anew
        original.rename(tmp_path / "elsewhere")
        other.rename(original)
        other = original
    result = CliRunner().invoke(app, [*command, "--data-dir", str(other)])
    assert result.exit_code == 2
    assert "no server is ready in" in result.stderr
    assert "is a copy, or was moved" in result.stderr
    assert admin == []


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"Gr??e! ?\n"), ("latin-1", b"Gr\xfc\xdfe! ?\n")])
def test_a_terminal_gets_a_stand_in_for_what_it_cannot_show(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bytes
) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding=encoding))
    monkeypatch.setattr(main_module, "app", lambda: sys.stdout.write("Grüße! \ufffd\n"))
    main_module.main()
    sys.stdout.flush()
    assert terminal.getvalue() == shown


def test_a_configured_admin_key_is_shown(admin: list[str | None], tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f'data_dir = "{tmp_path}"\n[server]\nadmin_key = "mine"\n')
    result = CliRunner().invoke(app, ["learning", "pause", "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert admin == ["Bearer mine"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["status"], "no server is ready in"),
        (["pin"], "give a version, or --off"),
        (["pin", "1", "--off"], "give a version, or --off"),
        (["train"], "openclaw-rl train --now"),
        (["feedback", "t", "--good", "--bad"], "one of --good, --bad and --value"),
        (["feedback", "t", "--good"], "no server is ready in"),
        (["forget"], "one of SESSION, --turn ID and --everything"),
        (["forget", "s", "--turn", "t"], "one of SESSION, --turn ID and --everything"),
        (["forget", "--everything"], "--everything needs --user"),
        (["serve", "--set", "server.prot=1"], "server.prot: no such setting"),
        (["serve", "--set", "server.port"], "write KEY=VALUE"),
        (["serve", "--set", "=5"], "write KEY=VALUE"),
        (["serve", "--host", "0.0.0.0"], "is not loopback"),
    ],
)
def test_what_cannot_be_done_is_one_line(args: list[str], says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*args, "--data-dir", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_feedback_on_a_server_without_keys_shows_none(admin: list[str | None], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["feedback", "t", "--good", "--data-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "t: effect judged, state judged\n")
    assert admin == [None]


def test_feedback_shows_the_first_chat_key_of_the_settings(admin: list[str | None], tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(
        f'data_dir = "{tmp_path}"\n[[server.api_keys]]\nkey = "sk-1"\n[[server.api_keys]]\nkey = "sk-2"\n'
    )
    assert CliRunner().invoke(app, ["feedback", "t", "--bad", "--config", str(config)]).exit_code == 0
    assert admin == ["Bearer sk-1"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"waiting": 3, "learning": True, "enabled": True}, "3 samples wait: the trainer takes them now"),
        ({"waiting": 0, "learning": True, "enabled": True}, "0 samples wait, nothing to train on"),
        ({"waiting": 3, "learning": False, "enabled": True}, "learning is paused, 3 samples wait"),
        ({"waiting": 3, "learning": True, "enabled": False}, "this server trains nothing"),
    ],
)
def test_train_now_says_whether_anything_is_trained(
    admin: list[str | None],
    tmp_path: Path,
    answer: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ANSWERS, "/v1/admin/train", answer)
    result = CliRunner().invoke(app, ["train", "--now", "--data-dir", str(tmp_path)])
    assert says in result.output
    assert result.exit_code == (0 if answer["learning"] and answer["enabled"] else 2)


@pytest.mark.parametrize(
    ("version", "folder", "says"),
    [
        ("1", "new", "version 1 is no adapter"),
        ("2", "there", "there exists already"),
        ("2", "new", "adapter_config.json: No such file or directory"),
        ("2", "file/new", "Not a directory"),
    ],
)
def test_an_adapter_that_cannot_be_copied_is_one_line(
    admin: list[str | None], tmp_path: Path, version: str, folder: str, says: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    args = ["export-adapter", str(tmp_path / folder), "--version", version, "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_list_of_commands_has_no_cut_sentence() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert [line for line in result.output.splitlines() if line.endswith("...") and "Usage" not in line] == []


def test_the_page_is_opened_through_a_file_that_only_its_owner_reads(
    admin: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("openclaw_rl.cli.main.webbrowser.open", opened.append)
    result = CliRunner().invoke(app, ["page", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    file, key = tmp_path / "run" / "page.html", (tmp_path / "keys" / "admin.key").read_text().strip()
    assert opened == [file.as_uri()]
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"/#{key}" in file.read_text()
    assert key not in result.output
    assert str(tmp_path / "keys" / "admin.key") in result.output


def test_no_page_without_a_server(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["page", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "no server is ready" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["wishes", "list", "--user", "an na"], "no wishes yet"),
        (
            ["keys", "usage"],
            "anna                     3 requests and 500 tokens today, 2 served, 1 wishes, never trained on",
        ),
        (["keys", "usage", "--json"], '"tokens": 500'),
    ],
)
def test_the_operator_sees_the_figures_of_users(
    admin: list[str | None], tmp_path: Path, words: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert said in result.output
    key = (tmp_path / "keys" / "admin.key").read_text()
    assert admin == [f"Bearer {key}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["wishes"], "no wishes yet"),
        (["wishes", "list"], "no wishes yet"),
        (["wishes", "remove", "3"], "wish 3 is removed"),
        (["wishes", "general", "3"], "wish 3 holds everywhere"),
        (["wishes", "general", "3", "--off"], "wish 3 holds where it was asked"),
        (["wishes", "practise", "3"], "wish 3 is practised while nobody chats"),
    ],
)
def test_wishes_are_asked_for_with_a_chat_key(
    admin: list[str | None], tmp_path: Path, words: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path), "--key", "sk-ann"])
    assert result.exit_code == 0, result.output
    assert said in result.output
    assert admin == ["Bearer sk-ann"]


@pytest.mark.parametrize(
    "pool",
    ['kind = "url"\nurls = ["http://a:1", "http://a:2"]', 'kind = "sglang"\nreplicas = 3'],
)
def test_one_engines_url_stands_in_the_place_of_a_configured_pool(pool: str, tmp_path: Path) -> None:
    config = tmp_path / "openclaw-rl.toml"
    config.write_text(f"[engine]\n{pool}\n")
    engine = settings_of(config, one_engine("http://b:9")).engine
    assert (engine.kind, engine.url, engine.urls, engine.is_pool) == ("url", "http://b:9", (), False)
