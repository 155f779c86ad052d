"""The data directory: private, and its secrets are kept."""

import stat
from pathlib import Path

import pytest
from pydantic import SecretStr

from openclaw_rl.data_dir import DataDir, write_private
from openclaw_rl.errors import SettingsError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_and_secrets_are_private_and_kept(tmp_path: Path) -> None:
    data = DataDir.prepare(tmp_path / "new")
    secret = data.secret("admin.key", None)
    assert len(secret) >= 32
    assert DataDir.prepare(tmp_path / "new").secret("admin.key", None) == secret
    assert data.secret("trainer.token", None) != secret
    assert data.secret("admin.key", SecretStr("mine")) == "mine"
    assert {mode(folder) for folder in (data.root, data.keys, data.versions, data.run, data.logs, data.cache)} == {
        0o700
    }
    assert mode(data.keys / "admin.key") == 0o600


def test_a_folder_that_cannot_be_made_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="data_dir: "):
        DataDir.prepare(tmp_path / "file" / "below")


def test_a_private_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old and longer")
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert mode(path) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
