"""Folders that a trainer writes weights into, and what else may lie beside them."""

import shutil
from pathlib import Path

import pytest

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import CommitRefused
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.pushed_files import PushedFiles
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import Version, VersionState, WeightKind

RUN = "push/0d51e72f"
SERVING = Version(2, 1, WeightKind.FULL, "base", "versions/full-2", None, VersionState.SERVING, durable=True)


def made(folder: Path, *names: str) -> list[Path]:
    places = [folder / name for name in names]
    for place in places:
        place.mkdir(parents=True)
        (place / "model.safetensors").touch()
    return places


@pytest.fixture
def policy(tmp_path: Path) -> PolicyEngine:
    policy = PolicyEngine(FakeEngine(), VersionAdmission(hold_s=1), PublisherSettings(), tmp_path, health=Health())
    policy.meet(True)
    return policy


def test_only_folders_of_a_driver_are_deleted(tmp_path: Path) -> None:
    old, kept = made(tmp_path, f"{RUN}/weight_v000001", f"{RUN}/weight_v000002")
    other, gone = made(tmp_path, f"{RUN}/notes", "push/deadbeef/weight_v1234567")
    ours = made(tmp_path, "push/backups/weight_v000001", "push/0d51e72f0/weight_v000001", "push/0D51E72F/weight_v1")
    (tmp_path / "push" / "0d51e720").symlink_to(tmp_path / "push" / "backups")
    files = PushedFiles(tmp_path / "push")
    files.add(1, files.find(f"{RUN}/weight_v000001"))
    files.add(2, files.find(f"{RUN}/weight_v000002"))
    assert files.drop(kept=2) == []
    assert not old.exists()
    assert not gone.parent.exists()
    assert all((place / "model.safetensors").is_file() for place in (kept, other, *ours))


async def test_a_run_whose_trainer_sends_weights_deletes_nothing(policy: PolicyEngine, tmp_path: Path) -> None:
    (place,) = made(tmp_path, f"{RUN}/weight_v000001")
    policy.meet(False)
    await policy.note_files(SERVING)
    assert place.is_dir()
    policy.meet(True)
    await policy.note_files(SERVING)
    assert not place.exists()


async def test_a_folder_that_cannot_be_deleted_is_a_problem_until_it_can(
    policy: PolicyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that still writes makes `rmtree` fail, and so does a folder of another user."""
    one, two = made(tmp_path, f"{RUN}/weight_v000001", "push/deadbeef/weight_v000001")
    rmtree = shutil.rmtree

    def fails_once(place: Path) -> None:
        if place == one:
            raise OSError(39, "Directory not empty", str(place))
        rmtree(place)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails_once)
        await policy.note_files(SERVING)
    assert not two.exists()
    assert any(str(one) in problem for problem in policy._health.problems())
    await policy.note_files(SERVING)
    assert not one.exists()
    assert policy._health.problems() == []


async def test_a_file_in_the_place_of_the_folder_ends_nothing(policy: PolicyEngine, tmp_path: Path) -> None:
    (tmp_path / "push").touch()
    await policy.note_files(SERVING)
    assert "push cannot be deleted" in str(policy._health.problems())


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "push").mkdir()
    (tmp_path / "push" / "circle").symlink_to("circle")
    for folder in ("push/circle", "push/\0", f"push/{'x' * 300}"):
        with pytest.raises(CommitRefused, match=r"cannot be read|no folder of that name"):
            PushedFiles(tmp_path / "push").find(folder)


def test_the_folders_of_the_engines_and_of_the_trainer_that_writes_stay(tmp_path: Path) -> None:
    """A second try of a version writes another folder, while engines that come back read the first one."""
    first, gone = made(tmp_path, f"{RUN}/weight_v000002", f"{RUN}/weight_v000001")
    (second,) = made(tmp_path, "push/deadbeef/weight_v000002")
    files = PushedFiles(tmp_path / "push")
    files.awaited = "push/deadbeef/weight_v000002"
    assert files.drop(kept=2, held=first) == []
    assert [place.exists() for place in (first, second, gone)] == [True, True, False]
    files.awaited = None
    files.add(2, second)
    files.drop(kept=2)
    assert [place.exists() for place in (first, second)] == [False, True]
