"""Folders of `versions/` that survive a start."""

import json
from pathlib import Path

import pytest
from ledger import IDENTITY, commit_of, give_sample, serve_version
from turns import make_request, make_turn

from openclaw_rl.errors import SettingsError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.version_folders import (
    prune,
    refuse_other_form,
    remove_unnamed,
    tidy,
    without_optimizer,
)
from openclaw_rl.settings import TrainerSettings, TrainingSettings
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


PEFT = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"]}
"""The keys of an adapter's config that PEFT documents."""
MADE = {"rank": 16, "alpha": 32.0, "target_modules": ("q_proj", "v_proj")}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rank": 8}, "trainer.rank is 8, and it was made with 16"),
        ({"alpha": 64.0}, "trainer.alpha is 64, and it was made with 32"),
        ({"target_modules": ("q_proj",)}, "trainer.target_modules are q_proj, and it was made with q_proj, v_proj"),
        ({"rank": 32, "alpha": 64.0}, "trainer.rank is 32, and it was made with 16; trainer.alpha is 64"),
    ],
)
async def test_settings_that_do_not_describe_the_stored_adapter_are_refused(tmp_path: Path, changed, says) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=IDENTITY, training=TrainingSettings())
    try:
        other = TrainerSettings.model_validate(MADE | changed)
        await refuse_other_form(ledger, tmp_path, other)  # no version is stored yet
        await served(ledger, tmp_path, 1)
        (folder,) = (tmp_path / "versions").iterdir()
        await refuse_other_form(ledger, tmp_path, other)  # a folder of another trainer, without a config
        (folder / "adapter_config.json").write_text(json.dumps(PEFT))
        await refuse_other_form(ledger, tmp_path, TrainerSettings.model_validate(MADE))
        with pytest.raises(SettingsError, match="version 1 of this data folder would mean something else") as refused:
            await refuse_other_form(ledger, tmp_path, other)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)
    finally:
        await ledger.aclose()


async def test_default_modules_mean_those_that_the_model_has(tmp_path: Path) -> None:
    """Without torch the server cannot know them; the trainer compares them when it loads the version."""
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=IDENTITY, training=TrainingSettings())
    try:
        await served(ledger, tmp_path, 1)
        (folder,) = (tmp_path / "versions").iterdir()
        (folder / "adapter_config.json").write_text(json.dumps(PEFT | {"target_modules": ["c_attn", "c_proj"]}))
        await refuse_other_form(ledger, tmp_path, TrainerSettings())
        for torn in ("{", "[]", '{"r": "x"}'):
            (folder / "adapter_config.json").write_text(torn)
            await refuse_other_form(ledger, tmp_path, TrainerSettings(rank=2))  # `verify` tells of a torn file
    finally:
        await ledger.aclose()
