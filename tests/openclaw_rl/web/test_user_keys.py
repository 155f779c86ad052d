"""Users and their keys on disk: digests alone, private, one change at a time, seen at the next request."""

import stat
import threading
from pathlib import Path

import pytest

from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import RequestError, SettingsError
from openclaw_rl.settings import ApiKey
from openclaw_rl.web.auth import Keys
from openclaw_rl.web.user_keys import UserKeys


@pytest.fixture
def users(tmp_path: Path) -> UserKeys:
    return UserKeys(DataDir.prepare(tmp_path).users)


def opened(keys: Keys, key: str) -> str | None:
    """Return the user that a key names, or None."""
    try:
        return keys.caller(f"Bearer {key}").user
    except RequestError as error:
        return None if error.status == 401 else str(error)


def test_the_file_is_private_and_holds_no_key(users: UserKeys, tmp_path: Path) -> None:
    key = users.add("anna", train=True, now=5.0)
    file = tmp_path / "keys" / "users.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    assert key.removeprefix("sk-orl-") not in file.read_text()
    assert [(one.user, one.train, one.created_at) for one in users.read()] == [("anna", True, 5.0)]


def test_a_running_server_sees_each_change_at_the_next_request(users: UserKeys) -> None:
    keys = Keys([], users)
    assert not keys.are_set
    assert keys.caller(None).user == "user"
    anna = users.add("anna", train=True, now=1.0)
    bert = users.add("bert", train=False, now=1.0)
    assert keys.are_set
    assert (opened(keys, anna), opened(keys, bert), opened(keys, "")) == ("anna", "bert", None)
    assert [keys.caller(f"Bearer {key}").train for key in (anna, bert)] == [True, False]
    again = users.rotate("anna", now=2.0)
    assert (opened(keys, anna), opened(keys, again)) == (None, "anna")
    users.revoke("anna")
    assert (opened(keys, again), opened(keys, bert)) == (None, "bert")


def test_a_file_that_nobody_may_look_at_closes_the_server_and_is_no_fault_of_a_chat(
    users: UserKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = users.add("anna", train=True, now=1.0)
    keys = Keys([], users)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr("openclaw_rl.web.user_keys.os.stat", refused)
        broken.setattr(Path, "read_bytes", refused)
        assert opened(keys, key) == "the server cannot read its users' keys"
    assert opened(keys, key) == "anna"


def test_without_its_last_user_a_server_is_closed_and_not_open_to_all(users: UserKeys, tmp_path: Path) -> None:
    key = users.add("anna", train=True, now=1.0)
    keys = Keys([], users)
    users.revoke("anna")
    assert keys.are_set
    assert opened(keys, key) is None
    (tmp_path / "keys" / "users.json").unlink()
    assert keys.are_set
    assert opened(keys, key) is None
    assert opened(Keys([], users), "") == "user", "the next start of a server without the file has no keys"


def test_keys_of_the_settings_and_of_users_open_side_by_side(users: UserKeys) -> None:
    key = users.add("anna", train=True, now=1.0)
    keys = Keys([ApiKey(key="sk-fixed", user="bert")], users)
    assert (opened(keys, key), opened(keys, "sk-fixed")) == ("anna", "bert")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"users": [{"user": "a"}]}',
        '{"users": [{"user": "a", "sha256": "00", "train": true, "created_at": 1}]}',
        '{"users": [{"user": "a", "sha256": "zz", "train": true, "created_at": 1}]}',
    ],
)
def test_a_file_that_is_no_list_of_users_starts_no_server_and_opens_nothing(
    users: UserKeys, tmp_path: Path, content: str
) -> None:
    key = users.add("anna", train=True, now=1.0)
    keys = Keys([ApiKey(key="sk-fixed", user="bert")], users)
    (tmp_path / "keys" / "users.json").write_text(content)
    with pytest.raises(SettingsError, match=r"users\.json: it is no list of users"):
        Keys([], users)
    with pytest.raises(RequestError) as refused:
        keys.caller(f"Bearer {key}")
    assert (refused.value.status, refused.value.code) == (503, "keys_unreadable")
    assert opened(keys, "sk-fixed") == "bert"


@pytest.mark.parametrize("name", ["", " anna", "an na", "-a", "a" * 65, "a/b", "ann\n", "ä"])
def test_a_name_that_no_line_could_show_is_refused(users: UserKeys, name: str) -> None:
    with pytest.raises(SettingsError, match="a name has up to 64"):
        users.add(name, train=True, now=1.0)
    assert users.read() == ()


def test_each_refusal_changes_nothing(users: UserKeys) -> None:
    users.add("anna", train=True, now=1.0)
    before = users.read()
    with pytest.raises(SettingsError, match=r"'anna' has a key: `openclaw-rl keys rotate anna`"):
        users.add("anna", train=False, now=2.0)
    for call in (lambda: users.revoke("bert"), lambda: users.rotate("bert", now=2.0)):
        with pytest.raises(SettingsError, match="there is no user 'bert'"):
            call()
    assert users.read() == before


def test_commands_at_once_lose_no_user(users: UserKeys) -> None:
    threads = [
        threading.Thread(target=users.add, args=(f"user{n}",), kwargs={"train": True, "now": 1.0}) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.user for one in users.read()} == {f"user{n}" for n in range(12)}
