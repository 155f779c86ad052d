"""Forgetting beyond the ledger: probes in folders of versions, and the way back to weights without the session."""

import json
from pathlib import Path

from openclaw_rl.server.privacy import without_probes
from openclaw_rl.trainers import checkpoint


def fill(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    probe = {"prompt_ids": [1, 2], "response_ids": [31_337], "log_probs": [-1.0], "parent_log_probs": [-1.0]}
    commit = {"lease_id": "l", "report": {"metrics": {"loss": 1.0}, "probes": [probe]}}
    (folder / checkpoint.COMMIT_FILE).write_text(json.dumps(commit))


def test_probes_leave_the_folder_of_a_version_and_it_stays_whole(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path, "lease-1", fill)
    assert "31337" in (folder / checkpoint.COMMIT_FILE).read_text()
    without_probes(folder)
    checkpoint.verify(folder)
    commit = json.loads((folder / checkpoint.COMMIT_FILE).read_text())
    assert commit["report"] == {"metrics": {"loss": 1.0}, "probes": []}
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    without_probes(folder)  # again: nothing to do
    without_probes(tmp_path / "another trainer's")  # no commit there
    checkpoint.verify(folder)


def test_a_folder_is_whole_at_every_moment_of_it(tmp_path: Path, monkeypatch) -> None:
    from openclaw_rl.server import privacy

    folder, real, seen = checkpoint.write(tmp_path, "lease-1", fill), privacy.write_private, []

    def watched(path: Path, content: bytes) -> None:
        real(path, content)
        checkpoint.verify(folder)
        seen.append(path.name)

    monkeypatch.setattr(privacy, "write_private", watched)
    without_probes(folder)
    assert seen == [checkpoint.MANIFEST_FILE, checkpoint.COMMIT_FILE]
