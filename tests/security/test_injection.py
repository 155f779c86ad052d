"""The text of a client, a model or a trainer is data: it sets no header, names no file and fills in no template."""

import http.client
import json
import uuid
from urllib.parse import urlsplit

import pytest

from openclaw_rl.errors import CommitRefused, SettingsError, TrainerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.ledger.snapshot import backup
from openclaw_rl.offline.export import export
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainers import checkpoint

ODD_SESSIONS = [
    "a\r\nSet-Cookie: stolen=1",
    "a\nb",
    "a\0b",
    "сессия-7",
    "x" * 100_000,
    " ",
    "../../etc",
    "a\u2028b",
    "'; DROP TABLE turn; --",
]


@pytest.mark.parametrize("where", ["session_id", "prompt_cache_key", "task", "episode", "model"])
def test_a_line_break_in_a_body_is_no_header(keyed, where):
    for odd in ODD_SESSIONS:
        for stream in (False, True):
            reply = keyed.chat("ann", **{where: odd, "stream": stream})
            assert reply.status_code in (200, 400), reply.text
            assert "set-cookie" not in reply.headers
            assert len(str(reply.headers)) < 10_000
    assert keyed.chat("ann").status_code == 200


def test_a_line_break_in_a_header_is_refused_on_the_wire(keyed):
    """Raw bytes, which our own clients would not send."""
    parts = urlsplit(keyed.server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-ann-5up3r\r\n"
        b"X-Session-Id: a\rSet-Cookie: stolen=1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    )
    connection.connect()
    connection.sock.sendall(head + body)
    answer = b""
    while piece := connection.sock.recv(65536):
        answer += piece
    connection.close()
    assert b"\nset-cookie" not in answer.split(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 'OWNED' }}"},
        {"messages": [{"role": "user", "content": "OWNED"}]},
        {"conversation": []},
        {"tokenize": True},
        {"tools": [{"type": "function", "function": {"name": "OWNED"}}]},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"return_dict": True},
        {"tokenizer_kwargs": {"a": 1}},
        {"max_length": 1, "truncation": True},
        {"padding": "max_length"},
        {"return_assistant_tokens_mask": True},
        {"self": 1},
    ],
)
def test_template_arguments_change_no_more_than_the_template_reads(keyed, kwargs):
    """The template, the messages and the call stay as they are: a 4xx, or the prompt without the argument."""
    session = f"kwargs-{uuid.uuid4().hex}"
    plain = keyed.chat("ann", headers={"X-Session-Id": session})
    odd = keyed.chat("ann", headers={"X-Session-Id": session + "-odd"}, chat_template_kwargs=kwargs)
    assert odd.status_code in (200, 400), odd.text
    if odd.status_code == 200:
        prompts = [
            keyed.ask("GET", f"/v1/turns/{reply.json()['id']}", "admin").json()["request"]["prompt_ids"]
            for reply in (plain, odd)
        ]
        assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "path",
    ["/v1/turns/..%2f..%2fkeys%2fadmin.key", "/v1/admin/versions/..%2f1", "/v1/turns/%00", "/..%2fkeys/admin.key"],
)
def test_no_route_reads_a_file(keyed, path):
    reply = keyed.ask("GET", path, "admin")
    assert reply.status_code in (404, 422)
    assert "admin-5up3r" not in reply.text


@pytest.mark.parametrize(
    "folder", ["/etc", "../outside", "versions/../../outside", "", ".", "versions/x/../../..", "versions\\..\\x\0"]
)
async def test_a_commit_names_a_folder_of_its_own_below_the_data_directory(tmp_path, folder, keyed):
    """The trainer's token does not open the rest of the disk."""
    manifest = {"folder": folder, "kind": "lora", "base_hash": "stub", "sha256": "0"}
    body = {"lease_id": "l", "fence": 1, "parent": 0, "manifest": manifest, "report": {"metrics": {}}}
    reply = keyed.ask("POST", "/v1/trainer/commit", "trainer", json=body)
    assert reply.status_code in (409, 422), reply.text
    from openclaw_rl.ledger.lineage import check_folder

    with pytest.raises(CommitRefused, match="not a folder"):
        check_folder(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", ".hidden"])
def test_a_lease_id_that_is_no_name_makes_no_folder(tmp_path, name):
    with pytest.raises(TrainerError, match="cannot name a folder"):
        checkpoint.write(tmp_path / "versions", name, lambda folder: None)
    assert list(tmp_path.iterdir()) == []


async def test_exports_and_backups_write_over_nothing_and_through_no_link(tmp_path):
    ledger = tmp_path / "ledger.sqlite3"
    opened = await Ledger.open(ledger, identity=Identity("b", "t", "m"), training=TrainingSettings())
    await opened.aclose()
    precious, link, dangling = tmp_path / "precious", tmp_path / "link", tmp_path / "dangling"
    precious.write_text("mine")
    link.symlink_to(precious)
    dangling.symlink_to(tmp_path / "elsewhere")
    for path in (precious, link, dangling):
        with pytest.raises(SettingsError, match="File exists"):
            export(ledger, path, what="turns", format="jsonl")
        with pytest.raises(Exception, match="File exists"):
            backup(ledger, path)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
