"""Checkpoint folders: whole or not there (case CR-2)."""

import json
import os
from pathlib import Path

import pytest

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.checkpoint import MANIFEST_FILE, OPTIMIZER_FILE


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 100)
    (folder / OPTIMIZER_FILE).write_bytes(b"o" * 100)


def test_a_written_folder_is_whole_and_private(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "versions", "lease-1", fill)
    assert folder == tmp_path / "versions" / "lease-1"
    checkpoint.verify(folder)
    assert [entry.name for entry in (tmp_path / "versions").iterdir()] == ["lease-1"]
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["weights", OPTIMIZER_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_torn_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    file = checkpoint.write(tmp_path, "lease-1", fill) / name
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-7], "changed": b"x" + content[1:], "empty": b""}[damage])
    assert not checkpoint.is_whole(file.parent)
    with pytest.raises(TrainerError, match=rf"torn.*{name}"):
        checkpoint.verify(file.parent)


def test_a_missing_file_is_refused_but_the_optimizer_state_may_be_pruned(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path, "lease-1", fill)
    (folder / OPTIMIZER_FILE).unlink()
    checkpoint.verify(folder)
    (folder / "weights").unlink()
    with pytest.raises(TrainerError, match=r"torn.*weights"):
        checkpoint.verify(folder)
    with pytest.raises(TrainerError, match="torn"):
        checkpoint.verify(tmp_path / "nowhere")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def full_disk(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.write(tmp_path, "lease-1", full_disk)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_write_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".tmp-lease-1").mkdir()
    (tmp_path / ".tmp-lease-1" / "weights").write_text("half")
    checkpoint.verify(checkpoint.write(tmp_path, "lease-1", fill))


def test_the_manifest_comes_last_and_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        assert json.loads((path / MANIFEST_FILE).read_text())["files"].keys() == {"weights", OPTIMIZER_FILE}
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    checkpoint.write(tmp_path, "lease-1", fill)
    assert events == [OPTIMIZER_FILE, "weights", MANIFEST_FILE, ".tmp-lease-1", "rename", tmp_path.name]


@pytest.mark.parametrize("lease_id", ["../x", "a/b", "", ".", "..", ".hidden"])
def test_a_lease_id_cannot_leave_the_folder(tmp_path: Path, lease_id: str) -> None:
    with pytest.raises(TrainerError, match="cannot name a folder"):
        checkpoint.write(tmp_path / "versions", lease_id, fill)
    assert not (tmp_path / "versions").exists()


def test_prune_keeps_the_newest_and_what_is_protected(tmp_path: Path) -> None:
    folders = []
    for number in range(6):
        folder = checkpoint.write(tmp_path, f"lease-{number}", fill)
        os.utime(folder / OPTIMIZER_FILE, ns=(number * 10**9, number * 10**9))
        folders.append(folder)
    (tmp_path / ".tmp-now").mkdir()
    (tmp_path / ".tmp-now" / OPTIMIZER_FILE).write_text("being written")
    checkpoint.prune(tmp_path, 2, protected={folders[1]})
    assert [(folder / OPTIMIZER_FILE).exists() for folder in folders] == [False, True, False, False, True, True]
    assert all(checkpoint.is_whole(folder) for folder in folders)
    assert (tmp_path / ".tmp-now" / OPTIMIZER_FILE).exists()
