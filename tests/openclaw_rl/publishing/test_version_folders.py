"""Folders of `versions/` that survive a start."""

from pathlib import Path

from ledger import IDENTITY, commit_of, give_sample, serve_version
from turns import make_request, make_turn

from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.version_folders import prune, remove_unnamed, tidy, without_optimizer
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainers import checkpoint
from openclaw_rl.types import TurnKey


def make(versions: Path, *names: str) -> None:
    for name in names:
        (versions / name).mkdir(parents=True)
        (versions / name / "manifest.json").write_text("{}")
        (versions / name / "adapter_model.safetensors").write_text("weights")


def left(versions: Path) -> set[str]:
    return {entry.name for entry in versions.iterdir()}


def test_only_what_is_named_or_may_yet_be_committed_stays(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    make(versions, "lease-1-aa", "lease-2-bb", "lease-3-cc", ".tmp-lease-3-cc", ".tmp-lease-2-bb", "foreign")
    removed = remove_unnamed(versions, ["versions/lease-1-aa"], "lease-3-cc")
    assert removed == [".tmp-lease-2-bb", "foreign", "lease-2-bb"]
    assert left(versions) == {"lease-1-aa", "lease-3-cc", ".tmp-lease-3-cc"}
    assert remove_unnamed(versions, ["versions/lease-1-aa"], None) == [".tmp-lease-3-cc", "lease-3-cc"]


def test_a_version_may_lie_deeper_or_elsewhere(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    make(versions, "run/step-1", "elsewhere")
    assert remove_unnamed(versions, ["versions/run/step-1", "elsewhere/adapter"], None) == ["elsewhere"]
    assert (versions / "run" / "step-1" / "manifest.json").exists()


def test_links_and_files_are_not_ours(tmp_path: Path) -> None:
    versions, outside = tmp_path / "versions", tmp_path / "outside"
    make(versions, "lease-1-aa")
    make(tmp_path, "outside")
    (versions / "link").symlink_to(outside)
    (versions / "note.txt").write_text("mine")
    assert remove_unnamed(versions, [], None) == ["lease-1-aa"]
    assert left(versions) == {"link", "note.txt"}
    assert (outside / "manifest.json").exists()


async def test_a_new_ledger_names_nothing(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    make(versions, "lease-9-zz")
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=IDENTITY, training=TrainingSettings())
    try:
        await tidy(ledger, versions)
    finally:
        await ledger.aclose()
    assert left(versions) == set()


def test_a_pruned_optimizer_state_is_found_and_the_adapter_stays(tmp_path: Path) -> None:
    versions = tmp_path / "versions"

    def fill(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_text("weights")
        (folder / checkpoint.OPTIMIZER_FILE).write_text("moments")

    newest = [checkpoint.write(versions, f"lease-{number}-aa", fill) for number in (1, 2, 3)][-1]
    make(versions, "foreign")  # not written by us: it has no optimizer state that could be gone
    folders = {number: f"versions/lease-{number}-aa" for number in (1, 2, 3)} | {4: "versions/foreign", 5: "away"}
    assert without_optimizer(tmp_path, folders) == []
    checkpoint.prune(versions, 2, {newest})
    assert without_optimizer(tmp_path, folders) == [1]
    assert all((versions / f"lease-{number}-aa" / "adapter_model.safetensors").exists() for number in (1, 2, 3))


async def served(ledger: Ledger, root: Path, number: int) -> None:
    """One step that came to serve, with its folder."""
    name, version = f"turn-{number}", (await ledger.tip()).weight_version
    turn = make_turn(name, ids=(3,), log_probs=(-1.0,), version=version)
    await give_sample(ledger, make_request(name), turn, TurnKey("r", "b", f"h{number}"))
    lease = await ledger.lease(trainer="test", now=True)
    assert lease is not None
    make(root / "versions", lease.lease_id)
    await ledger.commit(commit_of(lease))
    await serve_version(ledger, number)


async def test_the_folders_of_versions_that_nothing_asks_for_go_and_their_rows_stay(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=IDENTITY, training=TrainingSettings())
    try:
        for number in range(1, 9):
            await served(ledger, tmp_path, number)
        named = [row.folder for row in await ledger.versions()]
        assert await prune(ledger, tmp_path, newest=2, in_use={3}) == [5, 6]
        assert left(tmp_path / "versions") == {Path(str(named[number])).name for number in (1, 2, 3, 4, 7, 8)}
        rows = await ledger.versions()
        assert [row.folder for row in rows] == [*named[:5], None, None, named[7], named[8]]
        assert await prune(ledger, tmp_path, newest=2, in_use={3}) == []
        assert await prune(ledger, tmp_path, newest=2, in_use=()) == [3]
        await tidy(ledger, tmp_path / "versions")  # as at the next start
        assert left(tmp_path / "versions") == {Path(str(named[number])).name for number in (1, 2, 4, 7, 8)}
    finally:
        await ledger.aclose()
